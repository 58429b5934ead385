//! Runs that hang in a task or a tracker, alone and on several ranks, and runs that only pause.

use super::config;
use firebrick_backends::collective::{Settings, Threads};
use firebrick_engine::metrics::tracker::{TrackedRun, Tracker, TrackerResult};
use firebrick_engine::metrics::{Control, Event, Metrics, Observer};
use firebrick_engine::task::{Completion, Example, Reward, Split, Task, TaskError};
use firebrick_engine::trainer::{Hang, Trainer};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const TIMEOUT: &str = "trainer.heartbeat_timeout=2";

/// Blocks threads until a hang is reported.
#[derive(Clone, Default)]
struct Gate {
    opened: Arc<AtomicBool>,
    reports: Arc<Mutex<Vec<String>>>,
}

impl Gate {
    fn wait(&self) {
        while !self.opened.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Keeps a report, and lets the threads go on.
    fn handler(&self) -> impl Fn(&Hang) + Send + Sync + 'static {
        let gate = self.clone();
        move |hang| {
            gate.reports.lock().unwrap().push(hang.to_string());
            gate.opened.store(true, Ordering::SeqCst);
        }
    }

    fn reports(&self) -> Vec<String> {
        self.reports.lock().unwrap().clone()
    }
}

/// Prompts of one digit, whose completions are judged until one is one too many.
struct Hangs {
    left: AtomicUsize,
    gate: Gate,
}

impl Task for Hangs {
    fn name(&self) -> &'static str {
        "hangs"
    }

    fn len(&self, _: Split) -> Option<u64> {
        Some(10)
    }

    fn example(&self, _: Split, index: u64) -> Result<Example, TaskError> {
        Ok(Example::text(format!("{}+", index % 10), ""))
    }

    fn alphabet(&self) -> Option<&str> {
        Some("0123456789+=")
    }

    fn reward(&self, _: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.gate.wait();
        }
        Ok(Reward::single("length", completion.tokens.len() as f64))
    }
}

#[test]
fn a_rank_that_hangs_is_named_on_every_rank_with_what_it_waits_for() {
    let folders = tempfile::tempdir().unwrap();
    let gate = Gate::default();
    let ended = Threads::run(3, Settings::default(), |rank| {
        let left = if rank.rank() == 1 { 15 } else { usize::MAX };
        let task = Hangs { left: AtomicUsize::new(left), gate: gate.clone() };
        let overrides = [TIMEOUT, "trainer.val_before_train=false", "trainer.test_freq=0"];
        let builder = Trainer::builder(config(&folders.path().join("run"), &overrides)).task(task);
        let built = builder.on_hang(gate.handler()).world(rank).build();
        let error = built.and_then(|mut trainer| trainer.run().map(drop)).expect_err("an end");
        (error.is_hang(), error.to_string())
    });
    let reports = gate.reports();
    assert!(reports[0].contains("rank 1 hung in the phase `"), "{reports:?}");
    assert!(reports[0].contains("it waits for the thread that scores completions by rules"), "{reports:?}");
    let report = std::fs::read_to_string(folders.path().join("run/hang_rank_1.txt")).unwrap();
    assert!(report.contains("waits:") && report.contains("rank 1 in "), "{report}");
    for (rank, ended) in ended.into_iter().enumerate() {
        let (is_hang, said) = ended.unwrap();
        assert!(is_hang && said.contains("rank 1 is gone: it hung in the phase `"), "{rank}: {said}");
    }
}

/// A tracker whose server does not answer.
struct Silent(Gate);

impl Tracker for Silent {
    fn name(&self) -> &'static str {
        "Silent"
    }

    fn begin(&mut self, _: &TrackedRun<'_>) -> TrackerResult {
        Ok(())
    }

    fn metrics(&mut self, step: u64, _: &Metrics) -> TrackerResult {
        if step == 2 {
            self.0.wait();
        }
        Ok(())
    }
}

#[test]
fn a_tracker_that_does_not_answer_is_named_between_phases() {
    let folders = tempfile::tempdir().unwrap();
    let gate = Gate::default();
    let run = folders.path().join("run");
    let builder = Trainer::builder(config(&run, &[TIMEOUT, "trainer.save_freq=1"]));
    builder.tracker(Silent(gate.clone())).on_hang(gate.handler()).run().unwrap();
    let reports = gate.reports();
    assert_eq!(reports.len(), 1, "{reports:?}");
    for part in ["the run hung in the phase `report` of step 2", "the tracker Silent", "hang.txt", "with --resume"] {
        assert!(reports[0].contains(part), "{part}: {reports:?}");
    }
    assert!(run.join("hang.txt").exists());
}

/// Pauses the run after its first step, for longer than the timeout.
struct Pauses(Option<Instant>);

impl Observer for Pauses {
    fn event(&mut self, _: Event<'_>) {}

    fn control(&mut self) -> Control {
        let begun = *self.0.get_or_insert_with(Instant::now);
        if begun.elapsed() < Duration::from_secs(5) { Control::Pause } else { Control::Continue }
    }
}

#[test]
fn a_paused_run_and_one_whose_caller_waits_between_steps_do_not_hang() {
    let folders = tempfile::tempdir().unwrap();
    let gate = Gate::default();
    let ended = Threads::run(2, Settings::default(), |rank| {
        let config = config(&folders.path().join("paused"), &[TIMEOUT]);
        let builder = Trainer::builder(config).observer(Pauses(None)).on_hang(gate.handler());
        builder.world(rank).run().map(drop).map_err(|error| error.to_string())
    });
    assert!(ended.iter().all(|rank| *rank == Ok(Ok(()))), "{ended:?}");
    let mut trainer =
        Trainer::builder(config(&folders.path().join("stepped"), &[TIMEOUT])).on_hang(gate.handler()).build().unwrap();
    trainer.step().unwrap();
    std::thread::sleep(Duration::from_secs(5));
    trainer.step().unwrap();
    assert_eq!(gate.reports(), [""; 0]);
}
