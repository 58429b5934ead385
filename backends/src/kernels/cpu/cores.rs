//! Where a long row of small kernels runs.

use crate::device::is_cpu;
use crate::trace;
use burn::tensor::Device;

/// Runs work on one of the cores that kernels share theirs with; on the thread that asks where another device computes.
///
/// A kernel that is called from elsewhere wakes the cores and waits for them, for longer than a small one takes; called from one of
/// them it begins at once, and the others find their parts while they are still looking for some.
pub fn on_a_core<R: Send>(device: &Device, work: impl FnOnce() -> R + Send) -> R {
    if !is_cpu(device) {
        return work();
    }
    let recording = trace::leave();
    let (result, recording) = rayon::scope(|_| {
        trace::enter(recording);
        let result = work();
        (result, trace::leave())
    });
    trace::enter(recording);
    result
}
