//! The commented YAML of a new configuration.

use super::answers::{Answers, Data, Memory, Model, Reward};
use super::rows::{Form, Rows};
use firebrick::engine::hub::{HubName, RepoKind};
use firebrick::engine::plan::size::Budget;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, UndefinedBehavior, context};
use std::collections::BTreeMap;
use std::path::Path;

const TEMPLATE: &str = include_str!("run.yaml.jinja");

/// Instruction for models with answers after `####`.
const MARKED: &str = "\\nLet's think step by step and output the final answer after \\\"####\\\".";

/// Instruction for models with mathematical answers, in a template in YAML's double quotes.
const BOXED: &str = "\\nPlease reason step by step, and put your final answer within \\\\boxed{{}}.";

/// The configuration in a file of this name. Relative paths in it are relative to the file's folder.
pub fn write(answers: &Answers, file: &Path) -> String {
    let stem = file.file_stem().map_or("run".into(), |s| s.to_string_lossy());
    let (model, chats, context) = match &answers.model {
        Model::Tiny => (None, false, None),
        Model::Folder { path, context, chats } => (Some(checkpoint(path)), *chats, Some(*context)),
    };
    let (prompt_length, response_length) = lengths(&answers.data, context);
    let (data, rows) = match &answers.data {
        Data::Arithmetic => ("arithmetic", None),
        Data::Countdown => ("countdown", None),
        Data::Rows(rows) => ("rows", Some(rows)),
    };
    let partial = match (&answers.reward, &answers.data) {
        (Reward::Generated { partial }, Data::Countdown) => format!("{:<8}", if *partial { "0.1" } else { "0.0" }),
        (Reward::Generated { partial }, _) => format!("{partial:<12}"),
        _ => String::new(),
    };
    let (reward, reward_keys) = reward(&answers.reward);
    let (preset, budget) = match answers.memory {
        Memory::Preset(preset) => (Some(preset.to_string()), String::new()),
        Memory::Budget(Budget::Auto) => (None, "auto            # what the device has".to_owned()),
        Memory::Budget(Budget::Bytes(bytes)) => (None, size(bytes.0)),
    };
    let context = context! {
        file => file.display().to_string(),
        tiny => model.is_none(),
        output => quoted(&format!("runs/{stem}")),
        device => answers.device.to_string(),
        rows => rows.map(|rows| quoted(&rows.place)),
        holds_out => rows.is_some_and(|rows| rows.holds_out),
        answer_field => rows.and_then(|rows| rows.answer.as_deref()).map(quoted),
        marked => rows.is_some_and(|rows| rows.form == Form::Marked),
        prompt_field => rows.and_then(|rows| prompt_field(rows, chats, reward)),
        prompt => rows.map(|rows| format!("{{{}}}{}", rows.question, instruction(reward))),
        model, chats, data, partial, reward, reward_keys, prompt_length, response_length, preset, budget
    };
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(true);
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_syntax(syntax.build().expect("the syntax of Jinja"));
    environment.render_str(TEMPLATE, context).expect("the template has no other variables")
}

/// Text in YAML's double quotes.
fn quoted(text: &str) -> String {
    let escaped = |c: char| match c {
        '"' | '\\' => format!("\\{c}"),
        c if c.is_control() => format!("\\u{:04x}", u32::from(c)),
        c => c.to_string(),
    };
    format!("\"{}\"", text.chars().map(escaped).collect::<String>())
}

/// The quoted absolute path of a file.
fn place(path: &Path) -> String {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    quoted(&absolute.to_string_lossy())
}

/// The quoted path of a checkpoint, or its name on the Hub.
fn checkpoint(path: &Path) -> String {
    match HubName::of_path(path, RepoKind::Model) {
        Some(_) => quoted(&path.to_string_lossy()),
        None => place(path),
    }
}

/// The kind of a reward of rows, and its other keys.
fn reward(reward: &Reward) -> (&str, BTreeMap<&str, String>) {
    match reward {
        Reward::Generated { .. } => ("", BTreeMap::new()),
        Reward::Rule(kind) => (kind, BTreeMap::new()),
        Reward::Regex(pattern) => ("regex", BTreeMap::from([("pattern", quoted(pattern))])),
        Reward::Python { file, function } => {
            ("python", BTreeMap::from([("file", place(file)), ("function", quoted(function))]))
        }
        Reward::Model(path) => ("model", BTreeMap::from([("path", checkpoint(path))])),
    }
}

/// The instruction of a rule after the question.
fn instruction(reward: &str) -> &'static str {
    match reward {
        "gsm8k" => MARKED,
        "math" => BOXED,
        _ => "",
    }
}

/// The field that is the complete prompt: a conversation, or a text that the model continues.
fn prompt_field(rows: &Rows, chats: bool, reward: &str) -> Option<String> {
    let continues = !chats && rows.question == "prompt" && instruction(reward).is_empty();
    (rows.is_chat || continues).then(|| quoted(&rows.question))
}

/// Most tokens of prompt and completion, for a model of this context; `None` for the small decoder.
fn lengths(data: &Data, context: Option<usize>) -> (String, String) {
    let (prompt, response) = match (data, context) {
        (Data::Countdown, None) => (16, 16),
        (_, None) => (8, 5),
        (Data::Arithmetic, Some(context)) => ((context / 2).min(32), (context / 2).min(16)),
        (Data::Countdown, Some(context)) => ((context / 3).min(192), (context / 2).min(512)),
        (Data::Rows(_), Some(context)) => {
            let response = (context / 4).min(256);
            (context - response, response)
        }
    };
    let response = if context.is_some() { format!("{response:<5}") } else { response.to_string() };
    (format!("{prompt:<5}"), response)
}

/// Bytes in the largest unit that divides them: `2GiB`.
fn size(bytes: u64) -> String {
    let unit = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)]
        .into_iter()
        .find(|(_, shift)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    unit.map_or_else(|| bytes.to_string(), |(name, shift)| format!("{}{name}", bytes >> shift))
}
