//! Stages of a model on ranks of their own (pipeline parallelism, 1F1B) against one rank that has all layers, in f64.

use firebrick_arch::PipelineStage;
use firebrick_backends::collective::OperationKind;
use firebrick_engine::objective::value::ValueLoss;

use super::critic::critics;
use super::plans::{TOLERANCE, models as with_rows, objective};
use super::sequence_parallel::{CUTS, Task, assert_learnt_alike, is_campaign, of_sequences};
use crate::support::meshes::{SHARED_LAYERS, SharedSequences};
use crate::support::model::Model;
use crate::support::zero::{
    TECHNIQUES, Trained, UPDATES, alone, assert_same, on_ranks, packed, rows, settings, with_adapters,
    with_dropped_adapters,
};
use crate::support::{assert_gradient, checked, folders};

/// Stages do not take all micro-batches through a segment together.
const BY_SEGMENT: &str = "weights streamed, segment by segment";

/// Models that can be cut into two stages: all that have fixtures in the campaign, a sample with tied and untied ends
/// elsewhere.
fn models() -> Vec<Model> {
    let dirs = folders("models").into_iter();
    let dirs = dirs.filter(|dir| dir.join("golden/grads.safetensors").is_file());
    let models = dirs.map(|dir| Model::load(&dir)).filter(|model| {
        let sample = ["llama-gqa", "qwen2-tied", "gemma3", "olmo3", "qwen3_5"];
        let sample = sample.contains(&model.name.as_str());
        let local = is_campaign() && model.manifest.is_local();
        (local || sample) && PipelineStage::check(model.decoder.arch(), 2).is_ok()
    });
    let mut models: Vec<Model> = models.collect();
    // the first one is what single tests take
    models.sort_by_key(|model| model.name != "llama-gqa");
    models
}

/// The stages that a model has layers for.
fn cases(model: &Model) -> Vec<SharedSequences> {
    let all = SHARED_LAYERS.into_iter();
    all.filter(|(_, _, divide)| {
        let mut memory = settings(|_| {});
        divide(&mut memory);
        PipelineStage::check(model.decoder.arch(), memory.pipeline_model_parallel_size).is_ok()
    })
    .collect()
}

/// Whether the stages' gradients, put together, are those of one rank; those of a matrix that two stages have are the
/// same on both.
fn assert_gradients(label: &str, found: &[Trained], expected: &Trained) {
    for (name, expected) in &expected.gradients {
        let mut stages = found.iter().filter_map(|rank| rank.gradients.get(name));
        let own = stages.next();
        let own = own.unwrap_or_else(|| panic!("{label}: no stage has a gradient of {name}"));
        assert!(stages.all(|other| other == own), "{label}: {name}");
        assert_gradient(&format!("{label}: gradient of {name}"), own, expected, TOLERANCE);
    }
    let known = |name: &String| expected.gradients.contains_key(name);
    assert!(found.iter().flat_map(|rank| rank.gradients.keys()).all(known), "{label}");
}

/// How many runs are as one rank's.
fn compare(model: &Model, name: &str, sample: &[&str]) -> usize {
    let rows = rows(model);
    let mut found = 0;
    for (technique, turn_on) in TECHNIQUES.into_iter().chain(CUTS) {
        let skipped = technique == BY_SEGMENT || technique == "8-bit moments";
        if skipped || !is_campaign() && !sample.contains(&technique) {
            continue;
        }
        for one_by_one in [false, true] {
            let plain = if one_by_one { settings(turn_on) } else { packed(turn_on) };
            let expected = alone(model, &rows, &plain, Some(1.0));
            for (ranks, size, divide) in cases(model) {
                let mut memory = plain.clone();
                divide(&mut memory);
                let label = format!("{}{name}, {technique}, {ranks}", model.name);
                let trained = on_ranks(model, &rows, &memory, Some(1.0), size);
                assert_same(&label, &memory, &trained, &expected, TOLERANCE);
                // those of stages that share out state are shards
                if memory.zero_stage == 0 {
                    assert_gradients(&label, &trained, &expected);
                }
                found += 1;
            }
        }
    }
    found
}

#[test]
fn stages_train_what_one_rank_trains() {
    let mut found = 0;
    let models = models();
    let deepest = models.iter().map(|model| cases(model).len()).max();
    assert_eq!(deepest, Some(SHARED_LAYERS.len()), "a model of four layers");
    for (i, model) in models.into_iter().enumerate() {
        let sample = [
            &["plain", "every layer checkpointed", "padded rows"][..],
            &["plain", "weights streamed"],
            &["inputs on the host", "gradients on the host"],
            &["updated on the host"],
            &["plain", "a head of five rows"],
        ];
        found += compare(&model, "", sample[i % sample.len()]);
        if i == 0 || is_campaign() {
            let adapted = with_adapters(model);
            found += compare(&adapted, " with adapters", &["plain"]);
        }
    }
    checked("runs in stages", found);
}

#[test]
fn gradients_of_an_untied_model_in_stages_are_one_ranks_to_the_bit() {
    let model = models().swap_remove(0);
    assert!(!model.decoder.arch().tied);
    let rows = rows(&model);
    let mut memory = settings(|_| {});
    let expected = alone(&model, &rows, &memory, None);
    memory.pipeline_model_parallel_size = 2;
    let found = on_ranks(&model, &rows, &memory, None, 2);
    let mut compared = 0;
    for rank in &found {
        for (name, gradient) in &rank.gradients {
            assert!(*gradient == expected.gradients[name], "{name}");
            compared += 1;
        }
    }
    assert_eq!(compared, expected.gradients.len());
    // without clipping nothing else is added in another order
    assert!(found[0].weights == expected.weights);
}

#[test]
fn dropped_inputs_of_adapters_are_one_ranks() {
    let model = with_dropped_adapters(models().swap_remove(0), 0.3);
    let rows = rows(&model);
    let mut memory = settings(|_| {});
    let expected = alone(&model, &rows, &memory, None);
    memory.pipeline_model_parallel_size = 2;
    let found = on_ranks(&model, &rows, &memory, None, 2);
    assert_same("dropout", &memory, &found, &expected, TOLERANCE);
    assert_gradients("dropout", &found, &expected);
}

#[test]
fn a_rerun_in_stages_is_the_same_to_the_bit() {
    let model = models().swap_remove(0);
    let rows = rows(&model);
    for (ranks, size, divide) in cases(&model) {
        let mut memory = packed(|_| {});
        divide(&mut memory);
        let [found, again] = [(); 2].map(|()| on_ranks(&model, &rows, &memory, None, size).swap_remove(0));
        assert!(found.weights == again.weights, "{ranks}");
        assert!(found.steps == again.steps, "{ranks}");
    }
}

#[test]
fn a_stage_sends_a_message_a_micro_batch_and_direction_and_a_tied_matrix_once() {
    for model in models() {
        let (rows, arch) = (rows(&model), model.decoder.arch());
        let mut memory = settings(|_| {});
        memory.pipeline_model_parallel_size = 2;
        let tokens: usize = rows.iter().map(|row| row.tokens.len()).sum();
        let passed = UPDATES * rows.len();
        let tied = if arch.tied { UPDATES } else { 0 };
        let numbers = UPDATES * tokens * arch.hidden_size;
        let both = tied * arch.vocab_size * arch.hidden_size;
        for rank in on_ranks(&model, &rows, &memory, None, 2) {
            let kind = OperationKind::Send as usize;
            let sent = [rank.pipeline.operations[kind], rank.pipeline.bytes[kind]];
            let expected = [passed + tied, 8 * (numbers + both)].map(|n| n as u64);
            assert_eq!(sent, expected, "{}", model.name);
        }
    }
}

#[test]
fn a_stage_holds_its_own_weights_gradients_and_moments_alone() {
    let model = models().swap_remove(0);
    let rows = rows(&model);
    let mut memory = settings(|_| {});
    let whole = alone(&model, &rows, &memory, None).held;
    memory.pipeline_model_parallel_size = 2;
    let found = on_ranks(&model, &rows, &memory, None, 2);
    // moments and gradients; all ranks load the whole model
    for (kind, whole) in whole.into_iter().enumerate().take(2) {
        let parts: Vec<u64> = found.iter().map(|rank| rank.held[kind]).collect();
        assert_eq!(parts.iter().sum::<u64>(), whole, "{kind}: {parts:?}");
        assert!(parts.iter().all(|&part| part < whole), "{kind}: {parts:?}");
    }
    let weights: Vec<u64> = found.iter().map(|rank| rank.held[2]).collect();
    assert_eq!(weights.iter().sum::<u64>(), whole[2], "{weights:?}");
}

#[test]
fn losses_of_tokens_sequences_and_values_are_one_ranks() {
    let (mut cases, sample) = (0, ["llama-gqa", "gemma3"]);
    let pipelines = &SHARED_LAYERS[..3];
    for (model, rows) in with_rows() {
        if sample.contains(&model.name.as_str()) {
            let case = (&model, &rows[..]);
            let task = Task::Policy(objective());
            cases += assert_learnt_alike(case, "tokens", &task, pipelines);
            let task = Task::Policy(of_sequences());
            cases += assert_learnt_alike(case, "sequences", &task, &pipelines[1..2]);
        }
    }
    for (model, rows) in critics() {
        if model.name == "llama-gqa" {
            let task = Task::Critic(ValueLoss { clip_range: 0.05 });
            let case = (&model, &rows[..]);
            cases += assert_learnt_alike(case, "values", &task, pipelines);
        }
    }
    checked("losses in stages", cases);
}

#[test]
fn models_that_cannot_be_cut_into_stages_are_refused_by_name() {
    let model = |name: &str| {
        let found = with_rows().into_iter().find(|(model, _)| model.name == name);
        found.expect("a model with gradients").0
    };
    for (name, stages, part) in [("llama-gqa", 9, "layers"), ("qwen3-moe", 2, "experts")] {
        let stage = PipelineStage::new(0, stages);
        let refused = model(name).decoder.with_stage(stage).unwrap_err();
        let message = refused.to_string();
        assert!(message.contains("memory.pipeline_model_parallel_size"), "{message}");
        assert!(message.contains(part), "{part}: {message}");
    }
}
