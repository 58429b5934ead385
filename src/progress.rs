//! Console output of a run without a live view: a progress bar if stderr is a terminal, plain lines otherwise, a
//! summary at the end.

use crate::output;
use crate::table::Table;
use firebrick::engine::hub::on_download;
use firebrick::engine::metrics::{Event, Metrics, Observer, Summary};
use firebrick::engine::plan::size::Bytes;
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Write;
use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest interval of plain output, which also reports every tenth of the run.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Shows the downloads of models and datasets on stderr: a bar in a terminal, otherwise a line per file.
pub fn show_downloads() {
    let bar: Mutex<Option<ProgressBar>> = Mutex::new(None);
    let terminal = std::io::stderr().is_terminal();
    on_download(move |download| {
        // a bar is redrawn even after a panic
        let mut bar = bar.lock().unwrap_or_else(PoisonError::into_inner);
        if !terminal {
            if download.finished {
                let bytes = Bytes(download.total);
                output::message(&format!("downloaded {} ({bytes})", download.file));
            }
            return;
        }
        let bar =
            bar.get_or_insert_with(|| progress_bar("{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}"));
        bar.set_length(download.total);
        bar.set_message(download.file.clone());
        bar.set_position(download.done);
        if download.finished {
            bar.println(format!("downloaded {}", download.file));
            bar.set_message("");
            bar.finish_and_clear();
            bar.reset();
        }
    });
}

fn progress_bar(template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(0).with_style(style.progress_chars("=> "))
}

pub struct Progress {
    bar: Option<ProgressBar>,
    terminal: bool,
    last_line: Instant,
}

impl Progress {
    /// Progress on stderr: a bar if that is a terminal, unless `plain`.
    pub fn new(plain: bool) -> Self {
        Self { bar: None, terminal: !plain && std::io::stderr().is_terminal(), last_line: Instant::now() }
    }

    fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => output::message(text),
        }
    }

    fn advance(&mut self, phase: &'static str, step: u64, steps: u64, text: &str) {
        if self.terminal {
            if self.bar.as_ref().is_none_or(|b| b.length() != Some(steps) || b.prefix() != phase) {
                if let Some(old) = self.bar.take() {
                    old.finish_and_clear();
                }
                let bar = progress_bar("{prefix} [{bar:30}] {pos}/{len} {elapsed}<{eta} {msg}").with_prefix(phase);
                bar.set_length(steps);
                self.bar = Some(bar);
            }
            if let Some(bar) = &self.bar {
                bar.set_position(step);
                bar.set_message(text.to_owned());
            }
        } else if step == 1
            || step == steps
            || step.is_multiple_of((steps / 10).max(1))
            || self.last_line.elapsed() > LINE_INTERVAL
        {
            self.last_line = Instant::now();
            self.line(&format!("{phase} {step}/{steps} {text}"));
        }
    }
}

fn value(metrics: &Metrics, name: &str) -> f64 {
    metrics.get(name).copied().unwrap_or(f64::NAN)
}

/// Returns true if a validation value is printed: means, and those over several samples per prompt.
fn is_headline(name: &str) -> bool {
    let single = name.contains("@1/") || name.ends_with("@1");
    !name.contains('@') || (name.starts_with("val-core/") && !single)
}

/// Lines at the end of a run.
pub fn summary_lines(summary: &Summary) -> String {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let ranks = summary.rank_peak_bytes.iter().copied();
    let ranks = match (ranks.clone().min(), ranks.max()) {
        (Some(least), Some(most)) => {
            format!(" ({:.1} to {:.1} MiB on each rank)", mib(least), mib(most))
        }
        _ => String::new(),
    };
    let ended = if summary.steps < summary.max_steps {
        format!("stopped: {} of {} steps", summary.steps, summary.max_steps)
    } else {
        format!("finished: {} steps", summary.steps)
    };
    let mut lines = vec![format!(
        "{ended} in {:.0} s, {:.0} tokens/s on {}; peak memory {:.1} MiB{ranks}",
        summary.seconds,
        summary.tokens_per_second,
        summary.device,
        mib(summary.measured_peak_bytes)
    )];
    for (name, last) in summary.last.iter().filter(|(name, _)| is_headline(name)) {
        let first = summary.first.get(name).copied().unwrap_or(f64::NAN);
        lines.push(format!("  {name}: {first:.4} -> {last:.4}"));
    }
    lines.extend(memory_lines(summary));
    if summary.skipped_steps > 0 {
        lines.push(format!(
            "  {} optimizer steps were skipped because values were NaN or infinite",
            summary.skipped_steps
        ));
    }
    lines.join("\n")
}

/// Largest relative difference between predicted and measured peak without a warning.
const MAX_PEAK_ERROR: f64 = 0.15;

/// Predicted and measured bytes by phase.
fn memory_lines(summary: &Summary) -> Vec<String> {
    if summary.memory.is_empty() {
        return Vec::new();
    }
    let row = |name: &str, predicted: u64, measured: u64| {
        let ratio = format!("{:.2}", measured as f64 / predicted.max(1) as f64);
        vec![name.to_owned(), Bytes(predicted).to_string(), Bytes(measured).to_string(), ratio]
    };
    let predicted = summary.predicted_peak_bytes.unwrap_or(0);
    let phases = summary.memory.iter().map(|phase| row(phase.phase, phase.predicted_bytes, phase.measured_bytes));
    let rows = phases.chain([row("whole run", predicted, summary.measured_peak_bytes)]);
    let table = Table::new(1, &["memory", "predicted", "measured", "measured/predicted"]).rows(rows);
    let mut lines: Vec<String> = table.render().lines().map(|l| format!("  {l}")).collect();
    let ratio = summary.measured_peak_bytes as f64 / predicted.max(1) as f64;
    if (ratio - 1.0).abs() > MAX_PEAK_ERROR && summary.replans == 0 {
        lines.push(format!(
            "  warning: the measured peak is {:.0} % of the predicted peak; predictions assume completions of maximum length",
            ratio * 100.0
        ));
    }
    lines
}

/// One line per step. Missing metrics (no policy update, no critic) are left out.
fn step_line(metrics: &Metrics) -> String {
    let mut text = format!("reward {:.3}", value(metrics, "critic/score/mean"));
    for (label, name) in [
        ("loss", "actor/pg_loss"),
        ("entropy", "actor/entropy"),
        ("grad_norm", "actor/grad_norm"),
        ("vf_loss", "critic/vf_loss"),
    ] {
        if let Some(value) = metrics.get(name) {
            let _ = write!(text, " {label} {value:.4}");
        }
    }
    let seconds = value(metrics, "timing_s/step");
    let _ = write!(text, " {seconds:.2} s/step");
    text
}

impl Observer for Progress {
    fn event(&mut self, event: Event<'_>) {
        match event {
            ready @ Event::Ready { .. } => {
                for line in ready_lines(&ready) {
                    self.line(&line);
                }
            }
            Event::Sft { step, steps, metrics } => {
                let text = format!(
                    "loss {:.4} grad_norm {:.3} lr {:.2e}",
                    value(metrics, "train/loss"),
                    value(metrics, "actor/grad_norm"),
                    value(metrics, "actor/lr")
                );
                self.advance("sft", step, steps, &text);
            }
            Event::Step { step, steps, metrics, .. } => {
                self.advance("train", step, steps, &step_line(metrics));
            }
            Event::Validated { step, metrics } => {
                for (name, value) in metrics.iter().filter(|(name, _)| is_headline(name)) {
                    self.line(&format!("validation at step {step}: {name} {value:.4}"));
                }
            }
            Event::Replanned { phase, step, used, limit, settings } => {
                let needed = used.map_or(String::new(), |b| format!(" with {} in use", Bytes(b)));
                let allowed = limit.map_or(String::new(), |b| format!(", limit {}", Bytes(b)));
                self.line(&format!(
                    "out of memory in the {phase} phase of step {step}{needed}{allowed}; continuing with {}",
                    settings.join(" ")
                ));
            }
            Event::Phase { .. } => {}
            Event::Saved { path } => self.line(&format!("saved {}", path.display())),
            Event::Finished(summary) => {
                if let Some(bar) = self.bar.take() {
                    bar.finish_and_clear();
                }
                self.line(&summary_lines(summary));
            }
        }
    }
}

/// Lines before the first step.
fn ready_lines(event: &Event<'_>) -> Vec<String> {
    let Event::Ready {
        device,
        params,
        trainable,
        output,
        resumed_from,
        filtered,
        validation,
        predicted_peak_bytes,
        budget_bytes,
    } = event
    else {
        return Vec::new();
    };
    let part = if trainable < params { format!("{trainable} of ") } else { String::new() };
    let budget = budget_bytes.map_or(String::new(), |bytes| format!(", budget {}", Bytes(bytes)));
    let mut lines = vec![
        format!("training {part}{params} parameters on {device}; run folder {}", output.display()),
        format!("plan: predicted peak {}{budget} (plan.json)", Bytes(*predicted_peak_bytes)),
    ];
    if *resumed_from > 0 {
        lines.push(format!("resumed after step {resumed_from}"));
    }
    if *filtered > 0 {
        lines.push(format!("skipped {filtered} training prompts longer than rollout.prompt_length"));
    }
    if *validation == 0 {
        lines.push("no validation prompts: val-core metrics will not be reported".into());
    }
    lines
}
