//! Gathers of weights that run ahead of the computation (`memory.prefetch` under `ZeRO-3`): when they are asked for,
//! what runs beside them, how many bytes they hold, and that nothing else changes.

use super::{model, staged};
use crate::support::checked;
use crate::support::model::Model;
use crate::support::zero::{UPDATES, on_ranks, rows, runtime};
use firebrick_backends::accounts::{Category, Home};
use firebrick_backends::collective::{
    Background, Collective, CollectiveError, Element, Failure, Flat, Gathering, OperationKind, Result, Settings,
    Threads, Traffic,
};
use firebrick_engine::executor::{BoundaryKind, BoundaryLog, Residency, Runtime};
use firebrick_engine::learner::Learner;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::plan::{MemoryConfig, Order, ParamOffload};
use firebrick_engine::world::World;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A group that says when it is asked for a gather.
struct Tapped {
    group: Arc<dyn Collective>,
    asked: Box<dyn Fn() -> Result<()> + Send + Sync>,
}

impl fmt::Debug for Tapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tapped({:?})", self.group)
    }
}

impl Collective for Tapped {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Collective>> {
        self.group.split(color, key)
    }

    fn all_gather(&self, own: Flat) -> Result<Flat> {
        (self.asked)()?;
        self.group.all_gather(own)
    }

    fn start_all_gather(&self, own: Flat) -> Gathering {
        match (self.asked)() {
            Ok(()) => self.group.start_all_gather(own),
            Err(error) => Gathering::ended(Err(error)),
        }
    }

    fn reduce_scatter(&self, all: Flat) -> Result<Flat> {
        self.group.reduce_scatter(all)
    }

    fn all_reduce(&self, own: Flat) -> Result<Flat> {
        self.group.all_reduce(own)
    }

    fn all_to_all(&self, blocks: Flat) -> Result<Flat> {
        self.group.all_to_all(blocks)
    }

    fn send(&self, to: usize, own: Flat) -> Result<()> {
        self.group.send(to, own)
    }

    fn receive(&self, from: usize, len: usize, element: Element) -> Result<Flat> {
        self.group.receive(from, len, element)
    }

    fn exchange(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.group.exchange(own)
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

/// What a rank has computed and gathered in a pass.
#[derive(Default)]
struct Watch {
    log: Mutex<Option<Arc<BoundaryLog>>>,
    pass: Mutex<Pass>,
}

#[derive(Default)]
struct Pass {
    /// Visits that had been computed before the pass.
    before: usize,
    /// Visits that had been computed when each gather was asked for.
    asked: Vec<usize>,
    /// Gathers that were held until a visit was computed.
    held: usize,
}

impl Watch {
    /// Visits whose computation has ended: segments and heads.
    fn computed(&self) -> usize {
        let log = self.log.lock().unwrap();
        let rows = log.as_ref().map(|log| log.rows().rows).unwrap_or_default();
        let ends = [BoundaryKind::Forward, BoundaryKind::Head, BoundaryKind::Backward];
        let places = rows.iter().map(|(row, _)| row.moment.boundary.place);
        places.filter(|place| ends.contains(place)).count()
    }

    fn begin(&self) {
        let before = self.computed();
        *self.pass.lock().unwrap() = Pass { before, ..Pass::default() };
    }

    /// A gather is asked for.
    fn ask(&self) {
        let computed = self.computed();
        let mut pass = self.pass.lock().unwrap();
        let before = pass.before;
        pass.asked.push(computed - before);
    }

    /// A gather is about to take place: not before the computation of the visit has ended at whose beginning it was
    /// started, which therefore does not wait for it. The embedding is the first visit, and counts as computed.
    fn hold(&self, prefetch: usize) -> Result<()> {
        let (visit, before) = {
            let mut pass = self.pass.lock().unwrap();
            pass.held += 1;
            (pass.held - 1, pass.before)
        };
        let since = Instant::now();
        while self.computed() - before < visit.saturating_sub(prefetch.max(1)) {
            if since.elapsed() > Duration::from_secs(20) {
                let message = format!("visit {visit} is waited for while others compute");
                return Err(CollectiveError::Values(message));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }
}

/// A learner of a rank, its weights in their place.
fn learner(model: &Model, memory: &MemoryConfig, runtime: Runtime) -> Learner {
    let plan = memory.plan(model.decoder.arch()).unwrap();
    let decoder = model.decoder.clone();
    let mut learner = Learner::new(decoder, plan, OptimConfig::default(), runtime);
    learner.model.set_residency(Residency::Pass).unwrap();
    learner
}

/// What the first rank had computed when it asked for each gather of a scoring pass and of a training pass, in which
/// each gather takes as long as the visit that computes when it is started.
fn asked(memory: &MemoryConfig) -> [Vec<usize>; 2] {
    let model = model();
    let rows: Vec<_> = rows(&model).into_iter().take(2).collect();
    let found = Threads::run(2, Settings::default(), |group| {
        let watch = Arc::new(Watch::default());
        let (holds, asks, prefetch) = (Arc::clone(&watch), Arc::clone(&watch), memory.prefetch);
        let slow = Background::over(Arc::new(Tapped { group, asked: Box::new(move || holds.hold(prefetch)) }));
        let world = World::new(Arc::new(Tapped {
            group: slow,
            asked: Box::new(move || {
                asks.ask();
                Ok(())
            }),
        }));
        let runtime = runtime(&model, memory, &world);
        let log = BoundaryLog::new(&runtime.accounts, None);
        *watch.log.lock().unwrap() = Some(Arc::clone(&log));
        let mut learner = learner(&model, memory, runtime.with_log(log));
        watch.begin();
        learner.score(&rows, 1.0).unwrap();
        let scored = std::mem::take(&mut watch.pass.lock().unwrap().asked);
        watch.begin();
        learner.update(&rows, 1.0, &Nll, 1e-2).unwrap();
        let trained = std::mem::take(&mut watch.pass.lock().unwrap().asked);
        [scored, trained]
    });
    found.into_iter().next().unwrap().unwrap()
}

#[test]
fn the_next_visits_weights_are_gathered_while_a_visit_computes() {
    for prefetch in [1, 2, 3] {
        let mut memory = staged(|_| {}, |_| {});
        memory.zero_stage = 3;
        memory.gradient_checkpointing = true;
        memory.prefetch = prefetch;
        let plan = memory.plan(model().decoder.arch()).unwrap();
        let forward = plan.segments.len() + 2;
        let [scored, trained] = asked(&memory);
        assert_eq!(scored.len(), forward);
        assert_eq!(trained.len(), forward + plan.segments.len());
        for asked in [scored, trained] {
            for (visit, computed) in asked.into_iter().enumerate() {
                // when the visit began that is so many before it, behind the embedding
                let expected = visit.saturating_sub(prefetch).saturating_sub(1);
                assert_eq!(computed, expected, "visit {visit}, prefetch {prefetch}");
            }
        }
    }
}

#[test]
fn without_prefetch_weights_are_gathered_when_their_visit_begins() {
    let mut memory = staged(|_| {}, |_| {});
    memory.zero_stage = 3;
    memory.gradient_checkpointing = true;
    memory.prefetch = 0;
    for asked in asked(&memory) {
        for (visit, computed) in asked.into_iter().enumerate() {
            assert_eq!(computed, visit.saturating_sub(1), "visit {visit}");
        }
    }
}

/// How weights are shared out.
const SHARED: [fn(&mut MemoryConfig); 4] = [
    |m| m.gradient_checkpointing = true,
    |m| m.reshard_after_forward = false,
    |m| {
        m.gradient_checkpointing = true;
        m.order = Order::SegmentMajor;
    },
    |m| {
        m.gradient_checkpointing = true;
        m.param_offload = ParamOffload::Streamed;
    },
];

#[test]
fn gathers_ahead_change_neither_a_bit_nor_a_message() {
    let model = model();
    let rows = rows(&model);
    let mut cases = 0;
    for size in [2, 4] {
        for share_out in SHARED {
            let trained = |prefetch| {
                let mut memory = staged(|m| m.zero_stage = 3, share_out);
                memory.prefetch = prefetch;
                on_ranks(&model, &rows, &memory, Some(1.0), size).swap_remove(0)
            };
            let in_place = trained(0);
            for prefetch in [1, 2, 7] {
                let found = trained(prefetch);
                assert!(found.weights == in_place.weights, "prefetch {prefetch}");
                assert!(found.steps == in_place.steps, "prefetch {prefetch}");
                assert!(found.scores == in_place.scores, "prefetch {prefetch}");
                assert_eq!(found.operations, in_place.operations);
                assert_eq!(found.bytes, in_place.bytes);
                cases += 1;
            }
            let gathers = in_place.operations[OperationKind::AllGather as usize];
            assert!(gathers as usize >= UPDATES);
        }
    }
    checked("runs that gather weights ahead", cases);
}

#[test]
fn gathers_ahead_hold_the_bytes_of_as_many_visits_and_are_accounted_for() {
    let model = model();
    let rows: Vec<_> = rows(&model).into_iter().take(2).collect();
    for prefetch in [0, 1, 2] {
        let mut memory = staged(|_| {}, |_| {});
        memory.zero_stage = 3;
        memory.gradient_checkpointing = true;
        memory.prefetch = prefetch;
        let found = Threads::run(2, Settings::default(), |group| {
            let world = World::new(group);
            let runtime = runtime(&model, &memory, &world);
            let learner = learner(&model, &memory, runtime);
            let accounts = &learner.runtime.accounts;
            accounts.reset_peaks();
            learner.score(&rows, 1.0).unwrap();
            accounts.balance(Category::Communication, Home::Host)
        });
        // what two ranks have of a visit, whose shards are whole blocks
        let units = model.decoder.units();
        let of = |units: &[firebrick_models::decoder::Unit]| -> u64 {
            let specs = units.iter().flat_map(|unit| &unit.specs);
            specs.map(|s| 4 * s.numel().div_ceil(512) as u64 * 512).sum()
        };
        let last = units.len() - 1;
        let mut visits = vec![of(&units[..1])];
        visits.extend(units[1..last].chunks(2).map(of));
        visits.push(of(&units[last..]));
        // the visit at hand while its weights are put together, and those ahead of it
        let most = visits.windows(1 + prefetch).map(|own| own.iter().sum());
        let most: u64 = most.max().unwrap();
        for balance in found {
            let balance = balance.unwrap();
            assert_eq!(balance.peak_bytes, most, "prefetch {prefetch}");
            assert_eq!(balance.bytes, 0, "prefetch {prefetch}");
        }
    }
}
