//! Ranks that share every matrix in training (tensor parallelism) against one rank that has all of them, in f64.

use firebrick_arch::TensorShare;
use firebrick_backends::collective::OperationKind;
use firebrick_engine::objective::value::ValueLoss;
use firebrick_models::Decoder;
use firebrick_models::arch::QkNorm;
use firebrick_models::unit::Slot;

use super::critic::critics;
use super::plans::{TOLERANCE, models as with_rows, objective};
use super::sequence_parallel::{CUTS, Task, assert_learnt_alike, is_campaign, of_sequences};
use crate::support::meshes::{SHARED_MATRICES, SharedSequences};
use crate::support::model::Model;
use crate::support::zero::{
    TECHNIQUES, UPDATES, alone, assert_same, on_ranks, packed, rows, settings, with_adapters, with_dropped_adapters,
};
use crate::support::{checked, folders};

/// The parts of a matrix are quantised in blocks of their own.
const BY_BLOCKS: &str = "8-bit moments";

/// Models that two ranks share: CI takes one of grouped key heads, one with biases and tied ends, one with norms after
/// the halves and of each head, one with one key head, and one with a soft-cap; the campaign all.
fn models() -> Vec<Model> {
    let dirs = folders("models").into_iter();
    let dirs = dirs.filter(|dir| dir.join("golden/grads.safetensors").is_file());
    let models = dirs.map(|dir| Model::load(&dir)).filter(|model| {
        let sample = ["llama-gqa", "qwen2-tied", "gemma3", "mistral-window", "gemma2"];
        let sample = sample.contains(&model.name.as_str());
        let local = is_campaign() && model.manifest.is_local();
        (local || sample) && TensorShare::check_training(model.decoder.arch(), 2).is_ok()
    });
    let mut models: Vec<Model> = models.collect();
    // the first one is what single tests take
    models.sort_by_key(|model| model.name != "llama-gqa");
    models
}

/// The groups that a model's heads can be divided over.
fn cases(model: &Model) -> Vec<SharedSequences> {
    let heads = model.decoder.arch().num_heads;
    let all = SHARED_MATRICES.into_iter();
    all.filter(|(_, _, share)| {
        let mut memory = settings(|_| {});
        share(&mut memory);
        heads.is_multiple_of(memory.tensor_model_parallel_size)
    })
    .collect()
}

/// How many runs are as one rank's.
fn compare(model: &Model, name: &str, sample: &[&str]) -> usize {
    let rows = rows(model);
    let mut found = 0;
    for (technique, turn_on) in TECHNIQUES.into_iter().chain(CUTS) {
        if technique == BY_BLOCKS || !is_campaign() && !sample.contains(&technique) {
            continue;
        }
        let plain = packed(turn_on);
        let expected = alone(model, &rows, &plain, Some(1.0));
        for (ranks, size, share) in cases(model) {
            let mut memory = plain.clone();
            share(&mut memory);
            let label = format!("{}{name}, {technique}, {ranks}", model.name);
            let trained = on_ranks(model, &rows, &memory, Some(1.0), size);
            assert_same(&label, &memory, &trained, &expected, TOLERANCE);
            found += 1;
        }
    }
    found
}

#[test]
fn ranks_that_share_matrices_train_what_one_rank_trains() {
    let mut cases = 0;
    for (i, model) in models().into_iter().enumerate() {
        let sample = [
            &["plain", "every layer checkpointed", "padded rows"][..],
            &["plain", "a head of five rows"],
            &["weights streamed, segment by segment"],
            &["three queries at a time"],
            &["updated on the host", "gradients on the host"],
        ];
        cases += compare(&model, "", sample[i % sample.len()]);
        if i == 0 || is_campaign() {
            let adapted = with_adapters(model);
            cases += compare(&adapted, " with adapters", &["plain"]);
        }
    }
    checked("runs that share matrices", cases);
}

#[test]
fn a_rerun_on_ranks_that_share_matrices_is_the_same_to_the_bit() {
    let model = models().swap_remove(0);
    let rows = rows(&model);
    for (ranks, size, share) in SHARED_MATRICES {
        let mut memory = packed(|_| {});
        share(&mut memory);
        let [found, again] = [(); 2].map(|()| on_ranks(&model, &rows, &memory, None, size).swap_remove(0));
        assert!(found.weights == again.weights, "{ranks}");
        assert!(found.steps == again.steps, "{ranks}");
    }
}

#[test]
fn a_layer_takes_four_sums_and_six_where_it_is_recomputed() {
    let model = models().swap_remove(0);
    let (rows, layers) = (rows(&model), model.decoder.arch().num_layers as u64);
    for recomputed in [false, true] {
        let mut memory = settings(|_| {});
        memory.gradient_checkpointing = recomputed;
        memory.tensor_model_parallel_size = 2;
        let sums = if recomputed { 6 } else { 4 };
        for rank in on_ranks(&model, &rows, &memory, None, 2) {
            assert_eq!(rank.micro_batches, rows.len());
            let micros = (UPDATES * rank.micro_batches) as u64;
            let of = |kind: OperationKind| rank.shared[kind as usize];
            // the embedding has one, and the head one of its gradient and a gather of its scores
            let expected = micros * (sums * layers + 2);
            assert_eq!(of(OperationKind::AllReduce), expected, "{recomputed}");
            assert_eq!(of(OperationKind::AllGather), micros, "{recomputed}");
            assert_eq!(of(OperationKind::AllToAll), 0);
        }
    }
}

#[test]
fn losses_of_tokens_sequences_and_values_are_one_ranks() {
    let (mut cases, sample) = (0, ["llama-gqa", "gemma3"]);
    for (model, rows) in with_rows() {
        if sample.contains(&model.name.as_str()) {
            let case = (&model, &rows[..]);
            let task = Task::Policy(objective());
            cases += assert_learnt_alike(case, "tokens", &task, &SHARED_MATRICES);
            let task = Task::Policy(of_sequences());
            cases += assert_learnt_alike(case, "sequences", &task, &SHARED_MATRICES[1..2]);
        }
    }
    for (model, rows) in critics() {
        if model.name == "llama-gqa" {
            let task = Task::Critic(ValueLoss { clip_range: 0.05 });
            let case = (&model, &rows[..]);
            cases += assert_learnt_alike(case, "values", &task, &SHARED_MATRICES);
        }
    }
    checked("losses over shared matrices", cases);
}

fn refused(decoder: &Decoder, ranks: usize) -> String {
    let share = TensorShare::new(0, ranks);
    decoder.training_shard(share).unwrap_err().to_string()
}

#[test]
fn models_whose_matrices_cannot_be_shared_are_refused_by_name() {
    let model = |name: &str| {
        let found = with_rows().into_iter().find(|(model, _)| model.name == name);
        found.expect("a model with gradients").0
    };
    for (name, ranks, part) in [
        ("gemma2", 4, "attention has 2 heads"),
        ("qwen3_5", 2, "gated DeltaNet"),
        ("qwen3-moe", 2, "experts"),
        ("olmo3", 2, "span all heads"),
    ] {
        let message = refused(&model(name).decoder, ranks);
        assert!(message.contains("memory.tensor_model_parallel_size"), "{message}");
        assert!(message.contains(part), "{part}: {message}");
    }
    let dropped = with_dropped_adapters(model("llama-gqa"), 0.1);
    let message = refused(&dropped.decoder, 2);
    assert!(message.contains("set model.lora.dropout to 0"), "{message}");
}

#[test]
fn a_rank_holds_its_share_of_the_matrices_and_norms_whole() {
    for model in models() {
        let whole = &model.decoder;
        assert!(whole.arch().qk_norm != Some(QkNorm::Projection));
        let ranks = 2;
        let shares: Vec<Decoder> = (0..ranks)
            .map(|rank| whole.training_shard(TensorShare::new(rank, ranks)))
            .collect::<Result<_, _>>()
            .unwrap();
        for (index, spec) in whole.specs().enumerate() {
            let own = shares[0].specs().nth(index).unwrap();
            assert_eq!(own.trainable, spec.trainable);
            let shared = matches!(spec.slot, Slot::Q | Slot::O | Slot::Gate | Slot::Up | Slot::Down | Slot::Embedding);
            if shared {
                assert_eq!(own.numel() * ranks, spec.numel(), "{}", spec.name);
            }
        }
        let parts = |unit: usize| {
            let all = shares.iter().map(|share| {
                let range = share.units()[unit].range.clone();
                range.map(|index| share.param(index).download()).collect()
            });
            all.collect::<Result<Vec<Vec<_>>, firebrick_models::Error>>()
        };
        let again = shares[1].assembled(parts).unwrap();
        for ((spec, found), (_, expected)) in again.params().zip(whole.params()) {
            let [found, expected] = [found, expected].map(|value| value.download().unwrap());
            assert!(found.to_f64() == expected.to_f64(), "{}", spec.name);
        }
    }
}
