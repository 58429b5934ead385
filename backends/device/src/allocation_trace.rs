//! The last allocations of a run, and who made them: `PyTorch`'s memory history.
//!
//! On the CPU the counting allocator reports every allocation and release of [`MIN_BYTES`] or more, with its call
//! stack as addresses that become names when the trace is read. A GPU's pools have no such hook: there the trace has
//! what is registered in the accounts. While nothing is traced, an allocation costs one relaxed load more.

use firebrick_spec::Account;
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// Smaller allocations of the heap are not traced: a step makes millions of them, and no tensor of weight is among
/// them.
pub const MIN_BYTES: usize = 64 << 10;

/// Frames of a stack that are kept, the innermost.
pub const STACK_DEPTH: usize = 48;

/// Source of the events of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TraceSource {
    /// The counting allocator, with stacks.
    Heap,
    /// The accounts, with what the bytes are held for.
    Accounts,
}

impl TraceSource {
    const fn code(self) -> u8 {
        match self {
            Self::Heap => 1,
            Self::Accounts => 2,
        }
    }
}

/// One allocation or one release.
#[derive(Clone, Copy, Debug)]
pub struct TraceEvent {
    /// Equal in an allocation and in its release. Keys of the heap are addresses, which later allocations use again.
    pub key: u64,
    /// Its size.
    pub bytes: u64,
    /// A release, not an allocation.
    pub released: bool,
    /// The last value of [`AllocationTrace::set_place`].
    pub place: u64,
    /// Who holds the bytes, where the accounts reported it.
    pub account: Option<Account>,
    stack: [usize; STACK_DEPTH],
    depth: u8,
}

impl TraceEvent {
    /// Return addresses of the call stack, the innermost first; none of releases and where the accounts reported it.
    pub fn stack(&self) -> &[usize] {
        &self.stack[..usize::from(self.depth)]
    }
}

/// The events of a trace.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Source of the events.
    pub source: TraceSource,
    /// The last ones, oldest first.
    pub events: Vec<TraceEvent>,
    /// Older ones, for which there was no room.
    pub dropped: u64,
}

const OFF: u8 = 0;
static SOURCE: AtomicU8 = AtomicU8::new(OFF);
static PLACE: AtomicU64 = AtomicU64::new(0);
static KEYS: AtomicU64 = AtomicU64::new(0);
static RING: Mutex<Option<Ring>> = Mutex::new(None);

struct Ring {
    trace: u64,
    source: TraceSource,
    capacity: usize,
    events: VecDeque<TraceEvent>,
    dropped: u64,
}

/// Handling of an allocation of this thread by the allocator.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Handling {
    /// Counts it and traces it.
    Traced,
    /// Counts it: it is made by what traces another one.
    Counted,
    /// Neither: it is memory of the trace, which readings leave out.
    Ignored,
}

thread_local! {
    static HANDLING: Cell<Handling> = const { Cell::new(Handling::Traced) };
}

fn with_handling<T>(handling: Handling, work: impl FnOnce() -> T) -> T {
    let before = HANDLING.replace(handling);
    let result = work();
    HANDLING.set(before);
    result
}

/// Returns true if allocations of the heap are traced.
#[inline]
pub(crate) fn traces_heap() -> bool {
    SOURCE.load(Relaxed) == TraceSource::Heap.code()
}

/// An allocation while the heap is traced. Gives whether it counts.
#[cold]
pub(crate) fn allocated(address: usize, bytes: usize) -> bool {
    heap_event(address, bytes, false)
}

/// A release while the heap is traced, told before it happens: afterwards another thread may have the address. Gives
/// whether it counts.
#[cold]
pub(crate) fn freed(address: usize, bytes: usize) -> bool {
    heap_event(address, bytes, true)
}

fn heap_event(address: usize, bytes: usize, released: bool) -> bool {
    let handling = HANDLING.get();
    if handling == Handling::Traced && bytes >= MIN_BYTES {
        with_handling(Handling::Counted, || {
            let mut event = TraceEvent::new(address as u64, bytes as u64, released, None);
            if !released {
                event.capture_stack();
            }
            push(TraceSource::Heap, &event);
        });
    }
    handling != Handling::Ignored
}

/// Bytes that an account holds from now on. Gives the key of their trace, where accounts are traced.
#[inline]
pub(crate) fn held(account: Account, bytes: u64) -> Option<u64> {
    if SOURCE.load(Relaxed) != TraceSource::Accounts.code() {
        return None;
    }
    let key = KEYS.fetch_add(1, Relaxed);
    push(TraceSource::Accounts, &TraceEvent::new(key, bytes, false, Some(account)));
    Some(key)
}

/// Bytes that an account has given back.
pub(crate) fn released(key: u64, account: Account, bytes: u64) {
    push(TraceSource::Accounts, &TraceEvent::new(key, bytes, true, Some(account)));
}

impl TraceEvent {
    fn new(key: u64, bytes: u64, released: bool, account: Option<Account>) -> Self {
        Self { key, bytes, released, place: PLACE.load(Relaxed), account, stack: [0; STACK_DEPTH], depth: 0 }
    }

    /// The `backtrace` crate's lock may be taken again by the thread that has it, unlike the standard library's: an
    /// allocation may come from whatever prints a backtrace.
    fn capture_stack(&mut self) {
        let Self { stack, depth, .. } = self;
        backtrace::trace(|frame| {
            stack[usize::from(*depth)] = frame.ip().addr();
            *depth += 1;
            usize::from(*depth) < STACK_DEPTH
        });
    }
}

/// Adds an event to the trace, in whose ring there is room already.
fn push(source: TraceSource, event: &TraceEvent) {
    let mut ring = RING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(ring) = ring.as_mut().filter(|ring| ring.source == source) {
        if ring.events.len() == ring.capacity {
            ring.events.pop_front();
            ring.dropped += 1;
        }
        ring.events.push_back(*event);
    }
}

/// A trace that is being recorded; it ends when dropped. There is one in a process: the one that was started last.
#[derive(Debug)]
#[must_use = "a trace ends when it is dropped"]
pub struct AllocationTrace {
    trace: u64,
}

impl AllocationTrace {
    /// Records the last `capacity` events of this source, at least one. Their memory, some 450 bytes each, is taken at
    /// once, and readings of the heap leave it out.
    pub fn start(source: TraceSource, capacity: usize) -> Self {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let trace = STARTED.fetch_add(1, Relaxed);
        let capacity = capacity.max(1);
        end(|_| true);
        PLACE.store(0, Relaxed);
        SOURCE.store(source.code(), Relaxed);
        with_handling(Handling::Ignored, || {
            let events = VecDeque::with_capacity(capacity);
            let mut ring = RING.lock().unwrap_or_else(PoisonError::into_inner);
            *ring = Some(Ring { trace, source, capacity, events, dropped: 0 });
        });
        Self { trace }
    }

    /// Says where the run stands: a number of the caller's, which the events from now on get.
    pub fn set_place(&self, place: u64) {
        PLACE.store(place, Relaxed);
    }

    /// The events so far; none if another trace was started meanwhile.
    pub fn read(&self) -> Option<Trace> {
        let lock = || RING.lock().unwrap_or_else(PoisonError::into_inner);
        let is_ours = |ring: &&Ring| ring.trace == self.trace;
        let capacity = lock().as_ref().filter(is_ours)?.capacity;
        // before the lock: an allocation of this size waits for it
        let mut events = Vec::with_capacity(capacity);
        let ring = lock();
        let ring = ring.as_ref().filter(is_ours)?;
        events.extend(ring.events.iter().copied());
        Some(Trace { source: ring.source, events, dropped: ring.dropped })
    }
}

impl Drop for AllocationTrace {
    fn drop(&mut self) {
        end(|ring| ring.trace == self.trace);
    }
}

/// Ends the trace that is being recorded, if it is the one that is meant.
fn end(meant: impl FnOnce(&Ring) -> bool) {
    with_handling(Handling::Ignored, || {
        let mut ring = RING.lock().unwrap_or_else(PoisonError::into_inner);
        if ring.as_ref().is_some_and(meant) {
            // while its source is on, so that its memory leaves as it came: uncounted
            *ring = None;
            SOURCE.store(OFF, Relaxed);
        }
    });
}

/// The names of the functions at return addresses, without their hashes: one for each address, and those inlined at it
/// before it. An address without a name is left out.
pub fn function_names(addresses: impl IntoIterator<Item = usize>) -> BTreeMap<usize, Vec<String>> {
    let addresses: BTreeSet<usize> = addresses.into_iter().collect();
    let mut functions = BTreeMap::new();
    with_handling(Handling::Counted, || {
        for address in addresses {
            let mut names = Vec::new();
            let pointer = std::ptr::without_provenance_mut(address);
            backtrace::resolve(pointer, |symbol| {
                names.extend(symbol.name().map(|name| format!("{name:#}")));
            });
            if !names.is_empty() {
                functions.insert(address, names);
            }
        }
        backtrace::clear_symbol_cache();
    });
    functions
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounts::{Accounts, Category, Home, Role};

    /// The trace is one for the process, so one test has all cases.
    #[test]
    fn a_trace_has_the_last_events_with_their_places_and_stacks() {
        assert!(!traces_heap());
        let trace = AllocationTrace::start(TraceSource::Heap, 3);
        trace.set_place(7);
        assert!(allocated(0x1000, MIN_BYTES));
        assert!(allocated(0x2000, MIN_BYTES - 1));
        trace.set_place(8);
        assert!(freed(0x1000, MIN_BYTES));
        let events = trace.read().expect("it is the newest").events;
        let recorded: Vec<_> = events.iter().map(|e| (e.key, e.released, e.place, e.stack().is_empty())).collect();
        assert_eq!(recorded, [(0x1000, false, 7, false), (0x1000, true, 8, true)]);
        let names = function_names(events[0].stack().iter().copied());
        let named = names.values().flatten().any(|n| n.contains("allocation_trace"));
        assert!(named, "{names:?}");

        for address in 1..4 {
            allocated(address << 20, MIN_BYTES);
        }
        let read = trace.read().expect("it is the newest");
        assert_eq!((read.events.len(), read.dropped), (3, 2));
        // what the trace itself allocates is neither traced nor counted
        assert!(!with_handling(Handling::Ignored, || allocated(1, MIN_BYTES)));
        assert!(with_handling(Handling::Counted, || allocated(1, MIN_BYTES)));
        assert_eq!(trace.read().expect("it is the newest").dropped, 2);

        let other = AllocationTrace::start(TraceSource::Accounts, 10);
        assert!(trace.read().is_none());
        drop(trace);
        let accounts = Accounts::new().for_model(Role::Critic);
        drop(accounts.hold(Category::Gradients, Home::Host, 12));
        let read = other.read().expect("the older one's end is not its own");
        // other tests of this process hold bytes too
        let critics = read.events.iter().filter(|e| {
            let account = e.account.expect("accounts reported it");
            account.model == Role::Critic && e.bytes == 12
        });
        let critics: Vec<_> = critics.map(|e| (e.key, e.released)).collect();
        let [(first, false), (second, true)] = critics[..] else { panic!("{critics:?}") };
        assert_eq!(first, second);
        drop(other);
        assert_eq!(held(read.events[0].account.expect("an account"), 1), None);
    }
}
