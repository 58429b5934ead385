//! Plans for a run: the question that `firebrick-plan` is asked, read from a configuration, its data and its device.

mod kv_cache;
mod optimizer;
mod preset;
mod request;
mod workload;

pub use kv_cache::{cache_bytes_of_share, engine_limits};
pub use optimizer::check_optimizer;
pub use preset::{cache_bytes, check_preset_share, resolve_kv_cache, restrict_to_device};
pub use request::request;
pub use workload::{check_longest, observe, reward_work, set_needs};
