//! The memory timeline of a run: written when the steps that it was asked for are over, and when the run ends out of
//! memory.

use super::Trainer;
use crate::metrics::timeline::Reason;
use crate::{Error, Result};
use firebrick_backends::allocator::without_peak;

impl Trainer {
    /// Runs a part of the run. If it fails, the timeline is written: always where memory ran out, and else where one
    /// was asked for and is not written yet.
    pub(super) fn dump_timeline_on_oom<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let result = work(self);
        if let Err(error) = &result {
            if error.out_of_memory().is_some() {
                self.write_timeline(Reason::OutOfMemory, Some(error));
            } else if self.snapshots.is_owed() {
                self.write_timeline(Reason::Failed, Some(error));
            }
        }
        result
    }

    /// Writes the timeline as things are. Nothing is changed by it, and no failure of it is one of the run.
    pub(super) fn write_timeline(&mut self, reason: Reason, error: Option<&Error>) {
        let error = error.map(ToString::to_string);
        without_peak(|| {
            let timeline = self.snapshots.timeline(reason, error);
            self.recorder.timeline(&timeline);
        });
    }
}
