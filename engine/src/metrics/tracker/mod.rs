//! Experiment trackers. The recorder feeds each [`Tracker`], which never stops training.

mod event_file;
mod tensorboard;
#[cfg(feature = "trackio")]
mod trackio;

pub use tensorboard::TensorBoard;
#[cfg(feature = "trackio")]
pub use trackio::Trackio;

use crate::config::{Logger, TrainerConfig};
use crate::metrics::described::Metrics;
use crate::metrics::report::RolloutReport;
use crate::rollout::Rollout;
use firebrick_backends::allocator::without_peak;
use firebrick_backends::heartbeat::wait_for;
use serde_json::Value;
use std::error::Error;
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// The run of a tracker.
#[derive(Clone, Copy, Debug)]
pub struct TrackedRun<'a> {
    /// The run folder.
    pub folder: &'a Path,
    /// Project: `trainer.project_name`.
    pub project: &'a str,
    /// Name: `trainer.experiment_name`, or else that of its folder.
    pub name: &'a str,
    /// The resolved configuration.
    pub config: &'a Value,
    /// The resolved configuration as YAML.
    pub yaml: &'a str,
    /// The last step whose values stay, of a run that continues from a checkpoint. `None` if the run starts, or starts
    /// over: no value of an earlier session stays.
    pub last_step: Option<u64>,
}

/// Result of a tracker. The error is shown to the user once.
pub type TrackerResult = Result<(), Box<dyn Error + Send + Sync>>;

/// An experiment tracker such as `TensorBoard` or Trackio.
///
/// It is called on the training thread, between phases, and must not take long. An error or a panic only causes a
/// warning: the tracker is called again with later values, and may then write earlier ones.
pub trait Tracker {
    /// Name in messages.
    fn name(&self) -> &str;

    /// Begins or continues a run. Called first, and once.
    ///
    /// # Errors
    /// The reason of the failure. The first failure of a tracker is a warning; the run continues, and calls it again.
    fn begin(&mut self, run: &TrackedRun<'_>) -> TrackerResult;

    /// Receives the metrics of a step and of the validation after it, as in its line of `metrics.jsonl`. Steps ascend
    /// from 0.
    ///
    /// # Errors
    /// As [`Self::begin`].
    fn metrics(&mut self, step: u64, metrics: &Metrics) -> TrackerResult;

    /// Receives some samples as Markdown. By default it ignores them.
    ///
    /// # Errors
    /// As [`Self::begin`].
    fn text(&mut self, step: u64, name: &str, markdown: &str) -> TrackerResult {
        let _ = (step, name, markdown);
        Ok(())
    }

    /// Ends the session. Not called if the process is killed.
    ///
    /// # Errors
    /// As [`Self::begin`].
    fn finish(&mut self) -> TrackerResult {
        Ok(())
    }
}

/// The trackers of `trainer.logger`, without console and run folder, which an observer and the recorder write.
pub fn configured(config: &TrainerConfig) -> Vec<Box<dyn Tracker>> {
    let tracker = |logger: Logger| -> Option<Box<dyn Tracker>> {
        match logger {
            Logger::Console | Logger::File => None,
            Logger::Tensorboard => Some(Box::new(TensorBoard::new())),
            #[cfg(feature = "trackio")]
            Logger::Trackio => Some(Box::new(Trackio::new())),
            // `Loggers::check` rejects it before a run
            #[cfg(not(feature = "trackio"))]
            Logger::Trackio => None,
        }
    };
    config.logger.iter().filter_map(tracker).collect()
}

/// Maximum characters of a prompt or a completion in a text.
const MAX_TEXT_CHARS: usize = 4000;

/// Approximate number of texts of a run, as many as `TensorBoard` shows of a name.
const TEXT_COUNT: u64 = 10;

/// The trackers of a run. The run continues after their failures, the first of which is a warning, and their memory is
/// in no peak.
#[derive(Default)]
pub struct Trackers(Vec<Guarded>);

struct Guarded {
    tracker: Box<dyn Tracker>,
    warned: bool,
}

impl Guarded {
    fn call(&mut self, work: impl FnOnce(&mut dyn Tracker) -> TrackerResult) {
        let tracker = &mut *self.tracker;
        let _wait = wait_for(format!("the tracker {}", tracker.name()));
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
    /// Begins a run in all trackers.
    pub fn begin(trackers: Vec<Box<dyn Tracker>>, run: &TrackedRun<'_>) -> Self {
        let guarded = trackers.into_iter().map(|tracker| {
            let mut guarded = Guarded { tracker, warned: false };
            guarded.call(|tracker| tracker.begin(run));
            guarded
        });
        Self(guarded.collect())
    }

    /// Calls all trackers.
    fn call(&mut self, mut work: impl FnMut(&mut dyn Tracker) -> TrackerResult) {
        for guarded in &mut self.0 {
            guarded.call(&mut work);
        }
    }

    /// Sends the metrics of a step.
    pub fn metrics(&mut self, step: u64, metrics: &Metrics) {
        self.call(|tracker| tracker.metrics(step, metrics));
    }

    /// Sends the best and the worst sample of a step, about `TEXT_COUNT` times in a run of `steps`.
    pub fn samples(&mut self, step: u64, steps: u64, report: &RolloutReport) {
        let due = step == 1 || step == steps || step.is_multiple_of((steps / TEXT_COUNT).max(1));
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
            self.call(|tracker| tracker.text(step, name, &markdown));
        }
    }

    /// Ends the session.
    pub fn finish(&mut self) {
        self.call(|tracker| tracker.finish());
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
    let prompt_text = rollout.prompt_text.as_ref().unwrap_or(&prompt.text);
    for (title, part) in [("answer", &prompt.example.answer), ("prompt", prompt_text), ("completion", &rollout.text)] {
        let _ = write!(text, "\n\n**{title}**\n\n{}", code_block(part, MAX_TEXT_CHARS));
    }
    text
}

/// A text as a code block of Markdown, truncated to `max_chars`: lines indented by four spaces, a block that no text
/// can end.
fn code_block(text: &str, max_chars: usize) -> String {
    let mut block = String::new();
    let cut = text.char_indices().nth(max_chars).map(|(at, _)| at);
    for line in text[..cut.unwrap_or(text.len())].split(['\n', '\r']) {
        // writing to a string cannot fail
        let _ = writeln!(block, "    {line}");
    }
    if cut.is_some() {
        block.push_str("    …\n");
    }
    block
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let trackers: Vec<Box<dyn Tracker>> =
            vec![Box::new(Panics), Box::new(Fails(Arc::clone(&failed))), Box::new(Keeps(Arc::clone(&kept)))];
        let run = TrackedRun {
            folder: Path::new("run"),
            project: "p",
            name: "r",
            config: &Value::Null,
            yaml: "",
            last_step: None,
        };
        let mut trackers = Trackers::begin(trackers, &run);
        for step in 0..3 {
            trackers.metrics(step, &Metrics::new());
        }
        trackers.finish();
        // one that failed is asked again: a full disk may be mended
        assert_eq!(*kept.lock().unwrap(), [0, 1, 2]);
        assert_eq!(*failed.lock().unwrap(), [0, 1, 2]);
        assert!(trackers.0[0].warned && trackers.0[1].warned && !trackers.0[2].warned);
    }

    #[test]
    fn a_code_block_holds_any_text_and_cuts_a_long_one() {
        let hostile = "```\n<b>\r\n</script>\rx";
        let block = code_block(hostile, 100);
        assert!(block.lines().all(|line| line.starts_with("    ")), "{block}");
        assert!(!block.contains('\r'), "{block:?}");
        let long = code_block(&"ä".repeat(11), 10);
        assert_eq!(long.matches('ä').count(), 10);
        assert!(long.ends_with("…\n"));
    }
}
