//! Copies ahead of their use, and a thread for the host's part of them.

use super::copy_streams::CopyStreams;
use super::download::{Download, TIMEOUT, timed_out};
use super::host_tensor::HostTensor;
use super::upload::Upload;
use crate::{Error, Result};
use burn::tensor::{Device, Int, Tensor};
use firebrick_spec::heartbeat::wait_for;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;

type Job = Box<dyn FnOnce() + Send>;

/// Copies between host and device, waits for them and processes their data: on its own thread, concurrently with the
/// computation, or synchronously. Where the backend can, copies of a copier with a thread run beside kernels, on
/// streams of their own.
#[derive(Debug)]
pub struct Copier {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    streams: Option<CopyStreams>,
}

impl Copier {
    /// A copier without a thread: every copy is finished when its call returns.
    pub fn synchronous() -> Self {
        Self { jobs: None, thread: None, streams: None }
    }

    /// A copier of a device with its own thread. Falls back to a synchronous one, with a warning, where no thread can
    /// be started.
    pub fn asynchronous(device: &Device) -> Self {
        let (jobs, queue) = channel::<Job>();
        let started = std::thread::Builder::new()
            .name("firebrick-copier".into())
            .spawn(move || queue.into_iter().for_each(|job| job()));
        match started {
            Ok(thread) => Self { jobs: Some(jobs), thread: Some(thread), streams: CopyStreams::new(device) },
            Err(e) => {
                tracing::warn!("cannot start the copy thread ({e}); copies run synchronously");
                Self::synchronous()
            }
        }
    }

    /// Returns true if copies run concurrently with the computation.
    pub fn is_asynchronous(&self) -> bool {
        self.jobs.is_some()
    }

    /// Returns true if copies run beside kernels on the device.
    pub fn overlaps_kernels(&self) -> bool {
        self.streams.is_some()
    }

    /// Starts copying a matrix to the host, after all that the device was asked for until now. The matrix is `[rows,
    /// columns]`.
    pub fn download(&self, matrix: Tensor<2>) -> Download {
        match &self.streams {
            Some(streams) => Download::beside_kernels(streams.read_matrix(matrix)),
            None => Download::matrix(matrix),
        }
    }

    /// Starts copying indices to the host, likewise. They are `[count]`.
    pub fn download_indices(&self, indices: Tensor<1, Int>) -> Download {
        match &self.streams {
            Some(streams) => Download::beside_kernels(streams.read_indices(indices)),
            None => Download::indices(indices),
        }
    }

    /// Begins to copy matrices to the device.
    pub fn upload(&self, matrices: Vec<HostTensor>, device: &Device) -> Upload {
        match &self.streams {
            Some(streams) => Upload::beside_kernels(streams, matrices),
            None => Upload::queued(matrices, device),
        }
    }

    /// Runs a copy; jobs run in the order in which they are given.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> Result<T> + Send + 'static) -> Pending<T> {
        let guarded =
            move || catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(Error::panicked(panic.as_ref())));
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
    ///
    /// # Errors
    /// Those of the copy; `Error::Transfer` where its result was taken before, or the thread that copies has ended.
    pub fn take_ready(&mut self) -> Option<Result<T>> {
        let taken = || Err(Error::Transfer("the result of a copy was taken twice".into()));
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
    ///
    /// # Errors
    /// Those of the copy; `Error::Transfer` where it takes more than ten minutes, its result was taken before, or the
    /// thread that copies has ended.
    pub fn wait(self) -> Result<T> {
        match self {
            Self::Done(result) => result,
            Self::Running(result) => {
                let _wait = wait_for("a copy on the thread `firebrick-copier`");
                result.recv_timeout(TIMEOUT).unwrap_or_else(|e| {
                    Err(match e {
                        RecvTimeoutError::Timeout => timed_out(),
                        RecvTimeoutError::Disconnected => Error::Transfer("the copy thread has terminated".into()),
                    })
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_run_in_order_and_a_panic_in_one_is_its_own_error() {
        for copier in [Copier::synchronous(), Copier::asynchronous(&Device::flex())] {
            let first = copier.run(|| Ok(1));
            let second = copier.run(|| -> Result<i32> { panic!("no room") });
            let third = copier.run(|| Ok(3));
            assert_eq!(first.wait().unwrap(), 1);
            assert!(second.wait().unwrap_err().to_string().contains("no room"));
            assert_eq!(third.wait().unwrap(), 3);
        }
    }
}
