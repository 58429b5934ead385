//! Gathers that are started and waited for later: their order, what runs beside them, and what becomes of them where a
//! rank fails.

use super::failures::Random;
use super::{ranks, small};
use firebrick_backends::collective::{
    Background, Collective, CollectiveError, Element, Failure, Flat, Gathering, OperationKind, Result, Settings,
    Threads, Traffic,
};
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn row(rank: usize, number: usize) -> Flat {
    Flat::F32(vec![rank as f32 + 100.0 * number as f32; 3 + number])
}

/// The rows of all ranks, one behind the other.
fn rows(size: usize, number: usize) -> Flat {
    Flat::concat((0..size).map(|rank| row(rank, number)).collect())
}

#[test]
fn gathers_that_were_started_give_what_gathers_give_whatever_stands_between() {
    let results = ranks(3, |group| {
        let input = |number| row(group.rank(), number);
        let first = group.start_all_gather(input(1));
        let second = group.start_all_gather(input(2));
        let sum = group.all_reduce(Flat::F32(vec![group.rank() as f32]));
        let third = group.start_all_gather(input(3));
        let exchanged = group.exchange(vec![group.rank() as u8]);
        // in another order than they were started in
        let [third, first, second] = [third, first, second].map(|input| input.wait().unwrap());
        let traffic = group.traffic();
        ([first, second, third], sum.unwrap(), exchanged.unwrap(), traffic)
    });
    for (gathered, sum, exchanged, traffic) in results {
        assert_eq!(gathered, [1, 2, 3].map(|number| rows(3, number)));
        assert_eq!(sum, Flat::F32(vec![3.0]));
        assert_eq!(exchanged, [[0], [1], [2]]);
        let kind = OperationKind::AllGather as usize;
        assert_eq!(traffic.operations[kind], 3);
        // to two others
        assert_eq!(traffic.bytes[kind], 2 * 4 * (4 + 5 + 6));
    }
}

/// A group whose gathers wait until they are let go.
#[derive(Debug)]
struct Held {
    group: Arc<dyn Collective>,
    entered: Mutex<Sender<()>>,
    let_go: Mutex<Receiver<()>>,
}

impl Collective for Held {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Collective>> {
        self.group.split(color, key)
    }

    fn all_gather(&self, values: Flat) -> Result<Flat> {
        self.entered.lock().unwrap().send(()).unwrap();
        let let_go = self.let_go.lock().unwrap();
        let waited = let_go.recv_timeout(Duration::from_secs(20));
        waited.map_err(|_| CollectiveError::Values("nobody let it go".into()))?;
        self.group.all_gather(values)
    }

    fn reduce_scatter(&self, values: Flat) -> Result<Flat> {
        self.group.reduce_scatter(values)
    }

    fn all_reduce(&self, values: Flat) -> Result<Flat> {
        self.group.all_reduce(values)
    }

    fn all_to_all(&self, blocks: Flat) -> Result<Flat> {
        self.group.all_to_all(blocks)
    }

    fn send(&self, to: usize, values: Flat) -> Result<()> {
        self.group.send(to, values)
    }

    fn receive(&self, from: usize, len: usize, element: Element) -> Result<Flat> {
        self.group.receive(from, len, element)
    }

    fn exchange(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.group.exchange(bytes)
    }

    fn agree(&self, failure: Option<Failure>) -> Result<()> {
        self.group.agree(failure)
    }

    fn abort(&self, message: &str) {
        self.group.abort(message);
    }

    fn traffic(&self) -> Traffic {
        self.group.traffic()
    }
}

#[test]
fn a_gather_is_under_way_while_its_rank_goes_on() {
    let results = Threads::run(2, small(), |group| {
        let (enters, entered) = channel();
        let (lets_go, let_go) = channel();
        let held = Background::over(Arc::new(Held { group, entered: Mutex::new(enters), let_go: Mutex::new(let_go) }));
        let input = |number| row(held.rank(), number);
        let gathers = [1, 2].map(|number| held.start_all_gather(input(number)));
        // the first has begun and cannot end: this rank goes on all the same, and lets it
        entered.recv_timeout(Duration::from_secs(20)).unwrap();
        assert!(entered.try_recv().is_err(), "one after the other");
        for _ in &gathers {
            lets_go.send(()).unwrap();
        }
        gathers.map(|input| input.wait().unwrap())
    });
    for rank in results {
        assert_eq!(rank.unwrap(), [1, 2].map(|number| rows(2, number)));
    }
}

#[test]
fn a_failure_ends_all_gathers_that_were_started_behind_it_and_the_group_goes_on() {
    let started = Instant::now();
    let results = ranks(3, |group| {
        let input = |number| row(group.rank(), number);
        let done = group.start_all_gather(input(1));
        let failed = if group.rank() == 1 {
            // it never comes to the second
            group.agree(Some(Failure::new("no room"))).unwrap_err()
        } else {
            let behind = [2, 3].map(|number| group.start_all_gather(input(number)));
            let errors = behind.map(|gather| gather.wait().unwrap_err());
            assert_eq!(errors[0], errors[1]);
            errors[0].clone()
        };
        // one that is not waited for is told of by the next operation
        let told = if group.rank() == 1 {
            group.agree(Some(Failure::new("no room"))).unwrap_err()
        } else {
            drop(group.start_all_gather(input(4)));
            group.agree(None).unwrap_err()
        };
        let after = group.start_all_gather(input(5)).wait().unwrap();
        let sum = group.all_reduce(Flat::F32(vec![1.0])).unwrap();
        (done.wait().unwrap(), [failed, told], after, sum)
    });
    for (done, failed, after, sum) in results {
        assert_eq!(done, rows(3, 1));
        for error in failed {
            assert_eq!(error.to_string(), "rank 1 failed: no room");
        }
        assert_eq!(after, rows(3, 5));
        assert_eq!(sum, Flat::F32(vec![3.0]));
    }
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_rank_that_is_gone_ends_gathers_that_are_under_way() {
    let started = Instant::now();
    let results = Threads::run(3, small(), |group| {
        let gathers = [1, 2].map(|number| {
            assert!(group.rank() != 2 || number == 1, "a task that fails");
            group.start_all_gather(row(group.rank(), number))
        });
        let [first, second] = gathers.map(Gathering::wait);
        let later = group.agree(None).unwrap_err();
        (first, second.unwrap_err(), later)
    });
    for rank in &results[..2] {
        let (first, second, later) = rank.as_ref().unwrap();
        for error in [first.as_ref().err(), Some(second), Some(later)] {
            let message = error.map(ToString::to_string).unwrap_or_default();
            // the first may have ended before
            let gone = message.contains("rank 2 is gone: it panicked");
            assert!(gone || error.is_none(), "{message}");
        }
    }
    assert!(results[2].as_ref().unwrap_err().contains("a task that fails"));
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_gather_that_was_started_ends_at_its_deadline() {
    let settings = Settings { deadline: Duration::from_millis(50), ..small() };
    let (done, wait) = channel::<()>();
    let (wait, done) = (Mutex::new(wait), Mutex::new(Some(done)));
    let results = Threads::run(2, settings, |group| {
        if group.rank() == 1 {
            // as long as the other rank waits
            let _ = wait.lock().unwrap().recv();
            return None;
        }
        let error = group.start_all_gather(row(0, 0)).wait().unwrap_err();
        let again = group.agree(None).unwrap_err();
        done.lock().unwrap().take();
        Some((error, again))
    });
    let (error, again) = results[0].clone().unwrap().unwrap();
    let message = error.to_string();
    assert!(message.contains("waited 0 s for rank 1 in all_gather of 3 f32"), "{message}");
    assert_eq!(again, error);
}

#[test]
fn a_failure_told_to_all_ends_gathers_that_a_group_of_some_has_under_way() {
    let started = Instant::now();
    let results = ranks(4, |world| {
        let rank = world.rank();
        let group = world.split(rank / 2, rank).unwrap();
        let gather = (rank != 1).then(|| group.start_all_gather(row(rank, 0)));
        let told = world.agree((rank == 1).then(|| Failure::new("no room")));
        // the failure was taken by then, on another thread than the one that waits
        let gather = gather.map(Gathering::wait);
        let anew = world.split(rank / 2, rank).unwrap();
        let anew = anew.start_all_gather(row(rank, 1)).wait().unwrap();
        (gather, told.unwrap_err(), anew)
    });
    for (rank, (gather, told, anew)) in results.into_iter().enumerate() {
        assert_eq!(told.to_string(), "rank 1 failed: no room");
        match (rank, gather) {
            (1, None) | (2 | 3, Some(Ok(_))) => {}
            (0 | 2 | 3, Some(Err(error))) => assert_eq!(error, told),
            (_, other) => panic!("rank {rank}: {other:?}"),
        }
        let low = rank / 2 * 2;
        let rows = vec![row(low, 1), row(low + 1, 1)];
        assert_eq!(anew, Flat::concat(rows));
    }
    assert!(started.elapsed() < Duration::from_secs(5));
}

/// What a rank does instead of an operation.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Fail,
    Panic,
    Leave,
}

/// Where a rank has heard of a failure.
#[derive(Clone, Copy, PartialEq)]
enum Heard {
    /// In an operation of all ranks, which every rank has ended with it.
    InWorld,
    /// In one of a group of some, while others are still to hear of it.
    InGroup,
}

/// Gathers that were started, and where.
type Pending = VecDeque<(Heard, Gathering)>;

/// The groups of a rank.
struct Groups<'g> {
    world: &'g dyn Collective,
    some: &'g dyn Collective,
}

impl Groups<'_> {
    /// One of the operations of a phase, by number.
    fn operation(&self, which: u64, pending: &mut Pending) -> (Heard, Result<()>) {
        let Self { world, some } = self;
        let rank = world.rank();
        let ones = |len| Flat::F32(vec![1.0; len]);
        let input = |len| Flat::F32(vec![rank as f32; len]);
        match which {
            0..=2 => {
                pending.push_back((Heard::InWorld, world.start_all_gather(input(150))));
                (Heard::InWorld, Ok(()))
            }
            3 => {
                pending.push_back((Heard::InGroup, some.start_all_gather(input(7))));
                (Heard::InGroup, Ok(()))
            }
            4 | 5 => match pending.pop_front() {
                Some((place, gather)) => (place, gather.wait().map(drop)),
                None => (Heard::InWorld, Ok(())),
            },
            6 => (Heard::InWorld, world.reduce_scatter(ones(9)).map(drop)),
            7 => {
                let blocks = ones(2 * some.size());
                (Heard::InGroup, some.all_to_all(blocks).map(drop))
            }
            8 => (Heard::InWorld, world.exchange(vec![0; rank]).map(drop)),
            _ => (Heard::InGroup, some.all_reduce(ones(200)).map(drop)),
        }
    }

    /// A phase, as the trainer does its work: until its end, or until this rank fails or hears of a failure. Gives
    /// whether it came to its end on all ranks.
    fn phase(&self, steps: &[u64], fault: impl Fn(usize) -> Option<Fault>) -> Result<bool> {
        let mut pending = Pending::new();
        let mut failure = None;
        let mut heard = None;
        // what was started is waited for in the end
        let waits = steps.iter().filter(|&&step| step <= 3).map(|_| &4);
        for (at, &step) in steps.iter().chain(waits).enumerate() {
            match fault(at) {
                None => {}
                Some(Fault::Fail) => {
                    failure = Some(Failure::new("on purpose"));
                    break;
                }
                Some(Fault::Panic) => panic!("on purpose"),
                Some(Fault::Leave) => return Err(CollectiveError::Values("it left".into())),
            }
            match self.operation(step, &mut pending) {
                (_, Ok(())) => {}
                (place, Err(CollectiveError::Failed(_))) => {
                    heard = Some(place);
                    break;
                }
                (_, Err(error)) => return Err(error),
            }
        }
        drop(pending);
        if heard == Some(Heard::InWorld) {
            return Ok(false);
        }
        match self.world.agree(failure) {
            Ok(()) => Ok(true),
            Err(CollectiveError::Failed(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// What each phase came to on a rank, or its panic's message.
type CameTo = std::result::Result<Vec<Result<bool>>, String>;

/// Phases of some operations with some faults in them: what every rank came to, and its faults.
fn schedule(seed: u64) -> (Vec<CameTo>, Vec<Fault>) {
    let mut random = Random::new(seed);
    let size = 2 + random.below(3) as usize;
    let program: Vec<Vec<u64>> =
        (0..=random.below(3)).map(|_| (0..2 + random.below(8)).map(|_| random.below(10)).collect()).collect();
    let faults: Vec<(usize, usize, usize, Fault)> = (0..random.below(4))
        .map(|_| {
            let phase = random.below(program.len() as u64) as usize;
            let kinds = [Fault::Fail, Fault::Fail, Fault::Fail, Fault::Panic, Fault::Leave];
            (
                random.below(size as u64) as usize,
                phase,
                random.below(program[phase].len() as u64) as usize,
                kinds[random.below(5) as usize],
            )
        })
        .collect();
    let results = Threads::run(size, small(), |world| {
        let mut came_to = Vec::new();
        for (phase, steps) in program.iter().enumerate() {
            let some = match world.split(world.rank() / 2, 0) {
                Ok(some) => some,
                Err(error) => {
                    came_to.push(Err(error));
                    break;
                }
            };
            let groups = Groups { world: world.as_ref(), some: some.as_ref() };
            let fault = |at| {
                let place = (world.rank(), phase, at);
                let mut planned = faults.iter().filter(|(r, p, a, _)| (*r, *p, *a) == place);
                planned.next().map(|fault| fault.3)
            };
            came_to.push(groups.phase(steps, fault));
            if came_to.last().is_some_and(Result::is_err) {
                break;
            }
        }
        came_to
    });
    (results, faults.into_iter().map(|fault| fault.3).collect())
}

/// How many schedules are drawn: a sample, or those of the campaign `schedules`.
fn schedules() -> u64 {
    let campaign = std::env::var("FIREBRICK_CAMPAIGN").is_ok_and(|name| name == "schedules");
    if campaign { 10_000 } else { 2_000 }
}

#[test]
fn no_schedule_of_failures_with_gathers_under_way_hangs() {
    let mut failed = 0;
    let schedules = schedules();
    for seed in 0..schedules {
        let (results, faults) = schedule(seed);
        for rank in results.iter().flatten().flatten() {
            let late = matches!(rank, Err(CollectiveError::Deadline { .. }));
            let disagree = matches!(rank, Err(CollectiveError::Mismatch { .. }));
            assert!(!late && !disagree, "schedule {seed}: {results:?}");
        }
        if faults.iter().all(|fault| *fault == Fault::Fail) {
            // a phase comes to its end on all ranks or on none, and the next one begins
            for rank in &results {
                assert_eq!(rank, &results[0], "schedule {seed}");
                let came_to = rank.as_ref().unwrap();
                assert!(came_to.iter().all(Result::is_ok), "schedule {seed}");
                failed += came_to.iter().filter(|done| **done == Ok(false)).count();
                if faults.is_empty() {
                    assert!(came_to.iter().all(|done| *done == Ok(true)));
                }
            }
        }
    }
    assert!(failed as u64 > schedules / 5, "{failed} phases in which a rank failed");
}
