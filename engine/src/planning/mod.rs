//! Planning of a run: the planner's request, from a configuration, its data and its device.

mod kv_cache;
mod preset;
mod request;
mod workload;

pub use kv_cache::{cache_bytes_of_share, engine_limits};
pub use preset::{cache_bytes, check_preset_share, restrict_to_device};
pub use request::request;
pub use workload::{check_longest, observe, reward_work, set_needs};
