//! Keys whose values only a run decides: what is to be replaced for them, and by which candidates.

use super::assembly::Missing;
use super::entry::{Candidate, SourceLocation};
use super::facts::Facts;
use super::key_mapping::{MappedKey, SourceKey};
use super::rules::Rule;
use serde_json::{Value, json};

/// Settings that change no result: names of a run, and how many ranks there are.
fn is_free(ours: &str) -> bool {
    ["output", "trainer.project_name", "trainer.experiment_name", "trainer.nnodes", "trainer.n_gpus_per_node"]
        .contains(&ours)
        || ours.ends_with("parallel_size")
}

/// What becomes of such a key.
pub(super) enum Open {
    /// All candidates become the same.
    Agreed(MappedKey),
    /// Settings that stand in, and why the key has no value.
    Replaced(Vec<Missing>, String),
}

/// What becomes of a key with candidates, or with a text that needs something to be known.
pub(super) fn open(
    key: &str,
    (text, needs): (&str, &str),
    candidates: &[Candidate],
    rule: &Rule,
    facts: &Facts,
) -> Open {
    let mapped = |value: &Value| rule.judge(&SourceKey { key, value, facts });
    if candidates.is_empty() {
        // what kind of value it has decides which of our keys it is
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
        candidates.iter().map(|own| (own.value.as_ref().map(mapped), own)).collect();
    let quiet = |own: &Option<MappedKey>| own.as_ref().is_some_and(|own| matches!(own, MappedKey::NotNeeded(_)));
    if each.iter().all(|(own, at)| quiet(own) || own.is_none() && at.place.is_none())
        && let Some(MappedKey::NotNeeded(why)) = each.iter().find_map(|(own, _)| own.clone())
    {
        return Open::Agreed(MappedKey::NotNeeded(why));
    }
    if let Some(first) = each.first().and_then(|(own, _)| own.clone())
        && each.iter().all(|(own, _)| own.as_ref() == Some(&first))
    {
        return Open::Agreed(first);
    }
    let mut missing: Vec<Missing> = Vec::new();
    for (own, _) in &each {
        let Some(MappedKey::Set(settings, _)) = own else {
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

/// What a key of ours is by each candidate, with its line.
fn listed(each: &[(Option<MappedKey>, &Candidate)], ours: &str) -> String {
    let said = each.iter().map(|(own, candidate)| {
        let value = match own {
            Some(MappedKey::Set(settings, _)) => settings.iter().find(|(key, _)| key == ours).map(|(_, value)| value),
            _ => None,
        };
        match (value, &candidate.place) {
            (Some(value), Some(SourceLocation { line: Some(line), .. })) => format!("{value} (line {line})"),
            (Some(value), _) => value.to_string(),
            (None, Some(SourceLocation { line: Some(line), .. })) => format!("an unknown one (line {line})"),
            (None, _) => "none, its default".to_owned(),
        }
    });
    said.collect::<Vec<_>>().join(", ")
}
