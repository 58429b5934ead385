//! Losses, gradients, metrics and updates against TRL, verl and torch, and every plan against the plain one.

mod adapters;
mod critic;
mod losses;
#[path = "../../suite/parity/optim.rs"]
mod optim;
mod pipeline_parallel;
mod pipeline_waiting;
mod plans;
mod ranks;
mod router_loss;
mod sampling_groups;
mod sequence_parallel;
mod shared;
mod shared_prefix;
mod tensor_parallel;
mod zero;
