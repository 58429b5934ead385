//! Ranks that share work, sequences, matrices or layers against one rank, in f32: the same tables as in f64
//! (`tests/exact`), as far as moments of fewer bits do not round the other way.

use crate::support::meshes::{SHARED_LAYERS, SHARED_MATRICES, SHARED_SEQUENCES, SharedSequences};
use crate::support::model::Model;
use crate::support::tolerance::F32;
use crate::support::zero::{STAGES, TECHNIQUES, alone, assert_same, on_ranks, packed, rows};
use crate::support::{checked, fixtures};
use firebrick_engine::plan::{MomentKind, Order};

/// Whether all techniques are compared on all ranks: `tests/campaigns/run zero`.
fn is_campaign() -> bool {
    std::env::var("FIREBRICK_CAMPAIGN").is_ok_and(|name| name == "zero")
}

/// Every technique on ranks that share something in these ways; in CI each way by turns.
fn compare(what: &str, model: &str, ways: &[SharedSequences]) {
    let model = Model::load(&fixtures().join("models").join(model));
    let rows = rows(&model);
    let mut cases = 0;
    for (turn, (technique, turn_on)) in TECHNIQUES.into_iter().enumerate() {
        let plain = packed(turn_on);
        if plain.moments != MomentKind::F32 {
            continue;
        }
        let expected = alone(&model, &rows, &plain, Some(1.0));
        for (place, (name, size, share)) in ways.iter().enumerate() {
            if !is_campaign() && place != turn % ways.len() {
                continue;
            }
            let mut memory = plain.clone();
            share(&mut memory);
            if memory.pipeline_model_parallel_size > 1 && memory.order == Order::SegmentMajor {
                // refused by name
                continue;
            }
            let label = format!("{technique}, {name}, {size} ranks");
            let found = on_ranks(&model, &rows, &memory, Some(1.0), *size);
            assert_same(&label, &memory, &found, &expected, F32);
            cases += 1;
        }
    }
    checked(&format!("runs in f32 that share {what}"), cases);
}

#[test]
fn ranks_that_share_work_alone_train_in_f32_what_one_rank_trains() {
    compare("work", "llama-gqa", &[("data 2", 2, |_| {}), ("data 4", 4, |_| {})]);
}

#[test]
fn ranks_that_share_out_state_train_in_f32_what_one_rank_trains() {
    let ways: Vec<SharedSequences> =
        STAGES.into_iter().flat_map(|(stage, share_out)| [2, 4].map(|size| (stage, size, share_out))).collect();
    compare("out state", "llama-gqa", &ways);
}

#[test]
fn ranks_that_share_sequences_train_in_f32_what_one_rank_trains() {
    compare("sequences", "llama-gqa", &SHARED_SEQUENCES);
}

#[test]
fn ranks_that_share_matrices_train_in_f32_what_one_rank_trains() {
    compare("matrices", "llama-gqa", &SHARED_MATRICES);
}

#[test]
fn stages_train_in_f32_what_one_rank_trains() {
    // of four layers
    compare("layers", "gemma3", &SHARED_LAYERS);
}
