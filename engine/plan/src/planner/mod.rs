//! The plan with the least estimated time that fits a budget.
//!
//! Pure arithmetic on architecture, lengths and a [`DeviceProfile`](firebrick_spec::DeviceProfile): no device, no
//! weights. The search is exhaustive over the choices of all techniques: where weights, gradients and the
//! optimizer's state live, what segments keep, how many rows head and attention take, how many tokens a micro-batch
//! has, how many sequences are sampled at a time. Phases do not run at the same time, so each is fitted by itself once
//! it is settled where everything lives.
//!
//! Moments of fewer bits change results a little. They are counted as if they took
//! [`MomentKind::penalty`](crate::MomentKind::penalty) times as long, so that the planner takes them only where exact
//! ways to save as much cost more than that.

mod advice;
mod buffers;
mod degrees;
mod explain;
mod fit;
mod groups;
mod limits;
mod search;
mod solve;

pub use crate::request::{Candidate, Request};
pub use degrees::{ClusterFit, Degrees, FittingDegrees};
pub use explain::Decision;
pub use fit::{BatchProposal, Fit};
pub use groups::GroupProposal;
pub use solve::Failure;

#[cfg(test)]
mod tests;
