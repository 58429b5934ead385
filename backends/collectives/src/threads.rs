//! Ranks as threads of one process.

use super::group::Staged;
use super::mailbox::{Mailbox, Message};
use super::transport::Transport;
use super::{Background, Collective, Result, Settings};
use firebrick_device::panics::panic_message;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread;

/// Ranks that are threads of this process: for tests, and for programs that use the trainer as a library.
///
/// Ranks share the process's rayon pool. A collective must not run inside of it, where it would wait on a thread that
/// others need.
#[derive(Clone, Copy, Debug)]
pub struct Threads;

impl Threads {
    /// The ranks of a world, to be given to a thread each.
    pub fn world(size: usize, settings: Settings) -> Vec<Arc<dyn Collective>> {
        let boxes: Arc<[Mailbox]> = (0..size).map(|_| Mailbox::default()).collect();
        let rank = |rank| Endpoint { rank, boxes: Arc::clone(&boxes), channels: AtomicU64::new(1) };
        (0..size).map(|r| Background::over(Arc::new(Staged::world(Arc::new(rank(r)), settings)))).collect()
    }

    /// Runs work on a thread for each rank of a world, and gives what each made of it: by rank, the message of a panic
    /// where there was one. A rank that panics is lost to the others, which are told so.
    pub fn run<T: Send>(
        size: usize,
        settings: Settings,
        work: impl Fn(Arc<dyn Collective>) -> T + Sync,
    ) -> Vec<std::result::Result<T, String>> {
        let work = &work;
        thread::scope(|scope| {
            let ranks = Self::world(size, settings).into_iter();
            let run = |rank: Arc<dyn Collective>| {
                scope.spawn(move || {
                    let done = catch_unwind(AssertUnwindSafe(|| work(Arc::clone(&rank))));
                    done.map_err(|panic| {
                        let message = panic_message(panic.as_ref());
                        rank.abort(&format!("it panicked: {message}"));
                        message
                    })
                })
            };
            let threads: Vec<_> = ranks.map(run).collect();
            let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
            joined.map(|done| done.unwrap_or_else(|panic| Err(panic_message(panic.as_ref())))).collect()
        })
    }
}

/// One rank's end of the world. The others are told when it is dropped.
#[derive(Debug)]
struct Endpoint {
    rank: usize,
    boxes: Arc<[Mailbox]>,
    channels: AtomicU64,
}

impl Transport for Endpoint {
    fn shares_process(&self) -> bool {
        true
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.boxes.len()
    }

    fn post(&self, to: usize, channel: u64, message: Message) -> Result<()> {
        self.boxes[to].put(channel, self.rank, message);
        Ok(())
    }

    fn mailbox(&self) -> &Mailbox {
        &self.boxes[self.rank]
    }

    fn abort(&self, lost: usize, message: &str) {
        self.boxes.iter().for_each(|mailbox| mailbox.abort(lost, message));
    }

    fn channels(&self) -> &AtomicU64 {
        &self.channels
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if thread::panicking() {
            self.abort(self.rank, "it panicked");
        }
        let known = self.mailbox().failures();
        self.boxes.iter().for_each(|mailbox| mailbox.end(self.rank, "it has ended", &known));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_ends_because_of_another_one_names_that_one_to_the_others() {
        let boxes: Arc<[Mailbox]> = (0..3).map(|_| Mailbox::default()).collect();
        let rank = |rank| {
            let end = Endpoint { rank, boxes: Arc::clone(&boxes), channels: AtomicU64::new(1) };
            Staged::world(Arc::new(end), Settings::default())
        };
        let (first, last) = (rank(0), rank(2));
        // the words of rank 1 have reached rank 0 and not yet rank 2, which hears of them from rank 0
        boxes[0].abort(1, "no more");
        for group in [first, last] {
            let lost = group.exchange(Vec::new()).expect_err("rank 1 is gone");
            assert_eq!(lost.to_string(), "rank 1 is gone: no more");
        }
    }
}
