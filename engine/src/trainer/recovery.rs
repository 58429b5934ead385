//! How work runs on the models, and what happens where memory runs out: it is done again under the next cheaper plan.
//!
//! Nothing of a failed attempt stays: accumulators are dropped with it, and weights change only once all gradients are
//! there. Normalisers are fixed for the whole optimizer step, so a step that is cut differently is the same step.

use super::models::Models;
use super::save::Checkpoints;
use super::session::{Planned, Session};
use super::telemetry::Telemetry;
use crate::error::OutOfMemory;
use crate::executor::BoundaryKind;
use crate::metrics::{Event, Phase};
use crate::plan;
use crate::plan::planner::{Failure as PlanFailure, Fit};
use crate::world::World;
use crate::{Error, Result};
use firebrick_backends::collective::Failure;
use firebrick_backends::device_lost::is_lost;
use firebrick_backends::out_of_memory::{OutOfMemory as Refused, Watch, one_line};
use firebrick_backends::trace::span_on;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

/// An error that says that memory ran out.
fn out_of_memory(error: Error) -> Result<Box<OutOfMemory>, Error> {
    match (error.out_of_memory(), error) {
        (_, Error::OutOfMemory(what)) => Ok(what),
        (Some(cause), _) => Ok(Box::new(OutOfMemory::new(cause))),
        (None, other) => Err(other),
    }
}

/// Whether work can be done again after memory ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Replay {
    Possible,
    /// It cannot, for this reason.
    Impossible(&'static str),
}

impl Replay {
    /// What to do where a plan was found and is not taken.
    fn advice(self, fit: &Fit) -> String {
        match self {
            Self::Impossible(reason) => {
                let settings = fit.overrides().join(" ");
                format!("{reason}, so the step cannot be replayed; resume from the last checkpoint with: {settings}")
            }
            Self::Possible => recovery_is_off(fit),
        }
    }

    /// What to do where no plan is left. `tried` is the last one for which there was no memory while it was taken.
    fn without_plan(self, tried: Option<&Fit>, infeasible: &str) -> String {
        match (self, tried) {
            (Self::Impossible(reason), _) => {
                format!("{reason}, so the step cannot be replayed; resume from the last checkpoint. {infeasible}")
            }
            (Self::Possible, Some(fit)) => {
                let settings = fit.overrides().join(" ");
                format!(
                    "memory ran out again while the run took a cheaper plan; resume from the last checkpoint with: {settings}"
                )
            }
            (Self::Possible, None) => infeasible.to_owned(),
        }
    }
}

/// Work that was done, or that ran out of memory.
pub(super) type Attempt<T> = std::result::Result<T, Box<OutOfMemory>>;

/// Runs work once. Tells apart memory that ran out, however the device or the allocator say so, and all other errors.
pub(super) fn attempt<T>(work: impl FnOnce() -> Result<T>) -> Result<Attempt<T>> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(done)) => Ok(Ok(done)),
        Ok(Err(error)) => out_of_memory(error).map(Err),
        Err(panic) => {
            let Some(cause) = Refused::in_panic(panic.as_ref()) else {
                std::panic::resume_unwind(panic);
            };
            Ok(Err(Box::new(OutOfMemory::new(cause))))
        }
    }
}

/// What work came to on all ranks: where memory ran out on one, it did on every rank, with the same numbers, so that
/// all take the same plan; another error of one ends the run of all.
pub(super) fn agreed_attempt<T>(world: &World, own: Result<Attempt<T>>) -> Result<Attempt<T>> {
    if world.is_solo() {
        return own;
    }
    let failure = match &own {
        Ok(Ok(_)) => None,
        Ok(Err(what)) => Some(Failure::of_memory(&what.cause)),
        Err(error) => Some(Failure { users: error.is_user_error(), ..Failure::new(error.to_string()) }),
    };
    let Err(error) = world.agree_on_failure(failure) else {
        return own;
    };
    match (own, error.failure().and_then(Failure::memory)) {
        (own @ Err(_), _) => own,
        (Ok(Err(mut what)), Some(cause)) => {
            what.cause = cause;
            Ok(Err(what))
        }
        (Ok(Ok(_)), Some(cause)) => Ok(Err(Box::new(OutOfMemory::new(cause)))),
        (_, None) => Err(error.into()),
    }
}

impl Replay {
    /// Nothing runs again on a device that was lost.
    fn after(self, cause: &Refused) -> Self {
        match self {
            Self::Possible if cause.device_lost => Self::Impossible("the device was lost"),
            replay => replay,
        }
    }
}

impl Planned {
    /// Takes the next cheaper plan after memory ran out while models were loaded, or says what would help.
    pub(super) fn replan_after_oom(&mut self, mut what: Box<OutOfMemory>, recovers: bool) -> Result<()> {
        what.phase = "load";
        let failure = PlanFailure { phase: None, used: what.in_use_bytes(), limit: what.limit_bytes() };
        match self.request.next_cheaper(&self.plan, &failure) {
            Ok(fit) if what.cause.device_lost => {
                what.advice = device_is_lost(&fit);
                Err(Error::OutOfMemory(what))
            }
            Ok(fit) if recovers => {
                tracing::warn!("out of memory: {what}; next: {}", fit.overrides().join(" "));
                self.plan = fit.plan;
                self.replans += 1;
                Ok(())
            }
            Ok(fit) => {
                what.advice = recovery_is_off(&fit);
                Err(Error::OutOfMemory(what))
            }
            Err(plan::Error::Infeasible(infeasible)) => {
                what.advice = infeasible.to_string();
                Err(Error::OutOfMemory(what))
            }
            Err(other) => Err(other.into()),
        }
    }
}

fn recovery_is_off(fit: &Fit) -> String {
    let settings = fit.overrides().join(" ");
    format!("memory.recover is off; the smallest change that should fit: {settings}")
}

fn device_is_lost(fit: &Fit) -> String {
    let settings = fit.overrides().join(" ");
    format!("the device was lost, so nothing can be loaded again; start again with: {settings}")
}

/// The models under their plan, and the phases that run on them.
pub(super) struct Recovery {
    pub session: Arc<Session>,
    pub models: Models,
    pub planned: Planned,
    pub telemetry: Telemetry,
    /// The checkpoints that a run which ends can continue from.
    pub checkpoints: Checkpoints,
    /// The step that phases belong to: 0 before the first.
    pub step: u64,
}

impl Recovery {
    /// Brings the models to where a phase needs them and runs work that can be run again from its start. Where memory
    /// runs out, it is: under the next cheaper plan, until it gets by or no plan is left.
    pub fn recovering<T>(&mut self, phase: Phase, mut work: impl FnMut(&mut Self) -> Result<T>) -> Result<T> {
        let session = Arc::clone(&self.session);
        loop {
            let attempt = attempt(|| {
                let watch = Watch::start(&session.device)?;
                let done = self.models.place(phase, &session.world).and_then(|()| work(self));
                // memory that was refused explains whatever else failed
                watch.finish()?;
                let done = done?;
                self.models.policy.runtime.check()?;
                Ok(done)
            });
            match agreed_attempt(&session.world, attempt)? {
                Ok(done) => return Ok(done),
                Err(what) => self.replan_after_oom(phase, what, self.replay(phase))?,
            }
        }
    }

    /// Runs one phase: brings the models to where it needs them, times it, reads memory at its end, and turns a
    /// backend's panic into an error that names it.
    pub fn phase<T>(&mut self, phase: Phase, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.clean_up();
        let step = self.step;
        self.telemetry.recorder.event(Event::Phase { step, phase });
        self.telemetry.ledger.begin(step, phase);
        let started = Instant::now();
        let span = span_on(phase.name(), &self.session.device);
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.recovering(phase, |_| Ok(()))?;
            work(self)
        }));
        drop(span);
        self.telemetry.timings.add(phase, started.elapsed().as_secs_f64());
        self.telemetry.ledger.end(step, phase);
        let error = match result {
            Ok(Ok(done)) => return Ok(done),
            Ok(Err(error)) => error,
            Err(panic) => firebrick_backends::Error::panicked(panic.as_ref()).into(),
        };
        Err(self.failed(phase, step, error))
    }

    /// Adds the name of the phase to device errors, and to out-of-memory errors of work that cannot be repeated.
    pub fn failed(&self, phase: Phase, step: u64, error: Error) -> Error {
        let failed = |detail: String| {
            let phase = phase.name();
            if is_lost(&detail) {
                let detail = one_line(&detail);
                return Error::DeviceLost { phase, step, detail };
            }
            Error::Phase { phase, step, detail }
        };
        match (error.out_of_memory(), error) {
            (_, error @ Error::OutOfMemory(_)) => error,
            (Some(cause), _) => Error::OutOfMemory(Box::new(OutOfMemory {
                phase: phase.name(),
                step,
                ranked: self.models.policy.runtime.accounts.ranked(),
                ..OutOfMemory::new(cause)
            })),
            (None, Error::Model(firebrick_models::Error::Device { doing, detail })) => {
                failed(format!("{doing}: {detail}"))
            }
            (None, Error::Device(firebrick_backends::Error::Transfer(detail))) => failed(detail),
            (None, error) => error,
        }
    }

    /// Runs a phase whose whole work can be run again, and is where memory runs out: see
    /// [`recovering`](Self::recovering).
    pub fn recovering_phase<T>(&mut self, phase: Phase, work: impl FnMut(&mut Self) -> Result<T>) -> Result<T> {
        self.phase(phase, |t| t.recovering(phase, work))
    }

    /// Gives the pools' free pages back where a setting says so. Pools that keep pages for another phase's shapes cost
    /// reserved bytes; giving them back costs the time of allocating again.
    fn clean_up(&self) {
        let every = self.session.config.memory.cleanup_every;
        if every > 0 && self.step.is_multiple_of(every) {
            self.session.device.memory_cleanup();
        }
    }

    /// Runs work that changes weights and so cannot be run again. Where memory runs out, the run ends, and its message
    /// says how to go on from the last checkpoint.
    pub fn run_irreversible<T>(&mut self, phase: Phase, work: impl FnOnce(&mut Models) -> Result<T>) -> Result<T> {
        let attempt = attempt(|| {
            let watch = Watch::start(&self.session.device)?;
            let done = work(&mut self.models);
            watch.finish()?;
            done
        });
        match attempt? {
            Ok(done) => Ok(done),
            Err(what) => {
                let reason = "memory ran out while weights were updated";
                self.replan_after_oom(phase, what, Replay::Impossible(reason))?;
                unreachable!("work that cannot be repeated ends in an error")
            }
        }
    }

    /// Whether a phase's work changes nothing before it ends.
    fn replay(&self, phase: Phase) -> Replay {
        let updated = phase.updates().and_then(|role| self.planned.plan.models.get(&role));
        if updated.is_some_and(|plan| plan.optimizer.in_backward) {
            Replay::Impossible("memory.step_in_backward updates segments on the way")
        } else {
            Replay::Possible
        }
    }

    /// After work that cannot be run again: where it needed more than it may, the next cheaper plan is for what
    /// follows.
    pub fn check_after(&mut self, phase: Phase) -> Result<()> {
        let own = match self.models.policy.runtime.check() {
            Err(Error::OutOfMemory(what)) => Ok(Err(what)),
            other => other.map(Ok),
        };
        match agreed_attempt(&self.session.world, own)? {
            Err(what) => self.replan_after_oom(phase, what, self.replay(phase)),
            Ok(()) => Ok(()),
        }
    }

    /// Takes the next cheaper plan, or says why not and what would help.
    fn replan_after_oom(&mut self, phase: Phase, mut what: Box<OutOfMemory>, replay: Replay) -> Result<()> {
        let replay = replay.after(&what.cause);
        let runtime = &self.models.policy.runtime;
        (what.phase, what.step) = (phase.name(), self.step);
        runtime.record(BoundaryKind::OutOfMemory);
        if what.ranked.is_empty() {
            what.ranked = runtime.accounts.ranked();
        }
        let failure = PlanFailure { phase: phase.estimated(), used: what.in_use_bytes(), limit: what.limit_bytes() };
        let mut tried: Option<Fit> = None;
        loop {
            let Planned { request, plan, .. } = &self.planned;
            let next = request.next_cheaper(tried.as_ref().map_or(plan, |fit| &fit.plan), &failure);
            match (next, replay) {
                (Ok(fit), Replay::Possible) if self.session.config.memory.recover => {
                    let adopted = attempt(|| self.adopt(phase, &what, &fit));
                    let Err(again) = agreed_attempt(&self.session.world, adopted)? else {
                        return Ok(());
                    };
                    tracing::warn!("out of memory while a cheaper plan was taken: {again}");
                    what.cause = again.cause;
                    tried = Some(fit);
                }
                (Ok(fit), replay) => {
                    what.advice = replay.advice(&fit);
                    return Err(Error::OutOfMemory(what));
                }
                (Err(plan::Error::Infeasible(infeasible)), replay) => {
                    what.advice = replay.without_plan(tried.as_ref(), &infeasible.to_string());
                    return Err(Error::OutOfMemory(what));
                }
                (Err(other), _) => return Err(other.into()),
            }
        }
    }

    fn adopt(&mut self, phase: Phase, what: &OutOfMemory, fit: &Fit) -> Result<()> {
        tracing::warn!("out of memory: {what}");
        self.models.replan(&fit.plan)?;
        let (planned, telemetry) = (&mut self.planned, &mut self.telemetry);
        planned.plan = fit.plan.clone();
        telemetry.snapshots.planned(fit.estimate.phases.clone());
        planned.replans += 1;
        telemetry.recorder.plans(&planned.request, &planned.plan)?;
        let settings = fit.overrides();
        telemetry.recorder.event(Event::Replanned {
            phase,
            step: what.step,
            used: what.in_use_bytes(),
            limit: what.limit_bytes(),
            settings: &settings,
        });
        // what the failed attempt needed is no longer held: the next one is measured by itself
        telemetry.ledger.restart();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick_backends::out_of_memory::MemoryErrorKind;
    use std::io;

    fn kind(found: std::result::Result<(), Box<OutOfMemory>>) -> MemoryErrorKind {
        found.expect_err("memory that ran out").cause.kind
    }

    #[test]
    fn memory_that_ran_out_is_told_apart_however_it_arrives() {
        let device = firebrick_backends::Error::panicked(&"wgpu error: Out of Memory");
        let model = firebrick_models::Error::from(firebrick_backends::Error::panicked(&"CUDA_ERROR_OUT_OF_MEMORY"));
        let refused = io::Error::from(io::ErrorKind::OutOfMemory);
        let limit = OutOfMemory::new(Refused::over_limit(3, 2));
        let errors = [
            (Error::Device(device), MemoryErrorKind::Driver),
            (Error::Model(model), MemoryErrorKind::Driver),
            (Error::io("map", "weights")(refused), MemoryErrorKind::System),
            (Error::OutOfMemory(Box::new(limit)), MemoryErrorKind::Limit { allowed: 2 }),
        ];
        for (error, expected) in errors {
            let found = attempt(|| Err::<(), _>(error)).expect("no other error");
            assert_eq!(kind(found), expected);
        }
        let found = attempt::<()>(|| panic!("wgpu error: Out of Memory")).expect("no other error");
        assert_eq!(kind(found), MemoryErrorKind::Driver);
    }

    #[test]
    fn other_failures_go_through_as_they_are() {
        let missing = io::Error::from(io::ErrorKind::NotFound);
        let missing = attempt(|| Err::<(), _>(Error::io("read", "memory.jsonl")(missing)));
        assert!(matches!(missing, Err(Error::Io { .. })));
        let way_back = String::new();
        let step = Error::NonFinite { phase: "update_actor", section: "optim", step: 3, count: 10, way_back };
        assert!(matches!(attempt(|| Err::<(), _>(step)), Err(Error::NonFinite { .. })));
        let panic = catch_unwind(|| attempt::<()>(|| panic!("memory 7 is not in any pool")));
        let panic = panic.map(|_| ()).expect_err("the panic itself");
        let message = firebrick_backends::device::panic_message(panic.as_ref());
        assert_eq!(message, "memory 7 is not in any pool");
    }

    #[test]
    fn nothing_is_run_again_on_a_device_that_was_lost() {
        let lost = Refused { device_lost: true, ..Refused::over_limit(3, 2) };
        assert_eq!(Replay::Possible.after(&lost), Replay::Impossible("the device was lost"));
        assert_eq!(Replay::Possible.after(&Refused::over_limit(3, 2)), Replay::Possible);
    }
}
