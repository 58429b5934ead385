//! Which algorithm TRL's files are of: by the command, the program, the classes and trainers that they name, their keys,
//! or their own names.

use crate::entry::PROGRAM;
use crate::facts::Facts;
use crate::literal::has_word;
use crate::python::CLASS;

/// Which of TRL's configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Grpo,
    Rloo,
    Ppo,
}

const RL: [(&str, Class); 3] = [("grpo", Class::Grpo), ("rloo", Class::Rloo), ("ppo", Class::Ppo)];

/// Training that is none of reinforcement learning by rewards, as commands and classes name it.
const OTHERS: &str = "sft dpo kto orpo cpo bco gkd xpo prm reward nash distillation minillm simpo";

/// What trains, by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Named {
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
    let other = || OTHERS.split(' ').find(|name| words.contains(name)).map(|name| Named::Other(name.to_owned()));
    rl.or_else(other)
}

/// What the files name, the class of their arguments before the program.
pub(super) fn of_names(facts: &Facts) -> Option<Named> {
    let trainers = facts.keys().filter_map(|key| key.split_once("Trainer.").map(|(name, _)| name));
    let texts = [CLASS, PROGRAM].into_iter().filter_map(|key| facts.text(key));
    texts.chain(trainers).find_map(named)
}

/// The algorithm of rewards that a file's own name has, where nothing else says one.
pub(super) fn of_files(facts: &Facts) -> Option<Class> {
    let mut files = facts.all().filter_map(|fact| fact.place.as_ref());
    files.find_map(|place| match named(&place.file)? {
        Named::Rl(class) => Some(class),
        Named::Other(_) => None,
    })
}

/// Keys that only one class has.
const OF_PPO: &str = "num_ppo_epochs total_episodes cliprange kl_coef num_mini_batches sft_model_path whiten_rewards";
const OF_RLOO: &str = "normalize_advantages reward_clip_range";

/// The class of the files' arguments.
pub(super) fn class(facts: &Facts) -> Class {
    let has = |keys: &str| facts.keys().any(|key| has_word(keys, key));
    match of_names(facts) {
        Some(Named::Rl(class)) => class,
        _ if has(OF_PPO) => Class::Ppo,
        _ if has(OF_RLOO) => Class::Rloo,
        _ => of_files(facts).unwrap_or(Class::Grpo),
    }
}
