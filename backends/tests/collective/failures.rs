//! Ranks that fail, panic, leave or fall silent.

use super::{ranks, small};
use firebrick_backends::collective::{Collective, CollectiveError, Element, Failure, Flat, Result, Settings, Threads};
use std::time::{Duration, Instant};

#[test]
fn a_failure_ends_the_operation_that_others_are_in_and_the_group_goes_on() {
    let results = ranks(3, |group| {
        let first = match group.rank() {
            1 => group.agree(Some(Failure::new("no room on the disk"))),
            _ => group.all_reduce(Flat::F32(vec![1.0; 4])).map(drop),
        };
        let sum = group.all_reduce(Flat::F32(vec![group.rank() as f32])).unwrap();
        (first.unwrap_err(), sum)
    });
    for (error, sum) in results {
        assert_eq!(error.to_string(), "rank 1 failed: no room on the disk");
        assert_eq!(sum, Flat::F32(vec![3.0]));
    }
}

#[test]
fn all_ranks_act_on_the_same_failure() {
    let failure = |used| Failure { out_of_memory: true, limit: Some((used, 10)), ..Failure::new("over the limit") };
    for error in ranks(3, |group| group.agree(Some(failure(20 - group.rank() as u64))).unwrap_err()) {
        let worst = error.failure().unwrap();
        assert_eq!((worst.rank, worst.limit), (0, Some((20, 10))));
        let memory = worst.memory().unwrap();
        assert_eq!(memory.bytes, Some(20));
    }
    // what a cheaper plan does not mend comes first
    let mixed = ranks(2, |group| {
        let input = [failure(20), Failure::new("no file")][group.rank()].clone();
        group.agree(Some(input)).unwrap_err()
    });
    assert!(mixed.iter().all(|e| e.failure().unwrap().message == "no file"));
}

#[test]
fn a_panic_of_a_rank_ends_the_waits_of_the_others_with_its_name() {
    let started = Instant::now();
    let results = Threads::run(3, small(), |group| {
        assert!(group.rank() != 2, "a task that fails");
        group.all_gather(Flat::F32(vec![1.0])).unwrap_err().to_string()
    });
    for message in results[..2].iter().map(|rank| rank.as_ref().unwrap()) {
        assert!(message.contains("rank 2 is gone: it panicked"), "{message}");
    }
    assert!(results[2].as_ref().unwrap_err().contains("a task that fails"));
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_rank_that_leaves_is_missed_by_name() {
    let results = Threads::run(2, small(), |group| match group.rank() {
        0 => group.exchange(Vec::new()).unwrap_err().to_string(),
        _ => String::new(),
    });
    assert_eq!(results[0].as_ref().unwrap(), "rank 1 is gone: it has ended");
}

#[test]
fn a_wait_ends_at_its_deadline_and_says_for_whom_it_was() {
    let settings = Settings { deadline: Duration::from_millis(50), ..small() };
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    let done = std::sync::Mutex::new(Some(done));
    let results = Threads::run(2, settings, |group| {
        if group.rank() == 1 {
            // as long as the other rank waits
            let _ = wait.lock().unwrap().recv();
            return None;
        }
        let error = group.all_reduce(Flat::F32(vec![1.0])).unwrap_err();
        let again = group.agree(None).unwrap_err();
        done.lock().unwrap().take();
        Some((error, again))
    });
    let (error, again) = results[0].clone().unwrap().unwrap();
    let message = error.to_string();
    assert!(message.contains("waited 0 s for rank 1 in all_reduce of 1 f32"), "{message}");
    assert_eq!(again, error);
}

/// Blocks of a rank for a group of two.
fn pair(rank: usize) -> Flat {
    Flat::F32(vec![rank as f32, rank as f32 + 0.5])
}

#[test]
fn a_failure_told_to_all_ends_what_a_group_of_some_waits_for_and_all_split_anew() {
    let started = Instant::now();
    let results = ranks(4, |world| {
        let split = || world.split(world.rank() / 2, world.rank()).unwrap();
        let group = split();
        let first = match world.rank() {
            // it never comes to its group's operation
            1 => None,
            _ => Some(group.all_to_all(pair(world.rank()))),
        };
        let told = world.agree((world.rank() == 1).then(|| Failure::new("no room")));
        let later = (world.rank() == 0).then(|| group.all_to_all(pair(0)).unwrap_err());
        let sum = world.all_reduce(Flat::F32(vec![1.0])).unwrap();
        let anew = split().all_to_all(pair(world.rank())).unwrap();
        (first, told.unwrap_err(), later, sum, anew)
    });
    for (rank, (first, told, later, sum, anew)) in results.into_iter().enumerate() {
        assert_eq!(told.to_string(), "rank 1 failed: no room", "rank {rank}");
        match (rank, first) {
            // the other group is done by then, or is told of it while it waits
            (1, None) | (2 | 3, Some(Ok(_))) => {}
            (0 | 2 | 3, Some(Err(error))) => assert_eq!(error, told),
            (_, other) => panic!("rank {rank}: {other:?}"),
        }
        assert_eq!(later.is_some(), rank == 0);
        assert!(later.is_none_or(|error| error == told));
        assert_eq!(sum, Flat::F32(vec![4.0]));
        let (low, place) = ((rank / 2 * 2) as f32, 0.5 * (rank % 2) as f32);
        assert_eq!(anew, Flat::F32(vec![low + place, low + 1.0 + place]));
    }
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn what_reached_a_group_before_the_failure_is_still_delivered() {
    let results = ranks(2, |world| {
        let group = world.split(0, 0).unwrap();
        let taken = group.all_to_all(pair(world.rank()));
        let failure = (world.rank() == 1).then(|| Failure::new("no room"));
        (taken, world.agree(failure).unwrap_err().to_string())
    });
    let blocks = [vec![0.0, 1.0], vec![0.5, 1.5]].map(Flat::F32);
    for ((taken, told), blocks) in results.into_iter().zip(blocks) {
        assert_eq!(taken, Ok(blocks));
        assert_eq!(told, "rank 1 failed: no room");
    }
}

#[test]
fn a_failure_behind_values_that_nobody_has_taken_ends_what_a_group_waits_for() {
    let started = Instant::now();
    let results = ranks(2, |world| {
        let group = world.split(0, 0).unwrap();
        if world.rank() == 1 {
            world.send(0, Flat::F32(vec![1.0; 300])).unwrap();
            let told = world.agree(Some(Failure::new("no room"))).unwrap_err();
            return [told.clone(), told];
        }
        let waited = group.all_to_all(pair(0)).unwrap_err();
        [waited, world.agree(None).unwrap_err()]
    });
    for told in results.iter().flatten() {
        assert_eq!(told.to_string(), "rank 1 failed: no room");
    }
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn errors_in_a_group_of_some_name_ranks_of_the_world() {
    let settings = Settings { deadline: Duration::from_millis(100), ..small() };
    let results = Threads::run(4, settings, |world| {
        let group = world.split(world.rank() % 2, 0).unwrap();
        match world.rank() {
            1 => group.all_gather(Flat::F32(vec![1.0])).map(drop),
            3 => group.all_to_all(Flat::F32(vec![1.0; 4])).map(drop),
            _ => Ok(()),
        }
        .map_err(|error| error.to_string())
    });
    for rank in [1, 3] {
        let message = results[rank].clone().unwrap().unwrap_err();
        let mismatch = "rank 1 is in all_gather of 1 f32 (operation 0), rank 3 in all_to_all of 4 f32";
        assert!(message.contains(mismatch) || message.contains("is gone"), "{message}");
    }
    assert!(
        [1, 3].iter().any(|&rank| matches!(&results[rank], Ok(Err(m)) if m.contains("rank 1 is in"))),
        "{results:?}"
    );
    let late = Threads::run(4, settings, |world| {
        let group = world.split(world.rank() / 2, 0).unwrap();
        let waited = (world.rank() == 2).then(|| group.all_to_all(pair(2)).unwrap_err().to_string());
        if world.rank() == 3 {
            std::thread::sleep(Duration::from_millis(400));
        }
        waited
    });
    let message = late[2].clone().unwrap().unwrap();
    assert!(message.contains("rank 2 has waited 0 s for rank 3 in all_to_all of 2 f32"), "{message}");
}

#[test]
fn a_send_that_a_failure_overtook_does_not_disturb_what_follows() {
    let results = ranks(2, |group| {
        let first = match group.rank() {
            0 => group.agree(Some(Failure::new("no data"))),
            _ => group.send(0, Flat::F32(vec![1.0; 300])).and_then(|()| group.receive(0, 1, Element::F32).map(drop)),
        };
        (first.unwrap_err().to_string(), group.all_reduce(Flat::F32(vec![2.0])).unwrap())
    });
    for (message, sum) in results {
        assert_eq!(message, "rank 0 failed: no data");
        assert_eq!(sum, Flat::F32(vec![4.0]));
    }
}

/// xorshift64*
pub struct Random(u64);

impl Random {
    /// Other numbers for every seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// A number below another.
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % n
    }
}

/// What a rank does instead of an operation.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    Fail,
    Panic,
    Leave,
    Other,
}

/// One of the operations, by number.
fn operation(group: &dyn Collective, which: u64) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let values = |n: usize| Flat::F32(vec![1.0; n]);
    match which {
        0 => group.all_reduce(values(200)).map(drop),
        1 => group.reduce_scatter(values(3)).map(drop),
        2 => group.all_gather(values(1)).map(drop),
        3 => group.all_to_all(values(2 * size)).map(drop),
        4 => group.exchange(vec![0; rank]).map(drop),
        5 => group.agree(None),
        6 => group.split(rank % 2, 0)?.all_reduce(values(1)).map(drop),
        _ => {
            group.send((rank + 1) % size, values(150))?;
            group.receive((rank + size - 1) % size, 150, Element::F32).map(drop)
        }
    }
}

/// How a rank ended: with a panic's message, or as it said.
type Ended = std::result::Result<Result<()>, String>;

/// A program of some operations with some faults in it: what every rank came to.
fn schedule(seed: u64) -> (Vec<Ended>, Vec<(usize, Fault)>) {
    let mut random = Random::new(seed);
    let size = 2 + random.below(3) as usize;
    let steps: Vec<u64> = (0..2 + random.below(6)).map(|_| random.below(8)).collect();
    let faults: Vec<(usize, usize, Fault)> = (0..random.below(3))
        .map(|_| {
            let kind = [Fault::Fail, Fault::Panic, Fault::Leave, Fault::Other][random.below(4) as usize];
            (random.below(size as u64) as usize, random.below(steps.len() as u64) as usize, kind)
        })
        .collect();
    let results = Threads::run(size, small(), |group| {
        for (at, &step) in steps.iter().enumerate() {
            let fault = faults.iter().find(|(rank, when, _)| (*rank, *when) == (group.rank(), at));
            let done = match fault.map(|fault| fault.2) {
                None => operation(group.as_ref(), step),
                Some(Fault::Fail) => group.agree(Some(Failure::new("on purpose"))),
                Some(Fault::Panic) => panic!("on purpose"),
                Some(Fault::Leave) => return Ok(()),
                Some(Fault::Other) => operation(group.as_ref(), (step + 1) % 8),
            };
            // an error that all know of ends a phase; the run continues with the next one
            match done {
                Err(CollectiveError::Failed(_)) | Ok(()) => {}
                Err(other) => return Err(other),
            }
        }
        Ok(())
    });
    (results, faults.into_iter().map(|(rank, _, fault)| (rank, fault)).collect())
}

#[test]
fn no_schedule_of_failures_hangs() {
    let results: Vec<_> = (0..10_000).map(|seed| (seed, schedule(seed))).collect();
    for (seed, (results, faults)) in results {
        for rank in &results {
            let late = matches!(rank, Ok(Err(CollectiveError::Deadline { .. })));
            assert!(!late, "schedule {seed}: {results:?}");
            if faults.is_empty() {
                assert_eq!(rank, &Ok(Ok(())), "schedule {seed}");
            }
        }
    }
}
