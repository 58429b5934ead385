//! On tensor cores, for half precision: rows and scores in shared memory, sums in the registers of planes.

mod backward;
mod forward;
mod tile;

pub(super) use backward::{differentiate_keys, differentiate_queries};
pub(super) use forward::attend;
pub(super) use tile::Sizes;
