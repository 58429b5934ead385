//! Runs whose layers are divided into stages (pipeline parallelism), and what of that is refused.

use super::tensor_parallel::{Case, LAST, alike, close, learn_as_one_rank_and_repeat, made, refused};
use super::{EXPERTS, StopAfter, TINY, config, world};
use firebrick_backends::collective::{Settings, Threads};
use firebrick_engine::config::parse;
use firebrick_engine::plan::PlanReport;
use firebrick_engine::trainer::{Start, Trainer};

const STAGES: &str = "memory.pipeline_model_parallel_size=2";

/// Four layers, so that there are four stages.
const DEEP: &str = "model.arch={model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 4, \
                    num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 32}";

#[test]
fn runs_in_stages_learn_what_one_rank_learns_and_repeat_to_the_bit() {
    let folders = tempfile::tempdir().unwrap();
    let cases: [Case<'_>; 6] = [
        ("grpo", 2, &[], &[STAGES]),
        ("four stages", 4, &[DEEP], &["memory.pipeline_model_parallel_size=4"]),
        (
            "a reference, two ranks a stage that share out state",
            4,
            &["objective.kl_loss_coef=0.1"],
            &[STAGES, "memory.zero_stage=1"],
        ),
        (
            "a critic, weights streamed",
            2,
            &["objective.name=ppo"],
            &[STAGES, "memory.gradient_checkpointing=true", "memory.param_offload=streamed"],
        ),
        (
            "a value head",
            2,
            &["objective.name=ppo", "critic.shared_trunk=true"],
            &[STAGES, "memory.param_offload=idle"],
        ),
        (
            "a loss of sequences, state on the host",
            4,
            &["objective.name=gspo", "memory.packing=padded"],
            &[STAGES, "memory.optimizer_offload=cpu"],
        ),
    ];
    learn_as_one_rank_and_repeat(folders.path(), &cases);
}

#[test]
fn a_checkpoint_of_any_stages_is_continued_by_any_others() {
    let folders = tempfile::tempdir().unwrap();
    let whole = made(folders.path(), "whole", &[]);
    world(1, &whole, Start::Fresh);
    let meshes: [(usize, &[&str]); 5] = [
        (1, &[]),
        (2, &[STAGES]),
        (4, &[STAGES]),
        (4, &[STAGES, "memory.zero_stage=1"]),
        (2, &["memory.tensor_model_parallel_size=2"]),
    ];
    let pairs = (0..meshes.len()).map(|at| (at, (at + 1) % meshes.len()));
    for (from, to) in pairs.chain([(1, 1), (3, 3), (4, 3), (1, 0)]) {
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
fn what_stages_do_not_do_is_refused_before_anything_is_loaded() {
    let experts = [&EXPERTS[..1], &[STAGES]].concat();
    let cases: [(usize, &[&str], &str); 8] = [
        (3, &[STAGES], "this run's 3 ranks into stages"),
        (1, &[STAGES], "this run's 1 ranks into stages"),
        (
            8,
            &[DEEP, "memory.pipeline_model_parallel_size=8"],
            "it has 4 layers, and every stage needs at least one; set it to 4 or less",
        ),
        (2, &experts, "layer 0 has 4 experts"),
        (
            4,
            &[DEEP, STAGES, "memory.tensor_model_parallel_size=2"],
            "memory.pipeline_model_parallel_size: 2 and memory.tensor_model_parallel_size: 2",
        ),
        (4, &[DEEP, STAGES, "memory.ulysses_sequence_parallel_size=2"], "memory.ulysses_sequence_parallel_size: 2"),
        (2, &[DEEP, STAGES, "rollout.tensor_model_parallel_size=2"], "rollout.tensor_model_parallel_size: 2"),
        (2, &[DEEP, STAGES, "memory.step_in_backward=true", "optim.clip_grad=null"], "memory.step_in_backward"),
    ];
    for (size, overrides, part) in cases {
        let message = refused(size, overrides);
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn settings_that_do_not_go_with_stages_are_refused_when_they_are_read() {
    let cases: [(&[&str], &str); 2] = [
        (&[STAGES, "memory.zero_stage=2"], "a zero_stage of at most 1"),
        (
            &[
                STAGES,
                "memory.gradient_checkpointing=true",
                "memory.param_offload=streamed",
                "memory.order=segment_major",
            ],
            "remove memory.order: segment_major",
        ),
    ];
    for (overrides, part) in cases {
        let overrides: Vec<String> = overrides.iter().map(|o| (*o).to_owned()).collect();
        let message = parse(TINY, &overrides).unwrap_err().to_string();
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn an_error_of_one_stage_ends_the_run_of_all() {
    let folders = tempfile::tempdir().unwrap();
    let config = made(folders.path(), "run", &[STAGES]);
    let ended = Threads::run(4, Settings::default(), |rank| {
        let own = rank.rank();
        let mut trainer = Trainer::builder(config.clone()).world(rank).build().unwrap();
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
fn a_plan_in_a_file_runs_on_its_stages_and_is_refused_on_others() {
    let folders = tempfile::tempdir().unwrap();
    let run = |name: &str, size: usize, overrides: &[&str]| {
        let config = config(&folders.path().join(name), overrides);
        let ran = world(size, &config, Start::Fresh);
        alike(&ran);
        format!("memory.plan={}", config.output.join("plan.json").display())
    };
    let staged = run("staged", 4, &[STAGES, "memory.zero_stage=1"]);
    let again = run("again", 4, &[STAGES, "memory.zero_stage=1", &staged]);
    let report = |plan: &str| {
        let path = plan.strip_prefix("memory.plan=").unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        serde_json::from_str::<PlanReport>(&text).unwrap()
    };
    let own = report(&staged);
    assert_eq!(own, report(&again));
    let parallel = own.parallel.unwrap();
    assert_eq!([parallel.data, parallel.pipeline], [2, 2]);
    assert!(own.phases.iter().all(|phase| phase.stage.is_some()));
    let (a, b) = (folders.path().join("staged"), folders.path().join("again"));
    close("the plan of a file", &b, &a, LAST);
    let replicas = run("replicas", 2, &["memory.zero_stage=1"]);
    let alone = run("alone", 1, &[]);
    for (plan, size, overrides, part) in [
        (&staged, 4, &[][..], "memory.pipeline_model_parallel_size is 1; set it to 2"),
        (&staged, 2, &[STAGES], "this run has 2"),
        (&replicas, 2, &[STAGES], "memory.pipeline_model_parallel_size is 2; set it to 1"),
        (&alone, 2, &[STAGES], "memory.pipeline_model_parallel_size is 2; set it to 1"),
    ] {
        let message = refused(size, &[overrides, &[plan.as_str(), "memory.zero_stage=1"]].concat());
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}
