//! What single keys become: ranks, templates, experts, rows.

use super::turns::{at, verl};
use super::{imported, outcome};
use crate::KeyOutcome;
use serde_json::json;

#[test]
fn machines_and_devices_become_the_ranks_that_a_run_is_checked_for() {
    let found = verl("trainer.nnodes=2 trainer.n_gpus_per_node=8");
    assert_eq!(at(&found, "/trainer/nnodes"), 2);
    assert_eq!(at(&found, "/trainer/n_gpus_per_node"), 8);
    let one = verl("trainer.nnodes=1 trainer.n_gpus_per_node=1");
    assert_eq!(at(&one, "/trainer/nnodes"), json!(null));
    let launch = "accelerate launch --num_processes 8 --num_machines 2 examples/grpo.py --model_name_or_path m --dataset_name d --beta 0.1\n";
    let found = imported("run.sh", launch);
    assert_eq!(at(&found, "/trainer/nnodes"), 2);
    assert_eq!(at(&found, "/trainer/n_gpus_per_node"), 4);
    let uneven = imported("run.sh", &launch.replace("--num_machines 2", "--num_machines 3"));
    assert!(
        matches!(outcome(&uneven, "num_processes"), KeyOutcome::Cannot { why } if why.contains("each of 3 machines"))
    );
}

#[test]
fn what_carries_values_between_ranks_is_named_as_in_transformers() {
    let config = "model_name_or_path: m\ndataset_name: d\nnum_generations: 8\nddp_backend: ";
    for name in ["nccl", "mpi"] {
        let found = imported("grpo.yaml", &format!("{config}{name}\n"));
        assert_eq!(at(&found, "/trainer/ddp_backend"), name);
    }
    let other = imported("grpo.yaml", &format!("{config}gloo\n"));
    assert_eq!(at(&other, "/trainer/ddp_backend"), json!(null));
    assert!(matches!(outcome(&other, "ddp_backend"), KeyOutcome::NotNeeded { why } if why.contains("auto takes NCCL")));
}

#[test]
fn degrees_that_training_lacks_change_no_result_and_are_estimates() {
    let key = "actor_rollout_ref.actor.megatron.expert_model_parallel_size";
    let found = verl(&format!("{key}=4"));
    let why = "`firebrick plan CONFIG --tensor-parallel 4` estimates";
    assert!(matches!(outcome(&found, key), KeyOutcome::NotNeeded { why: found } if found.contains(why)));
}

#[test]
fn megatrons_context_is_shared_as_sequences_are() {
    let found = verl("actor_rollout_ref.actor.megatron.context_parallel_size=4");
    assert_eq!(at(&found, "/memory/ulysses_sequence_parallel_size"), 4);
}

#[test]
fn ranks_that_share_matrices_are_the_policys() {
    let key = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size";
    let found = verl(&format!("{key}=4"));
    assert_eq!(at(&found, "/memory/tensor_model_parallel_size"), 4);
    let reference = "actor_rollout_ref.ref.megatron.tensor_model_parallel_size";
    let same = verl(&format!("{key}=4 {reference}=4"));
    assert!(matches!(outcome(&same, reference), KeyOutcome::NotNeeded { why } if why.contains("the same")));
    let other = verl(&format!("{key}=4 {reference}=2"));
    let why = "with the same results";
    assert!(matches!(outcome(&other, reference), KeyOutcome::NotNeeded { why: found } if found.contains(why)));
}

#[test]
fn stages_are_the_policys() {
    let key = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size";
    let found = verl(&format!("{key}=4"));
    assert_eq!(at(&found, "/memory/pipeline_model_parallel_size"), 4);
    let reference = "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size";
    let other = verl(&format!("{key}=4 {reference}=2"));
    assert!(
        matches!(outcome(&other, reference), KeyOutcome::NotNeeded { why } if why.contains("with the same results"))
    );
}

#[test]
fn ranks_that_sample_together_are_the_runs() {
    let key = "actor_rollout_ref.rollout.tensor_model_parallel_size";
    let four = verl(&format!("{key}=4"));
    assert_eq!(at(&four, "/rollout/tensor_model_parallel_size"), 4);
    let one = verl(&format!("{key}=1"));
    assert!(matches!(outcome(&one, key), KeyOutcome::NotNeeded { why } if why.contains("by itself")));
}

#[test]
fn ranks_that_share_sequences_are_the_policys_and_bound_tokens_together() {
    let key = "actor_rollout_ref.actor.ulysses_sequence_parallel_size";
    let tokens = "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2000";
    let found = verl(&format!("{key}=4 {tokens}"));
    assert_eq!(at(&found, "/memory/ulysses_sequence_parallel_size"), 4);
    assert_eq!(at(&found, "/memory/train_tokens"), 8_000);
    let one = verl(&format!("{key}=1 {tokens}"));
    assert_eq!(at(&one, "/memory/ulysses_sequence_parallel_size"), json!(null));
    assert_eq!(at(&one, "/memory/train_tokens"), 2_000);
    let reference = "actor_rollout_ref.ref.ulysses_sequence_parallel_size";
    let same = verl(&format!("{key}=4 {reference}=4"));
    assert!(matches!(outcome(&same, reference), KeyOutcome::NotNeeded { why } if why.contains("the same")));
    let other = verl(&format!("{key}=4 {reference}=2"));
    let why = "with the same results";
    assert!(matches!(outcome(&other, reference), KeyOutcome::NotNeeded { why: found } if found.contains(why)));
}

#[test]
fn ranks_that_share_the_critics_sequences_are_its_own_and_bound_its_tokens() {
    let policy = "actor_rollout_ref.actor.ulysses_sequence_parallel_size";
    let key = "critic.ulysses_sequence_parallel_size";
    let said = |more: &str| verl(&format!("algorithm.adv_estimator=gae critic.ppo_max_token_len_per_gpu=2000 {more}"));
    for (more, own, tokens) in [
        (format!("{policy}=2 {key}=4"), json!(4), 8_000),
        (format!("{policy}=2 {key}=1"), json!(1), 2_000),
        (format!("{key}=2"), json!(2), 4_000),
        (format!("{policy}=2 {key}=2"), json!(null), 4_000),
        (format!("{policy}=2"), json!(null), 4_000),
    ] {
        let found = said(&more);
        assert_eq!(at(&found, "/critic/ulysses_sequence_parallel_size"), own, "{more}");
        assert_eq!(at(&found, "/memory/critic/train_tokens"), tokens, "{more}");
    }
    let without = verl(&format!("{key}=2"));
    assert!(matches!(outcome(&without, key), KeyOutcome::NotNeeded { why } if why.contains("critic")));
}

#[test]
fn arguments_of_the_chat_template_are_passed_on() {
    let found = verl("+data.apply_chat_template_kwargs.enable_thinking=False");
    let own = at(&found, "/model/chat_template_kwargs/enable_thinking");
    assert_eq!(own, json!(false));
}

#[test]
fn routes_are_replayed_from_the_rollout_alone() {
    let key = "actor_rollout_ref.actor.router_replay.mode";
    let found = verl(&format!("{key}=R3 actor_rollout_ref.rollout.enable_rollout_routing_replay=True"));
    assert_eq!(at(&found, "/rollout/router_replay"), json!(true));
    let found = verl(&format!("{key}=disabled"));
    assert!(matches!(outcome(&found, key), KeyOutcome::NotNeeded { .. }));
    let found = verl(&format!("{key}=R2"));
    assert!(matches!(outcome(&found, key), KeyOutcome::Cannot { .. }));
}

#[test]
fn the_auxiliary_loss_counts_where_trl_asks_for_routers_logits() {
    let program = |arguments: &str| {
        imported(
            "train.py",
            &format!("args = GRPOConfig(output_dir=\"runs\", router_aux_loss_coef=0.001{arguments})\n"),
        )
    };
    let found = program("");
    assert!(matches!(outcome(&found, "router_aux_loss_coef"), KeyOutcome::NotNeeded { .. }));
    let found = program(", model_init_kwargs={\"output_router_logits\": True}");
    assert_eq!(at(&found, "/model/router_aux_loss_coef"), 0.001);
}

#[test]
fn nemo_rl_s_rows_keep_their_fields_and_the_share_that_is_held_out() {
    let file = |more: &str| {
        format!(
            "policy: {{model_name: m}}\ngrpo: {{num_prompts_per_step: 8, num_generations_per_prompt: 4, max_num_steps: 5}}\ndata:\n  train: \
             {{data_path: rows.jsonl, input_key: problem, output_key: expected_answer, split_validation_size: 0.05, seed: 42}}\n{more}"
        )
    };
    let own = imported("grpo.yaml", &file("")).config;
    for part in ["{problem}", "answer_field: expected_answer", "validation_fraction: 0.05", "seed: 42"] {
        assert!(own.contains(part), "{part:?} is not in:\n{own}");
    }
    // rows of their own are validated on instead
    let other = imported("grpo.yaml", &file("  validation: {data_path: held.jsonl}\n")).config;
    assert!(other.contains("held.jsonl") && !other.contains("validation_fraction"), "{other}");
}
