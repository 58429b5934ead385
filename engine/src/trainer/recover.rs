//! Running out of memory, and going on: the work is done again under the next cheaper plan.
//!
//! Nothing of a failed attempt stays: accumulators are dropped with it, and weights change only once all gradients are
//! there. Normalisers are fixed for the whole optimizer step, so a step that is cut differently is the same step.

use super::Trainer;
use crate::error::OutOfMemory;
use crate::executor::Place;
use crate::metrics::{Event, Phase};
use crate::plan;
use crate::plan::planner::{Failure, Fit};
use crate::{Error, Result};
use firebrick_backends::device::panic_message;
use firebrick_backends::out_of_memory::is_out_of_memory;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// An error that says, in whatever words, that memory ran out.
fn out_of_memory(error: Error) -> Result<Box<OutOfMemory>, Error> {
    match error {
        Error::OutOfMemory(what) => Ok(what),
        Error::Model(firebrick_models::Error::Device { detail, .. })
        | Error::Device(firebrick_backends::Error::Transfer(detail))
            if is_out_of_memory(&detail) =>
        {
            Ok(Box::new(OutOfMemory {
                detail,
                ..OutOfMemory::default()
            }))
        }
        other => Err(other),
    }
}

impl Trainer {
    /// Runs work that can be run again from its start. Where memory runs out, it is: under the next cheaper plan, until it
    /// gets by or no plan is left.
    pub(super) fn recovering<T>(
        &mut self,
        phase: Phase,
        mut work: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<T> {
        loop {
            let attempt = catch_unwind(AssertUnwindSafe(|| {
                let done = work(self)?;
                self.learner.runtime.check()?;
                Ok(done)
            }));
            let error = match attempt {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err(error)) => error,
                Err(panic) => {
                    let detail = panic_message(panic.as_ref());
                    if !is_out_of_memory(&detail) {
                        std::panic::resume_unwind(panic);
                    }
                    Error::OutOfMemory(Box::new(OutOfMemory {
                        detail,
                        ranked: self.learner.runtime.accounts.ranked(),
                        ..OutOfMemory::default()
                    }))
                }
            };
            let what = out_of_memory(error)?;
            self.step_down(phase, what)?;
        }
    }

    /// After work that cannot be run again: where it needed more than it may, the next cheaper plan is for what follows.
    pub(super) fn check_after(&mut self, phase: Phase) -> Result<()> {
        match self.learner.runtime.check() {
            Err(Error::OutOfMemory(what)) => self.step_down(phase, what),
            other => other,
        }
    }

    /// Takes the next cheaper plan, or says why not and what would help.
    fn step_down(&mut self, phase: Phase, mut what: Box<OutOfMemory>) -> Result<()> {
        (what.phase, what.step) = (phase.name(), self.phase_step);
        self.learner.runtime.record(Place::OutOfMemory);
        let failure = Failure {
            phase: phase.estimated().map(str::to_owned),
            used: what.in_use_bytes,
            limit: what.limit_bytes,
        };
        let next = self.request.next_cheaper(&self.plan, &failure);
        let updated = phase.updates().and_then(|role| self.plan.models.get(&role));
        let partly = updated.is_some_and(|plan| plan.optimizer.in_backward);
        match next {
            Ok(fit) if self.config.memory.recover && !partly => self.adopt(phase, &what, &fit),
            Ok(fit) => {
                let settings = fit.overrides().join(" ");
                what.advice = if partly {
                    format!(
                        "memory.step_in_backward updates segments on the way, so the step cannot be replayed; resume from \
                         the last checkpoint with: {settings}"
                    )
                } else {
                    format!(
                        "memory.recover is off; the smallest change that should fit: {settings}"
                    )
                };
                Err(Error::OutOfMemory(what))
            }
            Err(plan::Error::Infeasible(infeasible)) => {
                what.advice = infeasible.to_string();
                Err(Error::OutOfMemory(what))
            }
            Err(other) => Err(other.into()),
        }
    }

    fn adopt(&mut self, phase: Phase, what: &OutOfMemory, fit: &Fit) -> Result<()> {
        tracing::warn!("out of memory: {what}");
        self.learner.runtime.forget_graphs();
        self.learner.replan(fit.plan.policy())?;
        if let (Some(critic), Some(plan)) = (&mut self.critic, fit.plan.critic()) {
            critic.replan(plan)?;
        }
        if let (Some(model), Some(plan)) = (&mut self.reference, fit.plan.reference()) {
            model.plan = plan.clone();
        }
        self.plan = fit.plan.clone();
        self.snapshots.planned(fit.estimate.phases.clone());
        self.replans += 1;
        self.recorder.plans(&self.request, &self.plan)?;
        let settings = fit.overrides();
        self.recorder.event(Event::Replanned {
            phase,
            step: what.step,
            used: what.in_use_bytes,
            limit: what.limit_bytes,
            settings: &settings,
        });
        self.place_models(phase)?;
        // what the failed attempt needed is no longer held: the next one is measured by itself
        self.ledger.restart();
        Ok(())
    }
}
