//! A communicator of NCCL, and the stream that it works on.

#![allow(unsafe_code, reason = "NCCL is a library of C")]

use super::super::mailbox::Mailbox;
use super::super::{CollectiveError, Result};
use super::library::{BYTE, Comm, Config, IN_PROGRESS, Library, SUCCESS, Stream, UniqueId};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Looks without a rest, and the rests after them: each twice the one before.
const BUSY_LOOKS: u32 = 200;
const SHORT_REST: Duration = Duration::from_micros(20);
const LONG_REST: Duration = Duration::from_millis(1);

/// Longest time that what others are still to get of a communicator that is given back takes.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// State of a wait for NCCL, and its deadline.
pub(super) struct Wait<'a> {
    pub mailbox: &'a Mailbox,
    pub deadline: Instant,
    pub seconds: u64,
    /// The rank that waits, in the whole world.
    pub rank: usize,
    /// The operation.
    pub operation: &'a dyn fmt::Display,
}

impl Wait<'_> {
    /// This rank's error in the operation.
    pub fn error(&self, message: impl Into<String>) -> CollectiveError {
        CollectiveError::Nccl { rank: self.rank, operation: self.operation.to_string(), message: message.into() }
    }

    fn driver(&self, error: DriverError) -> CollectiveError {
        self.error(format!("the GPU's driver: {error}"))
    }

    /// Looks until `done`, a rank gives up, or the deadline.
    fn until(&self, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
        let mut looks = 0_u32;
        let mut rest = SHORT_REST;
        loop {
            if done()? {
                return Ok(());
            }
            if let Some((rank, message)) = self.mailbox.aborted() {
                return Err(CollectiveError::Lost { rank, message });
            }
            if Instant::now() >= self.deadline {
                return Err(self.error(format!(
                    "it has not ended after {} s, though every rank has begun it; check the links between the GPUs \
                     (NCCL_DEBUG=INFO prints which it uses)",
                    self.seconds
                )));
            }
            looks += 1;
            if looks < BUSY_LOOKS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(rest);
                rest = (rest * 2).min(LONG_REST);
            }
        }
    }
}

/// The ranks of a group as NCCL knows them. Given back when dropped: what others are still to get leaves first, unless
/// it was given up.
pub(super) struct Communicator {
    library: &'static Library,
    comm: Comm,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    event: CudaEvent,
    ranks: usize,
    /// True if nothing has gone wrong.
    works: bool,
}

// SAFETY: a communicator may be used from any thread, by one at a time; it is used under a lock.
unsafe impl Send for Communicator {}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator({} ranks)", self.ranks)
    }
}

impl Communicator {
    /// Joins a group under its id, as one of its ranks, on the GPU of a context. All ranks of the group do so at the
    /// same time.
    pub fn join(
        library: &'static Library,
        context: &Arc<CudaContext>,
        (id, rank, ranks): (UniqueId, usize, usize),
        wait: &Wait<'_>,
    ) -> Result<Self> {
        let driver = |e| wait.driver(e);
        let stream = context.new_stream().map_err(driver)?;
        let event = context.new_event(None).map_err(driver)?;
        // NCCL takes the device whose context is current
        context.bind_to_thread().map_err(driver)?;
        let (mut comm, mut config): (Comm, _) = (std::ptr::null_mut(), Config::not_blocking());
        // SAFETY: it writes a communicator and reads a configuration of the size that this says.
        let code = unsafe {
            (library.comm_init_rank_config)(&raw mut comm, ranks as c_int, id, rank as c_int, &raw mut config)
        };
        if !matches!(code, SUCCESS | IN_PROGRESS) || comm.is_null() {
            return Err(wait.error(library.text(code, None)));
        }
        // from here on it is given back
        let mut joined = Self { library, comm, context: Arc::clone(context), stream, event, ranks, works: false };
        joined.settle(SUCCESS, wait)?;
        joined.works = true;
        Ok(joined)
    }

    /// Every rank's bytes one behind the other: `bytes` of each rank at `from`, all at `to`. Both are places on the
    /// device that nobody else uses until this returns.
    pub fn all_gather(&self, from: u64, to: u64, bytes: usize, wait: &Wait<'_>) -> Result<()> {
        self.bind(wait)?;
        // SAFETY: the places are as long as said and belong to the device of this communicator.
        let code = unsafe {
            (self.library.all_gather)(place(from).cast_const(), place(to), bytes, BYTE, self.comm, self.stream())
        };
        self.settle(code, wait)?;
        self.finish(wait)
    }

    /// Gives every rank its block of those at `from`, and takes every rank's block for this one, in their order, at
    /// `to`.
    pub fn all_to_all(&self, from: u64, to: u64, block: usize, wait: &Wait<'_>) -> Result<()> {
        self.bind(wait)?;
        let Library { group_start, group_end, send, recv, .. } = self.library;
        // SAFETY: a group is open until it is ended, which it is below.
        let mut code = unsafe { group_start() };
        for rank in 0..self.ranks {
            let at = (rank * block) as u64;
            for sends in [true, false] {
                if !matches!(code, SUCCESS | IN_PROGRESS) {
                    break;
                }
                let (peer, comm, stream) = (rank as c_int, self.comm, self.stream());
                // SAFETY: there are as many blocks at both places as ranks, on the device of this communicator.
                code = unsafe {
                    if sends {
                        let from = place(from + at).cast_const();
                        send(from, block, BYTE, peer, comm, stream)
                    } else {
                        recv(place(to + at), block, BYTE, peer, comm, stream)
                    }
                };
            }
        }
        // ended whatever was queued: one that is left open takes every later call
        // SAFETY: the group was begun above.
        let ended = unsafe { group_end() };
        let queued = matches!(code, SUCCESS | IN_PROGRESS);
        self.settle(if queued { ended } else { code }, wait)?;
        self.finish(wait)
    }

    /// Ends what is under way.
    pub fn give_up(mut self) {
        self.works = false;
    }

    /// Waits until all has left that others are still to get, and gives it back; whether that went well.
    fn is_returned(&self) -> bool {
        let going = |code| matches!(code, SUCCESS | IN_PROGRESS);
        // SAFETY: it was not given back before.
        if !going(unsafe { (self.library.comm_finalize)(self.comm) }) {
            return false;
        }
        let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
        loop {
            let mut state = SUCCESS;
            // SAFETY: it was not given back before; it writes one number.
            let code = unsafe { (self.library.comm_get_async_error)(self.comm, &raw mut state) };
            match (code, state) {
                (SUCCESS, SUCCESS) => {
                    // SAFETY: it is not used again.
                    return going(unsafe { (self.library.comm_destroy)(self.comm) });
                }
                (SUCCESS | IN_PROGRESS, IN_PROGRESS) if Instant::now() < deadline => {
                    std::thread::sleep(SHORT_REST);
                }
                _ => return false,
            }
        }
    }

    fn stream(&self) -> Stream {
        self.stream.cu_stream().cast()
    }

    fn bind(&self, wait: &Wait<'_>) -> Result<()> {
        self.context.bind_to_thread().map_err(|e| wait.driver(e))
    }

    /// NCCL's asynchronous state: whether it has done what it was asked for on the host.
    fn is_settled(&self, wait: &Wait<'_>) -> Result<bool> {
        let mut state = SUCCESS;
        // SAFETY: the communicator has not been given back; it writes one number.
        let code = unsafe { (self.library.comm_get_async_error)(self.comm, &raw mut state) };
        match (code, state) {
            (SUCCESS, SUCCESS) => Ok(true),
            (SUCCESS | IN_PROGRESS, IN_PROGRESS) => Ok(false),
            (SUCCESS, failed) | (failed, _) => Err(self.failed(failed, wait)),
        }
    }

    fn failed(&self, code: c_int, wait: &Wait<'_>) -> CollectiveError {
        wait.error(self.library.text(code, Some(self.comm)))
    }

    /// Waits until a call that gave `code` is through on the host.
    fn settle(&self, code: c_int, wait: &Wait<'_>) -> Result<()> {
        if !matches!(code, SUCCESS | IN_PROGRESS) {
            return Err(self.failed(code, wait));
        }
        wait.until(|| self.is_settled(wait))
    }

    /// Waits until the stream is through with all that it was asked for.
    fn finish(&self, wait: &Wait<'_>) -> Result<()> {
        self.event.record(&self.stream).map_err(|e| wait.driver(e))?;
        wait.until(|| {
            if self.event.try_is_complete().map_err(|e| wait.driver(e))? {
                return Ok(true);
            }
            // a rank that is gone shows here, and not in the event
            self.is_settled(wait).map(|_| false)
        })
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        if self.works && !std::thread::panicking() && self.is_returned() {
            return;
        }
        // the one way back that waits for no other rank
        // SAFETY: it was not given back before, and is not used again.
        unsafe {
            (self.library.comm_abort)(self.comm);
        }
    }
}

fn place(at: u64) -> *mut c_void {
    at as usize as *mut c_void
}
