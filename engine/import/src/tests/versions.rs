//! What verl does by default in its versions, and in what was built on it.

use super::turns::{at, verl};
use super::{imported, outcome, refusal};
use crate::KeyOutcome;
use serde_json::{Value, json};

/// A launch with nothing but these keys.
fn launch(keys: &str) -> crate::Imported {
    imported("run.sh", &format!("python3 -m verl.trainer.main_ppo {keys}\n"))
}

/// The keys whose defaults differ: KL off the reward, entropy bonus, dual clip.
fn defaults(found: &crate::Imported) -> [Value; 3] {
    let or = |path: &str, default: Value| Some(at(found, path)).filter(|value| !value.is_null()).unwrap_or(default);
    let dual = found.config.contains("clip_ratio_c: null");
    [
        or("/objective/use_kl_in_reward", json!(false)),
        or("/objective/entropy_coeff", json!(0.0)),
        if dual { Value::Null } else { json!(3.0) },
    ]
}

#[test]
fn verl_before_0_4_takes_the_kl_off_the_reward_and_has_an_entropy_bonus_and_no_dual_clip() {
    let old = [json!(true), json!(0.001), Value::Null];
    let old_with_kl_loss = [json!(false), json!(0.001), Value::Null];
    let new = [json!(false), json!(0.0), json!(3.0)];
    let grpo = "algorithm.adv_estimator=grpo";
    let kl_loss = "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001";
    for (keys, expected) in [
        // verl 0.2 and TinyZero: sizes of all devices together
        ("actor_rollout_ref.actor.ppo_micro_batch_size=8 critic.ppo_micro_batch_size=8".to_owned(), &old),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size=8".to_owned(), &old),
        // verl 0.3: a coefficient, and nothing that says what for
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 algorithm.kl_ctrl.kl_coef=0.001".to_owned(), &old),
        ("actor_rollout_ref.actor.fsdp_config.grad_offload=True".to_owned(), &old),
        ("trainer.val_generations_to_log_to_wandb=1".to_owned(), &old),
        // Logic-RL
        (format!("{grpo} {kl_loss} actor_rollout_ref.actor.ppo_micro_batch_size=16"), &old_with_kl_loss),
        // Search-R1
        (format!("{grpo} {kl_loss} data.max_start_length=2048 actor_rollout_ref.rollout.n_agent=5"), &old_with_kl_loss),
        // DeepScaleR, whose trainer never takes the KL off the reward, and whose sides of the clip are -1
        (
            format!("{grpo} actor_rollout_ref.rollout.n_val=8 actor_rollout_ref.actor.clip_ratio_low=-1"),
            &old_with_kl_loss,
        ),
        // verl since 0.4
        (format!("{grpo} algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.001"), &new),
        (
            "actor_rollout_ref.actor.loss_agg_mode=token-mean actor_rollout_ref.actor.ppo_micro_batch_size=8".into(),
            &new,
        ),
        ("trainer.device=cuda critic.ppo_micro_batch_size=8".into(), &new),
        // nothing that tells
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8".into(), &new),
    ] {
        assert_eq!(defaults(&launch(&keys)), *expected, "{keys}");
    }
    // what is written counts in every version
    let own = launch(
        "critic.ppo_micro_batch_size=8 actor_rollout_ref.actor.entropy_coeff=0.01 algorithm.kl_ctrl.kl_coef=0.01",
    );
    assert_eq!(defaults(&own), [json!(true), json!(0.01), Value::Null]);
    assert_eq!(at(&own, "/objective/kl_ctrl/kl_coef"), 0.01);
}

#[test]
fn a_version_that_nothing_tells_is_said() {
    let note = |keys: &str| {
        let found = launch(keys);
        let row = found.assumed.iter().find(|row| row.key.ends_with("entropy_coeff")).expect("a default");
        let KeyOutcome::Mapped { note, .. } = &row.outcome else {
            panic!("{row:?}");
        };
        note.clone()
    };
    assert!(note("data.train_batch_size=8").contains("0.001 in verl before 0.4"));
    assert!(note("critic.ppo_micro_batch_size=8").contains("default of verl before 0.4"));
    assert_eq!(note("trainer.device=cuda"), "");
}

#[test]
fn search_r1_s_groups_are_those_of_its_agents_and_its_search_is_named() {
    let found = verl("actor_rollout_ref.rollout.n_agent=5 data.max_start_length=2048 max_turns=2 do_search=true");
    assert_eq!(at(&found, "/rollout/n"), 5);
    assert_eq!(at(&found, "/rollout/top_p"), 0.95);
    let gaps: Vec<&str> = found.gaps().map(|row| row.key.as_str()).collect();
    assert_eq!(gaps, ["max_turns", "do_search"]);
}

#[test]
fn deepscaler_validates_with_a_temperature_of_its_own() {
    let found = verl("actor_rollout_ref.rollout.val_temperature=0.7 actor_rollout_ref.rollout.n_val=16");
    assert_eq!(at(&found, "/rollout/val_kwargs"), json!({"n": 16, "temperature": 0.7}));
    let clip = verl(
        "actor_rollout_ref.rollout.n_val=8 actor_rollout_ref.actor.clip_ratio=0.3 actor_rollout_ref.actor.clip_ratio_low=-1",
    );
    assert_eq!(at(&clip, "/objective/clip_ratio_low"), 0.3);
    assert_eq!(at(&clip, "/rollout/val_kwargs"), json!({"n": 8, "temperature": 0.6}));
}

#[test]
fn groups_are_compared_by_the_ground_truth_where_verl_compares_accuracies() {
    let dapo = "data.train_files=dapo.parquet actor_rollout_ref.rollout.n=4 algorithm.filter_groups.enable=True \
                reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=4096 ";
    let metric = |more: &str| at(&verl(&format!("{dapo}{more}")), "/rollout/dynamic_sampling/metric");
    assert_eq!(metric("algorithm.filter_groups.metric=acc"), "verl_math");
    assert_eq!(metric("algorithm.filter_groups.metric=score"), "verl_math");
    assert_eq!(metric("algorithm.filter_groups.metric=seq_reward"), "score");
    let own = "custom_reward_function.path=r.py custom_reward_function.name=grade";
    assert_eq!(metric(&format!("algorithm.filter_groups.metric=acc {own}")), "grade");
    let kl = verl(&format!("{dapo}algorithm.filter_groups.metric=seq_final_reward algorithm.use_kl_in_reward=True"));
    assert_eq!(kl.gaps().map(|row| row.key.as_str()).collect::<Vec<_>>(), ["algorithm.filter_groups.metric"]);
}

#[test]
fn a_pass_over_the_rows_draws_gen_batch_size_of_them_at_a_time() {
    let rows = "data.train_files=gsm8k.parquet trainer.total_epochs=2 data.train_batch_size=8 data.gen_batch_size=24 actor_rollout_ref.rollout.n=4";
    let filtered = verl(&format!("{rows} algorithm.filter_groups.enable=True"));
    // 7,473 rows of GSM8K
    assert_eq!(at(&filtered, "/trainer/steps"), 2 * (7_473 / 24));
    assert_eq!(at(&filtered, "/trainer/train_batch_size"), 8);
    assert_eq!(at(&filtered, "/rollout/dynamic_sampling/oversampling"), 3.0);
    // without a filter all that are drawn are trained on
    assert_eq!(at(&verl(rows), "/trainer/train_batch_size"), 24);
    let unbounded =
        verl(&format!("{rows} algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=0"));
    assert_eq!(at(&unbounded, "/rollout/dynamic_sampling/max_num_gen_batches"), 1_000_000);
}

#[test]
fn the_overlong_penalty_has_the_limit_of_its_manager() {
    let section = "reward_model.reward_kwargs";
    let keys = |limit: u32| {
        format!(
            "data.max_response_length=8192 {section}.overlong_buffer_cfg.enable=True \
             {section}.overlong_buffer_cfg.len=1024 {section}.max_resp_len={limit}"
        )
    };
    assert_eq!(at(&verl(&keys(8192)), "/task/rewards/1"), json!({"kind": "length", "buffer": 1024, "weight": 1.0}));
    let own = json!({"kind": "length", "buffer": 1024, "weight": 1.0, "limit": 4096});
    assert_eq!(at(&verl(&keys(4096)), "/task/rewards/1"), own);
}

#[test]
fn dr_grpo_s_factor_is_beside_the_sequences_of_a_step() {
    let found = verl(
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm actor_rollout_ref.actor.loss_scale_factor=4096 \
         actor_rollout_ref.rollout.n=4",
    );
    assert_eq!(at(&found, "/objective/loss_scale_factor"), 4096 * 8 * 4);
}

#[test]
fn ranks_that_share_sequences_are_under_fsdp_since_2026_and_the_critics_offload_too() {
    let tokens = "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2000";
    let found = verl(&format!("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2 {tokens}"));
    assert_eq!(at(&found, "/memory/ulysses_sequence_parallel_size"), 2);
    assert_eq!(at(&found, "/memory/train_tokens"), 4000);
    let found = launch(
        "algorithm.adv_estimator=gae critic.fsdp.param_offload=True critic.fsdp.ulysses_sequence_parallel_size=2 \
         critic.fsdp.forward_prefetch=True",
    );
    assert_eq!(at(&found, "/memory/critic/param_offload"), "idle");
    assert_eq!(at(&found, "/critic/ulysses_sequence_parallel_size"), 2);
    assert_eq!(found.gaps().count(), 0);
}

#[test]
fn switches_and_templates_that_firebrick_has_are_mapped() {
    for (key, path, value) in [
        ("trainer.val_before_train=False", "/trainer/val_before_train", json!(false)),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=3", "/objective/rollout_is", json!("token_truncate")),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=3", "/objective/rollout_is_threshold", json!(3.0)),
        ("actor_rollout_ref.model.custom_chat_template=t.jinja", "/model/chat_template", json!("t.jinja")),
    ] {
        let found = verl(key);
        assert_eq!(at(&found, path), value, "{key}");
        assert_eq!(found.gaps().count(), 0, "{key}");
    }
    let text = "actor_rollout_ref:\n  model:\n    path: m\n    custom_chat_template: \"{{ messages[0].content }}\"\n";
    assert_eq!(at(&imported("c.yaml", text), "/model/chat_template"), "{{ messages[0].content }}");
}

#[test]
fn what_changes_no_result_is_not_needed_and_what_does_is_a_gap() {
    for key in [
        "actor_rollout_ref.rollout.pipeline_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size=4",
        "actor_rollout_ref.model.trust_remote_code=True",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.actor.shuffle=True",
        "reward_model.reward_manager=batch",
        "trainer.default_hdfs_dir=$SOMEWHERE",
        "trainer.max_actor_ckpt_to_keep=null",
        "data.validation_shuffle=True",
    ] {
        assert_eq!(verl(key).gaps().count(), 0, "{key}");
    }
    for key in [
        "algorithm.adv_estimator=raft",
        "actor_rollout_ref.actor.optim.lr=$NO_SUCH_RATE",
        "actor_rollout_ref.actor.no_such_key=1",
        "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_kl",
        "data.shuffle=False",
        "data.truncation=left",
        "reward_model.reward_manager=remote",
        "data.train_batch_size=24 actor_rollout_ref.actor.shuffle=True",
    ] {
        let own = key.rsplit(' ').next().and_then(|word| word.split('=').next());
        let found = verl(key);
        assert_eq!(found.gaps().map(|row| row.key.as_str()).next(), own, "{key}");
    }
}

#[test]
fn programs_that_are_not_verls_trainer_are_refused_or_named() {
    for (script, parts) in [
        ("torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet optim.lr=1e-5\n", ["supervised", "sft"]),
        ("python3 -m verl.trainer.main_generation data.path=a.parquet model.path=m\n", ["trains nothing", "generate"]),
    ] {
        let said = refusal("run.sh", script);
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    }
    let yaml = "data: {train_files: a.parquet, prompt_dict_keys: [question]}\nmodel: {partial_pretrain: m}\n";
    assert!(refusal("sft.yaml", yaml).contains("supervised"));
    let other = imported(
        "run.sh",
        "python3 -m verl.experimental.one_step_off_policy.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=8\n",
    );
    assert!(matches!(outcome(&other, "(program)"), KeyOutcome::Cannot { .. }));
    let main = imported("run.sh", "python3 -m verl.trainer.main_ppo data.train_batch_size=8\n");
    assert!(main.rows.iter().all(|row| row.key != "(program)"));
}
