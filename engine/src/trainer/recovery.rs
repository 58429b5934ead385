//! How work runs on the models, and what happens where it cannot go on: where memory runs out it is done again under the
//! next cheaper plan, and a run that ends says which checkpoint to continue from.
//!
//! Nothing of a failed attempt stays: accumulators are dropped with it, and weights change only once all gradients are
//! there. Normalisers are fixed for the whole optimizer step, so a step that is cut differently is the same step.

use super::attempt::{Replay, agreed_attempt, attempt};
use super::models::Models;
use super::session::{Planned, Session};
use super::telemetry::Telemetry;
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

/// The newest checkpoints of a run, and which of them are known to work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Checkpoints {
    /// The step of the newest.
    pub newest: Option<u64>,
    /// Applied optimizer steps in it, of the policy and of the critic.
    pub updates: [u64; 2],
    /// The step of the newest one before it that was continued from, so that its weights are known to work.
    pub good: Option<u64>,
    /// Whether that one may be beyond the number of those to keep.
    pub spares: bool,
}

impl Checkpoints {
    /// The checkpoints that a session finds which continues from a state, as rank 0 sees them.
    pub fn at_start(run: &RunDir, world: &World, resumed: Option<&TrainerState>) -> Result<Self> {
        let Some(state) = resumed else {
            return Ok(Self::default());
        };
        let found = run.checkpoints()?;
        let earlier = found.iter().rev().map(|(step, _)| *step).find(|step| *step < state.step);
        let good = world.of_main(earlier)?;
        let updates = [state.optimizer_steps, state.critic_steps];
        Ok(Self { newest: Some(state.step), updates, good, spares: false })
    }
}

impl Recovery {
    /// Removes the oldest checkpoints, not the one of a step.
    pub fn prune(&self, spared: Option<u64>) -> Result<()> {
        self.telemetry.recorder.run().prune(self.session.config.trainer.max_ckpt_to_keep, spared)
    }

    /// Removes the checkpoint that was kept until the newest was known to work, once it is.
    pub fn release_spared(&mut self, state: &TrainerState) -> Result<()> {
        if self.checkpoints.spares && self.newest_works(state) {
            self.checkpoints.spares = false;
            self.session.world.together(self.prune(None))?;
        }
        Ok(())
    }

    /// Whether updates have been applied after the newest checkpoint, so that its weights gave finite gradients.
    pub fn newest_works(&self, state: &TrainerState) -> bool {
        let Checkpoints { newest, updates, .. } = self.checkpoints;
        let [policy, critic] = [state.optimizer_steps > updates[0], state.critic_steps > updates[1]];
        let has_critic = self.models.critic.is_some();
        // while the critic trains by itself the policy is what it was
        let waits = has_critic && !self.session.trains_policy(state.step);
        newest.is_some() && (policy || waits) && (critic || !has_critic)
    }

    /// Which checkpoint a run can continue from whose weights may be ruined.
    pub fn way_back(&self, state: &TrainerState) -> String {
        let run = self.telemetry.recorder.run().path();
        let path = |step: u64| run.join(RunDir::checkpoint_name(step)).display().to_string();
        match (self.checkpoints.newest, self.checkpoints.good) {
            (Some(newest), _) if self.newest_works(state) => {
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
