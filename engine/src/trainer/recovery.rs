//! Phases on the models, and recovery: if memory runs out, a phase runs again under the next cheaper plan, and the
//! error that ends a run names the checkpoint to continue from.
//!
//! A failed attempt leaves nothing behind: its accumulators are dropped, and weights change only once all gradients
//! exist. Normalizers are fixed per optimizer step, so another division into micro-batches is the same step.

use super::attempt::{Replay, agreed_attempt, attempt};
use super::models::Models;
use super::save::Saves;
use super::session::{Planned, Session};
use super::telemetry::Telemetry;
use super::watchdog::Watchdog;
use crate::checkpoint::{RunDir, TrainerState};
use crate::error::OutOfMemory;
use crate::executor::BoundaryKind;
use crate::metrics::{Event, Phase};
use crate::plan;
use crate::plan::planner::{Failure as PlanFailure, Fit};
use crate::world::World;
use crate::{Error, Result};
use firebrick_backends::device_lost::is_lost;
use firebrick_backends::out_of_memory::{Watch, one_line};
use firebrick_backends::trace::span_on;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

/// The models under their plan, the state of the run, and the phases that run on them.
pub(super) struct Recovery {
    pub session: Arc<Session>,
    pub models: Models,
    pub planned: Planned,
    pub telemetry: Telemetry,
    pub watchdog: Watchdog,
    /// State that checkpoints keep.
    pub state: TrainerState,
    /// Checkpoints that a failed run can continue from.
    pub checkpoints: Checkpoints,
    /// The checkpoint under way.
    pub saves: Saves,
    /// Step that phases belong to: 0 before the first.
    pub step: u64,
}

impl Recovery {
    /// Places the models for a phase and runs repeatable work. If memory runs out, repeats it under the next cheaper
    /// plan, until it succeeds or no plan is left.
    pub fn recovering<T>(&mut self, phase: Phase, mut work: impl FnMut(&mut Self) -> Result<T>) -> Result<T> {
        let _place = self.watchdog.enter(self.step, phase.name());
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

    /// Runs one phase: places the models, times it, reads memory at its end, and turns a backend's panic into an error
    /// that names the phase.
    pub fn phase<T>(&mut self, phase: Phase, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let step = self.step;
        let _place = self.watchdog.enter(step, phase.name());
        self.clean_up();
        self.telemetry.recorder.event(Event::Phase { step, phase });
        let started = Instant::now();
        let span = span_on(phase.name(), &self.session.device);
        // a backend that reads its memory first does the work that waits, which fails on a lost device
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.telemetry.ledger.begin(step, phase);
            self.recovering(phase, |_| Ok(()))?;
            work(self)
        }));
        drop(span);
        self.telemetry.timings.add(phase, started.elapsed().as_secs_f64());
        let ended = catch_unwind(AssertUnwindSafe(|| self.telemetry.ledger.end(step, phase)));
        let result = result.and_then(|done| ended.map(|()| done));
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

    /// Runs a phase whose whole work is repeatable: see [`recovering`](Self::recovering).
    pub fn recovering_phase<T>(&mut self, phase: Phase, work: impl FnMut(&mut Self) -> Result<T>) -> Result<T> {
        self.phase(phase, |run| run.recovering(phase, work))
    }

    /// Releases the pools' free pages as often as `memory.cleanup_every` says. Kept pages cost reserved bytes, released
    /// ones the time of allocating again.
    fn clean_up(&self) {
        let every = self.session.config.memory.cleanup_every;
        if every > 0 && self.step.is_multiple_of(every) {
            self.session.device.memory_cleanup();
        }
    }

    /// Runs work that changes weights, which cannot be repeated. If memory runs out, the run ends with a message that
    /// tells how to resume from the last checkpoint.
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

    /// Repeatability of a phase: its work must change nothing before it ends.
    fn replay(&self, phase: Phase) -> Replay {
        let updated = phase.updates().and_then(|role| self.planned.plan.models.get(&role));
        if updated.is_some_and(|plan| plan.optimizer.in_backward) {
            Replay::Impossible("memory.step_in_backward updates segments on the way")
        } else {
            Replay::Possible
        }
    }

    /// Checks memory after work that cannot be repeated: above the limit, the next cheaper plan applies to what
    /// follows.
    pub fn check_after(&mut self, phase: Phase) -> Result<()> {
        let checked = match self.models.policy.runtime.check() {
            Err(Error::OutOfMemory(what)) => Ok(Err(what)),
            other => other.map(Ok),
        };
        match agreed_attempt(&self.session.world, checked)? {
            Err(what) => self.replan_after_oom(phase, what, self.replay(phase)),
            Ok(()) => Ok(()),
        }
    }

    /// Takes the next cheaper plan, or returns an error with the reason and a remedy.
    fn replan_after_oom(&mut self, phase: Phase, mut what: Box<OutOfMemory>, replay: Replay) -> Result<()> {
        // another plan moves what is written
        self.finish_save()?;
        let replay = replay.after(&what.cause);
        let runtime = &self.models.policy.runtime;
        (what.phase, what.step) = (phase.name(), self.step);
        runtime.record(BoundaryKind::OutOfMemory);
        if what.ranked.is_empty() {
            what.ranked = runtime.accounts.ranked();
        }
        let failure = PlanFailure {
            phase: phase.estimates().first().copied(),
            used: what.in_use_bytes(),
            limit: what.limit_bytes(),
        };
        let mut tried: Option<Fit> = None;
        loop {
            let Planned { request, plan, .. } = &mut self.planned;
            let failed = tried.as_ref().map_or(&*plan, |fit| &fit.plan);
            let next = request.next_cheaper(failed, &failure);
            request.learn(failed, &failure);
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

    /// Takes a plan and records it.
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
        // the next attempt is measured without the memory of the failed one
        telemetry.ledger.restart();
        Ok(())
    }

    /// Removes the oldest checkpoints, except the one of the step `spared` and the one with the best validation.
    pub fn prune(&self, spared: Option<u64>) -> Result<()> {
        let config = &self.session.config.trainer;
        let best = self.state.best.as_ref().filter(|best| config.keep_best.as_ref() == Some(&best.metric));
        let spared: Vec<u64> = spared.into_iter().chain(best.map(|best| best.step)).collect();
        self.telemetry.recorder.run.prune(config.max_ckpt_to_keep, &spared)
    }

    /// Removes the spared checkpoint once the newest is known to work.
    pub fn release_spared(&mut self) -> Result<()> {
        if self.checkpoints.spares && self.newest_works() {
            self.checkpoints.spares = false;
            self.session.world.agree(self.prune(None))?;
        }
        Ok(())
    }

    /// Returns true if updates were applied after the newest checkpoint, so its weights gave finite gradients.
    pub fn newest_works(&self) -> bool {
        let (Checkpoints { newest, updates, .. }, state) = (self.checkpoints, &self.state);
        let [policy, critic] = [state.optimizer_steps > updates[0], state.critic_steps > updates[1]];
        let has_critic = self.models.critic.is_some();
        // while only the critic trains, the policy does not change
        let waits = has_critic && !self.session.trains_policy(state.step);
        newest.is_some() && (policy || waits) && (critic || !has_critic)
    }

    /// Advice on resuming a run whose weights may be ruined.
    pub fn resume_advice(&self) -> String {
        let run = self.telemetry.recorder.run.path();
        let path = |step: u64| run.join(RunDir::checkpoint_name(step)).display().to_string();
        match (self.checkpoints.newest, self.checkpoints.good) {
            (Some(newest), _) if self.newest_works() => {
                format!("continue with --resume from the last good checkpoint, {}", path(newest))
            }
            (Some(newest), Some(good)) => format!(
                "the last good checkpoint is {}: delete {}, which may have the same weights, and continue with --resume",
                path(good),
                path(newest)
            ),
            (Some(newest), None) => format!(
                "start again if --resume fails too: the only checkpoint, {}, may have the same weights",
                path(newest)
            ),
            (None, _) => "start again: no checkpoint was written before".to_owned(),
        }
    }
}

/// The newest checkpoints of a run that are known to work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Checkpoints {
    /// Step of the newest.
    pub newest: Option<u64>,
    /// Optimizer steps applied before it, of policy and critic.
    pub updates: [u64; 2],
    /// Step of the newest earlier one whose weights are known to work.
    pub good: Option<u64>,
    /// True if that one may exceed `trainer.max_ckpt_to_keep`.
    pub spares: bool,
}

impl Checkpoints {
    /// Checkpoints at the start of a session that resumes from a state, as rank 0 sees them.
    pub fn at_start(run: &RunDir, world: &World, resumed: Option<&TrainerState>) -> Result<Self> {
        let Some(state) = resumed else {
            return Ok(Self::default());
        };
        let steps = run.checkpoints()?.into_iter().map(|(step, _)| step);
        let earlier = steps.rev().find(|step| *step < state.step);
        let good = world.broadcast(earlier)?;
        let updates = [state.optimizer_steps, state.critic_steps];
        Ok(Self { newest: Some(state.step), updates, good, spares: false })
    }
}
