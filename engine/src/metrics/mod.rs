//! What a run measures.

mod phase;

pub use phase::{Phase, PhaseTimings};
