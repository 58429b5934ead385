//! Files, observer and measurements of a run.

use super::models::Loaded;
use super::session::{Planned, Session};
use crate::checkpoint::TrainerState;
use crate::metrics::profile::Profiler;
use crate::metrics::timeline::Reason;
use crate::metrics::{Ledger, PhaseTimings, Recorder, Snapshots};
use crate::{Error, Result};
use firebrick_backends::allocator::without_peak;

/// Files, observer and measurements of a run.
pub(super) struct Telemetry {
    pub recorder: Recorder,
    pub ledger: Ledger,
    /// Memory timelines.
    pub snapshots: Snapshots,
    /// Trace of some steps.
    pub profiler: Profiler,
    /// Seconds of the phases since they were last reported.
    pub timings: PhaseTimings,
}

impl Telemetry {
    /// Telemetry of a run that begins in a state, under a plan. Traces `profile` steps.
    pub fn begin(
        recorder: Recorder,
        session: &Session,
        planned: &Planned,
        loaded: &Loaded,
        state: &TrainerState,
        profile: u64,
    ) -> Self {
        let (log, info) = (&loaded.log, &session.info);
        let device = format!("{} ({})", info.device, info.name);
        let unified = planned.request.profile.is_unified();
        let mut snapshots = Snapshots::new(log, device, unified, state.step, session.config.memory.snapshot);
        snapshots.planned(planned.estimate().phases);
        let accounts = &loaded.models.policy.runtime.accounts;
        Self {
            recorder,
            ledger: Ledger::new(state.peak_bytes, &session.device, accounts, log),
            snapshots,
            profiler: Profiler::new(log, profile, state.step..session.steps),
            timings: PhaseTimings::default(),
        }
    }

    /// Begins a step.
    pub fn begin_step(&mut self, step: u64) {
        let profiled = self.profiler.begin_step(step);
        self.snapshots.begin_step(step, profiled);
    }

    /// Ends the step, whether it succeeded or not.
    pub fn end_step(&mut self) {
        self.profiler.end_step(&self.recorder.run);
    }

    /// Writes the timeline if a part of the run has failed: always if memory ran out, else if one is due and not yet
    /// written.
    pub fn dump_timeline_on_oom<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            if error.out_of_memory().is_some() {
                self.write_timeline(Reason::OutOfMemory, Some(error));
            } else if self.snapshots.is_owed() {
                self.write_timeline(Reason::Failed, Some(error));
            }
        }
        result
    }

    /// Writes the memory timeline. A failure to write does not end the run.
    pub fn write_timeline(&mut self, reason: Reason, error: Option<&Error>) {
        let error = error.map(ToString::to_string);
        without_peak(|| {
            let timeline = self.snapshots.timeline(reason, error);
            self.recorder.timeline(&timeline);
        });
    }
}
