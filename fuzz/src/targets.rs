//! Functions of the fuzz targets: each gives a parser bytes that anybody may have written. A parser may reject them; it
//! must not panic, hang or exhaust memory. The test `fuzz` runs the same functions on `seeds/`.

use firebrick_backends::device::{DeviceSpec, open};
use firebrick_engine::checkpoint::{RunDir, check_model, trainer_state};
use firebrick_engine::config::{CheckedFile, parse};
use firebrick_engine::hub::{HubName, RepoKind};
use firebrick_engine::metrics::{MemoryTimeline, TimelineReport, TokenLog, TokenSettings};
use firebrick_engine::plan::{Plan, PlannedFor};
use firebrick_engine::reward::read_answer;
use firebrick_engine::task::environment::read_reply;
use firebrick_engine::task::{
    Calculator, CalculatorConfig, Completion, Jsonl, JsonlConfig, Rewards, Split, Task, ToolCall, ToolParser, Turn,
};
use firebrick_engine::turns::behind_thought;
use firebrick_import::{Options, SourceFile, import};
use firebrick_models::checkpoint::adapter_shape;
use firebrick_models::tokenizer::{ChatOptions, Message};
use firebrick_models::{Arch, Checkpoint, Tokenizer};
use firebrick_report::{Follower, Report};
use math_answer::{AnswerSource, Checker};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use tempfile::TempDir;

/// A fuzz target: its name and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: [Target; 24] = [
    ("adapter", adapter),
    ("arch", arch),
    ("calculator", calculator),
    ("chat_template", chat_template),
    ("checksums", checksums),
    ("config", config),
    ("hub_name", hub_name),
    ("import_python", import_python),
    ("import_shell", import_shell),
    ("import_yaml", import_yaml),
    ("math_answer", math_answer),
    ("plan", plan),
    ("replies", replies),
    ("rewards", rewards),
    ("rows_arrow", rows_arrow),
    ("rows_csv", rows_csv),
    ("rows_json", rows_json),
    ("rows_parquet", rows_parquet),
    ("run_folder", run_folder),
    ("safetensors", safetensors),
    ("safetensors_index", safetensors_index),
    ("tokenizer_config", tokenizer_config),
    ("trainer_state", trainer_state),
    ("turns", turns),
];

/// `config.json` of a model of a few hundred weights.
const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4,
    "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 8,
    "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "tie_word_embeddings": true}"#;

/// Its weights.
const WEIGHTS: &[u8] = include_bytes!("../seeds/safetensors/tiny");

/// A run's configuration.
const RUN: &str = "task: {kind: calculator}\nmodel: {arch: {}}\noutput: run\nobjective: grpo\n";

/// A temporary folder with these files, one of which a target replaces.
struct Folder(TempDir);

impl Folder {
    fn new(files: &[(&str, &[u8])]) -> Self {
        let folder = Self(TempDir::with_prefix("firebrick-fuzz-").expect("a temporary folder"));
        for (name, bytes) in files {
            folder.write(name, bytes);
        }
        folder
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().expect("the folder")).expect("a folder");
        fs::write(&path, bytes).expect("a file");
        path
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

/// Parts between zero bytes, as text.
fn parts<const N: usize>(data: &[u8]) -> [String; N] {
    let mut parts = data.splitn(N, |byte| *byte == 0).map(|part| String::from_utf8_lossy(part).into_owned());
    std::array::from_fn(|_| parts.next().unwrap_or_default())
}

fn text(data: &[u8]) -> String {
    String::from_utf8_lossy(data).into_owned()
}

/// YAML, and overrides in lines.
pub fn config(data: &[u8]) {
    let [yaml, overrides] = parts(data);
    let overrides: Vec<String> = overrides.lines().map(str::to_owned).collect();
    if let Ok(checked) = CheckedFile::parse(&yaml, None, &overrides) {
        checked.problems.iter().for_each(|problem| drop(problem.to_string()));
    }
    let Ok(config) = parse(&yaml, &overrides) else { return };
    let written = config.to_yaml().expect("a configuration can be written");
    let again = parse(&written, &[]).unwrap_or_else(|error| panic!("{error}\n{written}"));
    assert_eq!(again, config, "a run folder's configuration is the run's");
}

/// Rows of a file: as they are, and as verl's.
fn rows(name: &str, data: &[u8]) {
    let folder = Folder::new(&[(name, data)]);
    let plain =
        json!({"train": name, "prompt": "{question}: {{}}", "answer_field": "answer", "rewards": [{"kind": "exact"}]});
    let any = json!({"train": name, "prompt": "?", "answer": "1", "rewards": [{"kind": "exact"}]});
    let verl = json!({"train": name, "prompt_field": "prompt", "rewards": [{"kind": "math"}]});
    for config in [plain, any, verl] {
        let config: JsonlConfig = serde_json::from_value(config).expect("settings");
        let Ok(task) = Jsonl::new(&config, folder.path()) else { continue };
        for index in 0..task.len(Split::Train).unwrap_or_default() {
            task.example(Split::Train, index).expect("a row that was read before");
        }
    }
}

/// JSON Lines, or a JSON list.
pub fn rows_json(data: &[u8]) {
    rows("rows.json", data);
}

/// Comma-separated values.
pub fn rows_csv(data: &[u8]) {
    rows("rows.csv", data);
}

/// A Parquet file.
pub fn rows_parquet(data: &[u8]) {
    rows("rows.parquet", data);
}

/// An Arrow file or stream.
pub fn rows_arrow(data: &[u8]) {
    rows("rows.arrow", data);
}

/// `plan.json`.
pub fn plan(data: &[u8]) {
    let run = PlannedFor { ranks: 1, sequence: 1, critic_sequence: 1, tensor: 1, pipeline: 1, sampling: 1 };
    let _ = Plan::from_json(&text(data), Path::new("plan.json"), &run);
}

/// `model.safetensors`.
pub fn safetensors(data: &[u8]) {
    load(&Folder::new(&[("config.json", CONFIG.as_bytes()), ("model.safetensors", data)]));
}

/// `model.safetensors.index.json`, which names a whole file.
pub fn safetensors_index(data: &[u8]) {
    let files =
        [("config.json", CONFIG.as_bytes()), ("a.safetensors", WEIGHTS), ("model.safetensors.index.json", data)];
    load(&Folder::new(&files));
}

fn load(folder: &Folder) {
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU");
    let _ = Checkpoint::open(folder.path()).and_then(|checkpoint| checkpoint.load(&device));
}

/// `config.json` of a model.
pub fn arch(data: &[u8]) {
    if let Ok(Value::Object(config)) = serde_json::from_slice(data) {
        let _ = Arch::from_config(&config, Path::new("config.json"));
    }
    let _ = Checkpoint::describe(Folder::new(&[("config.json", data)]).path());
}

/// `adapter_config.json`.
pub fn adapter(data: &[u8]) {
    let Ok(Value::Object(config)) = serde_json::from_str(CONFIG) else { unreachable!("an object") };
    let arch = Arch::from_config(&config, Path::new("config.json")).expect("an architecture");
    let _ = adapter_shape(&arch, Folder::new(&[("adapter_config.json", data)]).path());
}

/// `tokenizer_config.json`.
pub fn tokenizer_config(data: &[u8]) {
    let folder = Folder::new(&[]);
    Tokenizer::characters("ab ").and_then(|tokenizer| tokenizer.save(folder.path())).expect("a tokenizer");
    folder.write("tokenizer_config.json", data);
    let Ok(tokenizer) = Tokenizer::from_dir(folder.path()) else { return };
    let _ = (tokenizer.encode("ab", true), tokenizer.render_chat(&[Message::new("user", "ab")], true));
}

/// A chat template, and messages as JSON.
pub fn chat_template(data: &[u8]) {
    let [template, messages] = parts(data);
    let tokenizer = Tokenizer::characters("ab ").expect("a tokenizer");
    let Ok(tokenizer) = tokenizer.with_chat_template(&template, Path::new("chat_template.jinja")) else { return };
    let messages: Vec<Value> = serde_json::from_str(&messages).unwrap_or_default();
    let given = messages.into_iter().filter_map(|message| match message {
        Value::Object(fields) => Message::from_fields(fields),
        _ => None,
    });
    let mut messages: Vec<Message> = given.collect();
    if messages.is_empty() {
        messages = vec![Message::new("user", "a"), Message::new("assistant", "b")];
    }
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    for training in [false, true] {
        let options = ChatOptions { tools: Some(&tools), training, ..ChatOptions::prompt() };
        let _ = (tokenizer.render_chat_with(&messages, options), tokenizer.encode_chat(&messages, options));
        let _ = tokenizer.encode_with_assistant_mask(&messages, 0, options);
    }
}

/// `checksums.json`, of a checkpoint whose model is verified.
pub fn checksums(data: &[u8]) {
    let folder = Folder::new(&[("step/checksums.json", data), ("step/model/config.json", CONFIG.as_bytes())]);
    let _ = check_model(&folder.path().join("step/model"));
}

/// `state.json` of a checkpoint.
pub fn trainer_state(data: &[u8]) {
    let _ = trainer_state::load_state(Folder::new(&[("state.json", data)]).path());
}

/// The files of a run folder, as `report`, `watch` and a resumed run read them.
pub fn run_folder(data: &[u8]) {
    let folder = Folder::new(&[("config.yaml", RUN.as_bytes())]);
    for name in ["metrics.jsonl", "samples.jsonl", "memory.jsonl", "run.log", "plan.json", "summary.json"] {
        folder.write(name, data);
    }
    folder.write(MemoryTimeline::FILE, data);
    folder.write(TokenLog::FILE, data);
    let report = Report::read(&[folder.path().to_owned()], 8).expect("a run folder");
    report.to_json();
    if let Ok(timeline) = MemoryTimeline::load(folder.path()) {
        let _ = (timeline.steps(), TimelineReport::new(&timeline));
    }
    Follower::open(folder.path()).and_then(|mut follower| follower.poll()).expect("a run folder");
    let run = RunDir::open(folder.path()).expect("a run folder");
    for name in ["metrics.jsonl", TokenLog::FILE] {
        run.rewind(name, "step", 3).expect("lines that are kept or not");
    }
    let tokenizer = Arc::new(Tokenizer::characters("ab").expect("a tokenizer"));
    TokenLog::open(&run, TokenSettings { groups: 1, max_bytes: 1 << 12 }, tokenizer).expect("a log");
}

/// A turn of a model: thoughts and tool calls.
pub fn turns(data: &[u8]) {
    let turn = text(data);
    let properties = json!({"x": {"type": "integer"}, "y": {"type": ["array", "null"]}, "z": {"type": "object"}});
    let tools = json!([{"type": "function", "function": {"name": "tool", "parameters": {"properties": properties}}}]);
    for parser in
        [ToolParser::Hermes, ToolParser::Llama3Json, ToolParser::Qwen3Xml, ToolParser::Openai, ToolParser::DeepseekV3]
    {
        let _ = (parser.parse(&turn, &tools), parser.parse(behind_thought(&turn, true), &Value::Null));
    }
    let _ = (behind_thought(&turn, false), ToolParser::of_call(&turn, "tool"), ToolParser::other(&turn));
}

/// A ground truth, and a completion.
pub fn math_answer(data: &[u8]) {
    let [gold, completion] = parts(data);
    for source in [AnswerSource::Any, AnswerSource::Latex] {
        for tolerance in [0.0, 1e-6] {
            let _ = Checker { source, tolerance }.check(&gold, &completion);
        }
    }
}

/// A ground truth, and a completion, for every rule.
pub fn rewards(data: &[u8]) {
    static RULES: LazyLock<Vec<Rewards>> = LazyLock::new(|| {
        let rules = json!([
            {"kind": "gsm8k"}, {"kind": "gsm8k", "method": "flexible"}, {"kind": "exact", "ignore_case": true},
            {"kind": "contains", "ignore_case": true}, {"kind": "regex", "pattern": "(\\d+)"}, {"kind": "number"},
            {"kind": "math"}, {"kind": "verl_gsm8k"}, {"kind": "verl_math"}, {"kind": "trl_accuracy"},
            {"kind": "trl_think_format"}, {"kind": "format", "tags": ["think", "answer"]},
            {"kind": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
            {"kind": "choice"}, {"kind": "countdown"}, {"kind": "repetition"}, {"kind": "length", "max": 8}
        ]);
        let Value::Array(rules) = rules else { unreachable!("a list") };
        let rules = rules.into_iter().map(|rule| vec![serde_json::from_value(rule).expect("a rule")]);
        rules.map(|rule| Rewards::new(&rule).expect("a rule")).collect()
    });
    let [gold, completion] = parts(data);
    let completion = Completion { text: &completion, tokens: &[], finished: true, max_tokens: 8, in_thought: false };
    for rule in RULES.iter() {
        let _ = rule.score(&gold, &completion);
        rule.readings(completion.text).for_each(drop);
    }
}

/// A line of a reward program or an environment.
pub fn replies(data: &[u8]) {
    read_answer(&text(data));
    read_reply(&text(data));
}

fn imported(name: &str, data: &[u8]) {
    let environment = |name: &str| (name == "HOME").then(|| "/srv".to_owned());
    let _ = import(&[SourceFile::new(name, text(data))], &Options::default(), &environment);
}

/// A launch script in bash.
pub fn import_shell(data: &[u8]) {
    imported("run.sh", data);
}

/// A launch script in Python.
pub fn import_python(data: &[u8]) {
    imported("run.py", data);
}

/// A configuration of another engine, or a page of documentation.
pub fn import_yaml(data: &[u8]) {
    imported("run.yaml", data);
    imported("page.md", data);
}

/// A name or an address of the Hub.
pub fn hub_name(data: &[u8]) {
    let name = text(data);
    let _ = HubName::is_one(&name, Path::new("."));
    for kind in [RepoKind::Model, RepoKind::Dataset] {
        let _ = HubName::of_path(Path::new(&name), kind);
    }
}

/// An expression of the calculator.
pub fn calculator(data: &[u8]) {
    static TASK: LazyLock<Calculator> =
        LazyLock::new(|| Calculator::new(&CalculatorConfig::default()).expect("a task"));
    let arguments = [("expression".to_owned(), Value::String(text(data)))].into_iter().collect();
    let turn = Turn { text: String::new(), calls: vec![Ok(ToolCall { name: "calculate".to_owned(), arguments })] };
    let environments = TASK.environments().expect("a calculator");
    environments.make(0).step(&turn).expect("an answer");
}
