//! Keys and events through the observer of a real run.

use super::super::feed::Feed;
use super::super::keys::press;
use super::super::metrics::{curves, peak_bytes, phases};
use super::super::state::LiveState;
use super::{TINY, key};
use firebrick::engine::config::{Mode, RunConfig, parse};
use firebrick::engine::metrics::{Control, Event, Observer};
use firebrick::engine::trainer::Trainer;
use firebrick::report::Pick;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The observer of the view, with keys pressed after some steps and while the run is paused.
struct Typed {
    feed: Feed,
    state: LiveState,
    keys: Vec<(u64, char)>,
    /// Keys for the questions of a paused run.
    paused: Vec<char>,
    noted: Arc<Mutex<Vec<String>>>,
}

impl Typed {
    fn press(&mut self, c: char) {
        press(key(c), &mut self.state, Some(self.feed.steering()));
    }

    fn note(&self, what: impl Into<String>) {
        self.noted.lock().unwrap().push(what.into());
    }
}

impl Observer for Typed {
    fn event(&mut self, event: Event<'_>) {
        match &event {
            Event::Step { step, .. } => {
                self.note(step.to_string());
                let now = *step;
                let due = self.keys.iter().filter(|key| key.0 == now);
                let due: Vec<char> = due.map(|key| key.1).collect();
                for c in due {
                    self.press(c);
                }
            }
            Event::Saved { .. } => self.note("saved"),
            _ => {}
        }
        self.feed.event(event);
    }

    fn control(&mut self) -> Control {
        let control = self.feed.control();
        if control == Control::Pause
            && let Some(c) = self.paused.pop()
        {
            self.press(c);
        }
        self.note(format!("{control:?}"));
        control
    }
}

/// A run in a folder of its own.
struct Run(tempfile::TempDir);

impl Run {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn folder(&self) -> PathBuf {
        self.0.path().join("run")
    }

    fn config(&self, overrides: &[&str]) -> RunConfig {
        let overrides: Vec<String> = overrides.iter().map(|&o| o.to_owned()).collect();
        let mut config = parse(TINY, &overrides).unwrap();
        config.output = self.folder();
        config
    }

    /// Actions of a run with these keys.
    fn typed(&self, keys: &[(u64, char)], paused: &str) -> String {
        let config = self.config(&[]);
        let (feed, _arrived) = Feed::new(&config, Mode::Rl, &self.folder());
        let noted: Arc<Mutex<Vec<String>>> = Arc::default();
        let observer = Typed {
            feed,
            state: LiveState::new(false),
            keys: keys.to_vec(),
            paused: paused.chars().rev().collect(),
            noted: Arc::clone(&noted),
        };
        let builder = Trainer::builder(config).observer(observer);
        builder.build().unwrap().run().unwrap();
        noted.lock().unwrap().join(" ")
    }
}

#[test]
fn s_saves_p_pauses_until_p_and_q_stops_after_the_step() {
    let saved = Run::new().typed(&[(2, 's')], "");
    assert_eq!(saved, "1 Continue 2 Save saved Continue 3 Continue");
    let paused = Run::new().typed(&[(1, 'p')], "xsp");
    let wanted = "1 Pause Pause Save saved Pause Continue 2 Continue 3 Continue";
    assert_eq!(paused, wanted);
    let stopped = Run::new().typed(&[(2, 'q')], "");
    assert_eq!(stopped, "1 Continue 2 Stop saved");
    let stopped = Run::new().typed(&[(1, 'p')], "q");
    assert_eq!(stopped, "1 Pause Stop saved");
}

#[test]
fn a_real_run_is_told_with_its_phases_samples_memory_and_plan() {
    let folder = Run::new();
    let config = folder.config(&[]);
    let (feed, arrived) = Feed::new(&config, Mode::Rl, &folder.folder());
    let trainer = Trainer::builder(config).observer(feed).build();
    let summary = trainer.unwrap().run().unwrap();
    let mut state = LiveState::new(false);
    for news in arrived.try_iter() {
        state.apply(news);
    }
    let run = &state.run;
    assert_eq!((run.step, run.steps, run.ended), (3, Some(3), Some(3)));
    let planned = run.planned.as_ref().unwrap();
    assert_eq!(Some(planned.peak_bytes), summary.predicted_peak_bytes);
    let phases = phases(run);
    let names: Vec<&str> = phases.iter().map(|phase| phase.name).collect();
    assert!(names.contains(&"gen") && names.contains(&"update_actor"));
    let of_update = phases.iter().find(|p| p.name == "update_actor").unwrap();
    assert!(of_update.bytes.unwrap() > 0 && of_update.planned.unwrap() > 0);
    assert!(peak_bytes(run).unwrap() > 0);
    let newest = state.current().unwrap();
    assert_eq!((newest.pick, newest.excerpt.step), (Pick::Newest, 3));
    assert_eq!(newest.read[0].1.as_deref(), Some(newest.excerpt.completion.trim()));
    let best = state.picked(Pick::Best).unwrap().excerpt.reward;
    let worst = state.picked(Pick::Worst).unwrap().excerpt.reward;
    assert!(best >= worst);
    let points = curves(run).map(|(_, metric)| run.scalars.curve(metric).len());
    assert_eq!(points[..2], [3, 2]);
}

/// Notes the time that the view took: until the run was ready, and until now.
struct Timed(Feed, Arc<Mutex<(Duration, Duration)>>);

impl Observer for Timed {
    fn event(&mut self, event: Event<'_>) {
        let ready = matches!(event, Event::Ready { .. });
        self.0.event(event);
        let mut spent = self.1.lock().unwrap();
        spent.1 = self.0.spent();
        if ready {
            spent.0 = spent.1;
        }
    }
}

#[test]
fn telling_the_view_takes_less_than_a_hundredth_of_a_step() {
    // steps of a tenth of a second and more, since what is told does not grow with the model. Somebody else's work may
    // hold up a thread of this machine: the least of three counts
    let larger = [
        "model.arch.hidden_size=128",
        "model.arch.intermediate_size=384",
        "model.arch.num_hidden_layers=4",
        "rollout.n=16",
        "trainer.train_batch_size=8",
        "trainer.steps=5",
    ];
    let share = || {
        let run = Run::new();
        let config = run.config(&larger);
        let (feed, arrived) = Feed::new(&config, Mode::Rl, &run.folder());
        let reader = std::thread::spawn(move || arrived.iter().count());
        let spent: Arc<Mutex<(Duration, Duration)>> = Arc::default();
        let observer = Timed(feed, Arc::clone(&spent));
        let trainer = Trainer::builder(config).observer(observer).build();
        let summary = trainer.unwrap().run().unwrap();
        assert!(reader.join().unwrap() > 25);
        let (ready, all) = *spent.lock().unwrap();
        assert!(all > ready);
        all.saturating_sub(ready).as_secs_f64() / summary.seconds
    };
    let shares = [share(), share(), share()];
    let least = shares.into_iter().fold(f64::INFINITY, f64::min);
    assert!(least < 0.01, "{shares:?}");
}
