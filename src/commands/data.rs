//! `firebrick data`.

use crate::arguments::DataArgs;
use crate::output;
use crate::table::Table;
use firebrick::engine::config;
use firebrick::engine::data::{DataReport, Lengths, SampledPrompt, SplitReport};
use firebrick::spec::json::{to_lines, to_text};
use std::fmt::Write;

/// Width of the longest bar of a histogram, in characters.
const BAR_WIDTH: u64 = 40;

pub fn run(args: &DataArgs) -> anyhow::Result<()> {
    let config = config::load(&args.config, &args.overrides)?;
    let report = DataReport::of(&config, args.samples)?;
    if args.json {
        return output::print_raw(&(to_lines(&serde_json::to_value(&report)?) + "\n"));
    }
    output::print(&text(&report))
}

fn text(report: &DataReport) -> String {
    let mut text = split("training", &report.train, report);
    match &report.validation {
        Some(validation) => {
            text += "\n";
            text += &split("validation", validation, report);
            if report.shared_prompts > 0 {
                let _ =
                    writeln!(text, "warning: {} validation prompts are training prompts too", report.shared_prompts);
            }
        }
        None => text += "\nno validation examples\n",
    }
    for sample in &report.samples {
        text += "\n";
        text += &prompt(sample, report);
    }
    text
}

fn split(name: &str, split: &SplitReport, report: &DataReport) -> String {
    let mut text = match split.rows {
        Some(rows) => format!("{} {name}: {rows} rows\n", report.task),
        None => format!("{} {name}: endless, of which {} were made\n", report.task, split.looked_at),
    };
    if !split.columns.is_empty() {
        let rows = split.columns.iter().map(|column| {
            let kinds: Vec<&str> = column.kinds.iter().map(String::as_str).collect();
            let kinds = if kinds.is_empty() { "null".to_owned() } else { kinds.join(" or ") };
            vec![format!("  {}", column.name), kinds, column.values.to_string()]
        });
        text += &Table::new(2, &["  column", "type", "values"]).rows(rows).render();
    }
    if let Some(tokens) = &split.prompt_tokens {
        text += &lengths("prompt", tokens, split.looked_at);
        let _ = writeln!(
            text,
            "  {} longer than rollout.prompt_length = {}, {} duplicates of an earlier prompt",
            split.over_long, report.prompt_length, split.duplicates
        );
    }
    if let Some(tokens) = &split.solution_tokens {
        text += &lengths("solution", tokens, split.looked_at);
    }
    let what = format!("{name} rows");
    if let Some(warning) = split.special_tokens.warning(&what, "task.special_tokens", report.special_tokens) {
        let _ = writeln!(text, "warning: {warning}");
    }
    text
}

fn lengths(what: &str, lengths: &Lengths, of: u64) -> String {
    let sample =
        if lengths.counted < of { format!(" (of {} rows, evenly spread)", lengths.counted) } else { String::new() };
    let mut text = format!(
        "  {what} tokens{sample}: {} to {}, median {}, mean {:.1}, 95 % at most {}\n",
        lengths.min, lengths.max, lengths.median, lengths.mean, lengths.p95
    );
    let most = lengths.histogram.iter().map(|bin| bin.count).max().unwrap_or(1);
    let width = lengths.max.to_string().len();
    for bin in &lengths.histogram {
        let bar = "#".repeat((bin.count * BAR_WIDTH).div_ceil(most) as usize);
        let line = format!("{:>width$}-{:<width$} {:>8} {bar}", bin.from, bin.to, bin.count);
        let _ = writeln!(text, "    {}", line.trim_end());
    }
    text
}

/// A prompt: the template's input, the model's input, and the answer.
fn prompt(sample: &SampledPrompt, report: &DataReport) -> String {
    let mut text = format!("prompt {}, {} tokens\n", sample.index, sample.tokens);
    if let Some(messages) = &sample.messages {
        text += "  the chat template was given\n";
        for message in messages {
            text += &quoted(&format!("{}: {}", message.role(), message.text()));
            let is_text = |content: &serde_json::Value| content.is_string() || content.is_array();
            for (name, value) in message.fields() {
                if name != "role" && !(name == "content" && is_text(value)) {
                    text += &quoted(&format!("  {name}: {}", to_text(value)));
                }
            }
        }
        if let Some(tools) = &sample.tools {
            text += &quoted(&format!("tools: {}", to_text(tools)));
        }
        for (name, value) in &report.chat_template_kwargs {
            text += &quoted(&format!("{name}: {value}"));
        }
        text += "  and gave, as the model reads it\n";
    } else {
        text += "  plain text, as the model reads it\n";
    }
    text += &quoted(&sample.decoded);
    if !sample.answer.is_empty() {
        let _ = writeln!(text, "  answer: {}", sample.answer);
    }
    if let Some(solution) = &sample.solution {
        text += "  solution\n";
        text += &quoted(solution);
    }
    text
}

/// Quoted lines of a text; an empty last one shows that the text ends with a line break.
fn quoted(text: &str) -> String {
    text.split('\n').fold(String::new(), |mut quoted, line| {
        let _ = writeln!(quoted, "    | {line}");
        quoted
    })
}
