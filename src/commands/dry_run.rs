//! `firebrick train --dry-run`: everything before the first step, except the weights.

use super::UserError;
use crate::doctor::free_disk;
use crate::output;
use firebrick::engine::plan::size::Bytes;
use firebrick::engine::trainer::{DryRun, References, TrainerBuilder};
use std::fmt::Write;

pub fn run(builder: TrainerBuilder) -> anyhow::Result<()> {
    let dry = builder.dry_run()?;
    let free = free_disk(&dry.output);
    output::print(&text(&dry, free))?;
    let mut problems = Vec::new();
    problems.extend(dry.references.as_ref().and_then(unrewarded));
    if let Some(free) = free.filter(|free| *free < dry.disk_bytes) {
        problems.push(format!(
            "the run will write about {} to {}, which has {} free; choose another `output`, or lower \
             trainer.max_ckpt_to_keep",
            Bytes(dry.disk_bytes),
            dry.output.display(),
            Bytes(free)
        ));
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(UserError(problems.join("\n")).into())
}

fn text(dry: &DryRun, free: Option<u64>) -> String {
    let mut text = format!("device      {} ({})\n", dry.device.device, dry.device.name);
    let mut line = |name: &str, what: String| {
        writeln!(text, "{name:<11} {what}").unwrap_or_default();
    };
    let prompts = match dry.prompts {
        Some(count) => format!("{count} prompts"),
        None => "generated prompts".to_owned(),
    };
    let filtered = match dry.filtered {
        0 => String::new(),
        n => format!(" ({n} longer ones skipped: rollout.prompt_length)"),
    };
    line("data", format!("{prompts}{filtered}, {} for validation", dry.validation));
    let peak = dry.estimate.peak_phase().map_or("", |phase| phase.name.name());
    let budget = match dry.budget {
        Some(bytes) => format!(", of {} that the plan may use", Bytes(bytes)),
        None => String::new(),
    };
    let bytes = Bytes(dry.estimate.peak_bytes);
    line("memory", format!("{bytes} at most, in {peak}{budget}"));
    let seconds = dry.estimate.seconds.total();
    line(
        "time",
        format!(
            "{} a step at most, {} for {} steps; estimated",
            duration(seconds),
            duration(seconds * dry.steps as f64),
            dry.steps
        ),
    );
    let free = free.map_or_else(|| "free space unknown".to_owned(), |b| format!("{} free", Bytes(b)));
    line("disk", format!("about {} for checkpoints, {free}", Bytes(dry.disk_bytes)));
    match &dry.references {
        Some(References { graded, unrewarded, .. }) => {
            line("references", format!("{graded} graded, {unrewarded} of them earn nothing"));
        }
        None => line("references", "none to grade".to_owned()),
    }
    for (i, (prompt, tokens)) in dry.rendered.iter().enumerate() {
        line("", String::new());
        line(&format!("prompt {}", i + 1), format!("{tokens} tokens"));
        for row in prompt.lines() {
            line("", output::printable(row));
        }
    }
    text
}

/// The problem that the rules do not reward the task's own answers.
fn unrewarded(references: &References) -> Option<String> {
    let References { graded, unrewarded, first } = references;
    (*unrewarded > 0).then(|| {
        let shown: Vec<String> = first.iter().map(|answer| format!("  {answer:?}")).collect();
        format!(
            "{unrewarded} of {graded} reference answers earn nothing under the rewards of the task, so completions may \
             never earn a reward. Check the rules and the source of the answers (task.answer_field, \
             task.answer_extract). The first:\n{}",
            shown.join("\n")
        )
    })
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 10.0 => format!("{s:.1} s"),
        s if s < 600.0 => format!("{s:.0} s"),
        s if s < 36_000.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.0} h", s / 3600.0),
    }
}
