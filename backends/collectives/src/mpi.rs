//! Ranks as processes under `mpirun` or `srun`: messages of bytes over MPI.
//!
//! MPI lives on a thread of its own, which alone calls it: communicators of Open MPI must not change threads, and this
//! needs no more of MPI than `MPI_THREAD_FUNNELED`. The thread sends what it is given and puts what arrives into the
//! mailbox, where the collectives wait with their deadlines; so no rank ever waits inside MPI for another one's
//! collective. A tag tells the channels apart.

#![allow(unsafe_code, reason = "MPI is a library of C")]

use super::group::Staged;
use super::mailbox::{Mailbox, Message};
use super::parcel::Parcel;
use super::transport::Transport;
use super::{Background, Collective, CollectiveError, Result, Settings};
use ::mpi::Threading;
use ::mpi::ffi;
use std::ffi::c_int;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Tag of the message of a rank that gives up. Each channel has the next two tags: one for values, one for failures.
const ABORT_TAG: c_int = 0;

/// Longest time that a rank which gives up takes to tell the others.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Rests between two looks for messages: short while somebody waits for one, then longer and longer.
const SHORT_REST: Duration = Duration::from_micros(50);
const LONG_REST: Duration = Duration::from_millis(2);

/// Looks without a rest after something has happened.
const BUSY_LOOKS: u32 = 200;

/// The processes that a launcher of MPI started.
#[derive(Clone, Copy, Debug)]
pub struct Mpi;

impl Mpi {
    /// All processes of the launch. To be called once a process.
    ///
    /// # Errors
    /// If MPI does not start, or was started before.
    pub fn world(settings: Settings) -> Result<Arc<dyn Collective>> {
        let mailbox = Arc::new(Mailbox::default());
        let (orders, queue) = channel();
        let (ready, started) = channel();
        let arrived = Arc::clone(&mailbox);
        let thread = std::thread::Builder::new()
            .name("firebrick-mpi".into())
            .spawn(move || run(&queue, &arrived, &ready))
            .map_err(|e| CollectiveError::Transport(format!("its thread cannot be started: {e}")))?;
        let failed = |_| CollectiveError::Transport("MPI_Init ended the thread that called it".into());
        let (rank, size) = started.recv().map_err(failed)??;
        let endpoint = Endpoint {
            rank,
            size,
            mailbox,
            orders: Mutex::new(orders),
            thread: Some(thread),
            gave_up: AtomicBool::new(false),
            channels: AtomicU64::new(1),
        };
        let world = Staged::world(Arc::new(endpoint), settings);
        Ok(Background::over(Arc::new(world)))
    }
}

/// Requests to MPI's thread.
enum Order {
    Post {
        to: usize,
        tag: c_int,
        bytes: Parcel,
    },
    /// Ends when all is sent: with `MPI_Finalize`, which waits for all ranks, or without, which tells the launcher that
    /// the run failed.
    Stop {
        finalize: bool,
    },
}

#[derive(Debug)]
struct Endpoint {
    rank: usize,
    size: usize,
    mailbox: Arc<Mailbox>,
    orders: Mutex<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
    gave_up: AtomicBool,
    channels: AtomicU64,
}

impl Endpoint {
    fn order(&self, order: Order) -> Result<()> {
        let orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = |_| CollectiveError::Transport("its thread has ended".into());
        orders.send(order).map_err(gone)
    }
}

impl Transport for Endpoint {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn post(&self, to: usize, channel: u64, message: Message) -> Result<()> {
        let (kind, bytes) = match message {
            Message::InGroup(bytes) => (0, bytes),
            Message::Failure(bytes) => (1, bytes.into()),
        };
        let tag = c_int::try_from(1 + 2 * channel + kind);
        let tag = tag.map_err(|_| CollectiveError::Transport("too many groups of ranks".into()))?;
        self.order(Order::Post { to, tag, bytes })
    }

    fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    fn abort(&self, lost: usize, message: &str) {
        if self.gave_up.swap(true, Relaxed) {
            return;
        }
        self.mailbox.abort(lost, message);
        for to in (0..self.size).filter(|&to| to != self.rank) {
            let bytes = [&(lost as u64).to_le_bytes(), message.as_bytes()].concat().into();
            // without its thread nobody can be told; the launcher will
            let _ = self.order(Order::Post { to, tag: ABORT_TAG, bytes });
        }
    }

    fn channels(&self) -> &AtomicU64 {
        &self.channels
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort(self.rank, "it panicked");
        }
        let finalize = !self.gave_up.load(Relaxed);
        let _ = self.order(Order::Stop { finalize });
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// MPI's thread, from its start to its end.
fn run(orders: &Receiver<Order>, mailbox: &Mailbox, ready: &Sender<Result<(usize, usize)>>) {
    let Some((universe, _)) = ::mpi::initialize_with_threading(Threading::Funneled) else {
        let _ = ready.send(Err(CollectiveError::Transport("it was started before in this process".into())));
        return;
    };
    let (mut rank, mut size): (c_int, c_int) = (0, 0);
    // SAFETY: MPI is initialized, on this thread; both write one number.
    unsafe {
        ffi::MPI_Comm_rank(ffi::RSMPI_COMM_WORLD, &raw mut rank);
        ffi::MPI_Comm_size(ffi::RSMPI_COMM_WORLD, &raw mut size);
    }
    let _ = ready.send(Ok((rank as usize, size as usize)));
    let mut pump = Pump { mailbox, flying: Vec::new(), idle: 0 };
    if pump.run(orders) {
        drop(universe);
    } else {
        // without MPI_Finalize the launcher knows that the run failed and ends the others
        std::mem::forget(universe);
    }
}

/// Messages on their way.
struct Pump<'m> {
    mailbox: &'m Mailbox,
    /// Sends that MPI has not completed, with what they send.
    flying: Vec<(ffi::MPI_Request, Parcel)>,
    /// Looks at which nothing happened.
    idle: u32,
}

impl Pump<'_> {
    /// Until it is told to stop, or all who could are gone. Gives whether to finalize.
    fn run(&mut self, orders: &Receiver<Order>) -> bool {
        loop {
            let order = match self.rest() {
                None => orders.try_recv().map_err(|e| e == TryRecvError::Disconnected),
                Some(rest) => orders.recv_timeout(rest).map_err(|e| e == RecvTimeoutError::Disconnected),
            };
            self.idle = self.idle.saturating_add(1);
            match order {
                Ok(Order::Post { to, tag, bytes }) => self.send(to, tag, bytes),
                Ok(Order::Stop { finalize }) => {
                    self.complete(finalize);
                    return finalize;
                }
                Err(true) => return false,
                Err(false) => {}
            }
            self.look();
        }
    }

    /// Time to wait for an order; none where something has just happened.
    fn rest(&self) -> Option<Duration> {
        let beyond = self.idle.checked_sub(BUSY_LOOKS)?;
        if !self.flying.is_empty() || self.mailbox.is_awaited() {
            return Some(SHORT_REST);
        }
        Some((SHORT_REST * 2_u32.saturating_pow(beyond / 16)).min(LONG_REST))
    }

    /// Until all is sent; where the run has failed, not for long.
    fn complete(&mut self, finalize: bool) {
        let until = Instant::now() + SHUTDOWN_TIMEOUT;
        while !self.flying.is_empty() && (finalize || Instant::now() < until) {
            self.look();
            std::thread::sleep(SHORT_REST);
        }
        // MPI may still read them
        std::mem::forget(std::mem::take(&mut self.flying));
    }

    fn look(&mut self) {
        while self.receive() {
            self.idle = 0;
        }
        let before = self.flying.len();
        self.flying.retain_mut(|(request, _)| {
            let mut done: c_int = 0;
            // SAFETY: the request is one of `MPI_Isend` that has not completed: completed ones are removed here.
            unsafe { ffi::MPI_Test(request, &raw mut done, ffi::RSMPI_STATUS_IGNORE) };
            done == 0
        });
        if self.flying.len() < before {
            self.idle = 0;
        }
    }

    fn send(&mut self, to: usize, tag: c_int, bytes: Parcel) {
        self.idle = 0;
        // SAFETY: an all-zero request is overwritten before it is read.
        let mut request: ffi::MPI_Request = unsafe { std::mem::zeroed() };
        // SAFETY: the bytes live, at the same place and unchanged, as long as the request is in `flying`.
        unsafe {
            ffi::MPI_Isend(
                bytes.as_ptr().cast(),
                bytes.len() as c_int,
                ffi::RSMPI_UINT8_T,
                to as c_int,
                tag,
                ffi::RSMPI_COMM_WORLD,
                &raw mut request,
            );
        }
        self.flying.push((request, bytes));
    }

    /// Receives a message, if one has arrived.
    fn receive(&mut self) -> bool {
        // SAFETY: both are plain data, which `MPI_Improbe` fills in where it finds a message.
        let (mut message, mut status): (ffi::MPI_Message, ffi::MPI_Status) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let (mut arrived, mut len): (c_int, c_int) = (0, 0);
        // SAFETY: called on the thread that initialized MPI; `status` is that of the message found.
        unsafe {
            ffi::MPI_Improbe(
                ffi::RSMPI_ANY_SOURCE,
                ffi::RSMPI_ANY_TAG,
                ffi::RSMPI_COMM_WORLD,
                &raw mut arrived,
                &raw mut message,
                &raw mut status,
            );
            if arrived == 0 {
                return false;
            }
            ffi::MPI_Get_count(&raw const status, ffi::RSMPI_UINT8_T, &raw mut len);
        }
        let mut bytes: Vec<u8> = Vec::with_capacity(len as usize);
        // SAFETY: the buffer has room for the bytes that the message has, all of which are written.
        unsafe {
            ffi::MPI_Mrecv(
                bytes.as_mut_ptr().cast(),
                len,
                ffi::RSMPI_UINT8_T,
                &raw mut message,
                ffi::RSMPI_STATUS_IGNORE,
            );
            bytes.set_len(len as usize);
        }
        let from = status.MPI_SOURCE as usize;
        match status.MPI_TAG {
            ABORT_TAG => {
                let (lost, message) = bytes.split_first_chunk().expect("a rank and its last words");
                self.mailbox.abort(u64::from_le_bytes(*lost) as usize, &String::from_utf8_lossy(message));
            }
            tag => {
                let (channel, kind) = ((tag as u64 - 1) / 2, (tag - 1) % 2);
                let message = match kind {
                    0 => Message::InGroup(bytes.into()),
                    _ => Message::Failure(bytes),
                };
                self.mailbox.put(channel, from, message);
            }
        }
        true
    }
}
