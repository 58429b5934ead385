//! Ranks that share out state (`ZeRO`) against one rank that has all of it, in f32: numbers, bytes, messages,
//! checkpoints.

mod checkpoints;
mod messages;
mod prefetch;

use crate::support::model::Model;
use crate::support::tolerance::F32;
use crate::support::zero::{STAGES, TECHNIQUES, UPDATES, alone, assert_same, on_ranks, rows, settings, share};
use crate::support::{checked, fixtures};
use firebrick_backends::collective::OperationKind;
use firebrick_engine::plan::{MemoryConfig, MomentKind, Order};

fn model() -> Model {
    Model::load(&fixtures().join("models/llama-gqa"))
}

fn staged(turn_on: fn(&mut MemoryConfig), share_out: fn(&mut MemoryConfig)) -> MemoryConfig {
    let mut memory = settings(turn_on);
    share_out(&mut memory);
    memory
}

#[test]
fn ranks_that_share_out_state_train_what_one_rank_trains() {
    let (model, mut cases) = (model(), 0);
    let rows = rows(&model);
    for (technique, turn_on) in TECHNIQUES {
        let plain = settings(turn_on);
        if plain.moments != MomentKind::F32 {
            // a moment that is rounded the other way is no longer near: see the test of bits
            continue;
        }
        let expected = alone(&model, &rows, &plain, Some(1.0));
        for (stage, share_out) in STAGES {
            let memory = staged(turn_on, share_out);
            for size in [2, 4] {
                let label = format!("{technique}, {stage}, {size} ranks");
                let found = on_ranks(&model, &rows, &memory, Some(1.0), size);
                assert_same(&label, &memory, &found, &expected, F32);
                cases += 1;
            }
        }
    }
    checked("runs in f32 that share out state", cases);
}

#[test]
fn sharing_out_state_changes_no_bit_where_the_sums_are_the_same() {
    let (model, mut cases) = (model(), 0);
    // a micro-batch a rank: sums over the ranks are all there are, and without clipping the norm changes nothing
    for size in [2, 4] {
        let rows: Vec<_> = rows(&model).into_iter().take(size).collect();
        for (technique, turn_on) in TECHNIQUES {
            let replicated = on_ranks(&model, &rows, &settings(turn_on), None, size);
            for (stage, share_out) in STAGES {
                let memory = staged(turn_on, share_out);
                let [found, again] = [(); 2].map(|()| on_ranks(&model, &rows, &memory, None, size).swap_remove(0));
                let label = format!("{technique}, {stage}, {size} ranks");
                assert!(found.weights == replicated[0].weights, "{label}");
                assert!(found.weights == again.weights, "{label}: a rerun");
                assert!(found.steps == again.steps, "{label}: a rerun");
                cases += 1;
            }
        }
    }
    checked("runs that share out state to the bit", cases);
}

#[test]
fn a_rank_holds_its_share_of_moments_gradients_and_weights() {
    let model = model();
    let rows = rows(&model);
    let all = model.decoder.num_params() as u64;
    for size in [2, 4] {
        let [own, unit, visit] = share(&model, size);
        for (stage, share_out) in STAGES {
            let memory = staged(|_| {}, share_out);
            let ranks = on_ranks(&model, &rows, &memory, None, size);
            let label = format!("{stage}, {size} ranks");
            assert_eq!(ranks[0].held[0], 8 * own, "{label}: the first rank has most");
            for rank in ranks {
                let [moments, gradients, weights] = rank.held;
                assert!(moments <= 8 * own, "{label}: {moments} bytes of moments");
                // a whole graph completes the gradients of all its layers together
                let unsummed = match (memory.zero_stage, memory.gradient_checkpointing) {
                    (1, _) | (_, false) => all,
                    _ => unit.max(visit),
                };
                let most = 4 * (own + unsummed);
                assert!(gradients <= most, "{label}: {gradients} of {most} bytes of gradients");
                let most = 4 * match (memory.zero_stage, memory.reshard_after_forward) {
                    (3, true) => own + visit,
                    (3, false) => own + all,
                    _ => all,
                };
                assert!(weights <= most, "{label}: {weights} of {most} bytes of weights");
            }
        }
    }
}

#[test]
fn ranks_send_a_message_for_what_they_sum_and_gather() {
    let model = model();
    let rows = rows(&model);
    let units = model.decoder.units().len();
    for order in [Order::MicroMajor, Order::SegmentMajor] {
        for size in [2, 4] {
            for (stage, share_out) in STAGES {
                let mut memory = staged(|_| {}, share_out);
                if order == Order::SegmentMajor && memory.zero_stage < 3 {
                    continue;
                }
                memory.order = order;
                let found = &on_ranks(&model, &rows, &memory, None, size)[0];
                let plan = memory.plan(model.decoder.arch()).unwrap();
                let (segments, rounds) = (plan.segments.len(), found.rounds);
                let label = format!("{stage}, {size} ranks, {order:?}");
                assert_eq!(rounds == 1, order == Order::SegmentMajor, "{label}");
                let sums = match memory.zero_stage {
                    1 => units,
                    _ => units * rounds,
                };
                let gathers = match (memory.zero_stage, memory.reshard_after_forward) {
                    // the ends once a pass, each segment for its forward and its backward
                    (3, true) => (2 * segments + 2) * rounds,
                    (3, false) => (segments + 2) * rounds,
                    _ => units,
                };
                let sent = |kind: OperationKind| found.operations[kind as usize] as usize;
                assert_eq!(sent(OperationKind::ReduceScatter), UPDATES * sums, "{label}");
                assert_eq!(sent(OperationKind::AllGather), UPDATES * gathers, "{label}");
                assert_eq!(sent(OperationKind::AllReduce), 0, "{label}");
            }
        }
    }
}
