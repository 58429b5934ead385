//! On SIMT units, in f32.

mod backward;
mod forward;
mod tile;

pub(super) use backward::{key_value_backward, query_backward};
pub(super) use forward::attention_forward;
pub(in crate::cube) use forward::{KeyRows, attend};
pub(in crate::cube) use tile::{NO_ROW, SIDE, STAGE, TILE};
