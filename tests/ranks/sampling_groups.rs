//! Runs that sample on groups of ranks that share every matrix, and what of that is refused.

use super::{EXPERTS, Ran, TINY, config, run, same_on_all, world};
use firebrick_backends::collective::{Settings, Threads};
use firebrick_engine::config::parse;
use firebrick_engine::trainer::Start;
use std::collections::BTreeMap;
use std::path::Path;

const TOGETHER: &str = "rollout.tensor_model_parallel_size=2";

/// Settings under which a difference in the last digits of a gradient stays one in the weights.
const SMOOTH: [&str; 3] = ["optim.eps=1e-3", "optim.lr=1e-3", "update.old_log_probs=trainer"];

fn close(label: &str, found: &Ran, alone: &Ran) {
    assert_eq!(found.metrics.len(), alone.metrics.len(), "{label}");
    for (found, alone) in found.metrics.iter().zip(&alone.metrics) {
        let (found, alone): (BTreeMap<_, _>, BTreeMap<_, _>) =
            (found.iter().cloned().collect(), alone.iter().cloned().collect());
        for key in [
            "response_length/mean",
            "critic/rewards/mean",
            "rollout/prefill_tokens",
            "val-core/arithmetic/reward",
            "actor/pg_loss",
        ] {
            let Some(alone) = alone.get(key) else {
                continue;
            };
            let [found, alone] = [found[key], *alone].map(f64::from_bits);
            let near = (found - alone).abs() <= 1e-5 * alone.abs().max(1.0);
            assert!(near, "{label}: {key} is {found} instead of {alone}");
        }
    }
    for (name, found) in &found.weights {
        for (found, alone) in found.iter().zip(&alone.weights[name]) {
            let [found, alone] = [found, alone].map(|&bits| f64::from_bits(bits));
            let near = (found - alone).abs() <= 2e-5;
            assert!(near, "{label}: {name}: {found} instead of {alone}");
        }
    }
}

/// A model of four heads and two key heads.
const HEADS: &str = "model.arch={model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 4, \
     num_key_value_heads: 2, max_position_embeddings: 32}";

fn runs(folder: &Path, name: &str, size: usize, together: usize, overrides: &[&str]) -> Vec<Ran> {
    let key = format!("rollout.tensor_model_parallel_size={together}");
    let all = [&[HEADS, &key], &SMOOTH[..], overrides].concat();
    let name = format!("{name} {size} {together}");
    world(size, &config(&folder.join(name), &all), Start::Fresh)
}

#[test]
fn runs_that_sample_on_groups_learn_what_runs_learn_whose_ranks_sample_alone() {
    let folders = tempfile::tempdir().unwrap();
    let cases: [(&str, usize, usize, &[&str]); 6] = [
        ("weights shared out", 2, 2, &["memory.zero_stage=3", "memory.gradient_checkpointing=true"]),
        ("two groups, weights away while they sample", 4, 2, &["memory.zero_stage=1", "memory.param_offload=idle"]),
        (
            "one group of four, two of whom share a key head, and sequences",
            4,
            4,
            &["memory.ulysses_sequence_parallel_size=2", "memory.zero_stage=2"],
        ),
        ("a baseline", 2, 2, &["objective.name=remax"]),
        (
            "a critic, its weights shared out, and prompts drawn again",
            2,
            2,
            &[
                "objective.name=ppo",
                "memory.zero_stage=3",
                "memory.reshard_after_forward=false",
                "rollout.dynamic_sampling={enable: true, max_num_gen_batches: 2}",
            ],
        ),
        (
            "a value head, sampled at a temperature",
            2,
            2,
            &["objective.name=ppo", "critic.shared_trunk=true", "rollout.temperature=0.8", "rollout.top_k=7"],
        ),
    ];
    for (name, size, together, overrides) in cases {
        let found = runs(folders.path(), name, size, together, overrides);
        same_on_all(&found);
        let apart = runs(folders.path(), name, size, 1, overrides);
        close(name, &found[0], &apart[0]);
    }
}

#[test]
fn adapters_are_sampled_from_on_groups_and_a_rerun_is_the_same_to_the_bit() {
    let folders = tempfile::tempdir().unwrap();
    runs(folders.path(), "base", 2, 1, &["trainer.steps=2"]);
    let base = folders.path().join("base 2 1/checkpoints/step-000002/model");
    let model = format!("model={{path: {}, lora: {{rank: 2}}}}", base.display());
    let run = |name: &str, together: usize| {
        let key = format!("rollout.tensor_model_parallel_size={together}");
        let all = [&[&*model, &key, "memory.zero_stage=3", "memory.gradient_checkpointing=true"], &SMOOTH[..]].concat();
        world(2, &config(&folders.path().join(name), &all), Start::Fresh)
    };
    let (found, again, apart) = (run("a", 2), run("b", 2), run("c", 1));
    same_on_all(&found);
    assert_eq!(found, again);
    close("adapters", &found[0], &apart[0]);
}

/// What the first of so many ranks says of a run that is refused.
fn refused(size: usize, overrides: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let config = config(&folder.path().join("run"), overrides);
    let said = Threads::run(size, Settings::default(), |rank| {
        run(config.clone(), Start::Fresh, rank).unwrap_err().to_string()
    });
    said.into_iter().next().unwrap().unwrap()
}

#[test]
fn groups_that_cannot_sample_together_are_refused_before_anything_is_loaded() {
    let key = |degree: usize| format!("rollout.tensor_model_parallel_size={degree}");
    let experts = [&EXPERTS[..1], &[TOGETHER]].concat();
    let cases: [(usize, &[&str], &str); 6] = [
        (3, &[TOGETHER], "this run's 3 ranks"),
        (1, &[TOGETHER], "this run's 1 ranks"),
        (4, &[&key(4)], "attention has 2 heads; set it to a number that divides 2"),
        (2, &experts, "layer 0 has 4 experts"),
        (2, &[TOGETHER, "rollout.quantization=int8"], "remove rollout.quantization"),
        (
            2,
            &[
                TOGETHER,
                "task={kind: calculator}",
                "rollout.prompt_length=1000",
                "model.arch={model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2, \
                 max_position_embeddings: 2000}",
            ],
            "would run the task's environments; set it to 1",
        ),
    ];
    for (size, overrides, part) in cases {
        let message = refused(size, overrides);
        assert!(message.contains("rollout.tensor_model_parallel_size"), "{message}");
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
    let none = parse(TINY, &[key(0)]).unwrap_err().to_string();
    assert!(none.contains("must be at least 1"), "{none}");
}

#[test]
fn a_plan_for_ranks_that_sample_together_runs_on_such_alone() {
    let folders = tempfile::tempdir().unwrap();
    let made = config(&folders.path().join("made"), &[TOGETHER, "memory.zero_stage=1"]);
    let ran = world(2, &made, Start::Fresh);
    let plan = format!("memory.plan={}", made.output.join("plan.json").display());
    let again = config(&folders.path().join("again"), &[&plan, TOGETHER]);
    assert!(world(2, &again, Start::Fresh)[1].weights == ran[0].weights);
    let message = refused(2, &[&plan]);
    assert!(
        message.contains("tensor 2 in sampling")
            && message.contains("rollout.tensor_model_parallel_size is 1; set it to 2"),
        "{message}"
    );
}
