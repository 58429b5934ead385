//! Host copies of tensors, and a thread for the host's part of a copy: waiting for it, filling buffers, adding up.
//!
//! Transfers themselves are queued where kernels are (CUDA: one stream), so they do not overlap with computation on the device.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use rayon::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::device::is_cpu;
use crate::{Error, Precision, PrecisionExt, Result};

/// After this time a copy fails: the device hangs.
const TIMEOUT: Duration = Duration::from_mins(10);

/// Elements of a task in host arithmetic.
const GRAIN: usize = 1 << 15;

/// A matrix in host memory, in the float type that it had on its device: f32, f16 or bf16 for weights in half precision, or f64 in
/// exactness tests.
#[derive(Clone, Debug)]
pub struct HostTensor(TensorData);

impl HostTensor {
    /// Copies a matrix to the host. Waits until it is computed.
    ///
    /// # Errors
    /// Where the device reports an error, or does not answer within ten minutes.
    pub fn download(tensor: Tensor<2>) -> Result<Self> {
        Download::matrix(tensor).finish_matrix()
    }

    /// f32 values in row-major order.
    #[must_use]
    pub fn from_values(values: Vec<f32>, shape: [usize; 2]) -> Self {
        Self(TensorData::new(values, shape))
    }

    /// Zeros of the same type.
    #[must_use]
    pub fn zeros(&self, shape: [usize; 2]) -> Self {
        Self(TensorData::zeros_dtype(shape, self.0.dtype()))
    }

    /// The matrix on a device; the host keeps its copy.
    #[must_use]
    pub fn upload(&self, device: &Device) -> Tensor<2> {
        self.clone().into_device(device)
    }

    /// The matrix on a device; consumes the host's copy.
    #[must_use]
    pub fn into_device(self, device: &Device) -> Tensor<2> {
        match self.0.dtype() {
            // without a type Burn would convert it to the device's default
            half @ (DType::BF16 | DType::F16) => Tensor::from_data(self.0, (device, half)),
            _ => Tensor::from_data(self.0, device),
        }
    }

    /// The values in f32 where they are in half precision, else as they are.
    #[must_use]
    pub fn widened(self) -> Self {
        match self.0.dtype() {
            DType::BF16 | DType::F16 => Self(self.0.convert_dtype(DType::F32)),
            _ => self,
        }
    }

    /// A copy in a precision.
    #[must_use]
    pub fn rounded(&self, precision: Precision) -> Self {
        Self(match precision {
            Precision::F32 => self.0.clone(),
            Precision::Bf16 => self.0.clone().convert_dtype(DType::BF16),
            Precision::F16 => self.0.clone().convert_dtype(DType::F16),
        })
    }

    /// The precision that the values are stored in.
    #[must_use]
    pub fn precision(&self) -> Precision {
        Precision::of(self.0.dtype())
    }

    /// Moves the host's copy to memory that the device copies from fastest (pinned, where the backend can). Only
    /// [`HostTensor::into_device`] would profit: [`HostTensor::upload`] copies the values into pageable memory first.
    pub fn pin(&mut self, device: &Device) {
        device.staging(std::iter::once(&mut self.0));
    }

    /// Rows and columns.
    #[must_use]
    pub fn dims(&self) -> [usize; 2] {
        let dims = self.0.shape().as_slice();
        [dims[0], dims[1]]
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.as_bytes().len()
    }

    /// The values, mutable. They must not be in half precision: see [`HostTensor::widened`].
    pub fn values(&mut self) -> HostValues<'_> {
        // one of the two always succeeds: values are f32 or f64
        if self.0.as_slice::<f64>().is_ok() {
            return match self.0.as_mut_slice::<f64>() {
                Ok(values) => HostValues::F64(values),
                Err(_) => unreachable!("just read as f64"),
            };
        }
        match self.0.as_mut_slice::<f32>() {
            Ok(values) => HostValues::F32(values),
            Err(e) => unreachable!("a host tensor is f32 or f64: {e:?}"),
        }
    }

    /// Values as f64, for reading.
    #[must_use]
    pub fn to_f64(&self) -> Vec<f64> {
        self.0.iter::<f64>().collect()
    }

    /// Values as f32, for reading.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        self.0.iter::<f32>().collect()
    }

    /// Adds another matrix of the same shape, in parallel.
    pub fn add(&mut self, mut other: Self) {
        match (self.values(), other.values()) {
            (HostValues::F32(a), HostValues::F32(b)) => add(a, b),
            (HostValues::F64(a), HostValues::F64(b)) => add(a, b),
            _ => unreachable!("gradients of one parameter have one type"),
        }
    }

    /// Adds row `i` of `rows` to row `at[i]` of this matrix.
    pub fn add_rows(&mut self, at: &[usize], mut rows: Self) {
        let columns = self.dims()[1];
        match (self.values(), rows.values()) {
            (HostValues::F32(a), HostValues::F32(b)) => add_rows(a, columns, at, b),
            (HostValues::F64(a), HostValues::F64(b)) => add_rows(a, columns, at, b),
            _ => unreachable!("gradients of one parameter have one type"),
        }
    }

    /// Sum of squares, accumulated in f64 in a fixed order.
    #[must_use]
    pub fn sum_of_squares(&self) -> f64 {
        fn sum<T: Copy + Into<f64> + Sync>(values: &[T]) -> f64 {
            let parts: Vec<f64> = values
                .par_chunks(GRAIN)
                .map(|c| c.iter().map(|&v| v.into() * v.into()).sum())
                .collect();
            parts.iter().sum()
        }
        match (self.0.as_slice::<f32>(), self.0.as_slice::<f64>()) {
            (Ok(values), _) => sum(values),
            (_, Ok(values)) => sum(values),
            _ => unreachable!("a host tensor is f32 or f64"),
        }
    }
}

/// Waits until matrices are computed. A GPU whose memory ran out says so when something that depends on the memory is read, and not
/// when it is asked to finish; this reads a number of each. On the CPU nothing comes late.
///
/// # Errors
/// Where a matrix was never computed: memory ran out, or a kernel failed.
pub fn check_computed(matrices: impl IntoIterator<Item = Tensor<2>>) -> Result<()> {
    let late = matrices.into_iter().filter(|t| !is_cpu(&t.device()));
    let numbers = late.map(|t| t.slice([0..1, 0..1]).cast(DType::F32));
    // A sum depends on every one of them. Written side by side into one tensor they would not do: a tensor is as good as the last that
    // was written to it.
    let Some(sum) = numbers.reduce(Tensor::add) else {
        return Ok(());
    };
    let read = sum.try_into_data();
    read.map(drop).map_err(|e| Error::device(&e))
}

/// Values of a [`HostTensor`] in row-major order.
#[derive(Debug)]
pub enum HostValues<'a> {
    /// f32.
    F32(&'a mut [f32]),
    /// f64, in exactness tests.
    F64(&'a mut [f64]),
}

fn add<T: Copy + std::ops::AddAssign + Send + Sync>(a: &mut [T], b: &[T]) {
    a.par_chunks_mut(GRAIN)
        .zip(b.par_chunks(GRAIN))
        .for_each(|(a, b)| {
            for (a, b) in a.iter_mut().zip(b) {
                *a += *b;
            }
        });
}

fn add_rows<T: Copy + std::ops::AddAssign>(a: &mut [T], columns: usize, at: &[usize], b: &[T]) {
    for (&row, values) in at.iter().zip(b.chunks_exact(columns)) {
        let own = &mut a[row * columns..(row + 1) * columns];
        for (a, b) in own.iter_mut().zip(values) {
            *a += *b;
        }
    }
}

/// A pending read of a tensor.
type Reading = Pin<Box<dyn Future<Output = Result<TensorData>> + Send>>;

/// A copy to the host in progress. It is started on the thread that computes, so that it follows the tensor's kernels in the device's
/// queue, and may be waited for on any thread.
///
/// Tensors themselves never leave their thread: each thread has its own stream and memory pools on the device.
pub struct Download {
    reading: Reading,
    done: Option<Result<TensorData>>,
    /// Whether the data arrive in a staging buffer of the device's pool, which they would keep allocated.
    staged: bool,
}

impl std::fmt::Debug for Download {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Download(done: {})", self.done.is_some())
    }
}

impl Download {
    /// Starts copying a matrix.
    #[must_use]
    pub fn matrix(tensor: Tensor<2>) -> Self {
        Self::start(!is_cpu(&tensor.device()), async move {
            let data = tensor.into_data_async().await;
            data.map_err(|e| Error::device(&e))
        })
    }

    /// Starts copying indices.
    #[must_use]
    pub fn indices(tensor: Tensor<1, Int>) -> Self {
        Self::start(!is_cpu(&tensor.device()), async move {
            let data = tensor.into_data_async().await;
            data.map_err(|e| Error::device(&e))
        })
    }

    fn start(
        staged: bool,
        reading: impl Future<Output = Result<TensorData>> + Send + 'static,
    ) -> Self {
        let mut reading: Reading = Box::pin(reading);
        // the first poll enqueues the read
        let mut context = Context::from_waker(Waker::noop());
        let done = match reading.as_mut().poll(&mut context) {
            Poll::Ready(result) => Some(result),
            Poll::Pending => None,
        };
        Self {
            reading,
            done,
            staged,
        }
    }

    /// Waits for the copy. The result owns its memory: it keeps no staging buffer of the device.
    pub fn finish(self) -> Result<TensorData> {
        let staged = self.staged;
        let data = self.arrive()?;
        if !staged {
            return Ok(data);
        }
        let (shape, dtype) = (data.shape().clone(), data.dtype());
        Ok(TensorData::from_bytes_vec(
            data.as_bytes().to_vec(),
            shape,
            dtype,
        ))
    }

    fn arrive(mut self) -> Result<TensorData> {
        if let Some(result) = self.done.take() {
            return result;
        }
        let thread = Arc::new(Unpark(std::thread::current()));
        let waker = Waker::from(thread);
        let mut context = Context::from_waker(&waker);
        let started = Instant::now();
        loop {
            if let Poll::Ready(result) = self.reading.as_mut().poll(&mut context) {
                return result;
            }
            let left = TIMEOUT.saturating_sub(started.elapsed());
            if left.is_zero() {
                return Err(timed_out());
            }
            std::thread::park_timeout(left);
        }
    }

    /// Waits for a matrix; see [`Self::finish`].
    pub fn finish_matrix(self) -> Result<HostTensor> {
        self.finish().map(HostTensor)
    }
}

/// Wakes the waiting thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn timed_out() -> Error {
    Error::Transfer(format!(
        "a copy between host and device did not finish within {} s",
        TIMEOUT.as_secs()
    ))
}

type Job = Box<dyn FnOnce() + Send>;

/// Waits for copies and processes their data: on its own thread, concurrently with the computation, or synchronously.
#[derive(Debug)]
pub struct Copier {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Copier {
    /// A copier without a thread: every copy is finished when its call returns.
    #[must_use]
    pub fn synchronous() -> Self {
        Self {
            jobs: None,
            thread: None,
        }
    }

    /// A copier with its own thread. Falls back to a synchronous one, with a warning, where no thread can be started.
    #[must_use]
    pub fn asynchronous() -> Self {
        let (jobs, queue) = channel::<Job>();
        let started = std::thread::Builder::new()
            .name("firebrick-copier".into())
            .spawn(move || queue.into_iter().for_each(|job| job()));
        match started {
            Ok(thread) => Self {
                jobs: Some(jobs),
                thread: Some(thread),
            },
            Err(e) => {
                tracing::warn!("cannot start the copy thread ({e}); copies run synchronously");
                Self::synchronous()
            }
        }
    }

    /// Whether copies run concurrently with the computation.
    #[must_use]
    pub fn is_asynchronous(&self) -> bool {
        self.jobs.is_some()
    }

    /// Runs a copy; jobs run in the order in which they are given.
    pub fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        let guarded = move || {
            catch_unwind(AssertUnwindSafe(work))
                .unwrap_or_else(|panic| Err(Error::panicked(panic.as_ref())))
        };
        let Some(jobs) = &self.jobs else {
            return Pending::Done(guarded());
        };
        let (done, result) = channel();
        let job = Box::new(move || {
            // the receiver may be gone
            let _ = done.send(guarded());
        });
        match jobs.send(job) {
            Ok(()) => Pending::Running(result),
            Err(job) => {
                (job.0)();
                Pending::Running(result)
            }
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // panics of jobs were turned into their results
            let _ = thread.join();
        }
    }
}

/// The result of a copy that may be in progress.
#[derive(Debug)]
#[must_use = "a copy may have failed"]
pub enum Pending<T> {
    /// Finished.
    Done(Result<T>),
    /// On the copier's thread.
    Running(Receiver<Result<T>>),
}

impl<T> Pending<T> {
    /// The result, if the copy is finished. Must not be called again after it returned `Some`.
    pub fn take_ready(&mut self) -> Option<Result<T>> {
        let taken = || {
            Err(Error::Transfer(
                "the result of a copy was taken twice".into(),
            ))
        };
        match self {
            Self::Done(result) => Some(std::mem::replace(result, taken())),
            Self::Running(result) => match result.try_recv() {
                Ok(done) => Some(done),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => Some(taken()),
            },
        }
    }

    /// Waits for the copy.
    pub fn wait(self) -> Result<T> {
        match self {
            Self::Done(result) => result,
            Self::Running(result) => result.recv_timeout(TIMEOUT).unwrap_or_else(|e| {
                Err(match e {
                    RecvTimeoutError::Timeout => timed_out(),
                    RecvTimeoutError::Disconnected => {
                        Error::Transfer("the copy thread has terminated".into())
                    }
                })
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(values: &[f32], shape: [usize; 2]) -> HostTensor {
        HostTensor::from_values(values.to_vec(), shape)
    }

    #[test]
    fn a_matrix_survives_the_way_to_the_device_and_back() {
        let device = Device::flex();
        let there = matrix(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3]).upload(&device);
        let back = HostTensor::download(there).unwrap();
        assert_eq!(back.dims(), [2, 3]);
        assert_eq!(back.to_f32(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(back.bytes(), 24);
    }

    #[test]
    fn rows_are_added_where_they_belong_also_twice() {
        let mut table = matrix(&[0.0; 6], [3, 2]);
        table.add_rows(&[2, 0, 2], matrix(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [3, 2]));
        assert_eq!(table.to_f32(), [3.0, 4.0, 0.0, 0.0, 6.0, 8.0]);
        assert!((table.sum_of_squares() - 125.0).abs() < 1e-12);
    }

    #[test]
    fn copies_run_in_order_and_a_panic_in_one_is_its_own_error() {
        for copier in [Copier::synchronous(), Copier::asynchronous()] {
            let first = copier.run(|| Ok(1));
            let second = copier.run(|| -> Result<i32> { panic!("no room") });
            let third = copier.run(|| Ok(3));
            assert_eq!(first.wait().unwrap(), 1);
            assert!(second.wait().unwrap_err().to_string().contains("no room"));
            assert_eq!(third.wait().unwrap(), 3);
        }
    }
}
