//! Ranks that share out state (`ZeRO`) against one rank that has all of it, in f64.

use firebrick_engine::objective::value::ValueLoss;

use super::critic::critics;
use super::plans::{TOLERANCE, models as with_rows, objective};
use super::sequence_parallel::{Task, assert_learnt_alike, of_sequences};
use crate::support::meshes::SharedSequences;
use crate::support::model::Model;
use crate::support::techniques::Technique;
use crate::support::zero::{STAGES, TECHNIQUES, alone, assert_same, on_ranks, rows, settings, with_adapters};
use crate::support::{checked, folders};

/// Whether all there is to compare is compared: `tests/campaigns/run zero`.
fn is_campaign() -> bool {
    std::env::var("FIREBRICK_CAMPAIGN").is_ok_and(|name| name == "zero")
}

/// CI takes a model with an untied end, one with tied ones and one with experts; the campaign all.
fn models() -> Vec<Model> {
    let dirs = folders("models").into_iter();
    let dirs = dirs.filter(|dir| dir.join("golden/grads.safetensors").is_file());
    let models = dirs.map(|dir| Model::load(&dir)).filter(|model| {
        let sample = ["llama-gqa", "qwen2-tied", "qwen3-moe", "gpt-oss"].contains(&model.name.as_str());
        (is_campaign() && model.manifest.is_local()) || sample
    });
    let mut models: Vec<Model> = models.collect();
    // single tests take the first one
    models.sort_by_key(|model| model.name == "gpt-oss");
    models
}

/// How many runs are as one rank's: of all techniques on two and four ranks in the campaign; in CI of some techniques,
/// the stages by turns on two and four.
fn compare(model: &Model, name: &str, sample: &[&str]) -> usize {
    let rows = rows(model);
    let mut cases = 0;
    for (technique, turn_on) in TECHNIQUES {
        if !is_campaign() && !sample.contains(&technique) {
            continue;
        }
        let plain = settings(turn_on);
        let expected = alone(model, &rows, &plain, Some(1.0));
        let none: Technique = ("nothing shared out", |_| {});
        for (turn, (stage, share_out)) in STAGES.into_iter().chain([none]).enumerate() {
            let mut memory = plain.clone();
            share_out(&mut memory);
            let sizes = [2, 4];
            let own = turn % sizes.len();
            for &size in if is_campaign() { &sizes[..] } else { &sizes[own..=own] } {
                let label = format!("{}{name}, {technique}, {stage}, {size} ranks", model.name);
                let found = on_ranks(model, &rows, &memory, Some(1.0), size);
                assert_same(&label, &memory, &found, &expected, TOLERANCE);
                cases += 1;
            }
        }
    }
    cases
}

#[test]
fn ranks_that_share_out_state_train_what_one_rank_trains() {
    let mut cases = 0;
    for model in models() {
        cases += compare(&model, "", &["plain", "weights streamed", "8-bit moments"]);
        cases += compare(&with_adapters(model), " with adapters", &["plain"]);
    }
    checked("runs that share out state", cases);
}

#[test]
fn losses_of_tokens_sequences_and_values_are_one_ranks() {
    const SHARED: [SharedSequences; 5] = [
        ("data 2", 2, |_| {}),
        ("data 2, ZeRO-1", 2, |m| m.zero_stage = 1),
        ("data 4, ZeRO-2", 4, |m| m.zero_stage = 2),
        ("data 2, ZeRO-3", 2, |m| {
            m.zero_stage = 3;
            m.gradient_checkpointing = true;
        }),
        ("data 4, ZeRO-3 without resharding", 4, |m| {
            m.zero_stage = 3;
            m.reshard_after_forward = false;
        }),
    ];
    let mut cases = 0;
    for (model, rows) in with_rows() {
        if model.name == "llama-gqa" {
            let case = (&model, &rows[..]);
            let task = Task::Policy(objective());
            cases += assert_learnt_alike(case, "tokens", &task, &SHARED);
            let task = Task::Policy(of_sequences());
            cases += assert_learnt_alike(case, "sequences", &task, &SHARED[2..4]);
        }
    }
    for (model, rows) in critics() {
        // elsewhere positions turn by the longest sequence of a micro-batch, which a rank has its own of
        let local = is_campaign() && model.manifest.is_local();
        if local || ["llama-gqa", "qwen2-tied"].contains(&model.name.as_str()) {
            let task = Task::Critic(ValueLoss { clip_range: 0.05 });
            let case = (&model, &rows[..]);
            cases += assert_learnt_alike(case, "values", &task, &SHARED);
        }
    }
    checked("losses of ranks that share out state", cases);
}

#[test]
fn fewer_sequences_than_ranks_that_share_out_state_are_no_hang() {
    let model = models().swap_remove(0);
    let one = &rows(&model)[..1];
    for (stage, share_out) in STAGES {
        let memory = settings(share_out);
        let expected = alone(&model, one, &memory, None);
        let found = on_ranks(&model, one, &memory, None, 4);
        let label = format!("one sequence on four ranks, {stage}");
        assert_same(&label, &memory, &found, &expected, TOLERANCE);
    }
}

#[test]
fn gathers_that_run_ahead_of_computation_change_no_number() {
    let model = models().swap_remove(0);
    let rows = rows(&model);
    let mut cases = 0;
    for (technique, turn_on) in TECHNIQUES {
        let expected = alone(&model, &rows, &settings(turn_on), Some(1.0));
        for (stage, share_out) in STAGES {
            for prefetch in [0, 1, 2] {
                let mut memory = settings(turn_on);
                share_out(&mut memory);
                if memory.zero_stage < 3 {
                    continue;
                }
                memory.prefetch = prefetch;
                let label = format!("{technique}, {stage}, prefetch {prefetch}");
                let found = on_ranks(&model, &rows, &memory, Some(1.0), 2);
                assert_same(&label, &memory, &found, &expected, TOLERANCE);
                cases += 1;
            }
        }
    }
    checked("runs whose gathers run ahead", cases);
}
