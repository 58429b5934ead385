use super::limits::{LIMITS, Limit};
use super::*;
use crate::config::parse;

/// A configuration with every section, in which no setting stands in the way of another.
const COMPLETE: &str = "
model: {path: m, lora: {}}
output: runs/x
task: {kind: arithmetic}
warmup: {sft: {train: rows.jsonl}}
sft: {train: rows.jsonl}
memory: {gradient_checkpointing: true, activation_offload: true, optimizer_offload: cpu}
";

/// The keys of an objective that are read only beside others.
fn companions(key: &str) -> Vec<String> {
    let with: &[&str] = match key {
        _ if key.starts_with("critic") || key.starts_with("memory.critic") => &["objective=ppo"],
        "rollout.dynamic_sampling.max_num_gen_batches" | "rollout.dynamic_sampling.oversampling" => {
            &["rollout.dynamic_sampling.enable=true"]
        }
        "objective.kl_ctrl.horizon" => &["objective.use_kl_in_reward=true"],
        "objective.rollout_is_threshold" | "objective.rollout_is_threshold_lower" => {
            &["objective.rollout_is=token_mask"]
        }
        "objective.entropy_coef_delta" => &["objective.use_adaptive_entropy=true"],
        "objective.tau_pos" | "objective.tau_neg" => &["objective=sapo"],
        "objective.lam" => &["objective=ppo"],
        _ if key.contains("vespo") => &["objective=vespo"],
        _ if key.contains("cov") || key.contains("ppo_kl") => {
            if key.contains("clip_cov") {
                &["objective=clip_cov"]
            } else {
                &["objective=kl_cov"]
            }
        }
        _ => &[],
    };
    with.iter().map(|&setting| setting.to_owned()).collect()
}

fn validator() -> jsonschema::Validator {
    jsonschema::validator_for(&schema()).expect("a schema")
}

fn is_valid(text: &str) -> bool {
    let config: Value = serde_saphyr::from_str(text).expect("YAML");
    validator().is_valid(&config)
}

#[test]
fn the_schema_is_one_without_references_or_numbers_of_rust() {
    let schema = schema();
    assert!(jsonschema::meta::is_valid(&schema));
    let text = schema.to_string();
    // a key may be named so: of a number it is a text
    for absent in ["$ref", "\"format\":\"", "]("] {
        assert!(!text.contains(absent), "{absent}");
    }
    assert!(text.len() < 200_000, "{} bytes", text.len());
}

#[test]
fn sections_may_be_null_and_an_objective_a_name() {
    for ok in [
        "model: {path: m}\noutput: o\nobjective: grpo\nmemory:\ncritic: null\n",
        "model: {path: m}\noutput: o\nobjective: {name: dapo, kl_loss_type: low_var_kl}\n",
        "model: {path: m, lora: {r: 8, lora_alpha: 16, target_modules: [q_proj]}}\noutput: o\n",
        "model: {path: m}\noutput: o\nmemory: {budget: 8GiB, limit: 4096}\noptim: {loss_scale: dynamic}\n",
    ] {
        assert!(is_valid(ok), "{ok}");
    }
    for wrong in [
        "model: {path: m}\noutput: o\nobjective: gpro\n",
        "model: {path: m}\noutput: o\nmemory: {budget: 8 parsecs}\n",
        "model: {path: m}\noutput: o\nrollout: {n: 0}\n",
        "model: {path: m}\noutput: o\nrollout: {m: 8}\n",
        "model: {path: m}\noutput: o\ntask: {kind: arithmetic, train: x}\n",
        "model: {path: m}\noutput: o\ntask: {kind: jsonl, train: x, rewards: [{kind: exact, pattern: x}]}\n",
        "model: {path: m}\n",
        "model: null\noutput: o\n",
    ] {
        assert!(!is_valid(wrong), "{wrong}");
    }
}

#[test]
fn what_is_written_back_complete_is_valid() {
    for objective in ["grpo", "ppo", "gspo"] {
        let text = format!("model: {{path: m}}\noutput: o\ntask: {{kind: arithmetic}}\nobjective: {objective}\n");
        let config = parse(&text, &[]).expect("a configuration");
        let yaml = config.to_yaml().expect("YAML");
        let value: Value = serde_saphyr::from_str(&yaml).expect("YAML");
        let errors: Vec<String> =
            validator().iter_errors(&value).map(|e| format!("{}: {e}", e.instance_path())).collect();
        assert!(errors.is_empty(), "{errors:#?}\n{yaml}");
    }
}

/// A number beyond a bound, and the bound itself.
fn around(limit: Limit) -> (f64, Option<f64>) {
    match limit {
        Limit::AtLeast(bound) => (bound - 1.0, Some(bound)),
        Limit::AtMost(bound) => (bound + 1.0, Some(bound)),
        Limit::Above(bound) | Limit::Below(bound) => (bound, None),
    }
}

/// Whether the program reads a key with a number.
fn refusal(key: &str, number: f64) -> Option<String> {
    let mut overrides = companions(key);
    overrides.push(format!("{key}={number}"));
    match parse(COMPLETE, &overrides) {
        Ok(config) => {
            let task = config.task.as_ref()?;
            let built = task.build(std::path::Path::new("."));
            let steps = config.trainer.steps;
            let scheduled = config.optim.lr_scheduler.build(config.optim.lr, steps);
            let refused = built.err().map(|e| e.to_string());
            refused.or(scheduled.err().map(|e| e.to_string()))
        }
        Err(error) => Some(error.to_string()),
    }
}

#[test]
fn numbers_beyond_a_bound_of_the_schema_are_refused_by_the_program() {
    for (key, limits) in LIMITS {
        // these are checked against others or only under the schedule that uses them
        if key.starts_with("optim.lr_scheduler.") && key != "optim.lr_scheduler.warmup_ratio" {
            continue;
        }
        for &limit in limits {
            let (beyond, at) = around(limit);
            let refused = refusal(key, beyond);
            assert!(refused.is_some(), "{key}={beyond} is read");
            if let Some(bound) = at {
                let name = key.rsplit('.').next().unwrap_or(key);
                let refused = refusal(key, bound)
                    .filter(|message| message.contains("at least") && message.contains(&format!("{name} must")));
                assert_eq!(refused, None, "{key}={bound}");
            }
        }
    }
}

#[test]
fn every_bound_is_of_a_key_and_stands_in_the_schema() {
    let all = crate::config::keys();
    for (key, _) in LIMITS {
        let own = all.iter().filter(|known| known.path.ends_with(key));
        let own: Vec<_> = own.collect();
        assert!(!own.is_empty(), "{key} is no key");
        for known in own {
            let bounded = ["at least", "above", "at most", "below"];
            assert!(bounded.iter().any(|word| known.takes.contains(word)), "{}: {}", known.path, known.takes);
        }
    }
}

/// Second names in the sources that a configuration is read by.
#[test]
fn every_second_name_that_is_read_is_in_the_schema() {
    let text = schema().to_string();
    let mut found = 0;
    for source in [
        include_str!("../lora.rs"),
        include_str!("../../../objectives/src/kl.rs"),
        include_str!("../../../objectives/src/settings/choices.rs"),
    ] {
        for name in source.split("alias = \"").skip(1) {
            let name = name.split('"').next().unwrap_or_default();
            assert!(text.contains(&format!("\"{name}\"")), "{name}");
            found += 1;
        }
    }
    assert!(found >= 15, "{found}");
}

#[test]
fn links_of_documentation_lose_their_targets() {
    assert_eq!(
        plain("See [`build`](Self::build) and [1, 2],\nor `a[0]` (twice).\n\nMore."),
        "See `build` and [1, 2], or `a[0]` (twice).\n\nMore."
    );
}
