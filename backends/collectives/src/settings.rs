//! Deadline and frame size of a group.

use std::time::Duration;

/// Deadline and frame size of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Longest wait for another rank in one operation.
    pub deadline: Duration,
    /// Most bytes of one message; longer ones are cut.
    pub frame: usize,
}

impl Default for Settings {
    /// Half an hour, as `PyTorch` waits (`torch.distributed`), and 256 MiB, since MPI counts in 32 bits.
    fn default() -> Self {
        Self { deadline: Duration::from_mins(30), frame: 256 << 20 }
    }
}
