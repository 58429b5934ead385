//! Trackers: where people look at runs beside the run folder. A [`Tracker`] is fed by the recorder and never in the way
//! of training.

mod configured;
mod event_file;
mod guarded;
mod markdown;
mod tensorboard;
#[cfg(feature = "trackio")]
mod trackio;
mod traits;

pub use configured::configured;
pub use guarded::Trackers;
pub use tensorboard::TensorBoard;
#[cfg(feature = "trackio")]
pub use trackio::Trackio;
pub use traits::{TrackedRun, Tracker, TrackerResult};
