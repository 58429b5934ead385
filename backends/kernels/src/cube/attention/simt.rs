//! On SIMT units, in f32.

mod backward;
mod forward;
mod tile;

pub(super) use backward::{key_value_backward, query_backward};
pub(super) use forward::attention_forward;
pub(super) use tile::STAGE;
