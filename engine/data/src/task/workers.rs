//! Settings of the processes that run a user's programs.

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
