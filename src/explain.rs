//! Description of a configuration key: its type, range, default and unit, its names in verl and TRL, and its
//! documentation.

mod words;

use firebrick::engine::config::{Key, keys, nearest_keys};
use firebrick::engine::objective::Algorithm;
use serde_json::Value;
use std::fmt::Write;
use words::{find, words};

/// Width of wrapped text.
const WIDTH: usize = 96;
/// Most suggestions for an unknown key.
const MAX_SUGGESTIONS: usize = 5;

/// Describes a key, and the keys of a section. A key can be named by its unique end, such as `head_rows`,
/// or by its name in verl or TRL.
///
/// # Errors
/// The nearest keys, for an unknown name.
pub fn explain(name: &str) -> Result<String, String> {
    let keys = keys();
    let name = name.trim().trim_end_matches('.');
    if let Some(key) = keys.iter().find(|key| key.path == name) {
        return Ok(describe(key, &keys));
    }
    let ending = format!(".{name}");
    let ends: Vec<&Key> = keys.iter().filter(|key| key.path.ends_with(&ending)).collect();
    match ends.as_slice() {
        [] => translated(name, &keys).ok_or_else(|| unknown(name)),
        [key] => Ok(describe(key, &keys)),
        [first, others @ ..] => {
            let others: Vec<&str> = others.iter().map(|key| key.path.as_str()).collect();
            let others = wrapped(&format!("The same name elsewhere: {}", others.join(", ")), 2);
            Ok(format!("{}\n{others}\n", describe(first, &keys)))
        }
    }
}

/// All sections and top-level keys.
pub fn overview() -> String {
    let keys = keys();
    let top: Vec<&Key> = keys.iter().filter(|key| !key.path.contains('.')).collect();
    format!("{}\n`firebrick config explain KEY` describes one key.\n", list(&top))
}

/// Describes the key of a name in verl or TRL.
fn translated(name: &str, keys: &[Key]) -> Option<String> {
    let names = find(name);
    let first = names.first()?;
    let key = keys.iter().find(|key| key.path == first.key)?;
    let mut others: Vec<&str> = names.iter().map(|name| name.key).collect();
    others.retain(|key| *key != first.key);
    others.dedup();
    let mut text = format!("{}: {}'s word for {}\n\n", first.word, first.engine, first.key);
    text.push_str(&describe(key, keys));
    if !others.is_empty() {
        let others = wrapped(&format!("The same word elsewhere: {}", others.join(", ")), 2);
        let _ = writeln!(text, "\n{others}");
    }
    Some(text)
}

fn unknown(name: &str) -> String {
    let near = nearest_keys(name, MAX_SUGGESTIONS).join(", ");
    format!("there is no key `{name}`; the nearest are {near}")
}

fn describe(key: &Key, keys: &[Key]) -> String {
    let mut text = format!("{}\n{}\n", key.path, wrapped(&summary(key, keys), 2));
    let words = words(&key.path);
    let mut fact = |name: &str, value: &str| {
        if !value.is_empty() {
            let _ = writeln!(text, "  {name:<9}{value}");
        }
    };
    if !key.is_section || !key.values.is_empty() {
        fact("takes", &key.takes);
        fact("default", &default(key));
    }
    fact("unit", words.unit);
    fact("of", &kinds(key));
    fact("verl", words.verl);
    fact("TRL", words.trl);
    fact("docs", &page_of(&key.path));
    if !key.values.is_empty() {
        text.push_str("\n  values\n");
        for (name, what) in &key.values {
            let what = what.as_deref().unwrap_or_default();
            let _ = writeln!(text, "{}", wrapped(&format!("{name:<24}{what}"), 4));
        }
    }
    let inside = format!("{}.", key.path);
    let below = keys.iter().filter(|other| {
        let rest = other.path.strip_prefix(&inside);
        rest.is_some_and(|rest| !rest.contains('.'))
    });
    let below: Vec<&Key> = below.collect();
    if !below.is_empty() {
        let _ = write!(text, "\n  keys\n{}", list(&below));
    }
    text
}

/// Description of a key; a key of `memory.critic` also has the policy key's.
pub fn summary(key: &Key, all: &[Key]) -> String {
    let name = key.path.strip_prefix("memory.critic.");
    match name.and_then(|name| all.iter().find(|k| k.path == format!("memory.{name}"))) {
        Some(policy) => format!("{} {}", policy.description, key.description),
        None => key.description.clone(),
    }
}

fn kinds(key: &Key) -> String {
    if key.kinds.is_empty() {
        return String::new();
    }
    format!("kind: {}", key.kinds.join(", "))
}

/// The page and the heading that document a key.
fn page_of(path: &str) -> String {
    let section = path.split('.').next().unwrap_or(path);
    let is_top = !keys().iter().any(|key| key.path == section && key.is_section);
    let anchor = if is_top { "top-level" } else { section };
    format!("docs/reference/configuration.md#{anchor}")
}

/// A value in YAML.
pub fn written(value: &Value) -> String {
    match value {
        Value::String(text) if text.is_empty() => "\"\"".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The default of a key; for the objective also the different defaults of algorithms.
fn default(key: &Key) -> String {
    let Some(value) = &key.default else {
        return if key.is_required { "none: it has to be given".to_owned() } else { String::new() };
    };
    let mut text = written(value);
    let Some(name) = key.path.strip_prefix("objective.") else {
        return text;
    };
    let pointer = format!("/{}", name.replace('.', "/"));
    for algorithm in Algorithm::ALL {
        let settings = serde_json::to_value(algorithm.settings()).unwrap_or_default();
        let other = settings.pointer(&pointer).filter(|other| *other != value);
        if let (Some(other), Some(algorithm), false) = (other, settings["name"].as_str(), name == "name") {
            let _ = write!(text, "; {algorithm}: {}", written(other));
        }
    }
    text
}

/// A line per key.
fn list(keys: &[&Key]) -> String {
    let name = |key: &Key| key.path.rsplit('.').next().unwrap_or_default().to_owned();
    let widest = keys.iter().map(|key| name(key).len()).max().unwrap_or(0);
    let mut text = String::new();
    for key in keys {
        let what = key.description.split(". ").next().unwrap_or_default();
        let what = what.trim_end_matches('.');
        let room = WIDTH.saturating_sub(widest + 6);
        let short: String = what.chars().take(room).collect();
        let more = if short.len() < what.len() { "…" } else { "" };
        let _ = writeln!(text, "    {:<widest$}  {}{more}", name(key), short.trim_end());
    }
    text
}

/// Text in indented lines.
fn wrapped(text: &str, indent: usize) -> String {
    let mut lines = vec![" ".repeat(indent)];
    for word in text.split_inclusive(' ') {
        let line = lines.last().map_or(0, |line| line.chars().count());
        if line > indent && line + word.trim_end().chars().count() > WIDTH {
            lines.push(" ".repeat(indent + 2));
        }
        if let Some(line) = lines.last_mut() {
            line.push_str(word);
        }
    }
    let lines: Vec<&str> = lines.iter().map(|line| line.trim_end()).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_told_with_all_that_is_known_of_it() {
        let text = explain("memory.head_rows").unwrap();
        for part in [
            "memory.head_rows\n  Rows (tokens) per chunk of logits",
            "takes    integer, at least 1",
            "default  1024",
            "unit     rows (tokens)",
            "verl     actor_rollout_ref.actor.entropy_from_logits_with_chunking",
            "TRL      use_liger_kernel",
            "docs     docs/reference/configuration.md#memory",
        ] {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
    }

    #[test]
    fn an_objectives_default_is_that_of_each_algorithm_and_values_are_told() {
        let text = explain("objective.clip_ratio_high").unwrap();
        assert!(text.contains("default  0.2; dapo: 0.28"), "{text}");
        let text = explain("objective.loss_agg_mode").unwrap();
        assert!(text.contains("seq-mean-token-sum-norm"), "{text}");
    }

    #[test]
    fn a_section_lists_its_keys_and_a_list_those_of_its_entries() {
        let text = explain("memory").unwrap();
        assert!(text.contains("    budget ") && text.contains("    reference "), "{text}");
        assert!(!text.contains("takes"), "{text}");
        let text = explain("task.rewards").unwrap();
        assert!(text.contains("    weight ") && text.contains("    tolerance "), "{text}");
        assert!(explain("task.rewards.tolerance").unwrap().contains("of       kind: number"));
        assert!(overview().contains("    rollout "));
    }

    #[test]
    fn a_name_that_is_no_key_brings_the_nearest_and_a_last_part_is_enough() {
        let error = explain("memory.hed_rows").unwrap_err();
        assert!(error.contains("memory.head_rows"), "{error}");
        assert!(explain("train_batch_size").unwrap().starts_with("trainer.train_batch_size\n"));
        let text = explain("clip_grad").unwrap();
        assert!(text.contains("elsewhere: ") && text.contains("critic.optim.clip_grad"), "{text}");
    }

    #[test]
    fn verls_and_trls_words_lead_to_the_key() {
        for (word, first, key) in [
            ("num_generations", "num_generations: TRL's word for rollout.n\n", "rollout.n"),
            ("actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.n: verl's word for rollout.n\n", "rollout.n"),
            ("data.train_files", "data.train_files: verl's word for task.train\n", "task.train"),
            ("train_files", "data.train_files: verl's word for task.train\n", "task.train"),
            ("bf16", "bf16: TRL's word for precision\n", "precision"),
        ] {
            let text = explain(word).unwrap();
            assert!(text.starts_with(first), "{word}:\n{text}");
            assert!(text.contains(&format!("\n\n{key}\n  ")), "{word}:\n{text}");
        }
        // a key of ours is that key, whatever others call so
        assert!(explain("temperature").unwrap().starts_with("rollout.temperature\n"));
        let keys = keys();
        for names in words::all() {
            let word = names.split(", ").next().unwrap_or_default();
            let text = explain(word).unwrap_or_else(|e| panic!("{word}: {e}"));
            assert!(keys.iter().any(|key| text.contains(&key.path)), "{word}");
        }
    }

    #[test]
    fn every_key_is_explained_in_lines_that_fit() {
        for key in keys() {
            let text = explain(&key.path).unwrap();
            assert!(text.lines().count() >= 3, "{text}");
            for line in text.lines() {
                let one_word = line.trim().split(' ').count() < 3;
                let fact = line.starts_with("  default") || line.starts_with("  of ");
                assert!(fact || one_word || line.chars().count() <= WIDTH + 4, "{line}");
            }
        }
    }
}
