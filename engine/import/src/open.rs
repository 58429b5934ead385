//! Unresolved keys: their placeholders and candidates.

use super::assembly::Missing;
use super::entry::Candidate;
use super::facts::Facts;
use super::key_mapping::{MappedKey, SourceKey};
use super::rules::Rule;
use serde_json::{Value, json};

/// Returns true for settings that change no result: names of a run, numbers of ranks.
fn is_free(ours: &str) -> bool {
    ["output", "trainer.project_name", "trainer.experiment_name", "trainer.nnodes", "trainer.n_gpus_per_node"]
        .contains(&ours)
        || ours.ends_with("parallel_size")
}

/// Outcome of an unresolved key.
pub(super) enum Open {
    /// All candidates map to the same.
    Agreed(MappedKey),
    /// Placeholders, and the reason why the key has no value.
    Replaced(Vec<Missing>, String),
}

/// Resolves a key from its candidates, or from its source text.
pub(super) fn open(
    key: &str,
    (text, needs): (&str, &str),
    candidates: &[Candidate],
    rule: &Rule,
    facts: &Facts,
) -> Open {
    let mapped = |value: &Value| rule.convert(&SourceKey { key, value, facts });
    if candidates.is_empty() {
        // the type of its value decides which Firebrick key it is
        let samples = [json!(text), json!(2), json!(0.5), json!(true)];
        let keys = samples.iter().find_map(|sample| match mapped(sample) {
            MappedKey::Set(settings, _) => Some(settings.into_iter().map(|(key, _)| key).collect::<Vec<_>>()),
            MappedKey::NotNeeded(_) | MappedKey::Cannot(_) => None,
        });
        if let (None, MappedKey::NotNeeded(why)) = (&keys, mapped(&samples[0])) {
            return Open::Agreed(MappedKey::NotNeeded(why));
        }
        let keys = keys.unwrap_or_default();
        if !keys.is_empty() && keys.iter().all(|ours| is_free(ours)) {
            let why = format!("no result depends on {}, which is `{text}` and needs {needs}", keys.join(", "));
            return Open::Agreed(MappedKey::NotNeeded(why));
        }
        let missing = keys.into_iter().map(|ours| Missing {
            key: ours,
            stands_in: Value::Null,
            what: format!("{key} is `{text}`, which needs {needs}"),
        });
        let why = format!("its value `{text}` needs {needs}; set it, or write our key by hand");
        return Open::Replaced(missing.collect(), why);
    }
    let each: Vec<(Option<MappedKey>, &Candidate)> =
        candidates.iter().map(|candidate| (candidate.value.as_ref().map(mapped), candidate)).collect();
    let is_ignored = |mapped: &Option<MappedKey>| matches!(mapped, Some(MappedKey::NotNeeded(_)));
    if each.iter().all(|(mapped, at)| is_ignored(mapped) || mapped.is_none() && at.place.is_none())
        && let Some(MappedKey::NotNeeded(why)) = each.iter().find_map(|(mapped, _)| mapped.clone())
    {
        return Open::Agreed(MappedKey::NotNeeded(why));
    }
    if let Some(first) = each.first().and_then(|(mapped, _)| mapped.clone())
        && each.iter().all(|(mapped, _)| mapped.as_ref() == Some(&first))
    {
        return Open::Agreed(first);
    }
    let mut missing: Vec<Missing> = Vec::new();
    for (mapped, _) in &each {
        let Some(MappedKey::Set(settings, _)) = mapped else {
            continue;
        };
        for (ours, value) in settings {
            if !missing.iter().any(|known| known.key == *ours) {
                let what = format!("{key} has several values: {}", listed(&each, ours));
                missing.push(Missing { key: ours.clone(), stands_in: value.clone(), what });
            }
        }
    }
    Open::Replaced(missing, format!("only a run decides its value: {needs}"))
}

/// Values of a Firebrick key by candidate, with their lines.
fn listed(each: &[(Option<MappedKey>, &Candidate)], ours: &str) -> String {
    let values = each.iter().map(|(mapped, candidate)| {
        let value = match mapped {
            Some(MappedKey::Set(settings, _)) => settings.iter().find(|(key, _)| key == ours).map(|(_, value)| value),
            _ => None,
        };
        match (value, candidate.line()) {
            (Some(value), line) => format!("{value}{line}"),
            (None, line) if line.is_empty() => "none, its default".to_owned(),
            (None, line) => format!("an unknown one{line}"),
        }
    });
    values.collect::<Vec<_>>().join(", ")
}
