//! Runs of TRL's that are not imported: supervised training, preferences, and what is not TRL's at all.

use super::class::{Named, of_files, of_names};
use crate::facts::Facts;
use crate::literal::has_word;
use crate::rules::Rules;
use std::sync::LazyLock;

/// The table of the keys that only the configurations of reinforcement learning have.
pub(crate) const TABLE: &str = include_str!("../../rules/trl_algorithms.txt");

static RULES: LazyLock<Rules> = LazyLock::new(|| {
    let functions = [super::FUNCTIONS.as_slice(), &[crate::common::FUNCTIONS]].concat();
    Rules::read(&[TABLE], &functions).unwrap_or_else(|why| panic!("the table of TRL's algorithms: {why}"))
});

/// Keys that only others have, and whose they are.
const KEYS_OF_OTHERS: [(&str, &str); 5] = [
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
const LOSSES_OF_DPO: &str = "sigmoid sigmoid_norm hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired \
                             aot_pair apo_zero apo_down discopop simpo kto orpo";

/// Keys of the tables that others have too.
const SHARED: &str = "beta loss_type max_prompt_length disable_dropout use_liger_loss pad_to_multiple_of \
                      router_aux_loss_coef model_adapter_name ref_adapter_name sync_ref_model ref_model_mixup_alpha \
                      ref_model_sync_steps";

/// Why the files are of a run that is not imported, where they are.
pub(crate) fn refusal(facts: &Facts) -> Option<String> {
    let other = match of_names(facts) {
        Some(Named::Rl(_)) => return None,
        Some(Named::Other(name)) => Some(name),
        None if facts.text("stage").is_some() => Some("LLaMA-Factory".to_owned()),
        None if facts.text("loss_type").is_some_and(|own| has_word(LOSSES_OF_DPO, own)) => Some("dpo".to_owned()),
        None => None,
    };
    let is_of_rl = |key: &str| {
        RULES.find(key).is_some() && !has_word(SHARED, key)
            || key.starts_with("reward_funcs")
            || key == "reward_model_name_or_path"
    };
    if other.is_none() && facts.keys().any(is_of_rl) {
        return None;
    }
    let key = KEYS_OF_OTHERS.iter().find(|(keys, _)| keys.split_whitespace().any(|key| facts.is_written(key)));
    let key = key.map(|(_, name)| (*name).to_owned());
    let other = other.or(key);
    if other.is_none() && of_files(facts).is_some() {
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
