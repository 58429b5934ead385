//! Copies to the host.

use super::copy_streams::{CopyStreams, Reading};
use super::host_tensor::HostTensor;
use crate::device::is_cpu;
use crate::trace::span;
use crate::{Error, Result};
use burn::tensor::{Device, Int, Tensor, TensorData};
use firebrick_spec::heartbeat::wait_for;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// After this time a copy fails: the device hangs.
pub(super) const TIMEOUT: Duration = Duration::from_mins(10);

/// A copy to the host in progress. It is started on the thread that computes, so that it follows the tensor's kernels,
/// and may be waited for on any thread.
///
/// Tensors themselves never leave their thread: each thread has its own stream and memory pools on the device.
pub struct Download {
    /// Until it is waited for.
    reading: Option<Reading>,
    done: Option<Result<TensorData>>,
    /// True if the data arrive in a buffer of the device, mapped to be read, and have to be copied out of it.
    mapped: bool,
    /// True if the device writes to its destination until the copy was waited for, whoever has dropped it meanwhile.
    written_to: bool,
}

impl std::fmt::Debug for Download {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Download(done: {})", self.done.is_some())
    }
}

impl Download {
    /// Starts copying a matrix, in the queue of the device's kernels. The matrix is `[rows, columns]`.
    pub fn matrix(tensor: Tensor<2>) -> Self {
        Self::in_queue(&tensor.device(), async move {
            let data = tensor.into_data_async().await;
            data.map_err(|e| Error::device(&e))
        })
    }

    /// Starts copying indices, likewise. They are `[count]`.
    pub fn indices(tensor: Tensor<1, Int>) -> Self {
        Self::in_queue(&tensor.device(), async move {
            let data = tensor.into_data_async().await;
            data.map_err(|e| Error::device(&e))
        })
    }

    fn in_queue(device: &Device, reading: impl Future<Output = Result<TensorData>> + Send + 'static) -> Self {
        let mapped = !is_cpu(device) && CopyStreams::new(device).is_none();
        Self::start(Box::pin(reading), mapped, false)
    }

    /// Starts a copy on a stream of its own.
    pub(super) fn beside_kernels(reading: Reading) -> Self {
        Self::start(reading, false, true)
    }

    fn start(mut reading: Reading, mapped: bool, written_to: bool) -> Self {
        let mut context = Context::from_waker(Waker::noop());
        let done = match reading.as_mut().poll(&mut context) {
            Poll::Ready(result) => Some(result),
            Poll::Pending => None,
        };
        Self { reading: done.is_none().then_some(reading), done, mapped, written_to }
    }

    /// Waits for the copy. On CUDA the data stay in the pinned memory that they arrived in, which the device can copy from
    /// again: fresh pages would take longer than the copy itself.
    ///
    /// # Errors
    /// `Error::OutOfMemory` where the device's memory ran out before, `Error::Transfer` where it reports another error
    /// or does not answer within ten minutes.
    pub fn finish(mut self) -> Result<TensorData> {
        let _span = span("copy to host", 0.0);
        let data = match (self.done.take(), self.reading.take()) {
            (Some(result), _) => result,
            (None, Some(reading)) => drive(reading),
            (None, None) => unreachable!("a copy is waited for once"),
        }?;
        Ok(if self.mapped { owned(&data) } else { data })
    }

    /// Waits for a matrix; see [`Self::finish`].
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub fn finish_matrix(self) -> Result<HostTensor> {
        self.finish().map(HostTensor::from_data)
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        if let Some(reading) = self.reading.take().filter(|_| self.written_to) {
            // nobody wants its result or its error
            let _ = drive(reading);
        }
    }
}

impl HostTensor {
    /// Copies a matrix to the host, on CUDA into pinned memory. Waits until it is computed. The tensor is
    /// `[rows, columns]`.
    ///
    /// # Errors
    /// If the device reports an error, or does not answer within ten minutes.
    pub fn download(tensor: Tensor<2>) -> Result<Self> {
        Download::matrix(tensor).finish_matrix()
    }
}

fn owned(data: &TensorData) -> TensorData {
    TensorData::from_bytes_vec(data.as_bytes().to_vec(), data.shape().clone(), data.dtype())
}

/// Waits for a read that was started.
fn drive(mut reading: Reading) -> Result<TensorData> {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let started = Instant::now();
    let mut wait = None;
    loop {
        if let Poll::Ready(result) = reading.as_mut().poll(&mut context) {
            return result;
        }
        let left = TIMEOUT.saturating_sub(started.elapsed());
        if left.is_zero() {
            return Err(timed_out());
        }
        wait.get_or_insert_with(|| wait_for("the device, to copy to the host"));
        std::thread::park_timeout(left);
    }
}

/// Wakes the waiting thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

pub(super) fn timed_out() -> Error {
    Error::Transfer(format!("a copy between host and device did not finish within {} s", TIMEOUT.as_secs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_survives_the_way_to_the_device_and_back() {
        let device = Device::flex();
        let values = vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let there = HostTensor::from_values(values.clone(), [2, 3]).upload(&device);
        let back = HostTensor::download(there).unwrap();
        assert_eq!(back.dims(), [2, 3]);
        assert_eq!(back.to_f32(), values);
        assert_eq!(back.bytes(), 24);
    }
}
