//! On tensor cores, for half precision: rows and scores in shared memory, accumulators in registers.

mod backward;
mod forward;
mod tile;

pub(super) use backward::{key_value_backward, query_backward};
pub(super) use forward::attention_forward;
