//! The trackers that a configuration names.

use super::tensorboard::TensorBoard;
#[cfg(feature = "trackio")]
use super::trackio::Trackio;
use super::traits::Tracker;
use crate::config::{Logger, TrainerConfig};

/// The trackers of `trainer.logger`. The console and the files of the run folder are none: an observer and the recorder
/// write those.
pub fn configured(config: &TrainerConfig) -> Vec<Box<dyn Tracker>> {
    let tracker = |logger: Logger| -> Option<Box<dyn Tracker>> {
        match logger {
            Logger::Console | Logger::File => None,
            Logger::Tensorboard => Some(Box::new(TensorBoard::new())),
            #[cfg(feature = "trackio")]
            Logger::Trackio => Some(Box::new(Trackio::new())),
            // `Loggers::check` refuses it before a run
            #[cfg(not(feature = "trackio"))]
            Logger::Trackio => None,
        }
    };
    config.logger.iter().filter_map(tracker).collect()
}
