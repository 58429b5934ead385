//! Units of keys, and verl's and TRL's words for them. What a key is, takes and defaults to stands in the schema.

/// What a schema does not say of a key. Empty where there is nothing to say.
#[derive(Clone, Copy, Debug, Default)]
pub struct Words {
    /// What its number counts.
    pub unit: &'static str,
    /// verl's key, as a path of its configuration.
    pub verl: &'static str,
    /// TRL's argument.
    pub trl: &'static str,
}

/// Key, unit, verl's word and TRL's, separated by tabs. A key of a critic's or a supervised optimizer is found by its
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

/// What is known of a key by its path. Sections that stand in several places have the words of one of them.
pub fn words(path: &str) -> Words {
    let ends = |key: &str| {
        let before = path.strip_suffix(key);
        before.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    let policys = path.replacen("memory.critic.", "memory.", 1);
    let exact = rows().find(|(key, _)| *key == policys);
    let Some((key, words)) = exact.or_else(|| rows().find(|(key, _)| ends(key))) else {
        return Words::default();
    };
    // the same key of another model has another path in verl
    let verl = if key == path { words.verl } else { "" };
    Words { verl, ..words }
}

/// All words of verl and TRL, as the table has them.
#[cfg(test)]
pub fn all() -> impl Iterator<Item = &'static str> {
    rows().flat_map(|(_, words)| [words.verl, words.trl]).filter(|cell| !cell.is_empty())
}

/// Whose word one is, and the key that it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreign {
    pub engine: &'static str,
    pub word: &'static str,
    pub key: &'static str,
}

/// Keys that verl or TRL call so: by the whole word, or by the end of a path of verl's.
pub fn called(name: &str) -> Vec<Foreign> {
    let ending = format!(".{name}");
    let mut found = Vec::new();
    for (key, words) in rows() {
        for (engine, cell) in [("verl", words.verl), ("TRL", words.trl)] {
            let is_it = |word: &&str| *word == name || word.ends_with(&ending);
            let own = cell.split(", ").find(is_it);
            found.extend(own.map(|word| Foreign { engine, word, key }));
        }
    }
    // the whole word says more than a path's end
    let whole: Vec<Foreign> = found.iter().filter(|own| own.word == name).copied().collect();
    if whole.is_empty() { found } else { whole }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick::engine::config::keys;

    #[test]
    fn words_are_of_keys_that_there_are_and_each_key_has_one_row() {
        let all = keys();
        assert_eq!(rows().count() + 1, WORDS.lines().count(), "four cells a row");
        for (at, (key, words)) in rows().enumerate() {
            assert!(all.iter().any(|known| known.path == key), "{key} is no key");
            let again = rows().skip(at + 1).any(|(other, _)| other == key);
            assert!(!again, "{key} stands twice");
            let said = [words.unit, words.verl, words.trl].concat();
            assert!(!said.is_empty(), "{key} has no words");
        }
    }

    #[test]
    fn a_critics_optimizer_has_the_words_of_its_keys_and_not_the_policys_path() {
        let own = words("critic.optim.clip_grad");
        assert_eq!((own.unit, own.verl, own.trl), ("norm of the gradient", "", "max_grad_norm"));
        assert_eq!(words("memory.critic.train_tokens").unit, "tokens");
        assert_eq!(words("model.tokenizer").trl, "");
    }
}
