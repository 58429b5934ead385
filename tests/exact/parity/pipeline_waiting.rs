//! Rows that wait for a stage of a pipeline while it scores.

use firebrick_backends::collective::{Collective, Element, Failure, Flat, Result, Settings, Threads, Traffic};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::sleep;
use std::time::Duration;

use super::plans::models;
use crate::support::zero::{groups, learner, rows, settings};

/// Messages with rows that were sent to a stage and not received there.
#[derive(Debug, Default)]
struct Waiting {
    now: AtomicUsize,
    most: AtomicUsize,
    all: AtomicUsize,
}

/// Ranks whose rows are counted, by stage, of which the last is slow to receive.
#[derive(Debug)]
struct Counted {
    ranks: Arc<dyn Collective>,
    waiting: Arc<[Waiting; 4]>,
}

impl Collective for Counted {
    fn rank(&self) -> usize {
        self.ranks.rank()
    }

    fn size(&self) -> usize {
        self.ranks.size()
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Collective>> {
        let (ranks, waiting) = (self.ranks.split(color, key)?, Arc::clone(&self.waiting));
        Ok(Arc::new(Self { ranks, waiting }))
    }

    fn all_gather(&self, own: Flat) -> Result<Flat> {
        self.ranks.all_gather(own)
    }

    fn reduce_scatter(&self, all: Flat) -> Result<Flat> {
        self.ranks.reduce_scatter(all)
    }

    fn all_reduce(&self, own: Flat) -> Result<Flat> {
        self.ranks.all_reduce(own)
    }

    fn all_to_all(&self, blocks: Flat) -> Result<Flat> {
        self.ranks.all_to_all(blocks)
    }

    fn send(&self, to: usize, own: Flat) -> Result<()> {
        if !own.is_empty() {
            let waiting = &self.waiting[to];
            waiting.all.fetch_add(1, SeqCst);
            let now = waiting.now.fetch_add(1, SeqCst) + 1;
            waiting.most.fetch_max(now, SeqCst);
        }
        self.ranks.send(to, own)
    }

    fn receive(&self, from: usize, len: usize, element: Element) -> Result<Flat> {
        if len > 0 && self.rank() + 1 == self.size() {
            sleep(Duration::from_millis(20));
        }
        let received = self.ranks.receive(from, len, element)?;
        if len > 0 {
            self.waiting[self.rank()].now.fetch_sub(1, SeqCst);
        }
        Ok(received)
    }

    fn exchange(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.ranks.exchange(own)
    }

    fn agree(&self, failure: Option<Failure>) -> Result<()> {
        self.ranks.agree(failure)
    }

    fn abort(&self, message: &str) {
        self.ranks.abort(message);
    }

    fn traffic(&self) -> Traffic {
        self.ranks.traffic()
    }
}

#[test]
fn no_more_than_one_micro_batch_waits_for_a_stage_while_it_scores() {
    let mut all = models().into_iter();
    let model = all.find(|(model, _)| model.name == "gemma3");
    let (model, _) = model.expect("a model of four layers");
    let rows = rows(&model);
    let mut memory = settings(|_| {});
    memory.pipeline_model_parallel_size = 4;
    let waiting: Arc<[Waiting; 4]> = Arc::default();
    let scored = Threads::run(4, Settings::default(), |ranks| {
        let waiting = Arc::clone(&waiting);
        let world = groups(&memory, Arc::new(Counted { ranks, waiting }));
        let learner = learner(&model, &memory, None, &world);
        learner.score(&rows, 1.0).expect("scores").logp
    });
    let scored: Vec<_> = scored.into_iter().map(|rank| rank.expect("scores")).collect();
    assert!(scored.iter().all(|rank| *rank == scored[0]));
    assert!(rows.len() > 4);
    for (stage, own) in waiting.iter().enumerate() {
        let [all, most] = [&own.all, &own.most].map(|count| count.load(SeqCst));
        let micros = if stage == 0 { 0 } else { rows.len() };
        assert_eq!([all, most], [micros, micros.min(1)], "stage {stage}");
    }
}
