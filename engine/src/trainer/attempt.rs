//! Work that may run out of memory: told apart from other errors, on all ranks alike, and whether it can be done again.

use super::session::Planned;
use crate::error::OutOfMemory;
use crate::plan;
use crate::plan::planner::{Failure as PlanFailure, Fit};
use crate::world::World;
use crate::{Error, Result};
use firebrick_backends::collective::Failure;
use firebrick_backends::out_of_memory::OutOfMemory as Refused;
use std::panic::{AssertUnwindSafe, catch_unwind};

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
pub(super) enum Replay {
    Possible,
    /// It cannot, for this reason.
    Impossible(&'static str),
}

impl Replay {
    /// Nothing runs again on a device that was lost.
    pub fn after(self, cause: &Refused) -> Self {
        match self {
            Self::Possible if cause.device_lost => Self::Impossible("the device was lost"),
            replay => replay,
        }
    }

    /// What to do where a plan was found and is not taken.
    pub fn advice(self, fit: &Fit) -> String {
        match self {
            Self::Impossible(reason) => {
                let settings = fit.overrides().join(" ");
                format!("{reason}, so the step cannot be replayed; resume from the last checkpoint with: {settings}")
            }
            Self::Possible => recovery_is_off(fit),
        }
    }

    /// What to do where no plan is left. `tried` is the last one for which there was no memory while it was taken.
    pub fn without_plan(self, tried: Option<&Fit>, infeasible: &str) -> String {
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

impl Planned {
    /// Takes the next cheaper plan after memory ran out while models were loaded, or says what would help.
    pub fn replan_after_oom(&mut self, mut what: Box<OutOfMemory>, recovers: bool) -> Result<()> {
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
