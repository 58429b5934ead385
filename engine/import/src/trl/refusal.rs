//! Unsupported runs: TRL's supervised and preference training, and other engines.

use super::class::{Trainer, from_contents, from_file_names};
use crate::facts::Facts;
use crate::literal::has_word;
use crate::rules::Rules;
use std::sync::LazyLock;

/// The table of keys that only the RL configurations have.
pub(crate) const TABLE: &str = include_str!("../../rules/trl_algorithms.txt");

static RULES: LazyLock<Rules> = LazyLock::new(|| {
    let functions = [super::FUNCTIONS.as_slice(), &[crate::common::FUNCTIONS]].concat();
    Rules::read(&[TABLE], &functions).unwrap_or_else(|why| panic!("the table of TRL's algorithms: {why}"))
});

/// Keys of other trainers only, with the trainer.
const OTHER_KEYS: [(&str, &str); 5] = [
    ("packing dataset_text_field assistant_only_loss completion_only_loss", "sft"),
    (
        "precompute_ref_log_probs precompute_ref_batch_size reference_free rpo_alpha f_divergence_type label_smoothing \
         use_weighting",
        "dpo",
    ),
    ("desirable_weight undesirable_weight", "kto"),
    ("center_rewards_coefficient", "reward"),
    ("finetuning_type cutoff_len pref_beta", "LLaMA-Factory"),
];

/// Losses of DPO, CPO and KTO.
const DPO_LOSSES: &str = "sigmoid sigmoid_norm hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired \
                             aot_pair apo_zero apo_down discopop simpo kto orpo";

/// Keys of the tables that other trainers share.
const SHARED_KEYS: &str = "beta loss_type max_prompt_length disable_dropout use_liger_loss pad_to_multiple_of \
                      router_aux_loss_coef model_adapter_name ref_adapter_name sync_ref_model ref_model_mixup_alpha \
                      ref_model_sync_steps";

/// Reason why the files' run is not imported, if it is not.
pub(crate) fn refusal(facts: &Facts) -> Option<String> {
    let other = match from_contents(facts) {
        Some(Trainer::Rl(_)) => return None,
        Some(Trainer::Other(name)) => Some(name),
        None if facts.text("stage").is_some() => Some("LLaMA-Factory".to_owned()),
        None if facts.text("loss_type").is_some_and(|loss| has_word(DPO_LOSSES, loss)) => Some("dpo".to_owned()),
        None => None,
    };
    let is_rl_key = |key: &str| {
        RULES.find(key).is_some() && !has_word(SHARED_KEYS, key)
            || key.starts_with("reward_funcs")
            || key == "reward_model_name_or_path"
    };
    if other.is_none() && facts.keys().any(is_rl_key) {
        return None;
    }
    let key = OTHER_KEYS.iter().find(|(keys, _)| keys.split_whitespace().any(|key| facts.is_written(key)));
    let key = key.map(|(_, name)| (*name).to_owned());
    let other = other.or(key);
    if other.is_none() && from_file_names(facts).is_some() {
        return None;
    }
    Some(match other.as_deref() {
        Some("LLaMA-Factory") => {
            "these are settings of LLaMA-Factory, and `firebrick import` reads verl, TRL and NeMo RL; \
                                  `firebrick new` asks for what a run needs"
                .to_owned()
        }
        Some("sft") => {
            "these are settings of supervised training (SFTConfig), and `firebrick import` reads GRPOConfig, \
                        RLOOConfig and PPOConfig; `firebrick sft` trains on demonstrations with the section `sft` \
                        (docs/reference/configuration.md)"
                .to_owned()
        }
        Some(name) => format!(
            "these are settings of {}, which Firebrick does not train; `firebrick import` reads GRPOConfig, RLOOConfig and \
             PPOConfig",
            name.to_ascii_uppercase()
        ),
        None => {
            let keys: Vec<&str> = facts.keys().take(3).collect();
            format!(
                "no key of the files is only one of GRPOConfig, RLOOConfig or PPOConfig (the first are {}), so they may be \
                 of supervised training or DPO; import them with the script that has the command, such as `trl grpo`, or \
                 add a key such as num_generations",
                keys.join(", ")
            )
        }
    })
}
