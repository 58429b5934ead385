//! Learning-rate schedules, by the names and to the digits of transformers' `get_scheduler`.
//!
//! A schedule is a pure function of the optimizer step, counted from 0: a resumed run needs no
//! state.

mod config;
mod schedule;

pub use self::config::{LrSchedulerConfig, LrSchedulerError, SchedulerType};
pub use self::schedule::{Curve, LrSchedule};

#[cfg(test)]
mod tests;
