//! `trainer.logger`: destinations of metrics and progress.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Destination of metrics and progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Logger {
    /// Progress and summary in the terminal; warnings and errors always appear.
    Console,
    /// Files of the run folder, always written.
    File,
    /// `TensorBoard` event files in the run folder.
    Tensorboard,
    /// Trackio's local database.
    Trackio,
}

/// Destinations of metrics and progress: one or a list. [`Logger::File`] is always among them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(from = "OneOrMany", into = "Vec<Logger>")]
pub struct Loggers(Vec<Logger>);

#[derive(Clone, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "must be one of console, file, tensorboard and trackio, or a list of them; other trackers are not \
                 supported"
)]
enum OneOrMany {
    One(Logger),
    Many(Vec<Logger>),
}

impl From<OneOrMany> for Loggers {
    fn from(loggers: OneOrMany) -> Self {
        match loggers {
            OneOrMany::One(logger) => Self::new([logger]),
            OneOrMany::Many(loggers) => Self::new(loggers),
        }
    }
}

impl From<Loggers> for Vec<Logger> {
    fn from(loggers: Loggers) -> Self {
        loggers.0
    }
}

impl Default for Loggers {
    /// The terminal and the run folder.
    fn default() -> Self {
        Self::new([Logger::Console, Logger::File])
    }
}

impl Loggers {
    /// Each destination once, and the run folder's files.
    pub fn new(loggers: impl IntoIterator<Item = Logger>) -> Self {
        let mut unique = Vec::new();
        for logger in loggers.into_iter().chain([Logger::File]) {
            if !unique.contains(&logger) {
                unique.push(logger);
            }
        }
        Self(unique)
    }

    /// Returns true if a destination is among them.
    pub fn has(&self, logger: Logger) -> bool {
        self.0.contains(&logger)
    }

    /// Rejects a tracker that the build lacks.
    ///
    /// # Errors
    /// The message, with the Cargo feature of the tracker.
    pub(super) fn check(&self, has_trackio: bool) -> Result<(), String> {
        if self.has(Logger::Trackio) && !has_trackio {
            return Err("trainer.logger: this build has no trackio; remove it, use tensorboard, or build with \
                        `--features trackio` (it compiles SQLite)"
                .into());
        }
        Ok(())
    }

    /// All destinations, in their order.
    pub fn iter(&self) -> impl Iterator<Item = Logger> {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_word_and_a_list_are_read_and_the_files_are_always_written() {
        for (given, resolved) in [
            (json!("trackio"), json!(["trackio", "file"])),
            (json!(["file", "console"]), json!(["file", "console"])),
            (json!(["console", "tensorboard", "console"]), json!(["console", "tensorboard", "file"])),
            (json!([]), json!(["file"])),
        ] {
            let loggers: Loggers = serde_json::from_value(given).unwrap();
            assert_eq!(serde_json::to_value(loggers).unwrap(), resolved);
        }
        assert!(Loggers::default().has(Logger::Console));
    }

    #[test]
    fn trackio_needs_a_build_that_has_it() {
        let loggers = Loggers::new([Logger::Console, Logger::Trackio]);
        assert_eq!(loggers.check(true), Ok(()));
        assert!(loggers.check(false).unwrap_err().contains("--features trackio"));
        assert_eq!(Loggers::default().check(false), Ok(()));
    }

    #[test]
    fn a_tracker_that_is_not_here_is_refused_with_those_that_are() {
        for given in [json!("wandb"), json!(["console", "wandb"]), json!(1)] {
            let error = serde_json::from_value::<Loggers>(given).unwrap_err();
            assert!(error.to_string().contains("tensorboard and trackio"), "{error}");
        }
    }
}
