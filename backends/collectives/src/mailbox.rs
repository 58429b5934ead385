//! Messages that have arrived and not been taken, failures that this rank has been told of, and who will send no more.
//!
//! A rank has one mailbox, in which a thread of each of its groups may wait. A wait ends by what is put here, never by
//! what another thread takes: whatever can end it is recorded and announced in one step, under one lock.

use super::Failure;
use super::header::Header;
use super::parcel::Parcel;
use firebrick_spec::heartbeat::{Awaited, wait_for_rank};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt::Display;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Bytes from one rank to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Concerns only the group in which it is sent.
    InGroup(Parcel),
    /// The header of a rank that has failed, which concerns the groups that were split from that one too.
    Failure(Vec<u8>),
}

/// Why a wait for a message ended without one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// A rank is gone, with its last words.
    Lost(usize, String),
    /// A rank has failed and says so in the group that is watched.
    Failed(Failure),
    /// The deadline.
    TimedOut,
}

/// Place where ranks may report a failure instead of sending what a group waits for: the group that it was split
/// from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watched {
    /// That group's channel.
    pub channel: u64,
    /// Its first operation after the split.
    pub since: u64,
}

/// Failures that a rank knows of, by channel and operation: for each the first that it was told of.
pub(super) type Failures = HashMap<u64, BTreeMap<u64, Failure>>;

/// Mailbox of a rank's messages, by channel and sender, in the order in which each sender sent them.
#[derive(Debug, Default)]
pub(super) struct Mailbox {
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queues: HashMap<(u64, usize), VecDeque<Parcel>>,
    failures: Failures,
    /// Ranks that send nothing more.
    ended: HashMap<usize, String>,
    /// A rank that has given up: nobody waits any longer, for whomever.
    aborted: Option<(usize, String)>,
    /// Number of waiting threads.
    awaited: usize,
    /// The waits of threads, by the channel and sender of the message.
    awaited_messages: HashMap<(u64, usize), Awaited>,
}

impl State {
    fn tell(&mut self, channel: u64, operation: u64, failure: Failure) {
        let told = self.failures.entry(channel).or_default();
        told.entry(operation).or_insert(failure);
    }

    fn failed(&self, watched: Watched) -> Option<&Failure> {
        let told = self.failures.get(&watched.channel)?;
        told.range(watched.since..).next().map(|(_, told)| told)
    }
}

impl Mailbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what waits depend on, and has all look at it.
    fn change(&self, how: impl FnOnce(&mut State)) {
        how(&mut self.state());
        self.arrived.notify_all();
    }

    /// A message has arrived. One that tells of a failure is known as such from now on, whoever takes it, whenever.
    pub fn put(&self, channel: u64, from: usize, message: Message) {
        self.change(|state| {
            let parcel = match message {
                Message::InGroup(parcel) => parcel,
                Message::Failure(bytes) => {
                    // who takes a header that cannot be read says so
                    if let Ok(header) = Header::decode(&bytes, from)
                        && let Some(failure) = header.failure
                    {
                        state.tell(channel, header.sequence, failure);
                    }
                    bytes.into()
                }
            };
            let queue = state.queues.entry((channel, from)).or_default();
            queue.push_back(parcel);
            if let Some(awaited) = state.awaited_messages.remove(&(channel, from)) {
                awaited.has_come();
            }
        });
    }

    /// This rank fails in an operation of a channel: it does not wait for others in groups that were split from it.
    pub fn fail(&self, channel: u64, operation: u64, failure: Failure) {
        self.change(|state| state.tell(channel, operation, failure));
    }

    /// A rank sends nothing more, and knew of these failures. Messages that tell of them may still be on their way from
    /// others.
    pub fn end(&self, from: usize, message: &str, known: &Failures) {
        self.change(|state| {
            for (&channel, known) in known {
                for (&operation, failure) in known {
                    state.tell(channel, operation, failure.clone());
                }
            }
            let last_words = state.ended.entry(from);
            last_words.or_insert_with(|| message.to_owned());
        });
    }

    /// A rank is lost: whoever waits does not any longer. The first message counts.
    pub fn abort(&self, lost: usize, message: &str) {
        self.change(|state| {
            let first = &mut state.aborted;
            first.get_or_insert_with(|| (lost, message.to_owned()));
        });
    }

    /// The rank that has given up, with its last words.
    #[cfg(feature = "cuda")]
    pub fn aborted(&self) -> Option<(usize, String)> {
        self.state().aborted.clone()
    }

    /// Returns true if somebody waits for a message.
    #[cfg(feature = "mpi")]
    pub fn is_awaited(&self) -> bool {
        self.state().awaited > 0
    }

    /// Returns true if a rank has failed in an operation of a channel, as far as this one knows.
    pub fn has_failed(&self, channel: u64, operation: u64) -> bool {
        let state = self.state();
        let told = state.failures.get(&channel);
        told.is_some_and(|told| told.contains_key(&operation))
    }

    /// Failures that this rank knows of.
    pub fn failures(&self) -> Failures {
        self.state().failures.clone()
    }

    /// Drops what has arrived for a group that is no more.
    pub fn forget(&self, channel: u64) {
        let mut state = self.state();
        state.queues.retain(|(queue, _), _| *queue != channel);
        state.awaited_messages.retain(|(queue, _), _| *queue != channel);
        state.failures.remove(&channel);
    }

    /// The next message of a rank, in the operation `during`. What has arrived is delivered even where its sender is
    /// gone, or has failed since.
    pub fn take(
        &self,
        channel: u64,
        from: usize,
        watched: Option<Watched>,
        deadline: Instant,
        during: &dyn Display,
    ) -> Result<Parcel, Ended> {
        let mut wait = None;
        let mut state = self.state();
        loop {
            let queue = state.queues.get_mut(&(channel, from));
            if let Some(message) = queue.and_then(VecDeque::pop_front) {
                return Ok(message);
            }
            if let Some((rank, message)) = &state.aborted {
                return Err(Ended::Lost(*rank, message.clone()));
            }
            if let Some(failure) = watched.and_then(|watched| state.failed(watched)) {
                return Err(Ended::Failed(failure.clone()));
            }
            if let Some(message) = state.ended.get(&from) {
                return Err(Ended::Lost(from, message.clone()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Ended::TimedOut);
            }
            let wait = wait.get_or_insert_with(|| wait_for_rank(from, format!("rank {from} in {during}")));
            state.awaited_messages.insert((channel, from), wait.awaited());
            state.awaited += 1;
            let waited = self.arrived.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.awaited -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Element;
    use super::super::header::OperationKind;
    use super::*;
    use std::thread;
    use std::time::Duration;

    /// A group, and one that was split from it in its operation 3.
    const PARENT: u64 = 0;
    const GROUP: u64 = 5;
    const WATCHED: Watched = Watched { channel: PARENT, since: 4 };

    fn failure(rank: usize) -> Failure {
        Failure { rank, ..Failure::new("no room") }
    }

    fn header(rank: usize, sequence: u64) -> Message {
        let header = Header {
            kind: OperationKind::Agree,
            element: Element::Byte,
            sequence,
            bytes: 0,
            failure: Some(failure(rank)),
        };
        Message::Failure(header.encode())
    }

    /// Result of waiting for rank 1 in the group.
    fn waited(mailbox: &Mailbox, seconds: u64) -> Result<Parcel, Ended> {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        mailbox.take(GROUP, 1, Some(WATCHED), deadline, &"a test")
    }

    #[test]
    fn a_failure_ends_waits_of_other_groups_though_nobody_has_taken_what_came_before_it() {
        let mailbox = Mailbox::default();
        let told = thread::scope(|scope| {
            let waits = scope.spawn(|| waited(&mailbox, 20));
            while mailbox.state().awaited == 0 {
                thread::yield_now();
            }
            // a frame of a gather that another thread of this rank has not taken yet
            mailbox.put(PARENT, 1, Message::InGroup(vec![0; 9].into()));
            mailbox.put(PARENT, 1, header(1, 7));
            waits.join().unwrap()
        });
        assert_eq!(told, Err(Ended::Failed(failure(1))));
    }

    #[test]
    fn a_failure_that_another_thread_has_taken_is_told_before_a_rank_counts_as_gone() {
        let mailbox = Mailbox::default();
        mailbox.put(PARENT, 2, header(2, 4));
        mailbox.take(PARENT, 2, None, Instant::now(), &"a test").unwrap();
        mailbox.end(1, "it has ended", &Failures::new());
        assert_eq!(waited(&mailbox, 0), Err(Ended::Failed(failure(2))));
    }

    #[test]
    fn a_rank_that_ends_tells_of_failures_whose_messages_are_on_their_way() {
        let [mailbox, other] = [Mailbox::default(), Mailbox::default()];
        other.put(PARENT, 2, header(2, 4));
        mailbox.end(1, "it has ended", &other.failures());
        assert_eq!(waited(&mailbox, 0), Err(Ended::Failed(failure(2))));
    }

    #[test]
    fn what_has_arrived_and_failures_before_the_split_end_no_wait_with_an_error() {
        let mailbox = Mailbox::default();
        mailbox.put(PARENT, 1, header(1, 2));
        assert_eq!(waited(&mailbox, 0), Err(Ended::TimedOut));
        mailbox.put(GROUP, 1, Message::InGroup(vec![1].into()));
        mailbox.put(PARENT, 1, header(1, 4));
        assert_eq!(waited(&mailbox, 0), Ok(vec![1].into()));
        assert_eq!(waited(&mailbox, 0), Err(Ended::Failed(failure(1))));
        mailbox.end(1, "it has ended", &Failures::new());
        let lost = mailbox.take(GROUP, 1, None, Instant::now(), &"a test");
        assert_eq!(lost, Err(Ended::Lost(1, "it has ended".into())));
    }

    #[test]
    fn bytes_that_look_like_a_failure_are_none_where_they_are_data() {
        let mailbox = Mailbox::default();
        let Message::Failure(bytes) = header(1, 7) else { unreachable!("made above") };
        mailbox.put(PARENT, 1, Message::InGroup(bytes.into()));
        assert_eq!(waited(&mailbox, 0), Err(Ended::TimedOut));
    }
}
