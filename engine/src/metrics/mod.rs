//! What a run measures: phases and their time, memory by phase.

pub mod ledger;
mod phase;

pub use ledger::{Growth, Leak, Ledger, LedgerEntry};
pub use phase::{Phase, PhaseTimings};
