//! Whole runs on several ranks, which are threads of this process: the same weights, metrics and files as they promise.

mod budget;
mod folders;
mod hangs;
mod messages;
mod out_of_memory;
mod panics;
mod pipeline_parallel;
mod rewards;
mod sampling_groups;
mod sequence_parallel;
mod tensor_parallel;
mod warm_up;
mod written_models;

use firebrick_backends::collective::{Collective, Settings, Solo, Threads};
use firebrick_engine::config::{RunConfig, parse};
use firebrick_engine::metrics::{Control, Event, Metrics, Observer, is_of_a_machine};
use firebrick_engine::trainer::{Start, Trainer};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const TINY: &str = "
model:
  arch: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2,
         max_position_embeddings: 32}
task: {kind: arithmetic, difficulty: 1, partial: true, validation_size: 5}
output: run
device: cpu
rollout: {n: 4, prompt_length: 6, response_length: 4}
update: {ppo_mini_batch_size: 2}
optim: {lr: 1e-2}
trainer: {steps: 4, train_batch_size: 4, seed: 5, test_freq: 2, save_freq: 2}
";

/// The metrics that a rank's observer was told of, without those of its machine.
#[derive(Clone, Default)]
struct Noted(Arc<Mutex<Vec<Metrics>>>);

impl Observer for Noted {
    fn event(&mut self, event: Event<'_>) {
        if let Event::Step { metrics, .. } | Event::Validated { metrics, .. } = event {
            let mut metrics = metrics.clone();
            metrics.retain(|name, _| !is_of_a_machine(name));
            self.0.lock().unwrap().push(metrics);
        }
    }
}

/// What a rank came to.
#[derive(Clone, Debug, PartialEq)]
struct Ran {
    weights: BTreeMap<String, Vec<u64>>,
    /// Names and bits, since NaN is not equal to itself.
    metrics: Vec<Vec<(String, u64)>>,
    steps: u64,
}

fn config(folder: &Path, overrides: &[&str]) -> RunConfig {
    let overrides: Vec<String> = overrides.iter().map(|o| (*o).to_owned()).collect();
    let mut config = parse(TINY, &overrides).unwrap();
    folder.clone_into(&mut config.output);
    config
}

fn run(config: RunConfig, start: Start, ranks: Arc<dyn Collective>) -> firebrick::Result<Ran> {
    let noted = Noted::default();
    let mut trainer = Trainer::builder(config).start(start).observer(noted.clone()).world(ranks).build()?;
    trainer.run()?;
    let metrics = noted.0.lock().unwrap().clone();
    Ok(facts(&mut trainer, metrics))
}

/// The weights of a trainer that has run, beside the metrics that its observer was told of.
fn facts(trainer: &mut Trainer, metrics: Vec<Metrics>) -> Ran {
    let policy = trainer.whole_policy().unwrap();
    let weights = policy.params().map(|(spec, value)| {
        let values = value.download().unwrap().to_f64();
        (spec.name.clone(), values.into_iter().map(f64::to_bits).collect())
    });
    let bits = |m: Metrics| m.into_iter().map(|(name, v)| (name, v.to_bits())).collect();
    Ran {
        weights: weights.collect(),
        metrics: metrics.into_iter().map(bits).collect(),
        steps: trainer.finished_steps(),
    }
}

/// The run of a world: every rank's.
fn world(size: usize, config: &RunConfig, start: Start) -> Vec<Ran> {
    let ranks = Threads::run(size, Settings::default(), |rank| {
        run(config.clone(), start, rank).unwrap_or_else(|error| panic!("{error}"))
    });
    ranks.into_iter().map(|rank| rank.unwrap()).collect()
}

fn same_on_all(ranks: &[Ran]) {
    for (rank, other) in ranks.iter().enumerate() {
        assert_eq!(other.metrics, ranks[0].metrics, "rank {rank}");
        assert!(other.weights == ranks[0].weights, "weights of rank {rank}");
        assert!(!other.metrics.is_empty() && !other.weights.is_empty());
    }
}

#[test]
fn values_over_nccl_are_refused_on_cpus_by_name_and_nobody_else_minds() {
    let folders = tempfile::tempdir().unwrap();
    let one_step = |name: &str, backend: &str| {
        let own = format!("trainer.ddp_backend={backend}");
        let overrides = [own.as_str(), "trainer.steps=1", "trainer.save_freq=-1"];
        config(&folders.path().join(name), &overrides)
    };
    let asked = one_step("nccl", "nccl");
    let refused =
        Threads::run(2, Settings::default(), |rank| run(asked.clone(), Start::Fresh, rank).unwrap_err().to_string());
    for rank in refused {
        let said = rank.unwrap();
        assert!(said.contains("trainer.ddp_backend: nccl is unavailable"), "{said}");
        assert!(said.contains("set `device: cuda`"), "{said}");
    }
    let [auto, mpi] = ["auto", "mpi"].map(|backend| {
        let ranks = world(2, &one_step(backend, backend), Start::Fresh);
        same_on_all(&ranks);
        ranks
    });
    assert!(auto[0].weights == mpi[0].weights);
    // one rank alone sends nothing
    let alone = one_step("alone", "nccl");
    run(alone, Start::Fresh, Arc::new(Solo)).unwrap();
}

#[test]
fn ranks_hold_the_same_weights_and_metrics_and_a_rerun_is_the_same_to_the_bit() {
    let folders = tempfile::tempdir().unwrap();
    for size in [2, 4] {
        let folder = |name: &str| folders.path().join(format!("{name}{size}"));
        let runs = ["a", "b"].map(|name| {
            let config = config(&folder(name), &["trainer.steps=20", "trainer.save_freq=20"]);
            world(size, &config, Start::Fresh)
        });
        same_on_all(&runs[0]);
        assert!(runs[0] == runs[1], "{size} ranks, a rerun");
        let [first, second] = ["a", "b"].map(|name| state(&folder(name)));
        assert!(first.values().map(Vec::len).sum::<usize>() > 10_000);
        assert!(first == second, "{size} ranks, the optimizer's state of a rerun");
        let summary = std::fs::read(folder("a").join("summary.json")).unwrap();
        let summary: serde_json::Value = serde_json::from_slice(&summary).unwrap();
        let peaks = summary["rank_peak_bytes"].as_array().unwrap();
        assert_eq!(peaks.len(), size, "the peak of every rank");
        assert!(peaks.contains(&summary["measured_peak_bytes"]));
    }
}

/// The files of the optimizer's state in a run's checkpoints, by their paths.
fn state(run: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut folders = vec![run.join("checkpoints")];
    let mut found = BTreeMap::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if path.is_dir() {
                folders.push(path);
            } else if name.starts_with("optimizer") {
                let bytes = std::fs::read(&path).unwrap();
                found.insert(path.strip_prefix(run).unwrap().to_owned(), bytes);
            }
        }
    }
    found
}

/// A mixture of experts whose tokens are trained on by the experts that they were sampled with.
const EXPERTS: [&str; 3] = [
    "model.arch={model_type: qwen3_moe, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2, \
     head_dim: 8, max_position_embeddings: 32, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 8}",
    "rollout.router_replay=true",
    "update.old_log_probs=trainer",
];

#[test]
fn the_first_step_on_ranks_has_the_rollouts_losses_and_gradients_of_one_rank() {
    begins_as_one_rank_does(&[], &[]);
}

#[test]
fn experts_load_and_train_on_ranks_as_on_one() {
    let keys = ["rollout/expert_load_max", "rollout/expert_load_min", "rollout/rerouted"];
    begins_as_one_rank_does(&EXPERTS, &keys);
    // routers choose anew where routes are not replayed, the same on every rank
    let chosen = [EXPERTS[0], EXPERTS[2]];
    begins_as_one_rank_does(&chosen, &keys);
}

fn begins_as_one_rank_does(overrides: &[&str], more: &[&str]) {
    let folders = tempfile::tempdir().unwrap();
    let first_step = |size: usize| {
        let config = config(&folders.path().join(size.to_string()), overrides);
        let metrics = world(size, &config, Start::Fresh).swap_remove(0).metrics;
        let mut steps = metrics.into_iter().map(BTreeMap::from_iter);
        let step: BTreeMap<String, u64> = steps.find(|step| step.contains_key("actor/pg_loss")).unwrap();
        step
    };
    let alone = first_step(1);
    for size in [2, 4] {
        let found = first_step(size);
        let keys = [
            "prompt_length/mean",
            "response_length/mean",
            "critic/rewards/mean",
            "critic/advantages/max",
            "actor/entropy",
            "actor/pg_loss",
            "actor/grad_norm",
        ];
        for key in keys.iter().chain(more) {
            let [found, alone] = [&found, &alone].map(|step| f64::from_bits(step[*key]));
            let near = (found - alone).abs() <= 1e-5 * alone.abs().max(1e-2);
            assert!(near, "{key} on {size} ranks: {found} instead of {alone}");
        }
    }
}

#[test]
fn other_algorithms_and_models_run_on_ranks_too() {
    let folders = tempfile::tempdir().unwrap();
    let trained = folders.path().join("kl/checkpoints/step-000004/model");
    let adapted = format!("model={{path: {}, lora: {{rank: 2, dropout: 0.1}}}}", trained.display());
    let balanced = [&EXPERTS[..], &["model.router_aux_loss_coef=0.01"]].concat();
    let sharded = [&EXPERTS[..], &["memory.zero_stage=2"]].concat();
    let cases: [(&str, &[&str]); 6] = [
        ("experts", &balanced),
        ("experts that are shared out", &sharded),
        ("ppo", &["objective.name=ppo", "critic.warmup=1"]),
        ("kl", &["objective.kl_loss_coef=0.1", "update.old_log_probs=trainer"]),
        ("lora", &[&adapted]),
        ("remax", &["objective.name=remax"]),
    ];
    for (name, overrides) in cases {
        let config = config(&folders.path().join(name), overrides);
        same_on_all(&world(2, &config, Start::Fresh));
    }
}

/// Runs that share out state, by name: what is trained, and what is shared out.
const SHARED: [(&str, &[&str]); 5] = [
    ("ppo", &["objective.name=ppo", "memory.zero_stage=1", "memory.optimizer_offload=idle"]),
    ("moments in 8 bits", &["memory.zero_stage=2", "memory.moments=block8"]),
    (
        "kl",
        &[
            "objective.kl_loss_coef=0.1",
            "update.old_log_probs=trainer",
            "memory.zero_stage=3",
            "memory.gradient_checkpointing=true",
        ],
    ),
    (
        "a value head beside the policy, weights too",
        &[
            "objective.name=ppo",
            "critic.shared_trunk=true",
            "memory.zero_stage=3",
            "memory.gradient_checkpointing=true",
        ],
    ),
    (
        "ppo, weights too",
        &[
            "objective.name=ppo",
            "memory.zero_stage=3",
            "memory.reshard_after_forward=false",
            "memory.optimizer_offload=cpu",
        ],
    ),
];

#[test]
fn runs_that_share_out_state_begin_as_one_rank_does_and_resume_to_the_bit() {
    let folders = tempfile::tempdir().unwrap();
    for (name, overrides) in SHARED {
        let config = |size: usize, cut: &str| config(&folders.path().join(format!("{name} {size}{cut}")), overrides);
        let first = |ran: &Ran| -> BTreeMap<String, u64> {
            let mut steps = ran.metrics.iter().cloned().map(BTreeMap::from_iter);
            steps.find(|step| step.contains_key("actor/pg_loss")).unwrap()
        };
        let alone = first(&world(1, &config(1, ""), Start::Fresh)[0]);
        let whole = world(2, &config(2, ""), Start::Fresh);
        same_on_all(&whole);
        let found = first(&whole[0]);
        for key in ["actor/pg_loss", "actor/grad_norm", "critic/rewards/mean"] {
            let [found, alone] = [&found, &alone].map(|step| f64::from_bits(step[key]));
            let near = (found - alone).abs() <= 1e-5 * alone.abs().max(1e-2);
            assert!(near, "{name}: {key} on 2 ranks: {found} instead of {alone}");
        }
        for size in [2, 4] {
            let cut = config(size, " cut");
            let stopped = Threads::run(size, Settings::default(), |rank| {
                let stopping = Trainer::builder(cut.clone()).observer(StopAfter(2)).world(rank);
                stopping.build().unwrap().run().unwrap().steps
            });
            assert!(stopped.iter().all(|steps| *steps == Ok(2)));
            let trainer = cut.output.join("checkpoints/step-000002/trainer");
            assert!(trainer.join("optimizer.index.json").is_file());
            assert!(!trainer.join("optimizer.safetensors").exists());
            // on the same ranks, and what four ranks have written on one
            let resumed = world(if size == 2 { 2 } else { 1 }, &cut, Start::Resume);
            same_on_all(&resumed);
            assert_eq!(resumed[0].steps, 4);
            if size == 2 {
                assert!(resumed[0].weights == whole[0].weights, "{name}");
            }
        }
    }
}

#[test]
fn a_plan_that_shares_out_state_runs_on_as_many_ranks() {
    let folders = tempfile::tempdir().unwrap();
    let made = config(&folders.path().join("made"), &["memory.zero_stage=2"]);
    let made = (world(2, &made, Start::Fresh), made.output.join("plan.json"));
    let text = std::fs::read_to_string(&made.1).unwrap();
    assert!(text.contains("stage2"), "{text}");
    let plan = format!("memory.plan={}", made.1.display());
    let again = config(&folders.path().join("again"), &[&plan]);
    let again = world(2, &again, Start::Fresh);
    same_on_all(&again);
    assert!(again[0].weights == made.0[0].weights);
}

#[test]
fn a_plan_for_another_number_of_ranks_is_refused() {
    let folders = tempfile::tempdir().unwrap();
    let plan = folders.path().join("plan.json");
    std::fs::write(&plan, r#"{"parallel": {"data": 4, "zero": "stage1"}}"#).unwrap();
    let plan = format!("memory.plan={}", plan.display());
    let config = config(&folders.path().join("run"), &[&plan]);
    for error in
        Threads::run(2, Settings::default(), |rank| run(config.clone(), Start::Fresh, rank).unwrap_err().to_string())
    {
        let message = error.unwrap();
        assert!(message.contains("was made for 4 devices"), "{message}");
    }
}

#[test]
fn fewer_prompts_than_ranks_are_no_hang() {
    let folders = tempfile::tempdir().unwrap();
    let overrides = ["trainer.train_batch_size=1", "update.ppo_mini_batch_size=1", "rollout.n=2"];
    let config = config(&folders.path().join("run"), &overrides);
    let ranks = world(4, &config, Start::Fresh);
    same_on_all(&ranks);
    assert_eq!(ranks[3].steps, 4);
}

#[test]
fn a_run_on_ranks_goes_on_from_its_checkpoint_as_if_nothing_had_happened() {
    let folders = tempfile::tempdir().unwrap();
    let whole = world(2, &config(&folders.path().join("whole"), &[]), Start::Fresh);
    let cut = folders.path().join("cut");
    let ranks = Threads::run(2, Settings::default(), |rank| {
        let stopping = Trainer::builder(config(&cut, &[])).observer(StopAfter(2)).world(rank);
        stopping.build().unwrap().run().unwrap().steps
    });
    assert_eq!(ranks, [Ok(2), Ok(2)]);
    let resumed = world(2, &config(&cut, &[]), Start::Resume);
    assert!(resumed[1].weights == whole[1].weights);
    let lines = std::fs::read_to_string(cut.join("metrics.jsonl")).unwrap();
    // the line before the first step, and one a step
    assert_eq!(lines.lines().count(), 5);
}

/// Stops the run after some steps; asked on rank 0 alone.
struct StopAfter(usize);

impl Observer for StopAfter {
    fn event(&mut self, _event: Event<'_>) {}

    fn control(&mut self) -> Control {
        self.0 = self.0.saturating_sub(1);
        if self.0 == 0 { Control::Stop } else { Control::Continue }
    }
}

#[test]
fn an_error_of_one_rank_ends_the_run_of_all_with_its_name() {
    let folders = tempfile::tempdir().unwrap();
    let config = config(&folders.path().join("run"), &[]);
    let errors = Threads::run(3, Settings::default(), |rank| {
        let mut own = config.clone();
        if rank.rank() == 2 {
            // another run: found before anything is sampled
            own.optim.lr = 5e-3;
        }
        run(own, Start::Fresh, rank).unwrap_err().to_string()
    });
    for error in errors {
        let message = error.unwrap();
        assert!(message.contains("the configuration of rank 2"), "{message}");
    }
}

#[test]
fn a_world_of_another_size_than_the_configuration_says_is_refused() {
    let folders = tempfile::tempdir().unwrap();
    let overrides = ["trainer.nnodes=2", "trainer.n_gpus_per_node=2"];
    let config = config(&folders.path().join("run"), &overrides);
    let errors =
        Threads::run(2, Settings::default(), |rank| run(config.clone(), Start::Fresh, rank).unwrap_err().to_string());
    for error in errors {
        let message = error.unwrap();
        assert!(message.contains("4 ranks in all") && message.contains("mpirun -n 4"), "{message}");
    }
}

#[test]
fn a_folder_that_holds_a_run_is_refused_on_every_rank() {
    let folders = tempfile::tempdir().unwrap();
    let config = config(&folders.path().join("run"), &["trainer.steps=1"]);
    world(2, &config, Start::Fresh);
    let errors =
        Threads::run(2, Settings::default(), |rank| run(config.clone(), Start::Fresh, rank).unwrap_err().to_string());
    for error in errors {
        let message = error.unwrap();
        assert!(message.contains("already contains a run"), "{message}");
    }
}
