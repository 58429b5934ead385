//! Settings of the processes that run a user's programs.

use super::TaskError;

/// The interpreter of Python programs.
pub(super) fn default_python() -> String {
    "python3".to_owned()
}

/// Processes that work at the same time.
pub(super) fn default_workers() -> usize {
    2
}

/// Seconds that a call may take.
pub(super) fn default_timeout() -> f64 {
    60.0
}

/// Rejects invalid settings of `section`.
pub(super) fn check(workers: usize, timeout: f64, section: &str) -> Result<(), TaskError> {
    if workers == 0 {
        return Err(TaskError::config(format!("{section}.workers"), "expected at least 1 process, found 0"));
    }
    // a day, far beyond every call and within what clocks can add
    if !(timeout > 0.0 && timeout <= 86_400.0) {
        let detail = format!("expected seconds, more than 0 and at most 86400, found {timeout}");
        return Err(TaskError::config(format!("{section}.timeout"), detail));
    }
    Ok(())
}
