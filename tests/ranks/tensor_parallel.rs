//! Runs whose matrices ranks share in training (tensor parallelism), and what of that is refused.

use super::{EXPERTS, Ran, StopAfter, config, run, world};
use burn::tensor::Device;
use firebrick_backends::collective::{Settings, Threads};
use firebrick_engine::config::RunConfig;
use firebrick_engine::trainer::{Start, Trainer};
use firebrick_models::Checkpoint;
use std::collections::BTreeMap;
use std::path::Path;

const SHARED: &str = "memory.tensor_model_parallel_size=2";
const TOGETHER: &str = "rollout.tensor_model_parallel_size=2";

/// Settings under which a difference in the last digits of a gradient stays one in the weights.
const SMOOTH: [&str; 4] = [
    "optim.eps=1e-3",
    "optim.lr=1e-3",
    "update.old_log_probs=trainer",
    "model.arch={model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 4, \
     num_key_value_heads: 2, max_position_embeddings: 32}",
];

/// What ranks came to that have unlike parts of the weights: the same metrics.
pub fn alike(ranks: &[Ran]) {
    for (rank, other) in ranks.iter().enumerate() {
        assert_eq!(other.metrics, ranks[0].metrics, "rank {rank}");
        assert!(!other.metrics.is_empty() && !other.weights.is_empty());
    }
}

/// The weights of a folder of a run.
fn saved(run: &Path, folder: &str) -> BTreeMap<String, Vec<f64>> {
    let checkpoint = Checkpoint::open(&run.join(folder)).unwrap();
    let decoder = checkpoint.load(&Device::flex()).unwrap();
    let weights = decoder.params().map(|(spec, value)| {
        let values = value.download().unwrap().to_f64();
        (spec.name.clone(), values)
    });
    weights.collect()
}

pub const LAST: &str = "checkpoints/step-000004/model";

pub fn close(label: &str, found: &Path, expected: &Path, folder: &str) {
    let (found, expected) = (saved(found, folder), saved(expected, folder));
    assert!(found.keys().eq(expected.keys()), "{label}");
    for (name, found) in &found {
        assert_eq!(found.len(), expected[name].len(), "{label}: {name}");
        for (found, expected) in found.iter().zip(&expected[name]) {
            let near = (found - expected).abs() <= 2e-5;
            assert!(near, "{label}: {name}: {found} instead of {expected}");
        }
    }
}

pub fn made(folder: &Path, name: &str, overrides: &[&str]) -> RunConfig {
    let all = [&SMOOTH[..], overrides].concat();
    config(&folder.join(name), &all)
}

/// How a case is called, its ranks, its overrides, and those that divide its work.
pub type Case<'a> = (&'a str, usize, &'a [&'a str], &'a [&'a str]);

/// Runs each case on one rank, and twice on several: these learn what one learns, and the same to the bit.
pub fn learn_as_one_rank_and_repeat(folder: &Path, cases: &[Case<'_>]) {
    for &(name, size, overrides, divided) in cases {
        let alone = made(folder, &format!("{name} alone"), overrides);
        world(1, &alone, Start::Fresh);
        let divided = [overrides, divided].concat();
        let [a, b] = ["a", "b"].map(|run| {
            let config = made(folder, &format!("{name} {run}"), &divided);
            (world(size, &config, Start::Fresh), config.output)
        });
        alike(&a.0);
        assert_eq!(a.0, b.0, "{name}: a rerun");
        close(name, &a.1, &alone.output, LAST);
        if overrides.contains(&"objective.kl_loss_coef=0.1") {
            close(name, &a.1, &alone.output, "reference");
        }
        if overrides.contains(&"objective.name=ppo") && !overrides.contains(&"critic.shared_trunk=true") {
            let critic = "checkpoints/step-000004/trainer/critic/model";
            close(name, &a.1, &alone.output, critic);
        }
    }
}

#[test]
fn runs_that_share_matrices_learn_what_one_rank_learns_and_repeat_to_the_bit() {
    let folders = tempfile::tempdir().unwrap();
    let cases: [Case<'_>; 6] = [
        ("grpo", 2, &[], &[TOGETHER]),
        (
            "a reference, two groups, ranks that sample alone",
            4,
            &["objective.kl_loss_coef=0.1"],
            &["memory.zero_stage=1"],
        ),
        (
            "a critic, weights shared out, one group of four that samples",
            4,
            &["objective.name=ppo"],
            &["rollout.tensor_model_parallel_size=4", "memory.zero_stage=3", "memory.gradient_checkpointing=true"],
        ),
        (
            "a value head",
            2,
            &["objective.name=ppo", "critic.shared_trunk=true"],
            &[TOGETHER, "memory.param_offload=idle"],
        ),
        (
            "a loss of sequences, gradients shared out",
            4,
            &["objective.name=gspo", "memory.packing=padded"],
            &[TOGETHER, "memory.zero_stage=2"],
        ),
        (
            "four ranks, two of whom share a key head",
            4,
            &["objective.name=remax"],
            &["memory.tensor_model_parallel_size=4", "rollout.tensor_model_parallel_size=4"],
        ),
    ];
    for (name, size, overrides, shared) in cases {
        let shared = [&[SHARED], shared].concat();
        learn_as_one_rank_and_repeat(folders.path(), &[(name, size, overrides, &shared)]);
    }
}

#[test]
fn a_checkpoint_of_any_ranks_that_share_matrices_is_continued_by_any_others() {
    let folders = tempfile::tempdir().unwrap();
    let whole = made(folders.path(), "whole", &[]);
    world(1, &whole, Start::Fresh);
    let meshes: [(usize, &[&str]); 5] = [
        (1, &[]),
        (2, &[SHARED, TOGETHER]),
        (4, &[SHARED, TOGETHER]),
        (4, &[SHARED, TOGETHER, "memory.zero_stage=2"]),
        (2, &["memory.zero_stage=1"]),
    ];
    // each is continued by the next one, and the second and third by themselves
    let pairs = (0..meshes.len()).map(|at| (at, (at + 1) % meshes.len()));
    for (from, to) in pairs.chain([(1, 1), (3, 3), (0, 3)]) {
        let name = format!("{from} {to}");
        let (size, overrides) = meshes[from];
        let cut = made(folders.path(), &name, overrides);
        let stopped = Threads::run(size, Settings::default(), |rank| {
            let stopping = Trainer::builder(cut.clone()).observer(StopAfter(2)).world(rank);
            stopping.build().unwrap().run().unwrap().steps
        });
        assert!(stopped.iter().all(|steps| *steps == Ok(2)));
        let (size, overrides) = meshes[to];
        let resumed = made(folders.path(), &name, overrides);
        let ran = world(size, &resumed, Start::Resume);
        alike(&ran);
        assert_eq!(ran[0].steps, 4);
        close(&name, &resumed.output, &whole.output, LAST);
    }
}

#[test]
fn adapters_are_trained_saved_and_resumed_on_ranks_that_share_matrices() {
    let folders = tempfile::tempdir().unwrap();
    let base = made(folders.path(), "base", &["trainer.steps=2"]);
    world(1, &base, Start::Fresh);
    let base = base.output.join("checkpoints/step-000002/model");
    let model = format!("model={{path: {}, lora: {{rank: 2, merge: true}}}}", base.display());
    let run = |name: &str, overrides: &[&str]| {
        let all = [&SMOOTH[..3], &[&model], overrides].concat();
        config(&folders.path().join(name), &all)
    };
    let alone = run("alone", &[]);
    world(1, &alone, Start::Fresh);
    let shared = run("shared", &[SHARED, TOGETHER]);
    alike(&world(2, &shared, Start::Fresh));
    let merged = "checkpoints/step-000004/merged";
    close("adapters", &shared.output, &alone.output, merged);
    let cut = run("cut", &[SHARED, TOGETHER]);
    Threads::run(2, Settings::default(), |rank| {
        let stopping = Trainer::builder(cut.clone()).observer(StopAfter(2)).world(rank);
        stopping.build().unwrap().run().unwrap();
    });
    alike(&world(
        4,
        &run("cut", &[SHARED, TOGETHER, "memory.zero_stage=3", "memory.gradient_checkpointing=true"]),
        Start::Resume,
    ));
    close("resumed adapters", &cut.output, &alone.output, merged);
}

/// What the first of so many ranks says of a run that is refused.
pub fn refused(size: usize, overrides: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let config = config(&folder.path().join("run"), overrides);
    let said = Threads::run(size, Settings::default(), |rank| {
        run(config.clone(), Start::Fresh, rank).unwrap_err().to_string()
    });
    said.into_iter().next().unwrap().unwrap()
}

#[test]
fn what_ranks_that_share_matrices_do_not_do_is_refused_before_anything_is_loaded() {
    let experts = [&EXPERTS[..1], &[SHARED]].concat();
    let adapted = "model={path: none, lora: {rank: 2, dropout: 0.1}}";
    let cases: [(usize, &[&str], &str); 8] = [
        (3, &[SHARED], "this run's 3 ranks"),
        (1, &[SHARED], "this run's 1 ranks"),
        (4, &["memory.tensor_model_parallel_size=4"], "attention has 2 heads; set it to a number that divides 2"),
        (2, &experts, "layer 0 has 4 experts"),
        (2, &[SHARED, "memory.ulysses_sequence_parallel_size=2"], "set one of them to 1"),
        (2, &[SHARED, "memory.step_in_backward=true", "optim.clip_grad=null"], "memory.step_in_backward"),
        (
            2,
            &[
                SHARED,
                "model.arch={model_type: llama, hidden_size: 16, intermediate_size: 33, num_hidden_layers: 1, num_attention_heads: 2, \
                 max_position_embeddings: 32}",
            ],
            "its MLP is 33 wide; set it to a number that divides 33",
        ),
        (2, &[SHARED, "rollout.tensor_model_parallel_size=3"], "rollout.tensor_model_parallel_size: 3"),
    ];
    for (size, overrides, part) in cases {
        let message = refused(size, overrides);
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
    let folders = tempfile::tempdir().unwrap();
    let base = config(&folders.path().join("base"), &["trainer.steps=2"]);
    world(1, &base, Start::Fresh);
    let base = base.output.join("checkpoints/step-000002/model");
    let adapted = adapted.replace("none", &base.display().to_string());
    let message = refused(2, &[SHARED, &adapted]);
    assert!(message.contains("set model.lora.dropout to 0"), "{message}");
}

#[test]
fn an_error_of_one_rank_ends_the_run_of_all_that_share_matrices() {
    let folders = tempfile::tempdir().unwrap();
    let config = config(&folders.path().join("run"), &[SHARED, TOGETHER]);
    let ended = Threads::run(4, Settings::default(), |rank| {
        let own = rank.rank();
        let stopping = Trainer::builder(config.clone()).world(rank);
        let mut trainer = stopping.build().unwrap();
        if own == 3 {
            return "gone".to_owned();
        }
        trainer.run().unwrap_err().to_string()
    });
    for (rank, message) in ended.into_iter().enumerate() {
        let message = message.unwrap();
        assert!(rank == 3 || message.contains("rank 3"), "{message}");
    }
}

#[test]
fn a_plan_for_ranks_that_share_matrices_runs_on_such_alone() {
    let folders = tempfile::tempdir().unwrap();
    let made = config(&folders.path().join("made"), &[SHARED, TOGETHER, "memory.zero_stage=1"]);
    let ran = world(4, &made, Start::Fresh);
    let plan = format!("memory.plan={}", made.output.join("plan.json").display());
    let again = config(&folders.path().join("again"), &[&plan, SHARED, TOGETHER]);
    assert!(world(4, &again, Start::Fresh)[1].weights == ran[1].weights);
    let message = refused(4, &[&plan]);
    assert!(
        message.contains("was made for 4 devices: data 2 (ZeRO-1) x tensor 2")
            && message.contains("memory.tensor_model_parallel_size is 1; set it to 2"),
        "{message}"
    );
    let message = refused(4, &[&plan, SHARED]);
    assert!(message.contains("rollout.tensor_model_parallel_size is 1; set it to 2"), "{message}");
}
