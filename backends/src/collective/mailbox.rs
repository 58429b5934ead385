//! Messages that have arrived and not been taken, and who will send no more.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Why a wait for a message ended without one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// A rank is gone, with its last words.
    Lost(usize, String),
    /// A rank has failed and says so elsewhere: its message, which is still to be taken there.
    Failed(usize, Vec<u8>),
    /// The deadline.
    TimedOut,
}

/// Where ranks of a group may say that they have failed instead of sending what the group waits for: in the group that it was split from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watched<'a> {
    /// That group's channel.
    pub channel: u64,
    /// The ranks.
    pub ranks: &'a [usize],
    /// Failures that it had ended with when the group was split from it.
    pub before: usize,
    /// Whether a message says so.
    pub tells_of_failure: fn(&[u8]) -> bool,
}

/// Where a rank's messages arrive, by channel and sender, in the order in which each sender sent them.
#[derive(Debug, Default)]
pub(super) struct Mailbox {
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queues: HashMap<(u64, usize), VecDeque<Vec<u8>>>,
    /// Ranks that send nothing more.
    ended: HashMap<usize, String>,
    /// A rank that has given up: nobody waits any longer, for whomever.
    aborted: Option<(usize, String)>,
    /// Failures with which operations of a channel have ended, each with the header of a rank that failed.
    failures: HashMap<u64, Vec<(usize, Vec<u8>)>>,
    /// How many wait.
    awaited: usize,
}

impl State {
    /// A failure that another thread of this rank has taken, or one among the next messages of the ranks that are watched.
    fn failed(&self, watched: Watched<'_>) -> Option<Ended> {
        let taken = self.failures.get(&watched.channel);
        if let Some((rank, header)) = taken.and_then(|taken| taken.get(watched.before)) {
            return Some(Ended::Failed(*rank, header.clone()));
        }
        watched.ranks.iter().find_map(|&rank| {
            let next = self.queues.get(&(watched.channel, rank))?.front()?;
            (watched.tells_of_failure)(next).then(|| Ended::Failed(rank, next.clone()))
        })
    }
}

impl Mailbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A message has arrived.
    pub fn put(&self, channel: u64, from: usize, bytes: Vec<u8>) {
        self.state()
            .queues
            .entry((channel, from))
            .or_default()
            .push_back(bytes);
        self.arrived.notify_all();
    }

    /// A rank sends nothing more.
    pub fn end(&self, from: usize, message: &str) {
        self.state()
            .ended
            .entry(from)
            .or_insert_with(|| message.to_owned());
        self.arrived.notify_all();
    }

    /// A rank gives up: whoever waits does not any longer. The first message counts.
    pub fn abort(&self, from: usize, message: &str) {
        self.state()
            .aborted
            .get_or_insert_with(|| (from, message.to_owned()));
        self.arrived.notify_all();
    }

    /// The rank that has given up, with its last words.
    #[cfg(feature = "cuda")]
    pub fn aborted(&self) -> Option<(usize, String)> {
        self.state().aborted.clone()
    }

    /// Whether somebody waits for a message.
    #[cfg(feature = "mpi")]
    pub fn is_awaited(&self) -> bool {
        self.state().awaited > 0
    }

    /// An operation of a channel has ended with the failure of a rank, whose header this is: groups that were split from it end too, on
    /// whatever thread they are waited for.
    pub fn fail(&self, channel: u64, rank: usize, header: Vec<u8>) {
        let mut state = self.state();
        state
            .failures
            .entry(channel)
            .or_default()
            .push((rank, header));
        self.arrived.notify_all();
    }

    /// Failures with which operations of a channel have ended.
    pub fn failures(&self, channel: u64) -> usize {
        self.state().failures.get(&channel).map_or(0, Vec::len)
    }

    /// Drops what has arrived for a group that is no more.
    pub fn forget(&self, channel: u64) {
        let mut state = self.state();
        state.queues.retain(|(own, _), _| *own != channel);
        state.failures.remove(&channel);
    }

    /// The next message of a rank. What has arrived is delivered even where its sender is gone, or has failed since.
    pub fn take(
        &self,
        channel: u64,
        from: usize,
        watched: Option<Watched<'_>>,
        deadline: Instant,
    ) -> Result<Vec<u8>, Ended> {
        let mut state = self.state();
        loop {
            let queue = state.queues.get_mut(&(channel, from));
            if let Some(message) = queue.and_then(VecDeque::pop_front) {
                return Ok(message);
            }
            if let Some((rank, message)) = &state.aborted {
                return Err(Ended::Lost(*rank, message.clone()));
            }
            if let Some(failed) = watched.and_then(|watched| state.failed(watched)) {
                return Err(failed);
            }
            if let Some(message) = state.ended.get(&from) {
                return Err(Ended::Lost(from, message.clone()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Ended::TimedOut);
            }
            state.awaited += 1;
            let waited = self.arrived.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.awaited -= 1;
        }
    }
}
