//! Running a sequence of small kernels inside the thread pool that they use.

use crate::device::is_cpu;
use crate::trace;
use burn::tensor::Device;

/// Runs `work` on a thread of the kernels' thread pool where the device is the CPU, and on the calling thread
/// elsewhere. A recording of [`crate::trace`] continues inside.
///
/// A kernel that is called from outside the pool wakes its threads and waits for them, which takes longer than a small
/// kernel does. Called from inside it starts at once, and other threads steal their parts while they are still awake.
pub fn in_thread_pool<R: Send>(device: &Device, work: impl FnOnce() -> R + Send) -> R {
    if !is_cpu(device) {
        return work();
    }
    let recording = trace::detach();
    let (result, recording) = rayon::scope(|_| {
        trace::attach(recording);
        let result = work();
        (result, trace::detach())
    });
    trace::attach(recording);
    result
}
