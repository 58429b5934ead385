//! `firebrick bench`: where the time of a training step goes.

use super::load_config;
use crate::arguments::BenchArgs;
use crate::output;
use crate::table::Table;
use anyhow::Context;
use firebrick::backends::trace::{self, SpanRecord, SpanTotal};
use firebrick::engine::metrics::{Event, Metrics, Observer};
use firebrick::engine::trainer::Trainer;
use firebrick::models::Arch;
use firebrick::models::arch::Mixer;
use firebrick::spec::{DeviceProfile, Origin};
use serde::Serialize;
use serde_json::json;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Steps before the measured ones, which compile kernels and fault memory in.
const WARM_UP_STEPS: u64 = 1;

/// Records of the observed steps.
#[derive(Default)]
struct Collected {
    steps: Vec<Metrics>,
    spans: Vec<SpanRecord>,
    device: String,
}

/// Starts recording after the warm-up, and stops after the last step.
struct Recorder(Arc<Mutex<Collected>>);

impl Observer for Recorder {
    fn event(&mut self, event: Event<'_>) {
        let mut collected = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Ready { device, .. } => collected.device = device,
            Event::Step { step, steps, metrics, .. } => {
                if step > WARM_UP_STEPS {
                    collected.steps.push(metrics.clone());
                }
                if step == steps {
                    collected.spans = trace::finish();
                } else if step == WARM_UP_STEPS {
                    trace::record();
                }
            }
            _ => {}
        }
    }
}

/// Results per step.
#[derive(Debug, Serialize)]
struct Report {
    device: String,
    steps: usize,
    seconds_per_step: f64,
    /// Sampled tokens per second of sampling.
    generated_tokens_per_second: f64,
    /// Prompt and completion tokens per second of updating.
    updated_tokens_per_second: f64,
    /// Floating-point operations of the model per second of the whole step.
    model_flops_per_second: f64,
    /// That rate divided by the device's matmul rate.
    model_flop_utilisation: f64,
    /// Origin of the matmul rate.
    peak: Origin,
    phases: Vec<Line>,
    families: Vec<Line>,
}

#[derive(Debug, Serialize)]
struct Line {
    name: &'static str,
    calls_per_step: f64,
    /// Excluding nested families, for families; including them, for phases.
    seconds_per_step: f64,
    share: f64,
    /// Floating-point operations per second of that time, if they are counted.
    flops_per_second: Option<f64>,
}

pub fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let mut config = load_config(&args.config, &args.overrides, args.device)?;
    let scratch = tempfile::Builder::new().prefix("firebrick-bench-").tempdir().context("cannot create a folder")?;
    config.output = scratch.path().join("run");
    config.warmup.sft = None;
    config.trainer.steps = WARM_UP_STEPS + args.steps;
    config.trainer.test_freq = 0;
    config.trainer.save_freq = -1;
    config.trainer.val_max_samples = Some(1);
    let epochs = config.update.ppo_epochs;

    let collected = Arc::new(Mutex::new(Collected::default()));
    let recorder = Recorder(Arc::clone(&collected));
    let mut trainer = Trainer::builder(config).observer(recorder).build()?;
    trainer.run()?;
    let profile = trainer.profile().clone();
    let arch = trainer.policy().arch().clone();
    let matmul_params = trainer.policy().num_params() - embedding_params(&arch);
    drop(trainer);

    let collected = std::mem::take(&mut *collected.lock().unwrap_or_else(PoisonError::into_inner));
    if let Some(path) = &args.trace {
        write_trace(path, &collected.spans)?;
    }
    let work = Work { matmul_params: matmul_params as f64, arch: &arch, epochs: epochs as f64 };
    let report = report(&collected, &work, &profile);
    output::print_as(args.json, &report, || tables(&report))
}

/// Parameters that are looked up and not multiplied.
fn embedding_params(arch: &Arch) -> usize {
    if arch.tied { 0 } else { arch.vocab_size * arch.hidden_size }
}

/// Work of the model.
struct Work<'a> {
    matmul_params: f64,
    arch: &'a Arch,
    epochs: f64,
}

impl Work<'_> {
    /// Operations of one token's forward, in sequences of this length: two for each multiplied parameter, and
    /// four for each query number and key of attention (`PaLM`'s count, arXiv:2204.02311, which does not halve for
    /// causality).
    fn forward(&self, length: f64) -> f64 {
        let a = self.arch;
        let layers = a.count(Mixer::Attention);
        let attention = 4.0 * (layers * a.num_heads * a.head_dim) as f64 * length;
        2.0 * self.matmul_params + attention
    }

    /// Operations of a whole step: one forward of sampling, one of each scoring, three of each update.
    fn step(&self, metrics: &Metrics) -> f64 {
        let value = |name: &str| metrics.get(name).copied().unwrap_or(0.0);
        let length = value("prompt_length/mean") + value("response_length/mean");
        let scorings = ["timing_s/old_log_prob", "timing_s/ref"];
        let scorings = scorings.iter().filter(|n| metrics.contains_key(**n)).count();
        let passes = 1.0 + scorings as f64 + 3.0 * self.epochs;
        passes * value("perf/total_num_tokens") * self.forward(length)
    }
}

fn report(collected: &Collected, work: &Work<'_>, profile: &DeviceProfile) -> Report {
    let steps = collected.steps.len().max(1) as f64;
    let sum = |name: &str| -> f64 {
        let values = collected.steps.iter().filter_map(|m| m.get(name));
        values.sum()
    };
    let seconds = sum("perf/time_per_step");
    let tokens = sum("perf/total_num_tokens");
    let lengths = sum("prompt_length/mean") + sum("response_length/mean");
    let generated = tokens * sum("response_length/mean") / lengths.max(1e-9);
    let flops: f64 = collected.steps.iter().map(|m| work.step(m)).sum();
    let line = |name, family: &SpanTotal, time: f64| Line {
        name,
        calls_per_step: family.calls as f64 / steps,
        seconds_per_step: time / steps,
        share: time / seconds.max(1e-9),
        flops_per_second: (family.flops > 0.0).then(|| family.flops / time.max(1e-9)),
    };
    let top: Vec<SpanRecord> = collected.spans.iter().filter(|s| s.depth == 0).cloned().collect();
    let phases = trace::totals_by_name(&top);
    let mut families: Vec<Line> = trace::totals_by_name(&collected.spans)
        .iter()
        .map(|(name, family)| line(name, family, family.own_seconds))
        .collect();
    families.sort_by(|a, b| b.seconds_per_step.total_cmp(&a.seconds_per_step));
    let rate = flops / seconds.max(1e-9);
    Report {
        device: collected.device.clone(),
        steps: collected.steps.len(),
        seconds_per_step: seconds / steps,
        generated_tokens_per_second: generated / sum("timing_s/gen").max(1e-9),
        updated_tokens_per_second: work.epochs * tokens / sum("timing_s/update_actor").max(1e-9),
        model_flops_per_second: rate,
        model_flop_utilisation: rate / profile.matmul_flops.f32,
        peak: profile.origin,
        phases: phases.iter().map(|(name, family)| line(name, family, family.seconds)).collect(),
        families,
    }
}

fn tables(report: &Report) -> String {
    let mut text = format!(
        "{}: {} steps after one warm-up step, {:.3} s per step\n\
         sampling {:.0} tokens/s, update {:.0} tokens/s, model {:.1} GFLOP/s: {:.0} % of the matmul rate{}\n\n",
        report.device,
        report.steps,
        report.seconds_per_step,
        report.generated_tokens_per_second,
        report.updated_tokens_per_second,
        report.model_flops_per_second / 1e9,
        report.model_flop_utilisation * 100.0,
        match report.peak {
            Origin::Measured => " (measured)",
            Origin::DataSheet => " (from the data sheet; run firebrick devices --measure for a measured rate)",
            Origin::Assumed => " (assumed; run firebrick devices --measure for a measured rate)",
        }
    );
    for (title, lines) in [("PHASE", &report.phases), ("KERNEL FAMILY, SELF TIME", &report.families)] {
        let rows = lines.iter().map(|line| {
            let (calls, ms) = (format!("{:.0}", line.calls_per_step), format!("{:.2}", line.seconds_per_step * 1e3));
            let rate = line.flops_per_second.map_or_else(String::new, |rate| format!("{:.1}", rate / 1e9));
            vec![line.name.into(), calls, ms, format!("{:.1} %", line.share * 100.0), rate]
        });
        text += &Table::new(1, &[title, "CALLS", "MS", "SHARE", "GFLOP/S"]).rows(rows).render();
        text += "\n";
    }
    text + "Self time excludes nested families. Time in no family is spent in the backend's tensor operations.\n"
}

/// Spans in the Trace Event Format (complete events), which Perfetto and Chrome's trace viewer open.
fn write_trace(path: &Path, spans: &[SpanRecord]) -> anyhow::Result<()> {
    let events: Vec<_> = spans
        .iter()
        .map(|span| {
            json!({
                "name": span.name, "ph": "X", "pid": 1, "tid": 1,
                "ts": span.start * 1e6, "dur": span.seconds * 1e6,
                "args": {"flops": span.flops},
            })
        })
        .collect();
    let text = serde_json::to_string(&json!({"traceEvents": events, "displayTimeUnit": "ms"}))?;
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
