//! Running a phase: models where it needs them, its time, its memory, its errors.

use super::Trainer;
use crate::error::OutOfMemory;
use crate::executor::{Residency, ResidentModel};
use crate::metrics::{Event, Phase};
use crate::plan::Role;
use crate::{Error, Result};
use firebrick_backends::device_lost::is_lost;
use firebrick_backends::out_of_memory::one_line;
use firebrick_backends::trace::span_on;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

impl Trainer {
    /// Runs one phase: brings the models to where it needs them, times it, reads memory at its end, and turns a
    /// backend's panic into an error that names it.
    pub(super) fn phase<T>(&mut self, phase: Phase, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.clean_up();
        let step = self.phase_step;
        self.recorder.event(Event::Phase { step, phase });
        self.ledger.begin(step, phase);
        let started = Instant::now();
        let span = span_on(phase.name(), &self.device);
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.recovering(phase, |_| Ok(()))?;
            work(self)
        }));
        drop(span);
        self.timings.add(phase, started.elapsed().as_secs_f64());
        self.ledger.end(step, phase);
        let error = match result {
            Ok(Ok(done)) => return Ok(done),
            Ok(Err(error)) => error,
            Err(panic) => firebrick_backends::Error::panicked(panic.as_ref()).into(),
        };
        Err(self.failed(phase, step, error))
    }

    /// Adds the name of the phase to device errors, and to out-of-memory errors of work that cannot be repeated.
    pub(super) fn failed(&self, phase: Phase, step: u64, error: Error) -> Error {
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
                ranked: self.learner.runtime.accounts.ranked(),
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
    pub(super) fn recovering_phase<T>(&mut self, phase: Phase, work: impl FnMut(&mut Self) -> Result<T>) -> Result<T> {
        self.phase(phase, |t| t.recovering(phase, work))
    }

    /// Gives the pools' free pages back where a setting says so. Pools that keep pages for another phase's shapes cost
    /// reserved bytes; giving them back costs the time of allocating again.
    fn clean_up(&self) {
        let every = self.config.memory.cleanup_every;
        if every > 0 && self.phase_step.is_multiple_of(every) {
            self.device.memory_cleanup();
        }
    }

    /// Brings every model to where a phase needs it: first away, then here.
    pub(super) fn place_models(&mut self, phase: Phase) -> Result<()> {
        // without a model of its own the reference is the policy with its adapters off
        let reference = match self.reference {
            Some(_) => Role::Reference,
            None => Role::Policy,
        };
        let on_groups = self.world.sampling_size() > 1 || self.world.tensor_size() > 1;
        let used = |role| {
            let by_phase = phase.models().iter().find(|(used, _)| match used {
                Role::Reference => role == reference,
                used => role == *used,
            });
            match by_phase {
                // what samples is made from the weights where they wait
                Some((_, Residency::Rollout)) if on_groups => Residency::Idle,
                Some((_, now)) => *now,
                None => Residency::Idle,
            }
        };
        let critic = self.critic.as_mut().map(|critic| &mut critic.model);
        let policy = Some(&mut self.learner.model);
        let mut models: Vec<(&mut ResidentModel, Residency)> = [policy, self.reference.as_mut(), critic]
            .into_iter()
            .flatten()
            .map(|model| {
                let now = used(model.role());
                (model, now)
            })
            .collect();
        models.sort_by_key(|(_, now)| *now != Residency::Idle);
        models.into_iter().try_for_each(|(model, now)| model.set_residency(now))
    }
}
