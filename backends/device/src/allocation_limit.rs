//! Limits of what a thread allocates while it reads a file of unknown origin.
//!
//! A decompressor, a parser or a template may ask for any amount of memory, and an allocation cannot fail in Rust
//! without ending the process. With the [counting allocator](crate::allocator::CountingAllocator) and a
//! [handler](on_excess), the process then ends with the file's name instead of being killed. Without, nothing is
//! limited.

use std::cell::Cell;
use std::ptr;
use std::sync::OnceLock;

/// Bytes that a thread may allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocationLimit {
    /// In one allocation.
    pub largest: usize,
    /// In all that it has not freed. Memory that another thread frees stays counted.
    pub total: usize,
}

impl AllocationLimit {
    const NONE: Self = Self { largest: usize::MAX, total: usize::MAX };

    /// For work that gives its results to other threads.
    pub const fn largest(bytes: usize) -> Self {
        Self { largest: bytes, ..Self::NONE }
    }

    /// For work on one thread.
    pub const fn total(bytes: usize) -> Self {
        Self { largest: bytes, total: bytes }
    }
}

/// Called with the name of the work and the limit that it exceeds. It ends the process.
static ON_EXCESS: OnceLock<fn(&str, usize) -> !> = OnceLock::new();

/// Sets the handler, and with it the limits in force.
pub fn on_excess(end: fn(&str, usize) -> !) {
    // set once, at the program's start
    let _ = ON_EXCESS.set(end);
}

/// The work that a thread is at.
struct Scope {
    limit: Cell<AllocationLimit>,
    used: Cell<usize>,
    name: Cell<*const str>,
}

thread_local! {
    // without a destructor, so that the allocator may use it at any time
    static SCOPE: Scope = const {
        Scope { limit: Cell::new(AllocationLimit::NONE), used: Cell::new(0), name: Cell::new(ptr::from_ref("")) }
    };
}

/// Does work under a limit. `name` begins the message of a process that ends, as in "reading FILE".
pub fn limited<T>(limit: AllocationLimit, name: &str, work: impl FnOnce() -> T) -> T {
    struct Outer(AllocationLimit, usize, *const str);
    impl Drop for Outer {
        fn drop(&mut self) {
            SCOPE.with(|scope| {
                scope.limit.set(self.0);
                scope.used.set(self.1);
                scope.name.set(self.2);
            });
        }
    }
    if ON_EXCESS.get().is_none() {
        return work();
    }
    let _outer = SCOPE.with(|scope| {
        Outer(scope.limit.replace(limit), scope.used.replace(0), scope.name.replace(ptr::from_ref(name)))
    });
    work()
}

/// Counts an allocation before it is made.
pub(crate) fn charge(bytes: usize) {
    SCOPE.with(|scope| {
        let limit = scope.limit.get();
        if limit == AllocationLimit::NONE {
            return;
        }
        let used = scope.used.get().saturating_add(bytes);
        if bytes <= limit.largest && used <= limit.total {
            scope.used.set(used);
            return;
        }
        // the handler allocates too
        scope.limit.set(AllocationLimit::NONE);
        if let Some(end) = ON_EXCESS.get() {
            // SAFETY: the name is borrowed by `limited`, which is below on the stack of this thread, and which puts the
            // name before it back when it returns.
            #[allow(unsafe_code, reason = "a thread-local value cannot hold a borrow")]
            let name = unsafe { &*scope.name.get() };
            end(name, limit.largest.min(limit.total));
        }
    });
}

/// Counts memory that is given back.
pub(crate) fn release(bytes: usize) {
    SCOPE.with(|scope| {
        if scope.limit.get() != AllocationLimit::NONE {
            scope.used.set(scope.used.get().saturating_sub(bytes));
        }
    });
}
