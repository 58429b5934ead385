//! On tensor cores, for half precision: products of 16 × 16 numbers by a plane of units, from shared memory, summed up in f32.

mod backward;
mod forward;
mod tile;

pub(super) use backward::{differentiate_keys, differentiate_queries};
pub(super) use forward::attend;
pub(super) use tile::{PLANE, SIDE, Sizes, VECTOR};
