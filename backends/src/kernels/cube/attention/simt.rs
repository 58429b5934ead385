//! Without tensor cores: every unit makes its products itself, in f32.

mod backward;
mod forward;
mod tile;

pub(super) use backward::{differentiate_keys, differentiate_queries};
pub(super) use forward::attend;
pub(super) use tile::STAGE;
