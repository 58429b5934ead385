//! Keys of rollouts of several turns, of validation that samples, and of Python rewards.

use super::{imported, outcome};
use crate::KeyOutcome;
use serde_json::{Value, json};

/// A launch of verl with these keys more.
pub(super) fn verl(keys: &str) -> crate::Imported {
    let start = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=gsm8k.parquet \\\n  \
                 actor_rollout_ref.model.path=m data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8 ";
    let keys = keys.replace("MT.", "actor_rollout_ref.rollout.multi_turn.");
    imported("run.sh", &format!("{start}{keys}\n"))
}

/// What the imported configuration has at a place.
pub(super) fn at(imported: &crate::Imported, path: &str) -> Value {
    let config: Value = serde_saphyr::from_str(&imported.config).expect("YAML");
    config.pointer(path).cloned().unwrap_or(Value::Null)
}

fn cannot(imported: &crate::Imported, key: &str, part: &str) {
    match outcome(imported, key) {
        KeyOutcome::Cannot { why } => assert!(why.contains(part), "{key}: {why}"),
        other => panic!("{key}: {other:?}"),
    }
}

#[test]
fn limits_of_several_turns_are_mapped_and_tools_say_what_to_do() {
    let found = verl(
        "MT.enable=True MT.max_assistant_turns=5 MT.max_tool_response_length=128 MT.format=llama3_json \
         MT.tool_config_path=tools.yaml MT.tool_response_truncate_side=middle MT.max_parallel_calls=1 \
         MT.tokenization_sanity_check_mode=strict actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent \
         actor_rollout_ref.rollout.agent.num_workers=8",
    );
    let turns = at(&found, "/rollout/multi_turn");
    assert_eq!(turns, json!({"max_assistant_turns": 5, "max_tool_response_length": 128, "format": "llama3_json"}));
    let section = "actor_rollout_ref.rollout.multi_turn";
    cannot(&found, &format!("{section}.enable"), "task.environment");
    cannot(&found, &format!("{section}.tool_config_path"), "methods of one class");
    cannot(&found, &format!("{section}.tool_response_truncate_side"), "at their end, not middle");
    cannot(&found, &format!("{section}.max_parallel_calls"), "all calls of a turn");
    for key in [
        "actor_rollout_ref.rollout.agent.num_workers",
        "actor_rollout_ref.rollout.agent.default_agent_loop",
        "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode",
    ] {
        let own = outcome(&found, key);
        assert!(matches!(own, KeyOutcome::NotNeeded { .. }), "{key}: {own:?}");
    }

    // turns of the user are answers; the model has one turn more. verl cuts answers after 256 characters where nothing
    // is said
    let found = verl("MT.enable=True MT.max_user_turns=3 MT.max_assistant_turns=9 MT.format=pythonic");
    let turns = at(&found, "/rollout/multi_turn");
    assert_eq!(turns, json!({"max_assistant_turns": 4, "max_tool_response_length": 256}));
    cannot(&found, &format!("{section}.format"), "not as pythonic");
    for (name, format) in [("hermes", "hermes"), ("gpt-oss", "openai"), ("qwen3_coder", "qwen3_xml")] {
        let found = verl(&format!("MT.enable=True MT.format={name}"));
        assert_eq!(at(&found, "/rollout/multi_turn/format"), format);
    }

    let off = verl("MT.enable=False MT.max_assistant_turns=5 MT.format=hermes");
    assert_eq!(at(&off, "/rollout/multi_turn"), Value::Null);
    let custom = verl("actor_rollout_ref.rollout.agent.default_agent_loop=react_agent");
    let key = "actor_rollout_ref.rollout.agent.default_agent_loop";
    cannot(&custom, key, "an agent loop is a separate program");
}

#[test]
fn validation_that_samples_does_so_here_too() {
    let val = "actor_rollout_ref.rollout.val_kwargs";
    let found = verl(&format!("{val}.do_sample=True {val}.n=4 {val}.temperature=0.6 {val}.top_p=0.95 {val}.top_k=-1"));
    let own = at(&found, "/rollout/val_kwargs");
    assert_eq!(own, json!({"n": 4, "temperature": 0.6, "top_p": 0.95, "top_k": -1}));
    let greedy = verl(&format!("{val}.n=4 {val}.temperature=0.6"));
    assert_eq!(at(&greedy, "/rollout/val_kwargs"), Value::Null);
    let why = outcome(&greedy, &format!("{val}.n"));
    assert!(matches!(why, KeyOutcome::NotNeeded { why } if why.contains("are all the same")), "{why:?}");
}

#[test]
fn a_python_reward_keeps_its_arguments_under_the_names_of_both_years() {
    for section in ["custom_reward_function", "reward.custom_reward_function"] {
        let found = verl(&format!(
            "{section}.path=score.py {section}.name=judge +{section}.reward_kwargs.strict=True +{section}.reward_kwargs.a.b=2"
        ));
        let rewards = at(&found, "/task/rewards");
        let list = rewards.as_array().expect("a list");
        let own = list.iter().find(|reward| reward["kind"] == "python");
        let own = own.unwrap_or_else(|| panic!("{rewards:?}"));
        assert_eq!(own["function"], "judge");
        assert_eq!(own["kwargs"], json!({"strict": true, "a": {"b": 2}}));
    }
}

#[test]
fn environments_of_trl_are_named_by_their_module() {
    let program = |factory: &str| {
        let text = format!(
            "config = GRPOConfig(max_tool_calling_iterations=4, learning_rate=1e-6)\n\
             trainer = GRPOTrainer(model=\"m\", args=config, environment_factory={factory}, reward_funcs=[])\n"
        );
        imported("train.py", &text)
    };
    let found = program("envs.counter.Counter");
    assert_eq!(
        at(&found, "/task/environment"),
        json!({"kind": "python", "file": "envs/counter.py", "class": "Counter"})
    );
    let turns = at(&found, "/rollout/multi_turn/max_assistant_turns");
    assert_eq!(turns, 5);
    let own = program("Counter");
    cannot(&own, "GRPOTrainer.environment_factory", "the file that defines `Counter`");
}
