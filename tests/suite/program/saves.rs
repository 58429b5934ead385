//! Checkpoints that are written while the next step samples.

use super::Bench;
use firebrick_engine::config::load;
use firebrick_engine::metrics::{Control, Event, Observer};
use firebrick_engine::trainer::{Start, Trainer};
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// A checkpoint of each of three steps.
const EVERY_STEP: [&str; 4] =
    ["trainer.save_freq=1", "trainer.max_ckpt_to_keep=3", "trainer.test_freq=0", "trainer.val_before_train=false"];

type Work = Arc<dyn Fn() + Send + Sync>;

/// Notes phases and checkpoints, works at one of them, and pauses once if that is wanted.
#[derive(Clone, Default)]
struct Notes {
    noted: Arc<Mutex<Vec<String>>>,
    work: Option<(&'static str, Work)>,
    pauses: bool,
}

impl Notes {
    fn at(name: &'static str, work: impl Fn() + Send + Sync + 'static) -> Self {
        Self { work: Some((name, Arc::new(work))), ..Self::default() }
    }

    fn noted(&self) -> MutexGuard<'_, Vec<String>> {
        self.noted.lock().unwrap()
    }

    /// Place of a note.
    fn place(&self, what: &str) -> usize {
        let noted = self.noted();
        noted.iter().position(|note| note == what).unwrap_or_else(|| panic!("{what}: {noted:?}"))
    }
}

impl Observer for Notes {
    fn event(&mut self, event: Event<'_>) {
        let note = match event {
            Event::Phase { step, phase } => format!("{phase} {step}"),
            Event::Step { step, .. } => format!("step {step}"),
            Event::Saved { path } => path.file_name().unwrap().to_str().unwrap().to_owned(),
            _ => return,
        };
        if let Some((name, work)) = &self.work
            && *name == note
        {
            work();
        }
        self.noted().push(note);
    }

    fn control(&mut self) -> Control {
        if std::mem::take(&mut self.pauses) { Control::Pause } else { Control::Continue }
    }
}

/// A run of the bench's configuration.
fn trainer(bench: &Bench, run: &str, settings: &[&str], notes: &Notes, start: Start) -> Trainer {
    let output = format!("output={}", bench.path(run).display());
    let settings: Vec<String> = settings.iter().map(|s| (*s).to_owned()).chain([output]).collect();
    let config = load(&bench.path("config.yaml"), &settings).unwrap();
    Trainer::builder(config).observer(notes.clone()).start(start).build().unwrap()
}

fn fresh(bench: &Bench, run: &str, settings: &[&str], notes: &Notes) -> Trainer {
    trainer(bench, run, settings, notes, Start::Fresh)
}

/// Files of all checkpoints of a run, without the times and memory readings of its state.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            let inner = files(&path).into_iter();
            let name = PathBuf::from(path.file_name().unwrap());
            found.extend(inner.map(|(path, bytes)| (name.join(path), bytes)));
        } else if !path.ends_with("state.json") && !path.ends_with("checksums.json") {
            found.push((path.file_name().unwrap().into(), std::fs::read(&path).unwrap()));
        }
    }
    found.sort();
    found
}

#[test]
fn a_checkpoint_is_written_while_the_next_step_samples_and_is_complete_before_its_update() {
    let (bench, notes) = (Bench::new(), Notes::default());
    fresh(&bench, "run", &EVERY_STEP, &notes).run().unwrap();
    for step in 1..3 {
        let saved = notes.place(&format!("step-{step:06}"));
        let next = |phase: &str| notes.place(&format!("{phase} {}", step + 1));
        assert!(next("gen") < saved && saved < next("update_actor"), "{:?}", notes.noted());
    }
    assert_eq!(notes.noted().last().unwrap(), "step-000003");
    let lines = bench.read("run/metrics.jsonl");
    let waits = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let waits: Vec<bool> = waits.map(|line| line["timing_s/save_checkpoint"].is_number()).collect();
    let with_wait = waits.iter().skip_while(|waits| !**waits);
    assert_eq!(with_wait.collect::<Vec<_>>(), [&true, &true], "the first step waits for none");
}

#[test]
fn checkpoints_are_the_same_written_beside_steps_or_between_them() {
    let critic = ["objective=ppo", "critic={optim: {lr: 0.01}}", "rollout.n=1"];
    for (name, more) in [("critic", &critic[..]), ("bf16", &["precision=bf16"]), ("block8", &["memory.moments=block8"])]
    {
        let (bench, notes) = (Bench::new(), Notes::default());
        let settings = [&EVERY_STEP[..], more].concat();
        fresh(&bench, "beside", &settings, &notes).run().unwrap();
        let mut between = fresh(&bench, "between", &settings, &Notes::default());
        while between.finished_steps() < between.steps() {
            between.step().unwrap();
            let saved = bench.path(&format!("between/checkpoints/step-{:06}", between.finished_steps()));
            assert!(saved.is_dir(), "a caller finds the checkpoint after its step");
        }
        let [beside, between] = ["beside", "between"].map(|run| files(&bench.path(run).join("checkpoints")));
        assert!(beside == between && beside.len() > 12, "{name}");
        assert!(notes.place("gen 2") < notes.place("step-000001"), "{name}");
    }
}

#[test]
fn a_checkpoint_that_cannot_be_written_ends_the_run_with_the_same_message_beside_a_step_or_after_one() {
    let message = |beside: bool| {
        let bench = Bench::new();
        let checkpoints = bench.path("run/checkpoints");
        let notes = Notes::at("step 2", move || {
            std::fs::remove_dir_all(&checkpoints).unwrap();
            std::fs::write(&checkpoints, "no folder").unwrap();
        });
        let mut trainer = fresh(&bench, "run", &EVERY_STEP, &notes);
        let failed =
            if beside { trainer.run().map(drop) } else { trainer.step().and_then(|_| trainer.step()).map(drop) };
        let message = failed.unwrap_err().to_string().replace(bench.path("").to_str().unwrap(), "");
        let has = |note: &str| notes.noted().iter().any(|noted| noted == note);
        assert_eq!((has("gen 3"), has("update_actor 3")), (beside, false), "{:?}", notes.noted());
        assert!(bench.read("run/metrics.jsonl").contains("\"training/global_step\":2"), "finished steps stay");
        message
    };
    let [beside, between] = [message(true), message(false)];
    assert_eq!(beside, between);
    assert!(beside.contains("step-000002"), "{beside}");
}

#[test]
fn a_run_that_ends_while_a_checkpoint_is_written_waits_for_it() {
    let bench = Bench::new();
    let notes = Notes::at("reward 2", || panic!("an observer failed"));
    let mut trainer = fresh(&bench, "run", &EVERY_STEP, &notes);
    let ended = catch_unwind(AssertUnwindSafe(move || trainer.run().map(drop)));
    assert!(ended.is_err());
    let saved = std::fs::read_dir(bench.path("run/checkpoints")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(saved.collect::<Vec<_>>(), ["step-000001"]);
    let mut rest = self::trainer(&bench, "run", &EVERY_STEP, &Notes::default(), Start::Resume);
    assert_eq!(rest.run().unwrap().steps, 3);
}

#[test]
fn a_paused_run_completes_its_checkpoint() {
    let (bench, notes) = (Bench::new(), Notes { pauses: true, ..Notes::default() });
    fresh(&bench, "run", &EVERY_STEP, &notes).run().unwrap();
    assert!(notes.place("step-000001") < notes.place("gen 2"));
}
