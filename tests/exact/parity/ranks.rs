//! Several ranks against one: the loss, the gradient's norm and the weights of some updates, whatever the plan.

use std::collections::BTreeMap;
use std::sync::Arc;

use firebrick_backends::collective::{Collective, Settings, Solo, Threads};
use firebrick_engine::executor::{Residency, Runtime};
use firebrick_engine::learner::Learner;
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::plan::{MemoryConfig, Order, ParamOffload};
use firebrick_engine::sequence::Sequence;
use firebrick_engine::world::World;

use super::plans::{TEMPERATURE, TOLERANCE, models, objective};
use crate::support::model::Model;
use crate::support::{assert_close, assert_gradient, checked};

const UPDATES: usize = 3;
const LR: f64 = 1e-2;

/// Losses and norms of some updates, and the weights after them, to the bit.
#[derive(Clone, PartialEq)]
struct Trained {
    steps: Vec<[f64; 2]>,
    micro_batches: Vec<usize>,
    weights: BTreeMap<String, Vec<f64>>,
}

fn trained(model: &Model, rows: &[Sequence], memory: &MemoryConfig, ranks: Arc<dyn Collective>) -> Trained {
    let plan = memory.plan(model.decoder.arch()).expect("a plan");
    let runtime = Runtime::new(model.decoder.device()).with_prefetch(plan.prefetch).with_world(World::new(ranks));
    let optim = OptimConfig { lr: LR, ..OptimConfig::default() };
    let mut learner = Learner::new(model.decoder.clone(), plan, optim, runtime);
    let placed = learner.model.set_residency(Residency::Pass);
    placed.expect("weights in their place");
    let (mut steps, mut micro_batches) = (Vec::new(), Vec::new());
    for _ in 0..UPDATES {
        let updated = learner.update(rows, TEMPERATURE, &objective(), LR);
        let updated = updated.unwrap_or_else(|error| panic!("{}: {error}", model.name));
        steps.push([updated.sums.loss, updated.outcome.grad_norm]);
        micro_batches.push(updated.batch.micro_batches);
    }
    let weights = learner.decoder().params().map(|(spec, value)| {
        let values = value.download().expect("values").to_f64();
        (spec.name.clone(), values)
    });
    Trained { steps, micro_batches, weights: weights.collect() }
}

/// What every rank of a world comes to: the same on all, to the bit.
fn on_ranks(model: &Model, rows: &[Sequence], memory: &MemoryConfig, size: usize) -> Trained {
    let mut ranks = Threads::run(size, Settings::default(), |rank| trained(model, rows, memory, rank))
        .into_iter()
        .map(|rank| rank.unwrap_or_else(|panic| panic!("{}: {panic}", model.name)));
    let first = ranks.next().expect("a rank");
    for other in ranks {
        assert!(other == first, "{}: ranks have drifted apart", model.name);
    }
    first
}

fn assert_same(label: &str, found: &Trained, expected: &Trained) {
    for (found, expected) in found.steps.iter().zip(&expected.steps) {
        assert_close(&format!("{label}: loss"), found[0], expected[0], TOLERANCE);
        assert_close(&format!("{label}: norm"), found[1], expected[1], TOLERANCE);
    }
    for (name, values) in &found.weights {
        let expected = &expected.weights[name];
        assert_gradient(&format!("{label}: {name}"), values, expected, TOLERANCE);
    }
}

/// Where gradients and weights lie, and how micro-batches go through.
fn plans() -> Vec<(&'static str, MemoryConfig)> {
    let plan = |set: fn(&mut MemoryConfig)| {
        let mut memory = MemoryConfig { micro_batch_size: Some(1), ..MemoryConfig::default() };
        set(&mut memory);
        memory
    };
    vec![
        ("plain", plan(|_| {})),
        ("gradients on the host", plan(|m| m.grad_offload = true)),
        (
            "weights streamed, segment by segment",
            plan(|m| {
                m.gradient_checkpointing = true;
                m.param_offload = ParamOffload::Streamed;
                m.order = Order::SegmentMajor;
            }),
        ),
    ]
}

#[test]
fn ranks_that_share_a_batch_train_what_one_rank_trains() {
    let mut cases = 0;
    for (model, rows) in models() {
        if !model.manifest.is_local() {
            continue;
        }
        for (name, memory) in plans() {
            let expected = trained(&model, &rows, &memory, Arc::new(Solo));
            for size in [2, 4] {
                let label = format!("{}, {name}, {size} ranks", model.name);
                let found = on_ranks(&model, &rows, &memory, size);
                assert_same(&label, &found, &expected);
                cases += 1;
            }
        }
    }
    checked("runs on several ranks", cases);
}

#[test]
fn ranks_without_a_sequence_contribute_nothing() {
    let (model, rows) = models().swap_remove(0);
    let memory = MemoryConfig::default();
    let one = &rows[..1];
    let expected = trained(&model, one, &memory, Arc::new(Solo));
    let found = on_ranks(&model, one, &memory, 4);
    assert_eq!(found.micro_batches, [1; UPDATES]);
    assert_same("one sequence on four ranks", &found, &expected);
}

#[test]
fn the_same_ranks_train_the_same_to_the_bit() {
    let (model, rows) = models().swap_remove(0);
    let memory = MemoryConfig::default();
    let runs = [(); 2].map(|()| on_ranks(&model, &rows, &memory, 4));
    assert!(runs[0] == runs[1]);
}

#[test]
fn an_update_in_the_backward_pass_is_refused_on_several_ranks() {
    let (model, rows) = models().swap_remove(0);
    let memory = MemoryConfig { step_in_backward: true, ..MemoryConfig::default() };
    let plan = memory.plan(model.decoder.arch()).expect("a plan");
    let errors = Threads::run(2, Settings::default(), |rank| {
        let runtime = Runtime::new(model.decoder.device()).with_world(World::new(rank));
        let optim = OptimConfig { clip_grad: None, ..OptimConfig::default() };
        let mut learner = Learner::new(model.decoder.clone(), plan.clone(), optim, runtime);
        let updated = learner.update(&rows, TEMPERATURE, &objective(), LR);
        updated.map(drop).unwrap_err().to_string()
    });
    for error in errors {
        let message = error.unwrap();
        assert!(message.contains("memory.step_in_backward"), "{message}");
        assert!(message.contains("2 ranks"), "{message}");
    }
}
