//! Attempts of work that may run out of memory, on all ranks alike, and whether work can be repeated.

use super::session::Planned;
use crate::error::OutOfMemory;
use crate::plan;
use crate::plan::planner::{Failure as PlanFailure, Fit};
use crate::world::World;
use crate::{Error, Result};
use firebrick_backends::collective::Failure;
use firebrick_backends::out_of_memory::OutOfMemory as Refused;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The out-of-memory report of an error, or the error if it is another one.
fn out_of_memory(error: Error) -> Result<Box<OutOfMemory>, Error> {
    match (error.out_of_memory(), error) {
        (_, Error::OutOfMemory(what)) => Ok(what),
        (Some(cause), _) => Ok(Box::new(OutOfMemory::new(cause))),
        (None, other) => Err(other),
    }
}

/// Repeatability of work after memory ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Replay {
    Possible,
    /// Not possible, with the reason.
    Impossible(&'static str),
}

impl Replay {
    /// Repeatability after a failure: nothing runs again on a lost device.
    pub fn after(self, cause: &Refused) -> Self {
        match self {
            Self::Possible if cause.device_lost => Self::Impossible("the device was lost"),
            replay => replay,
        }
    }

    /// Advice if a plan was found and is not taken.
    pub fn advice(self, fit: &Fit) -> String {
        let settings = fit.overrides().join(" ");
        match self {
            Self::Impossible(reason) => {
                format!("{reason}, so the step cannot be replayed; resume from the last checkpoint with: {settings}")
            }
            Self::Possible => format!("memory.recover is off; the smallest change that should fit: {settings}"),
        }
    }

    /// Advice if no plan is left. `tried` is the last one, which ran out of memory while it was taken.
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

/// Result of work, or an out-of-memory report.
pub(super) type Attempt<T> = std::result::Result<T, Box<OutOfMemory>>;

/// Runs work once. Returns `Ok(Err(_))` if memory ran out, whatever error or panic reports it, and `Err(_)` for other
/// errors.
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

/// The attempt of all ranks: if memory ran out on one, every rank reports it with the same numbers, so that all take
/// the same plan; another error of one ends the run of all.
pub(super) fn agreed_attempt<T>(world: &World, attempt: Result<Attempt<T>>) -> Result<Attempt<T>> {
    if world.is_solo() {
        return attempt;
    }
    let failure = match &attempt {
        Ok(Ok(_)) => None,
        Ok(Err(what)) => Some(Failure::from_oom(&what.cause)),
        Err(error) => Some(Failure { users: error.is_user_error(), ..Failure::new(error.to_string()) }),
    };
    let Err(error) = world.agree_on_failure(failure) else {
        return attempt;
    };
    match (attempt, error.failure().and_then(Failure::memory)) {
        (failed @ Err(_), _) => failed,
        (Ok(Err(mut what)), Some(cause)) => {
            what.cause = cause;
            Ok(Err(what))
        }
        (Ok(Ok(_)), Some(cause)) => Ok(Err(Box::new(OutOfMemory::new(cause)))),
        (_, None) => Err(error.into()),
    }
}

impl Planned {
    /// Takes the next cheaper plan after memory ran out while models were loaded, or returns an error with advice.
    pub fn replan_after_oom(&mut self, mut what: Box<OutOfMemory>, recovers: bool) -> Result<()> {
        what.phase = "load";
        let failure = PlanFailure { phase: None, used: what.in_use_bytes(), limit: what.limit_bytes() };
        what.advice = match self.request.next_cheaper(&self.plan, &failure) {
            Ok(fit) if what.cause.device_lost => {
                let settings = fit.overrides().join(" ");
                format!("the device was lost, so nothing can be loaded again; start again with: {settings}")
            }
            Ok(fit) if recovers => {
                tracing::warn!("out of memory: {what}; next: {}", fit.overrides().join(" "));
                self.plan = fit.plan;
                self.replans += 1;
                return Ok(());
            }
            Ok(fit) => Replay::Possible.advice(&fit),
            Err(plan::Error::Infeasible(infeasible)) => infeasible.to_string(),
            Err(other) => return Err(other.into()),
        };
        Err(Error::OutOfMemory(what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick_backends::out_of_memory::MemoryErrorKind;
    use std::io;

    fn kind(attempt: Attempt<()>) -> MemoryErrorKind {
        attempt.expect_err("memory that ran out").cause.kind
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
            let refused = attempt(|| Err::<(), _>(error)).expect("no other error");
            assert_eq!(kind(refused), expected);
        }
        let refused = attempt::<()>(|| panic!("wgpu error: Out of Memory")).expect("no other error");
        assert_eq!(kind(refused), MemoryErrorKind::Driver);
    }

    #[test]
    fn other_failures_go_through_as_they_are() {
        let missing = io::Error::from(io::ErrorKind::NotFound);
        let missing = attempt(|| Err::<(), _>(Error::io("read", "memory.jsonl")(missing)));
        assert!(matches!(missing, Err(Error::Io { .. })));
        let (found, advice) = (String::new(), String::new());
        let step = Error::NonFinite { phase: "update_actor", step: 3, count: 10, found, advice };
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
