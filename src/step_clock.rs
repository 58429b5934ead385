//! The end of the running step, predicted from earlier steps, and the steps that are lost if it never comes.

use firebrick::engine::config::Mode;
use firebrick::engine::metrics::{Event, Phase};
use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

/// Latest steps, of which the slowest predicts the running one.
const RECENT: usize = 8;

/// Beginnings of the phases of a step, since its first, and the step's duration without validation and checkpoint.
type StepTimes = (Vec<(Phase, Duration)>, Duration);

/// Part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Before the first step.
    Start,
    /// Between steps.
    Between,
    Step,
    /// Validation and checkpoint after a step.
    After,
    Over,
}

/// Follows a run by its events.
pub struct StepClock {
    mode: Mode,
    test_freq: u64,
    part: Part,
    /// Finished steps, of all.
    finished: u64,
    steps: u64,
    /// Step of the newest checkpoint.
    saved: Option<u64>,
    /// Time of the last event.
    last: Instant,
    began: Instant,
    /// Phases of the running step so far.
    phases: Vec<(Phase, Duration)>,
    recent: VecDeque<StepTimes>,
    /// Durations of the longest validation and the longest checkpoint, if there were any.
    validation: Option<Duration>,
    saving: Option<Duration>,
    /// True between the end of a step and the end of its validation.
    validates: bool,
}

impl StepClock {
    pub fn new(test_freq: u64, mode: Mode, now: Instant) -> Self {
        Self {
            mode,
            test_freq,
            part: Part::Start,
            finished: 0,
            steps: u64::MAX,
            saved: None,
            last: now,
            began: now,
            phases: Vec::new(),
            recent: VecDeque::new(),
            validation: None,
            saving: None,
            validates: false,
        }
    }

    /// Follows an event.
    pub fn event(&mut self, event: &Event<'_>, now: Instant) {
        let spent = now.duration_since(self.last);
        match event {
            Event::Ready { resumed_from, .. } => {
                self.finished = *resumed_from;
                self.saved = Some(*resumed_from).filter(|step| *step > 0);
            }
            Event::Phase { step, phase } if *step > self.finished => {
                if self.part != Part::Step {
                    (self.part, self.began) = (Part::Step, now);
                    self.phases.clear();
                }
                self.phases.push((*phase, now.duration_since(self.began)));
            }
            Event::Step { step, steps, .. } => self.end_step(*step, *steps, now),
            Event::Sft { step, steps, .. } if self.mode == Mode::Sft => self.end_step(*step, *steps, now),
            Event::Validated { .. } if self.part == Part::After => {
                self.validation = self.validation.max(Some(spent));
                self.validates = false;
            }
            Event::Saved { path } => {
                self.saving = self.saving.max(Some(spent));
                self.saved = saved_step(path).or(self.saved);
            }
            Event::Finished(_) => self.part = Part::Over,
            // a validation's phases belong to it
            Event::Phase { .. } if self.validates => return,
            _ => {}
        }
        self.last = now;
    }

    fn end_step(&mut self, step: u64, steps: u64, now: Instant) {
        let phases = std::mem::take(&mut self.phases);
        self.recent.push_back((phases, now.duration_since(self.began)));
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        (self.part, self.finished, self.steps) = (Part::After, step, steps);
        self.validates = self.is_validated(step);
    }

    /// Follows the end of all work after a step, and a pause.
    pub fn between_steps(&mut self, now: Instant) {
        if self.validates {
            // without prompts there is no event
            self.validation = self.validation.max(Some(now.duration_since(self.last)));
        }
        if matches!(self.part, Part::After | Part::Between) {
            (self.part, self.validates, self.last) = (Part::Between, false, now);
        }
    }

    fn is_validated(&self, step: u64) -> bool {
        step == self.steps || (self.test_freq > 0 && step.is_multiple_of(self.test_freq))
    }

    /// Returns true after the run's last checkpoint.
    pub fn is_over(&self) -> bool {
        self.part == Part::Over
    }

    /// Returns true while a checkpoint may be written: a run that is stopped does nothing else then.
    pub fn may_save(&self) -> bool {
        matches!(self.part, Part::Between | Part::After) && !self.validates
    }

    /// Number of the running step, or of the last one between steps.
    pub fn step(&self) -> u64 {
        self.finished + u64::from(self.part == Part::Step)
    }

    /// Time until the step is finished and saved; `None` if nothing predicts it.
    pub fn remaining(&self, now: Instant) -> Option<Duration> {
        // a checkpoint loses nothing by an attempt
        let saving = self.saving.unwrap_or_default();
        let since = now.duration_since(self.last);
        match self.part {
            Part::Start => None,
            Part::Between | Part::Over => Some(saving),
            Part::After if self.validates => Some(self.validation?.saturating_sub(since) + saving),
            Part::After => Some(saving.saturating_sub(since)),
            Part::Step => {
                let validation = if self.is_validated(self.finished + 1) { self.validation? } else { Duration::ZERO };
                Some(self.rest_of_step(now)? + validation + saving)
            }
        }
    }

    /// Time until the phases of the running step have ended: the longest that recent steps took after the beginning of
    /// the running phase.
    fn rest_of_step(&self, now: Instant) -> Option<Duration> {
        let &(phase, at) = self.phases.last()?;
        // dynamic sampling repeats phases
        let times = self.phases.iter().filter(|(other, _)| *other == phase).count();
        let rest = |(phases, total): &StepTimes| {
            let mut begun = phases.iter().filter(|(other, _)| *other == phase).map(|(_, at)| *at);
            let same = begun.clone().nth(times - 1).or_else(|| begun.next_back())?;
            Some(total.saturating_sub(same))
        };
        let longest = self.recent.iter().filter_map(rest).max()?;
        Some(longest.saturating_sub(now.duration_since(self.began).saturating_sub(at)))
    }

    /// Takes notice of the newest checkpoint in the run folder: one that was written during a step is told at its end.
    pub fn found(&mut self, newest: Option<u64>) {
        // those of an earlier run are there until this one begins
        if self.part != Part::Start {
            self.saved = self.saved.max(newest);
        }
    }

    /// The steps that an end at once loses, and the way on.
    pub fn lost(&self) -> String {
        let first = self.saved.map_or(1, |step| step + 1);
        let last = self.step();
        let lost = match (self.part, first) {
            (Part::Start, _) if self.saved.is_none() => "no step has begun".to_owned(),
            _ if first > last => "nothing is lost".to_owned(),
            _ if first == last => format!("step {last} is lost"),
            _ => format!("steps {first} to {last} are lost"),
        };
        match self.saved {
            Some(step) => format!("{lost}; continue after step {step}, the last checkpoint, with --resume"),
            None => format!("{lost}; there is no checkpoint yet, so --resume starts the run again"),
        }
    }
}

/// Step of a checkpoint's folder, such as `step-000010`.
fn saved_step(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick::engine::metrics::{Metrics, StepReport};

    /// A clock of a run that validates every fourth step, and the time of its last event.
    struct Run(StepClock, Instant);

    impl Run {
        fn new() -> Self {
            let now = Instant::now();
            Self(StepClock::new(4, Mode::Rl, now), now)
        }

        /// An event after so many seconds.
        fn tell(&mut self, after: u64, event: &Event<'_>) {
            self.1 += Duration::from_secs(after);
            self.0.event(event, self.1);
        }

        fn phase(&mut self, after: u64, step: u64, phase: Phase) {
            self.tell(after, &Event::Phase { step, phase });
        }

        fn end(&mut self, after: u64, step: u64) {
            let (metrics, report) = (Metrics::new(), StepReport::default());
            self.tell(after, &Event::Step { step, steps: 100, metrics: &metrics, report: &report });
        }

        /// A step of 10 s of sampling and 20 s of updates.
        fn step(&mut self, step: u64) {
            self.phase(0, step, Phase::Generate);
            self.phase(10, step, Phase::UpdateActor);
            self.end(20, step);
        }

        fn save(&mut self, after: u64, step: u64) {
            self.tell(after, &Event::Saved { path: format!("checkpoints/step-{step:06}").into() });
        }

        /// Seconds until the run is saved, after so many.
        fn remaining(&self, after: u64) -> Option<u64> {
            self.0.remaining(self.1 + Duration::from_secs(after)).map(|left| left.as_secs())
        }
    }

    #[test]
    fn the_first_step_is_not_predicted_and_later_ones_by_the_phases_before() {
        let mut run = Run::new();
        assert_eq!(run.remaining(0), None);
        run.phase(5, 1, Phase::Generate);
        assert_eq!(run.remaining(1), None);
        run.phase(10, 1, Phase::UpdateActor);
        run.end(20, 1);
        run.0.between_steps(run.1);
        run.phase(0, 2, Phase::Generate);
        assert_eq!((run.remaining(0), run.remaining(4)), (Some(30), Some(26)));
        // a slow phase is not made up for by the next one
        run.phase(50, 2, Phase::UpdateActor);
        assert_eq!((run.remaining(0), run.remaining(19), run.remaining(99)), (Some(20), Some(1), Some(0)));
        run.end(20, 2);
        run.0.between_steps(run.1);
        run.phase(0, 3, Phase::Generate);
        assert_eq!(run.remaining(0), Some(70), "the slowest of the recent steps predicts");
    }

    #[test]
    fn a_validation_and_the_checkpoint_after_the_step_are_in_the_prediction() {
        let mut run = Run::new();
        for step in 1..=3 {
            run.step(step);
            run.save(3, step);
            run.0.between_steps(run.1);
        }
        assert_eq!(run.remaining(100), Some(3));
        run.phase(0, 4, Phase::Generate);
        assert_eq!(run.remaining(0), None, "the first validation is not predicted");
        run.phase(10, 4, Phase::UpdateActor);
        run.end(20, 4);
        run.phase(0, 4, Phase::Validation);
        assert_eq!((run.remaining(2), run.0.may_save()), (None, false));
        run.tell(7, &Event::Validated { step: 4, metrics: &Metrics::new() });
        assert_eq!((run.remaining(1), run.0.may_save()), (Some(2), true));
        run.save(3, 4);
        run.0.between_steps(run.1);
        for step in 5..=7 {
            run.step(step);
            run.0.between_steps(run.1);
        }
        run.phase(0, 8, Phase::Generate);
        assert_eq!(run.remaining(0), Some(30 + 7 + 3));
        run.phase(10, 8, Phase::UpdateActor);
        run.end(20, 8);
        run.phase(1, 8, Phase::Validation);
        assert_eq!(run.remaining(1), Some(7 - 2 + 3));
    }

    #[test]
    fn what_is_lost_is_said_by_steps_with_the_way_on() {
        let mut run = Run::new();
        let again = "there is no checkpoint yet, so --resume starts the run again";
        assert_eq!(run.0.lost(), format!("no step has begun; {again}"));
        run.phase(0, 1, Phase::Generate);
        assert_eq!(run.0.lost(), format!("step 1 is lost; {again}"));
        run.end(1, 1);
        run.phase(0, 2, Phase::Generate);
        assert_eq!(run.0.lost(), format!("steps 1 to 2 are lost; {again}"));
        run.end(1, 2);
        run.save(1, 2);
        let way = "continue after step 2, the last checkpoint, with --resume";
        assert_eq!(run.0.lost(), format!("nothing is lost; {way}"));
        run.0.between_steps(run.1);
        run.phase(0, 3, Phase::Generate);
        assert_eq!(run.0.lost(), format!("step 3 is lost; {way}"));
    }
}
