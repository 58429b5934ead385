//! The algorithm of TRL's files, by the command, the program, the classes and trainers that they name, their keys, or
//! their file names.

use crate::entry::PROGRAM;
use crate::facts::Facts;
use crate::key_mapping::SourceKey;
use crate::literal::has_word;
use crate::python::CLASS;

/// TRL's configuration classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Grpo,
    Rloo,
    Ppo,
}

const RL: [(&str, Class); 3] = [("grpo", Class::Grpo), ("rloo", Class::Rloo), ("ppo", Class::Ppo)];

/// Training without rewards, as commands and classes name it.
const OTHER_TRAINERS: &str = "sft dpo kto orpo cpo bco gkd xpo prm reward nash distillation minillm simpo";

/// A trainer by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trainer {
    Rl(Class),
    Other(String),
}

/// The trainer of a command (`trl dpo`), a program (`scripts/train_grpo.py`, `trl.scripts.rloo`), a class or a trainer.
fn named(text: &str) -> Option<Trainer> {
    let text = [".py", ".sh", ".yaml", ".yml", ".json"].iter().fold(text, |text, end| text.trim_end_matches(end));
    let last = text.rsplit(['/', '.']).next().unwrap_or(text);
    let last = ["ScriptArguments", "Config", "Trainer"].iter().fold(last, |text, end| text.trim_end_matches(end));
    let lower = last.to_ascii_lowercase();
    let words: Vec<&str> = lower.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let rl = RL.iter().find(|(name, _)| words.contains(name)).map(|(_, class)| Trainer::Rl(*class));
    let other =
        || OTHER_TRAINERS.split(' ').find(|name| words.contains(name)).map(|name| Trainer::Other(name.to_owned()));
    rl.or_else(other)
}

/// The trainer that the files name; the class of their arguments goes before the program.
pub(super) fn from_contents(facts: &Facts) -> Option<Trainer> {
    let trainers = facts.keys().filter_map(|key| key.split_once("Trainer.").map(|(name, _)| name));
    let texts = [CLASS, PROGRAM].into_iter().filter_map(|key| facts.text(key));
    texts.chain(trainers).find_map(named)
}

/// The algorithm in a file's name.
pub(super) fn from_file_names(facts: &Facts) -> Option<Class> {
    let mut files = facts.iter().filter_map(|fact| fact.place.as_ref());
    files.find_map(|place| match named(&place.file)? {
        Trainer::Rl(class) => Some(class),
        Trainer::Other(_) => None,
    })
}

/// Keys of only one class.
const PPO_KEYS: &str = "num_ppo_epochs total_episodes cliprange kl_coef num_mini_batches sft_model_path whiten_rewards";
const RLOO_KEYS: &str = "normalize_advantages reward_clip_range";

/// Returns true if the class of the files' arguments is that of an algorithm.
pub(super) fn algorithm(source: &SourceKey, name: &str) -> bool {
    RL.contains(&(name, class(source.facts)))
}

/// The class of the files' arguments.
pub(super) fn class(facts: &Facts) -> Class {
    let has = |keys: &str| facts.keys().any(|key| has_word(keys, key));
    match from_contents(facts) {
        Some(Trainer::Rl(class)) => class,
        _ if has(PPO_KEYS) => Class::Ppo,
        _ if has(RLOO_KEYS) => Class::Rloo,
        _ => from_file_names(facts).unwrap_or(Class::Grpo),
    }
}
