//! Which algorithm TRL's files are of: by the command, the program, the classes and trainers that they name, their keys,
//! or their own names.

use super::{grpo, ppo};
use crate::entry::PROGRAM;
use crate::facts::Facts;
use crate::key_mapping::rule;
use crate::python::CLASS;

/// Which of TRL's configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Grpo,
    Rloo,
    Ppo,
}

impl Class {
    pub fn name(self) -> &'static str {
        match self {
            Self::Grpo => "GRPOConfig",
            Self::Rloo => "RLOOConfig",
            Self::Ppo => "PPOConfig",
        }
    }
}

const RL: [(&str, Class); 3] = [("grpo", Class::Grpo), ("rloo", Class::Rloo), ("ppo", Class::Ppo)];

/// Training that is none of reinforcement learning by rewards, as commands and classes name it.
const OTHERS: [&str; 14] = [
    "sft",
    "dpo",
    "kto",
    "orpo",
    "cpo",
    "bco",
    "gkd",
    "xpo",
    "prm",
    "reward",
    "nash",
    "distillation",
    "minillm",
    "simpo",
];

/// Keys that only others have, and whose they are.
const KEYS_OF_OTHERS: [(&str, &str); 17] = [
    ("packing", "sft"),
    ("dataset_text_field", "sft"),
    ("assistant_only_loss", "sft"),
    ("completion_only_loss", "sft"),
    ("precompute_ref_log_probs", "dpo"),
    ("precompute_ref_batch_size", "dpo"),
    ("reference_free", "dpo"),
    ("rpo_alpha", "dpo"),
    ("f_divergence_type", "dpo"),
    ("label_smoothing", "dpo"),
    ("use_weighting", "dpo"),
    ("desirable_weight", "kto"),
    ("undesirable_weight", "kto"),
    ("center_rewards_coefficient", "reward"),
    ("finetuning_type", "LLaMA-Factory"),
    ("cutoff_len", "LLaMA-Factory"),
    ("pref_beta", "LLaMA-Factory"),
];

/// Losses of DPO, CPO and KTO.
const LOSSES_OF_DPO: [&str; 18] = [
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "aot_pair",
    "apo_zero",
    "apo_down",
    "discopop",
    "simpo",
    "kto",
    "orpo",
];

/// Keys of the tables that others have too.
const SHARED: [&str; 12] = [
    "beta",
    "loss_type",
    "max_prompt_length",
    "disable_dropout",
    "use_liger_loss",
    "pad_to_multiple_of",
    "router_aux_loss_coef",
    "model_adapter_name",
    "ref_adapter_name",
    "sync_ref_model",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
];

/// What trains, by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Named {
    Rl(Class),
    Other(String),
}

/// What a command (`trl dpo`), a program (`scripts/train_grpo.py`, `trl.scripts.rloo`), a class or a trainer names.
fn named(text: &str) -> Option<Named> {
    let text = [".py", ".sh", ".yaml", ".yml", ".json"].iter().fold(text, |own, end| own.trim_end_matches(end));
    let last = text.rsplit(['/', '.']).next().unwrap_or(text);
    let last = ["ScriptArguments", "Config", "Trainer"].iter().fold(last, |own, end| own.trim_end_matches(end));
    let lower = last.to_ascii_lowercase();
    let words: Vec<&str> = lower.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let rl = RL.iter().find(|(name, _)| words.contains(name)).map(|(_, class)| Named::Rl(*class));
    let other = || OTHERS.iter().find(|name| words.contains(name)).map(|name| Named::Other((*name).to_owned()));
    rl.or_else(other)
}

/// What the files name, the class of their arguments before the program.
fn of_names(facts: &Facts) -> Option<Named> {
    let trainers = facts.keys().filter_map(|key| key.split_once("Trainer.").map(|(name, _)| name));
    let texts = [CLASS, PROGRAM].into_iter().filter_map(|key| facts.text(key));
    texts.chain(trainers).find_map(named)
}

/// The algorithm of rewards that a file's own name has, where nothing else says one.
fn of_files(facts: &Facts) -> Option<Class> {
    let mut files = facts.all().filter_map(|fact| fact.place.as_ref());
    files.find_map(|place| match named(&place.file)? {
        Named::Rl(class) => Some(class),
        Named::Other(_) => None,
    })
}

/// Keys that only one class has.
const OF_PPO: [&str; 7] = [
    "num_ppo_epochs",
    "total_episodes",
    "cliprange",
    "kl_coef",
    "num_mini_batches",
    "sft_model_path",
    "whiten_rewards",
];
const OF_RLOO: [&str; 2] = ["normalize_advantages", "reward_clip_range"];

/// The class of the files' arguments.
pub(super) fn class(facts: &Facts) -> Class {
    let has = |keys: &[&str]| facts.keys().any(|key| keys.contains(&key));
    match of_names(facts) {
        Some(Named::Rl(class)) => class,
        _ if has(&OF_PPO) => Class::Ppo,
        _ if has(&OF_RLOO) => Class::Rloo,
        _ => of_files(facts).unwrap_or(Class::Grpo),
    }
}

/// Why the files are of a run that is not imported, where they are.
pub(crate) fn refusal(facts: &Facts) -> Option<String> {
    let other = match of_names(facts) {
        Some(Named::Rl(_)) => return None,
        Some(Named::Other(name)) => Some(name),
        None if facts.text("stage").is_some() => Some("LLaMA-Factory".to_owned()),
        None if facts.text("loss_type").is_some_and(|own| LOSSES_OF_DPO.contains(&own)) => Some("dpo".to_owned()),
        None => None,
    };
    let is_of_rl = |key: &str| {
        let table = rule(&[grpo::TABLE, ppo::TABLE], key).is_some();
        table && !SHARED.contains(&key) || key.starts_with("reward_funcs") || key == "reward_model_name_or_path"
    };
    if other.is_none() && facts.keys().any(is_of_rl) {
        return None;
    }
    let key = KEYS_OF_OTHERS.iter().find(|(key, _)| facts.is_written(key)).map(|(_, name)| (*name).to_owned());
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
