//! Operations that are under way while this rank computes.
//!
//! A group is used from one thread, which waits for every operation but those that it starts: these run on a thread of
//! the group's own, one after the other. Any other operation waits until they have ended. So the order of a group's
//! operations is that in which its rank asked for them, on every rank the same, whatever runs beside the computation;
//! headers and deadlines are those of any operation.
//!
//! A failure of another rank ends the operation that was under way, and with it all that were started behind it: the
//! others never came to them. It is the answer to the next operation that the rank waits for, and what it asks for
//! after that is the operation behind the failure, as on every other rank.

use super::gathering::{Gathering, Progress};
use super::tensors::TensorResult;
use super::{Collective, CollectiveError, Element, Failure, Flat, Look, Result, Traffic};
use burn::tensor::Tensor;
use firebrick_device::panics::panic_message;
use firebrick_spec::Home;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// A group whose gathers can be started and waited for later.
#[derive(Debug)]
pub struct Background {
    group: Arc<dyn Collective>,
    progress: Arc<Progress>,
    /// Started with the first operation that needs it.
    worker: Mutex<Option<Worker>>,
}

/// The thread of a group, and what it is asked for.
#[derive(Debug)]
struct Worker {
    jobs: Sender<Job>,
    thread: JoinHandle<()>,
}

/// A gather.
#[derive(Debug)]
struct Job {
    values: Flat,
    epoch: u64,
    answer: Sender<Result<Flat>>,
}

impl Background {
    /// A group that is used through this alone.
    pub fn over(group: Arc<dyn Collective>) -> Arc<dyn Collective> {
        Arc::new(Self { group, progress: Arc::default(), worker: Mutex::default() })
    }

    /// The group itself. Nothing may be under way.
    #[cfg(feature = "cuda")]
    pub(super) fn group(&self) -> &dyn Collective {
        self.group.as_ref()
    }

    /// An operation that this rank waits for, behind all that it started.
    fn after_all<T, E: From<CollectiveError>>(
        &self,
        work: impl FnOnce(&dyn Collective) -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        self.progress.settle()?;
        work(self.group.as_ref())
    }

    fn start(&self, job: Job) -> Result<()> {
        let mut worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        let running = match &mut *worker {
            Some(running) => running,
            none => none.insert(Worker::start(&self.group, &self.progress)?),
        };
        self.progress.standing().under_way += 1;
        running.jobs.send(job).map_err(|_| {
            self.progress.standing().under_way -= 1;
            CollectiveError::Transport("the thread of its group has ended".into())
        })
    }
}

impl Worker {
    fn start(group: &Arc<dyn Collective>, progress: &Arc<Progress>) -> Result<Self> {
        let (jobs, queue) = channel();
        let (group, progress) = (Arc::clone(group), Arc::clone(progress));
        let thread = std::thread::Builder::new().name("firebrick-gather".into());
        let thread = thread.spawn(move || run(&queue, group.as_ref(), &progress));
        let thread = thread.map_err(|error| {
            CollectiveError::Transport(format!("the thread of its group cannot be started: {error}"))
        })?;
        Ok(Self { jobs, thread })
    }
}

/// The thread of a group, until nobody asks it for anything.
fn run(queue: &Receiver<Job>, group: &dyn Collective, progress: &Progress) {
    for Job { values, epoch, answer } in queue {
        let failed = progress.standing().failure(epoch);
        let gathered = match failed {
            Some(error) => Err(error),
            None => gather(group, values),
        };
        if let Err(error @ CollectiveError::Failed(_)) = &gathered {
            progress.standing().failed = Some((epoch, error.clone()));
        }
        // who no longer waits for it is told by the next operation
        let _ = answer.send(gathered);
        progress.standing().under_way -= 1;
        progress.ended.notify_all();
    }
}

fn gather(group: &dyn Collective, values: Flat) -> Result<Flat> {
    let done = catch_unwind(AssertUnwindSafe(|| group.all_gather(values)));
    done.unwrap_or_else(|panic| {
        let message = format!("it panicked: {}", panic_message(panic.as_ref()));
        group.abort(&message);
        let rank = group.rank();
        Err(CollectiveError::Lost { rank, message })
    })
}

impl Drop for Background {
    fn drop(&mut self) {
        if std::thread::panicking() && self.progress.standing().under_way > 0 {
            // nobody may come to what is under way
            self.group.abort("it panicked");
        }
        let worker = self.worker.get_mut();
        let worker = worker.unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Worker { jobs, thread }) = worker {
            drop(jobs);
            // what is under way ends by itself: others come to it, fail, or are late
            let _ = thread.join();
        }
    }
}

impl Collective for Background {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn shares_process(&self) -> bool {
        self.group.shares_process()
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Collective>> {
        let group = self.after_all(|group| group.split(color, key))?;
        Ok(Self::over(group))
    }

    fn all_gather(&self, values: Flat) -> Result<Flat> {
        self.after_all(|group| group.all_gather(values))
    }

    fn start_all_gather(&self, values: Flat) -> Gathering {
        let (sender, answer) = channel();
        let epoch = self.progress.standing().epoch;
        let job = Job { values, epoch, answer: sender };
        match self.start(job) {
            Ok(()) => Gathering::under_way(answer, Arc::clone(&self.progress), epoch),
            Err(error) => Gathering::ended(Err(error)),
        }
    }

    fn reduce_scatter(&self, values: Flat) -> Result<Flat> {
        self.after_all(|group| group.reduce_scatter(values))
    }

    fn all_reduce(&self, values: Flat) -> Result<Flat> {
        self.after_all(|group| group.all_reduce(values))
    }

    fn all_to_all(&self, blocks: Flat) -> Result<Flat> {
        self.after_all(|group| group.all_to_all(blocks))
    }

    fn buffers_home(&self) -> Home {
        self.group.buffers_home()
    }

    fn watch_buffers(&self, look: Look) {
        self.group.watch_buffers(look);
    }

    fn all_gather_tensor(&self, tensor: Tensor<1>) -> TensorResult {
        self.after_all(|group| group.all_gather_tensor(tensor))
    }

    fn reduce_scatter_tensor(&self, tensor: Tensor<1>) -> TensorResult {
        self.after_all(|group| group.reduce_scatter_tensor(tensor))
    }

    fn all_reduce_tensor(&self, tensor: Tensor<1>) -> TensorResult {
        self.after_all(|group| group.all_reduce_tensor(tensor))
    }

    fn all_to_all_tensor(&self, blocks: Tensor<1>) -> TensorResult {
        self.after_all(|group| group.all_to_all_tensor(blocks))
    }

    fn send(&self, to: usize, values: Flat) -> Result<()> {
        self.after_all(|group| group.send(to, values))
    }

    fn receive(&self, from: usize, len: usize, element: Element) -> Result<Flat> {
        self.after_all(|group| group.receive(from, len, element))
    }

    fn exchange(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.after_all(|group| group.exchange(bytes))
    }

    fn agree(&self, failure: Option<Failure>) -> Result<()> {
        self.after_all(|group| group.agree(failure))
    }

    fn abort(&self, message: &str) {
        self.group.abort(message);
    }

    fn traffic(&self) -> Traffic {
        self.group.traffic()
    }
}
