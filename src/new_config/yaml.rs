//! The commented YAML of a new configuration.

use super::answers::{Answers, Data, Memory, Model, Reward};
use super::rows::{Form, Rows};
use firebrick::engine::hub::{HubName, RepoKind};
use firebrick::engine::plan::size::Budget;
use std::fmt::Write;
use std::path::Path;

/// What is asked of a model whose answers are found behind `####`.
const MARKED: &str = "Let's think step by step and output the final answer after \\\"####\\\".";

/// What is asked of a model whose answers are read as mathematics, in a template in YAML's double quotes.
const BOXED: &str = "Please reason step by step, and put your final answer within \\\\boxed{{}}.";

/// The configuration in a file of this name. Relative paths in it are relative to the file's folder.
pub fn write(answers: &Answers, file: &Path) -> String {
    let name = file.display();
    let stem = file.file_stem().map_or("run".into(), |s| s.to_string_lossy());
    let mut text = format!(
        "# Written by `firebrick new`. Every key that is not here has its default: `firebrick config explain KEY`.\n\
         #   firebrick config check {name}     all mistakes, after you have changed something\n\
         #   firebrick plan {name}             memory and time of a step\n\
         #   firebrick train {name}            the run; `key.path=value` behind it overrides a value\n\n"
    );
    text += &model(answers);
    text += &task(answers);
    let _ = write!(
        text,
        "\n# The run folder: checkpoints, metrics, samples.\noutput: {}\n\n# `auto` is the best GPU of the build, or else the CPU.\n\
         device: {}\n",
        quoted(&format!("runs/{stem}")),
        answers.device
    );
    text += &learning(answers);
    text += &memory(answers);
    text
}

/// Text in YAML's double quotes.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                quoted.push('\\');
                quoted.push(c);
            }
            c if c.is_control() => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// Where a file is, as a configuration in another folder names it.
fn place(path: &Path) -> String {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    quoted(&absolute.to_string_lossy())
}

fn model(answers: &Answers) -> String {
    match &answers.model {
        Model::Tiny => "\
# A small decoder from random weights. It learns in minutes, and shows what a run looks like.
model:
  arch:
    model_type: qwen3
    hidden_size: 128
    intermediate_size: 384
    num_hidden_layers: 3
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 32
    max_position_embeddings: 64
"
        .to_owned(),
        Model::Folder { path, .. } => format!(
            "# The checkpoint that is trained. With `lora` only adapters are, in a fraction of the memory.\n\
             model:\n  path: {}\n  # lora: {{rank: 16}}    # then optim.lr about ten times as high\n",
            checkpoint(path)
        ),
    }
}

/// Where a checkpoint is: a name of the Hub stays one.
fn checkpoint(path: &Path) -> String {
    match HubName::of_path(path, RepoKind::Model) {
        Some(_) => quoted(&path.to_string_lossy()),
        None => place(path),
    }
}

fn task(answers: &Answers) -> String {
    let mut text = match &answers.data {
        Data::Arithmetic => "\n# Generated sums such as 07+35=042; validation problems are never trained on.\n\
             task:\n  kind: arithmetic\n  difficulty: 2          # digits\n  zero_pad: true\n  validation_size: 500\n"
            .to_owned(),
        Data::Countdown => countdown(answers),
        Data::Rows(own) => rows(own, answers),
    };
    let judged = match &answers.reward {
        Reward::Generated { partial } => {
            text += &generated(&answers.data, *partial);
            return text;
        }
        Reward::Rule(kind) => format!("    - kind: {kind}\n"),
        Reward::Regex(pattern) => {
            format!("    - kind: regex\n      pattern: {}\n", quoted(pattern))
        }
        Reward::Python { file, function } => format!(
            "    # called in processes of python3; written for TRL or verl (docs/guides/rewards.md)\n    - kind: python\n      file: {}\n      \
             function: {}\n",
            place(file),
            quoted(function)
        ),
        Reward::Model(path) => format!("    - kind: model\n      path: {}\n", checkpoint(path)),
    };
    text += "  # The reward is the weighted sum of these; `firebrick config explain task.rewards` lists the kinds.\n  rewards:\n";
    text + &judged
}

/// What generated problems pay for answers that are nearly right.
fn generated(data: &Data, partial: bool) -> String {
    match data {
        Data::Countdown => format!(
            "  format_score: {:<8} # for an expression that uses the given integers and misses the target\n",
            if partial { "0.1" } else { "0.0" }
        ),
        _ => format!("  partial: {partial:<12}  # whether right characters of a wrong sum are worth something\n"),
    }
}

/// The section `task` of generated puzzles. A model without a tokenizer is shown numbers alone.
fn countdown(answers: &Answers) -> String {
    let (numbers, largest, style) = match answers.model {
        Model::Tiny => (3, 20, "short"),
        Model::Folder { .. } => (3, 50, "words"),
    };
    format!(
        r"
# Generated puzzles: reach a target with the given integers and + - * /. Validation problems are never trained on.
task:
  kind: countdown
  numbers: {numbers}             # integers per problem
  max_number: {largest}
  style: {style:<12}    # or `words` and `short`: an instruction, or the bare integers
"
    )
}

/// The section `task` over rows of files, without its rewards.
fn rows(rows: &Rows, answers: &Answers) -> String {
    let chats = matches!(answers.model, Model::Folder { chats: true, .. });
    let place = quoted(&rows.place);
    let held_out = if rows.holds_out {
        format!("  validation: {place}    # its files for validation or test\n")
    } else {
        "  validation_fraction: 0.05\n".to_owned()
    };
    let mut text = format!(
        "\n# Rows to train on, and rows that are held out and validated on. A file, a folder, a pattern, a list or a dataset of the \
         Hub.\ntask:\n  kind: dataset\n  train: {place}\n{held_out}"
    );
    let asks = match &answers.reward {
        Reward::Rule(kind) if kind == "gsm8k" => format!("\\n{MARKED}"),
        Reward::Rule(kind) if kind == "math" => format!("\\n{BOXED}"),
        _ => String::new(),
    };
    let question = &rows.question;
    let prompt = match (rows.is_chat, chats) {
        (true, _) => format!("  prompt_field: {}\n", quoted(question)),
        // a prompt that is one already: the model continues where it ends
        (false, false) if question == "prompt" && asks.is_empty() => "  prompt_field: \"prompt\"\n".to_owned(),
        (false, true) => {
            format!("  messages:\n    - role: user\n      content: \"{{{question}}}{asks}\"    # fields in braces\n")
        }
        (false, false) => {
            format!("  prompt: \"{{{question}}}{asks}\\n\"    # fields in braces\n")
        }
    };
    text += &prompt;
    if let Some(field) = &rows.answer {
        let _ = writeln!(text, "  answer_field: {}", quoted(field));
        if rows.form == Form::Marked {
            text += "  answer_extract: gsm8k     # what follows the last ####\n";
        }
    }
    text
}

/// The algorithm and the lengths.
fn learning(answers: &Answers) -> String {
    let context = match answers.model {
        Model::Tiny => return tiny(&answers.data),
        Model::Folder { context, .. } => context,
    };
    let (prompt, response) = match answers.data {
        Data::Arithmetic => ((context / 2).min(32), (context / 2).min(16)),
        Data::Countdown => ((context / 3).min(192), (context / 2).min(512)),
        Data::Rows(_) => {
            let response = (context / 4).min(256);
            (context - response, response)
        }
    };
    format!(
        "
# GRPO: completions of one prompt are compared with each other. Others: dapo, gspo, rloo, ppo, … (docs/guides/algorithms.md).
objective: grpo
rollout:
  n: 8                    # completions a prompt
  temperature: 1.0
  prompt_length: {prompt:<5}    # tokens; longer prompts are skipped and counted
  response_length: {response:<5}  # tokens
  max_num_seqs: 128       # sampled at a time
optim:
  lr: 1.0e-6
  lr_scheduler: {{lr_scheduler_type: constant_with_warmup, warmup_steps: 10}}
trainer:
  steps: 100
  train_batch_size: 16    # prompts a step
  test_freq: 25           # steps between validations
  save_freq: 50           # steps between checkpoints
"
    )
}

/// How the small decoder learns.
fn tiny(data: &Data) -> String {
    let (prompt, response) = match data {
        Data::Countdown => (16, 16),
        _ => (8, 5),
    };
    let lengths = format!("  prompt_length: {prompt:<5}    # tokens, one a character\n  response_length: {response}\n");
    TINY.replace("LENGTHS", &lengths)
}

const TINY: &str = "
# Demonstrations first, until about a third of the answers is right; the rest is learned only from rewards.
warmup:
  sft:
    steps: 400
    until_reward: 0.3
    batch_size: 128
    optim:
      lr: 1.0e-3
      betas: [0.9, 0.98]
      weight_decay: 0.0
      lr_scheduler: {lr_scheduler_type: constant_with_warmup, warmup_steps: 30}

# GRPO: completions of one prompt are compared with each other. Others: dapo, gspo, rloo, … (docs/guides/algorithms.md).
objective: grpo
rollout:
  n: 8                    # completions a prompt
LENGTHS  max_num_seqs: 1024      # sampled at a time
update:
  old_log_probs: sampler  # saves a forward pass
optim:
  lr: 4.0e-4
  betas: [0.9, 0.98]
  weight_decay: 0.0
  lr_scheduler: {lr_scheduler_type: linear, warmup_steps: 10}
trainer:
  steps: 400
  train_batch_size: 96    # prompts a step
  test_freq: 25           # steps between validations
";

/// Bytes in the largest unit that leaves a whole number: `2GiB`.
fn size(bytes: u64) -> String {
    let unit = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)]
        .into_iter()
        .find(|(_, shift)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    unit.map_or_else(|| bytes.to_string(), |(name, shift)| format!("{}{name}", bytes >> shift))
}

fn memory(answers: &Answers) -> String {
    let setting = match answers.memory {
        Memory::Budget(Budget::Auto) => "budget: auto            # what the device has".to_owned(),
        Memory::Budget(Budget::Bytes(bytes)) => format!("budget: {}", size(bytes.0)),
        Memory::Preset(preset) => format!("preset: {preset}"),
    };
    let why = match answers.memory {
        Memory::Budget(_) => {
            "# The fastest plan that is predicted to stay within this many device bytes is made and run."
        }
        Memory::Preset(_) => {
            "# Starting values of many settings (docs/guides/memory.md#presets). With `budget: 8GiB` instead, a plan is made."
        }
    };
    format!("\n{why}\nmemory:\n  {setting}\n")
}
