//! Units of keys, and their names in verl and TRL. The schema has their descriptions, types and defaults.

/// Facts on a key that the schema lacks; empty if unknown.
#[derive(Clone, Copy, Debug, Default)]
pub struct Words {
    /// Unit of its number.
    pub unit: &'static str,
    /// verl's key, as a path of its configuration.
    pub verl: &'static str,
    /// TRL's argument.
    pub trl: &'static str,
}

/// Key, unit, verl's word and TRL's, separated by tabs. Keys of other optimizers are found by their
/// end, `optim.lr`.
const WORDS: &str = include_str!("words.tsv");

/// The rows of the table: a key and its words.
fn rows() -> impl Iterator<Item = (&'static str, Words)> {
    WORDS.lines().skip(1).filter_map(|line| {
        let mut cells = line.split('\t');
        let mut next = || cells.next();
        let (key, unit, verl, trl) = (next()?, next()?, next()?, next()?);
        Some((key, Words { unit, verl, trl }))
    })
}

/// Facts on a key by its path. Sections in several places have the facts of one of them.
pub fn words(path: &str) -> Words {
    let ends = |key: &str| {
        let before = path.strip_suffix(key);
        before.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    let policy = path.replacen("memory.critic.", "memory.", 1);
    let exact = rows().find(|(key, _)| *key == policy);
    let Some((key, words)) = exact.or_else(|| rows().find(|(key, _)| ends(key))) else {
        return Words::default();
    };
    // another model's key has another path in verl
    let verl = if key == path { words.verl } else { "" };
    Words { verl, ..words }
}

/// All words of verl and TRL, in the table.
#[cfg(test)]
pub fn all() -> impl Iterator<Item = &'static str> {
    rows().flat_map(|(_, words)| [words.verl, words.trl]).filter(|cell| !cell.is_empty())
}

/// A name in another engine, and our key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreign {
    pub engine: &'static str,
    pub word: &'static str,
    pub key: &'static str,
}

/// Finds keys by their names in verl or TRL: by the whole name, or by the end of a path in verl.
pub fn find(name: &str) -> Vec<Foreign> {
    let ending = format!(".{name}");
    let mut names = Vec::new();
    for (key, words) in rows() {
        for (engine, cell) in [("verl", words.verl), ("TRL", words.trl)] {
            let is_it = |word: &&str| *word == name || word.ends_with(&ending);
            let matching = cell.split(", ").find(is_it);
            names.extend(matching.map(|word| Foreign { engine, word, key }));
        }
    }
    // a whole name takes precedence over a path's end
    let exact: Vec<Foreign> = names.iter().filter(|foreign| foreign.word == name).copied().collect();
    if exact.is_empty() { names } else { exact }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick::engine::config::keys;

    #[test]
    fn words_are_of_keys_that_there_are_and_each_key_has_one_row() {
        let known_keys = keys();
        assert_eq!(rows().count() + 1, WORDS.lines().count(), "four cells a row");
        for (at, (key, words)) in rows().enumerate() {
            assert!(known_keys.iter().any(|known| known.path == key), "{key} is no key");
            let again = rows().skip(at + 1).any(|(other, _)| other == key);
            assert!(!again, "{key} stands twice");
            let texts = [words.unit, words.verl, words.trl].concat();
            assert!(!texts.is_empty(), "{key} has no words");
        }
    }

    #[test]
    fn a_critics_optimizer_has_the_words_of_its_keys_and_not_the_policys_path() {
        let critic = words("critic.optim.clip_grad");
        assert_eq!((critic.unit, critic.verl, critic.trl), ("norm of the gradient", "", "max_grad_norm"));
        assert_eq!(words("memory.critic.train_tokens").unit, "tokens");
        assert_eq!(words("model.tokenizer").trl, "");
    }
}
