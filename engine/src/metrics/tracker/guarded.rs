//! All trackers of a run, kept out of the way of training.

use super::markdown::code_block;
use super::traits::{TrackedRun, Tracker, TrackerResult};
use crate::metrics::described::Metrics;
use crate::metrics::report::RolloutReport;
use crate::rollout::Rollout;
use firebrick_backends::allocator::without_peak;
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Most characters of a prompt or a completion in a text.
const TEXT_CHARS: usize = 4000;

/// Texts of a run: about one at every tenth of it, as many as `TensorBoard` shows of a name.
const TEXTS: u64 = 10;

/// The trackers of a run. Whatever one of them does, the run continues: the first failure of each is a warning, the
/// others are not mentioned, and memory that they take shows in no peak.
#[derive(Default)]
pub struct Trackers(Vec<Guarded>);

struct Guarded {
    tracker: Box<dyn Tracker>,
    warned: bool,
}

impl Guarded {
    fn call(&mut self, work: impl FnOnce(&mut dyn Tracker) -> TrackerResult) {
        let tracker = &mut *self.tracker;
        let done = without_peak(|| catch_unwind(AssertUnwindSafe(|| work(tracker))));
        let problem = match done {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it panicked".to_owned(),
        };
        if !self.warned {
            self.warned = true;
            tracing::warn!("{}: {problem}; the run continues, and metrics.jsonl has every value", self.tracker.name());
        }
    }
}

impl Trackers {
    /// Tells trackers of their run.
    pub fn begin(trackers: Vec<Box<dyn Tracker>>, run: &TrackedRun<'_>) -> Self {
        let guarded = trackers.into_iter().map(|tracker| {
            let mut guarded = Guarded { tracker, warned: false };
            guarded.call(|tracker| tracker.begin(run));
            guarded
        });
        Self(guarded.collect())
    }

    /// Hands on the metrics of a step.
    pub fn metrics(&mut self, step: u64, metrics: &Metrics) {
        for guarded in &mut self.0 {
            guarded.call(|tracker| tracker.metrics(step, metrics));
        }
    }

    /// Hands on the best and the worst sample of a step, at every tenth of a run of `steps`.
    pub fn samples(&mut self, step: u64, steps: u64, report: &RolloutReport) {
        let due = step == 1 || step == steps || step.is_multiple_of((steps / TEXTS).max(1));
        if self.0.is_empty() || !due {
            return;
        }
        let rollouts = report.rollouts.iter().filter_map(|rollout| Some((rollout, rollout.reward?)));
        let by_reward = |a: &(&Rollout, f64), b: &(&Rollout, f64)| a.1.total_cmp(&b.1);
        // of equal rewards the first
        let best = rollouts.clone().rev().max_by(by_reward);
        let worst = rollouts.min_by(by_reward);
        for (name, picked) in [("samples/best", best), ("samples/worst", worst)] {
            let Some((rollout, reward)) = picked else { continue };
            let markdown = sample(rollout, reward, report);
            for guarded in &mut self.0 {
                guarded.call(|tracker| tracker.text(step, name, &markdown));
            }
        }
    }

    /// Ends the session.
    pub fn finish(&mut self) {
        for guarded in &mut self.0 {
            guarded.call(|tracker| tracker.finish());
        }
    }
}

/// A sample in Markdown: its reward, the gold answer, the prompt, the completion.
fn sample(rollout: &Rollout, reward: f64, report: &RolloutReport) -> String {
    let prompt = &report.prompts[(rollout.prompt_index - report.first_prompt) as usize];
    let mut text = format!("reward {reward}");
    for (name, value) in &rollout.reward_parts {
        // writing to a string cannot fail
        let _ = write!(text, ", {name} {value}");
    }
    let asked = rollout.prompt_text.as_ref().unwrap_or(&prompt.text);
    for (title, part) in [("answer", &prompt.example.answer), ("prompt", asked), ("completion", &rollout.text)] {
        let _ = write!(text, "\n\n**{title}**\n\n{}", code_block(part, TEXT_CHARS));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::path::Path;
    use std::sync::{Arc, Mutex};

    type Steps = Arc<Mutex<Vec<u64>>>;

    struct Keeps(Steps);
    struct Fails(Steps);
    struct Panics;

    impl Tracker for Keeps {
        fn name(&self) -> &'static str {
            "keeps"
        }
        fn begin(&mut self, _run: &TrackedRun<'_>) -> TrackerResult {
            Ok(())
        }
        fn metrics(&mut self, step: u64, _metrics: &Metrics) -> TrackerResult {
            self.0.lock().unwrap().push(step);
            Ok(())
        }
    }

    impl Tracker for Fails {
        fn name(&self) -> &'static str {
            "fails"
        }
        fn begin(&mut self, _run: &TrackedRun<'_>) -> TrackerResult {
            Err("no disk".into())
        }
        fn metrics(&mut self, step: u64, _metrics: &Metrics) -> TrackerResult {
            self.0.lock().unwrap().push(step);
            Err("no disk".into())
        }
        fn finish(&mut self) -> TrackerResult {
            Err("no disk".into())
        }
    }

    impl Tracker for Panics {
        fn name(&self) -> &'static str {
            "panics"
        }
        fn begin(&mut self, _run: &TrackedRun<'_>) -> TrackerResult {
            panic!("on purpose")
        }
        fn metrics(&mut self, _step: u64, _metrics: &Metrics) -> TrackerResult {
            panic!("on purpose")
        }
    }

    #[test]
    fn what_one_tracker_does_changes_nothing_for_the_others() {
        let (kept, failed) = (Steps::default(), Steps::default());
        let all: Vec<Box<dyn Tracker>> =
            vec![Box::new(Panics), Box::new(Fails(Arc::clone(&failed))), Box::new(Keeps(Arc::clone(&kept)))];
        let run = TrackedRun {
            folder: Path::new("run"),
            project: "p",
            name: "r",
            config: &Value::Null,
            yaml: "",
            last_step: None,
        };
        let mut trackers = Trackers::begin(all, &run);
        for step in 0..3 {
            trackers.metrics(step, &Metrics::new());
        }
        trackers.finish();
        // one that failed is asked again: a full disk may be mended
        assert_eq!(*kept.lock().unwrap(), [0, 1, 2]);
        assert_eq!(*failed.lock().unwrap(), [0, 1, 2]);
        assert!(trackers.0[0].warned && trackers.0[1].warned && !trackers.0[2].warned);
    }
}
