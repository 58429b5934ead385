//! From files to a configuration and its account.

use super::account::{Imported, ImportedKey, KeyOutcome, Setting};
use super::assembly::{Assembly, Missing, names};
use super::engine::Engine;
use super::entry::{MissingFile, OVERRIDE, PROGRAM, ParsedSource, SourceValue};
use super::error::ImportError;
use super::facts::{Fact, Facts};
use super::key_mapping::{MappedKey, SourceKey};
use super::objective;
use super::open::{Open, open};
use super::rules::Rules;
use super::source_file::SourceFile;
use firebrick_engine::config;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Settings that `null` turns off; elsewhere null means no value.
const NULLABLE: [&str; 3] = ["objective.clip_ratio_c", "optim.clip_grad", "critic.optim.clip_grad"];

/// Most settings that are removed because the configuration rejects them.
const MAX_REJECTIONS: usize = 32;

/// Options of an import.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Engine of the files; detected by their keys if absent.
    pub engine: Option<Engine>,
    /// Rows of the training data, for lengths in epochs.
    pub rows: Option<u64>,
    /// Devices of the other engine's run, for batch sizes per device.
    pub devices: Option<u64>,
    /// Path to the working folder from the folder of the configuration, if they differ: it makes relative
    /// paths lead to the same files.
    pub way_back: Option<String>,
}

/// Converts files of another engine; later ones override earlier ones. `environment` gives the variables of scripts.
///
/// # Errors
/// [`ImportError`] for a file that cannot be read and for files of no engine that is known. A key that cannot be
/// converted is no error: the report lists it.
pub fn import(
    files: &[SourceFile],
    options: &Options,
    environment: &(dyn Fn(&str) -> Option<String> + Sync),
) -> Result<Imported, ImportError> {
    let (mut entries, mut definitions) = (Vec::new(), Vec::new());
    let readings: Vec<_> = files.iter().map(|file| (file, file.read(files, environment))).collect();
    // a file that another sources is read with that one
    let used: Vec<String> =
        readings.iter().flat_map(|(_, read)| read.iter().flat_map(|source| source.used.clone())).collect();
    let mut merged = ParsedSource::default();
    for (_, reading) in readings.into_iter().filter(|(file, _)| !used.contains(&file.name)) {
        let mut reading = reading?;
        entries.append(&mut reading.entries);
        definitions.append(&mut reading.definitions);
        merged.merge(reading);
    }
    let mut facts = Facts::new(entries);
    facts.definitions = definitions.into_iter().collect();
    (facts.rows, facts.devices, facts.home) = (options.rows, options.devices, environment("HOME"));
    facts.way_back.clone_from(&options.way_back);
    let engine = match options.engine {
        Some(engine) => engine,
        None => Engine::detect(&facts)?,
    };
    if let Some(other) = engine.refusal(&facts) {
        return Err(ImportError::OtherRun(other));
    }
    facts.add_defaults(engine.defaults(&facts));
    facts.resolve_references(environment);
    let mut builder = ImportBuilder::new(engine.rules());
    for fact in facts.iter() {
        builder.add(fact, &facts);
    }
    builder.add_combined(engine, &facts);
    for file in merged.absent.iter().filter(|file| !file.by.is_empty()) {
        builder.add_missing_file(file);
    }
    let mut imported = builder.finish(engine);
    if let Some(file) = merged.absent.iter().find(|file| file.has_settings) {
        // of a file that may set anything, no default is certain
        for setting in imported.assumed.iter().flat_map(ImportedKey::settings) {
            if imported.missing.iter().any(|known| known.key == setting.key) {
                continue;
            }
            let what = format!("the default of {engine}, which {} may change", file.file);
            imported.missing.push(Missing { key: setting.key.clone(), stands_in: setting.value.clone(), what });
        }
    }
    imported.notes = merged.notes;
    Ok(imported)
}

/// Placeholder of a setting that follows from unresolved keys, if there are any.
fn depends_on(keys: &BTreeSet<String>, key: &str, value: &Value) -> Option<Missing> {
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    let what = format!("it follows from {}, whose value only a run decides", names.join(", "));
    (!keys.is_empty()).then(|| Missing { key: key.to_owned(), stands_in: value.clone(), what })
}

/// The rows so far, and the configuration that they add up to.
struct ImportBuilder {
    rules: &'static Rules,
    assembly: Assembly,
    rows: Vec<ImportedKey>,
    /// Firebrick keys by the row of the files that set them.
    owners: BTreeMap<String, usize>,
    /// Placeholders of unresolved keys.
    placeholders: Vec<Missing>,
}

impl ImportBuilder {
    fn new(rules: &'static Rules) -> Self {
        Self {
            rules,
            assembly: Assembly::default(),
            rows: Vec::new(),
            owners: BTreeMap::new(),
            placeholders: Vec::new(),
        }
    }

    fn add(&mut self, fact: &Fact, facts: &Facts) {
        let outcome = self.outcome(fact, facts);
        // a program is no key: it gets a row only if results may depend on it
        if fact.key == PROGRAM && !matches!(outcome, KeyOutcome::Cannot { .. }) {
            return;
        }
        let value = match &fact.value {
            SourceValue::Known(value) => value.clone(),
            SourceValue::Unresolved { text, .. } => text.clone().into(),
        };
        self.rows.push(ImportedKey {
            key: fact.key.clone(),
            value,
            place: fact.place.clone(),
            replaces: fact.replaces.clone(),
            open: matches!(fact.value, SourceValue::Unresolved { .. }),
            outcome,
        });
    }

    fn outcome(&mut self, fact: &Fact, facts: &Facts) -> KeyOutcome {
        if fact.key.ends_with("_target_") {
            return KeyOutcome::NotNeeded { why: "it names a Python class of the other engine".into() };
        }
        if fact.key.ends_with(OVERRIDE) {
            return KeyOutcome::NotNeeded { why: "its section is laid over nothing".into() };
        }
        if let Some(section) = &fact.replaced_by {
            return KeyOutcome::NotNeeded { why: format!("{section} is given a value later, in place of the section") };
        }
        let Some((_, rule)) = self.rules.find(&fact.key) else {
            return KeyOutcome::Unknown { nearest: self.nearest(&fact.key) };
        };
        let value = match &fact.value {
            SourceValue::Known(value) => value,
            SourceValue::Unresolved { .. } if rule.is_not_needed => &Value::Null,
            SourceValue::Unresolved { text, needs, candidates } => {
                return match open(&fact.key, (text, needs), candidates, rule, facts) {
                    Open::Agreed(mapped) => self.apply(fact, mapped),
                    Open::Replaced(missing, why) => {
                        for missing in missing {
                            self.add_placeholder(missing);
                        }

                        KeyOutcome::Cannot { why }
                    }
                };
            }
        };
        if value == "???" {
            return KeyOutcome::NotNeeded { why: "has no value in the files".into() };
        }
        let source = SourceKey { key: &fact.key, value, facts };
        facts.unresolved_reads.take();
        let mapped = rule.convert(&source);
        let depends = facts.unresolved_reads.take();
        if let MappedKey::Set(settings, _) = &mapped {
            self.placeholders.extend(settings.iter().filter_map(|(key, value)| depends_on(&depends, key, value)));
        }
        self.apply(fact, mapped)
    }

    fn apply(&mut self, fact: &Fact, mapped: MappedKey) -> KeyOutcome {
        match mapped {
            MappedKey::NotNeeded(why) => KeyOutcome::NotNeeded { why },
            MappedKey::Cannot(why) => KeyOutcome::Cannot { why },
            MappedKey::Set(settings, note) => self.set(fact, settings, note),
        }
    }

    /// Adds a placeholder.
    fn add_placeholder(&mut self, missing: Missing) {
        if !missing.stands_in.is_null() && !self.assembly.has(&missing.key) {
            self.assembly.put(&missing.key, missing.stands_in.clone());
        }
        self.placeholders.push(missing);
    }

    /// Adds settings that follow from several keys.
    fn add_combined(&mut self, engine: Engine, facts: &Facts) {
        for finish in engine.finishers() {
            let before = self.assembly.settings().clone();
            facts.unresolved_reads.take();
            finish(facts, &mut self.assembly);
            let depends = facts.unresolved_reads.take();
            let changed = self.assembly.settings().iter().filter(|(key, value)| before.get(*key) != Some(value));
            self.placeholders.extend(changed.filter_map(|(key, value)| depends_on(&depends, key, value)));
        }
    }

    /// Sets keys, unless another key of the files has set them to other values.
    fn set(&mut self, fact: &Fact, mut settings: Vec<(String, Value)>, note: String) -> KeyOutcome {
        settings.retain(|(key, value)| !value.is_null() || NULLABLE.contains(&key.as_str()));
        if settings.is_empty() {
            return KeyOutcome::NotNeeded { why: "has no value in the files".into() };
        }
        let taken = settings.iter().find_map(|(key, value)| {
            let owner = &self.rows[*self.owners.get(key)?];
            let differs = self.assembly.get(key).is_some_and(|current| current != value);
            differs.then(|| (key.clone(), owner.key.clone()))
        });
        if let Some((key, owner)) = taken {
            let value = self.assembly.get(&key).cloned().unwrap_or_default();
            return KeyOutcome::Cannot {
                why: format!("it sets {key} too, which {owner} has set to {value}; keep one of the two"),
            };
        }
        for (key, value) in &settings {
            if fact.place.is_some() && !key.ends_with("[]") {
                self.owners.insert(key.clone(), self.rows.len());
            }
            self.assembly.put(key, value.clone());
        }
        let settings = settings.into_iter().map(|(key, value)| Setting { key, value }).collect();
        KeyOutcome::Mapped { settings, note }
    }

    /// Adds a row for a missing file.
    fn add_missing_file(&mut self, file: &MissingFile) {
        let what = if file.has_settings { "its settings are" } else { "the variables that it sets are" };
        self.rows.push(ImportedKey {
            key: file.by.clone(),
            value: file.file.clone().into(),
            place: Some(file.place.clone()),
            replaces: Vec::new(),
            open: false,
            outcome: KeyOutcome::Cannot {
                why: format!("{what} not among the files: import {} first, in one command with this file", file.file),
            },
        });
    }

    /// The most similar key of the tables.
    fn nearest(&self, key: &str) -> Option<String> {
        let names = self.rules.names().filter(|known| !known.ends_with("**"));
        let similarities = names.map(|known| (strsim::jaro_winkler(known, key), known));
        let (similarity, nearest) = similarities.max_by(|a, b| a.0.total_cmp(&b.0))?;
        (similarity > 0.93).then(|| nearest.to_owned())
    }

    fn finish(mut self, engine: Engine) -> Imported {
        for (key, why) in objective::resolve(&mut self.assembly) {
            self.retract(&key, &why);
        }
        self.complete();
        for missing in std::mem::take(&mut self.placeholders) {
            if !self.assembly.missing.iter().any(|known| known.key == missing.key) {
                self.assembly.missing.push(missing);
            }
        }
        self.fit_sizes();
        let problem = self.validate();
        let config = self.config();
        let (rows, assumed): (Vec<ImportedKey>, Vec<ImportedKey>) =
            self.rows.into_iter().partition(|row| row.place.is_some());
        let sets = |row: &ImportedKey| matches!(row.outcome, KeyOutcome::Mapped { .. });
        Imported {
            engine,
            config,
            rows,
            assumed: assumed.into_iter().filter(sets).collect(),
            missing: self.assembly.missing,
            adjusted: self.assembly.adjusted,
            notes: Vec::new(),
            problem,
        }
    }

    /// Removes a setting, also from the row that made it.
    fn retract(&mut self, key: &str, why: &str) {
        self.assembly.remove(key);
        for row in &mut self.rows {
            let KeyOutcome::Mapped { settings, .. } = &mut row.outcome else {
                continue;
            };
            settings.retain(|setting| setting.key != key);
            if settings.is_empty() {
                row.outcome = KeyOutcome::NotNeeded { why: why.to_owned() };
            }
        }
    }

    /// Adds placeholders for required values that the files lack.
    fn complete(&mut self) {
        let assembly = &mut self.assembly;
        assembly.need("model.path", "models/MODEL", "the model's folder");
        if !assembly.has("task.kind") {
            assembly.put("task.kind", json!("dataset"));
        }
        if !assembly.has_no_rows {
            assembly.need("task.train", "train.jsonl", "the file of training rows");
        }
        if assembly.rewards.is_empty() && !assembly.has("task.rewards") {
            assembly.need("task.rewards", json!([{"kind": "exact"}]), "what grades a completion");
            assembly.need("task.answer_field", "answer", "the field that has the answer");
        }
        assembly.need("trainer.steps", 100, "the number of steps: epochs x rows / trainer.train_batch_size");
        assembly.need("output", "runs/imported", "the run folder");
    }

    /// Adjusts sizes to each other: the longest sequence fits every token budget.
    fn fit_sizes(&mut self) {
        let size = |assembly: &Assembly, key: &str, default: u64| assembly.count(key).unwrap_or(default);
        let assembly = &mut self.assembly;
        let longest = size(assembly, "rollout.prompt_length", 512) + size(assembly, "rollout.response_length", 256);
        let longest = longest.min(size(assembly, "rollout.max_model_len", longest));
        let budgets = [
            ("memory.train_tokens", Some(16_384)),
            ("memory.score_tokens", Some(32_768)),
            ("memory.reference.score_tokens", None),
            ("memory.critic.train_tokens", None),
            ("memory.critic.score_tokens", None),
        ];
        for (key, default) in budgets {
            if assembly.count(key).or(default).is_some_and(|budget| budget < longest) {
                assembly.put(key, longest.into());
                assembly.adjusted.push(format!("{key} is {longest}: a prompt and its completion have to fit it"));
            }
        }
        let (slots, forward) = ("rollout.max_num_seqs", "rollout.max_num_batched_tokens");
        let (seqs, tokens) = (size(assembly, slots, 256), size(assembly, forward, 2048));
        if tokens < seqs {
            assembly.put(forward, seqs.into());
            assembly.adjusted.push(format!("{forward} is {seqs}: it may not be below {slots}"));
        }
        let critic = assembly.count("critic.warmup");
        let steps = size(assembly, "trainer.steps", 100);
        if let Some(warmup) = critic.filter(|warmup| *warmup >= steps) {
            assembly.adjusted.push(format!("critic.warmup is omitted: {warmup} steps are the whole run of {steps}"));
            assembly.remove("critic.warmup");
        }
    }

    /// Parses the configuration and removes settings that it is rejected for. Returns the remaining error.
    fn validate(&mut self) -> Option<String> {
        for _ in 0..MAX_REJECTIONS {
            let config = self.config();
            let Err(error) = config::parse(&config, &[]) else {
                return None;
            };
            let message = error.to_string();
            let named = |key: &&String| names(&message, key) && self.assembly.has(key);
            let owned = self.owners.keys().find(named).cloned();
            if let Some(key) = owned {
                self.reject(&key, &message);
            } else if let Some(key) = self.assembly.named_in(&message) {
                // a default of the engine, or a setting of several keys
                self.assembly.remove(&key);
                self.assembly.adjusted.push(format!("{key} is omitted: {message}"));
            } else {
                return Some(message);
            }
        }
        Some("too many settings are rejected".into())
    }

    /// Removes all settings of the row that set `key`, with the error message.
    fn reject(&mut self, key: &str, message: &str) {
        let Some(owner) = self.owners.get(key).copied() else {
            return;
        };
        self.rows[owner].outcome = KeyOutcome::Cannot { why: format!("{key} would be refused: {message}") };
        let assembly = &mut self.assembly;
        let keys = self.owners.extract_if(.., |_, row| *row == owner);
        keys.for_each(|(key, _)| drop(assembly.remove(&key)));
    }

    fn config(&self) -> String {
        let nested = Value::Object(self.assembly.nested());
        serde_saphyr::to_string(&nested).unwrap_or_default()
    }
}
