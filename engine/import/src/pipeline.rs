//! From files to a configuration and its account.

use super::account::{Imported, ImportedKey, KeyOutcome, Setting};
use super::assembly::{Assembly, Missing, names};
use super::engine::Engine;
use super::entry::{Absent, Given, PROGRAM, Reading};
use super::error::ImportError;
use super::facts::{Fact, Facts, OVERRIDE};
use super::key_mapping::{MappedKey, SourceKey};
use super::objective;
use super::open::{Open, open};
use super::rules::Rules;
use super::source_file::SourceFile;
use firebrick_engine::config;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Settings of ours that `null` turns off; elsewhere it says nothing.
const NULLABLE: [&str; 3] = ["objective.clip_ratio_c", "optim.clip_grad", "critic.optim.clip_grad"];

/// Most settings that are taken back because nothing accepts them.
const REFUSALS: usize = 32;

/// What an import is told beside the files.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Whose files they are; by their keys where absent.
    pub engine: Option<Engine>,
    /// Rows of the training data, for lengths in epochs.
    pub rows: Option<u64>,
    /// Devices of the other engine's run, for batch sizes a device.
    pub devices: Option<u64>,
    /// The way to the working folder from the folder that the configuration goes to, where that is another: what leads
    /// relative paths to the same files.
    pub way_back: Option<String>,
}

/// Reads files of another engine, later ones over earlier ones. `environment` gives the variables that scripts read.
///
/// # Errors
/// [`ImportError`] for a file that cannot be read and for files of no engine that is known. What cannot be done here is
/// no error: it stands in the table.
pub fn import(
    files: &[SourceFile],
    options: &Options,
    environment: &(dyn Fn(&str) -> Option<String> + Sync),
) -> Result<Imported, ImportError> {
    let (mut entries, mut definitions) = (Vec::new(), Vec::new());
    let readings: Vec<_> = files.iter().map(|file| (file, file.read(files, environment))).collect();
    // a file that another sources is read with that one
    let used: Vec<String> = readings.iter().flat_map(|(_, own)| own.iter().flat_map(|own| own.used.clone())).collect();
    let mut whole = Reading::default();
    for (_, reading) in readings.into_iter().filter(|(file, _)| !used.contains(&file.name)) {
        let mut reading = reading?;
        entries.append(&mut reading.entries);
        definitions.append(&mut reading.definitions);
        whole.join(reading);
    }
    let mut facts = Facts::new(entries);
    facts.definitions = definitions.into_iter().collect();
    (facts.rows, facts.devices, facts.home) = (options.rows, options.devices, environment("HOME"));
    facts.way_back.clone_from(&options.way_back);
    let engine = match options.engine {
        Some(engine) => engine,
        None => Engine::of(&facts)?,
    };
    if let Some(other) = engine.refusal(&facts) {
        return Err(ImportError::OtherRun(other));
    }
    facts.lay_under(engine.defaults(&facts));
    facts.follow_references(environment);
    let mut work = Work::new(engine.rules());
    for fact in facts.all() {
        work.take(fact, &facts);
    }
    work.follow(engine, &facts);
    for own in whole.absent.iter().filter(|own| !own.by.is_empty()) {
        work.lacks(own);
    }
    let mut imported = work.finish(engine);
    if let Some(own) = whole.absent.iter().find(|own| own.has_settings) {
        // of a file that may set anything, no default is certain
        for setting in imported.assumed.iter().flat_map(ImportedKey::settings) {
            if imported.missing.iter().any(|known| known.key == setting.key) {
                continue;
            }
            let what = format!("the default of {engine}, which {} may change", own.file);
            imported.missing.push(Missing { key: setting.key.clone(), stands_in: setting.value.clone(), what });
        }
    }
    imported.notes = whole.notes;
    Ok(imported)
}

/// A setting that follows from keys without a certain value, where it does, and has to be replaced.
fn depends_on(keys: &BTreeSet<String>, key: &str, value: &Value) -> Option<Missing> {
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    let what = format!("it follows from {}, whose value only a run decides", names.join(", "));
    (!keys.is_empty()).then(|| Missing { key: key.to_owned(), stands_in: value.clone(), what })
}

/// The rows so far, and the configuration that they make.
struct Work {
    rules: &'static Rules,
    assembly: Assembly,
    rows: Vec<ImportedKey>,
    /// Our keys by the row that set them, where it is written.
    owners: BTreeMap<String, usize>,
    /// Settings of keys whose values only a run decides.
    replaced: Vec<Missing>,
}

impl Work {
    fn new(rules: &'static Rules) -> Self {
        Self { rules, assembly: Assembly::default(), rows: Vec::new(), owners: BTreeMap::new(), replaced: Vec::new() }
    }

    fn take(&mut self, fact: &Fact, facts: &Facts) {
        let outcome = self.outcome(fact, facts);
        // a program is no key: it is worth a row where results may depend on it
        if fact.key == PROGRAM && !matches!(outcome, KeyOutcome::Cannot { .. }) {
            return;
        }
        let value = match &fact.given {
            Given::Value(value) => value.clone(),
            Given::Open { text, .. } => text.clone().into(),
        };
        self.rows.push(ImportedKey {
            key: fact.key.clone(),
            value,
            place: fact.place.clone(),
            replaces: fact.replaces.clone(),
            open: matches!(fact.given, Given::Open { .. }),
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
        if let Some(section) = &fact.taken_by {
            return KeyOutcome::NotNeeded { why: format!("{section} is given a value later, in place of the section") };
        }
        let Some((_, rule)) = self.rules.find(&fact.key) else {
            return KeyOutcome::Unknown { nearest: self.nearest(&fact.key) };
        };
        let value = match &fact.given {
            Given::Value(value) => value,
            Given::Open { .. } if rule.is_not_needed => &Value::Null,
            Given::Open { text, needs, candidates } => {
                return match open(&fact.key, (text, needs), candidates, rule, facts) {
                    Open::Agreed(mapped) => self.settle(fact, mapped),
                    Open::Replaced(missing, why) => {
                        for own in missing {
                            self.stand_in(own);
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
        facts.open_reads.take();
        let mapped = rule.judge(&source);
        let depends = facts.open_reads.take();
        if let MappedKey::Set(settings, _) = &mapped {
            self.replaced.extend(settings.iter().filter_map(|(key, value)| depends_on(&depends, key, value)));
        }
        self.settle(fact, mapped)
    }

    fn settle(&mut self, fact: &Fact, mapped: MappedKey) -> KeyOutcome {
        match mapped {
            MappedKey::NotNeeded(why) => KeyOutcome::NotNeeded { why },
            MappedKey::Cannot(why) => KeyOutcome::Cannot { why },
            MappedKey::Set(settings, note) => self.set(fact, settings, note),
        }
    }

    /// Puts a value that is to be replaced.
    fn stand_in(&mut self, own: Missing) {
        if !own.stands_in.is_null() && !self.assembly.has(&own.key) {
            self.assembly.put(&own.key, own.stands_in.clone());
        }
        self.replaced.push(own);
    }

    /// Settings that follow from several keys together.
    fn follow(&mut self, engine: Engine, facts: &Facts) {
        for put in engine.last() {
            let before = self.assembly.all().clone();
            facts.open_reads.take();
            put(facts, &mut self.assembly);
            let depends = facts.open_reads.take();
            let changed = self.assembly.all().iter().filter(|(key, value)| before.get(*key) != Some(value));
            self.replaced.extend(changed.filter_map(|(key, value)| depends_on(&depends, key, value)));
        }
    }

    /// Puts settings, unless another key of the files has put others there.
    fn set(&mut self, fact: &Fact, mut settings: Vec<(String, Value)>, note: String) -> KeyOutcome {
        settings.retain(|(key, value)| !value.is_null() || NULLABLE.contains(&key.as_str()));
        if settings.is_empty() {
            return KeyOutcome::NotNeeded { why: "has no value in the files".into() };
        }
        let taken = settings.iter().find_map(|(key, value)| {
            let owner = &self.rows[*self.owners.get(key)?];
            let differs = self.assembly.get(key).is_some_and(|own| own != value);
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

    /// A row for a file that the files name and that is not among them.
    fn lacks(&mut self, own: &Absent) {
        let what = if own.has_settings { "its settings are" } else { "the variables that it sets are" };
        self.rows.push(ImportedKey {
            key: own.by.clone(),
            value: own.file.clone().into(),
            place: Some(own.place.clone()),
            replaces: Vec::new(),
            open: false,
            outcome: KeyOutcome::Cannot {
                why: format!("{what} not among the files: import {} first, in one command with this file", own.file),
            },
        });
    }

    /// The key of the tables that is spelled most alike.
    fn nearest(&self, key: &str) -> Option<String> {
        let all = self.rules.names().filter(|known| !known.ends_with("**"));
        let alike = all.map(|known| (strsim::jaro_winkler(known, key), known));
        let (similarity, nearest) = alike.max_by(|a, b| a.0.total_cmp(&b.0))?;
        (similarity > 0.93).then(|| nearest.to_owned())
    }

    fn finish(mut self, engine: Engine) -> Imported {
        for (key, why) in objective::resolve(&mut self.assembly) {
            self.take_back(&key, &why);
        }
        self.complete();
        for own in std::mem::take(&mut self.replaced) {
            if !self.assembly.missing.iter().any(|known| known.key == own.key) {
                self.assembly.missing.push(own);
            }
        }
        self.fit();
        let problem = self.accept();
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

    /// Takes a setting out of the row that made it.
    fn take_back(&mut self, key: &str, why: &str) {
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

    /// Puts what a run needs and the files do not say.
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

    /// Makes sizes fit each other: a longest sequence fits every token budget.
    fn fit(&mut self) {
        let of = |assembly: &Assembly, key: &str, default: u64| assembly.whole(key).unwrap_or(default);
        let assembly = &mut self.assembly;
        let longest = of(assembly, "rollout.prompt_length", 512) + of(assembly, "rollout.response_length", 256);
        let longest = longest.min(of(assembly, "rollout.max_model_len", longest));
        let budgets = [
            ("memory.train_tokens", Some(16_384)),
            ("memory.score_tokens", Some(32_768)),
            ("memory.reference.score_tokens", None),
            ("memory.critic.train_tokens", None),
            ("memory.critic.score_tokens", None),
        ];
        for (key, default) in budgets {
            if assembly.whole(key).or(default).is_some_and(|budget| budget < longest) {
                assembly.put(key, longest.into());
                assembly.adjusted.push(format!("{key} is {longest}: a prompt and its completion have to fit it"));
            }
        }
        let (slots, forward) = ("rollout.max_num_seqs", "rollout.max_num_batched_tokens");
        let (seqs, tokens) = (of(assembly, slots, 256), of(assembly, forward, 2048));
        if tokens < seqs {
            assembly.put(forward, seqs.into());
            assembly.adjusted.push(format!("{forward} is {seqs}: it may not be below {slots}"));
        }
        let critic = assembly.whole("critic.warmup");
        let steps = of(assembly, "trainer.steps", 100);
        if let Some(warmup) = critic.filter(|warmup| *warmup >= steps) {
            assembly.adjusted.push(format!("critic.warmup is omitted: {warmup} steps are the whole run of {steps}"));
            assembly.remove("critic.warmup");
        }
    }

    /// Reads the configuration, and takes back settings that it is refused for. Gives what is left to say against it.
    fn accept(&mut self) -> Option<String> {
        for _ in 0..REFUSALS {
            let config = self.config();
            let Err(error) = config::parse(&config, &[]) else {
                return None;
            };
            let said = error.to_string();
            let named = |key: &&String| names(&said, key) && self.assembly.has(key);
            let owned = self.owners.keys().find(named).cloned();
            if let Some(key) = owned {
                self.refuse(&key, &said);
            } else if let Some(key) = self.assembly.named_in(&said) {
                // a default of theirs, or what followed from several keys
                self.assembly.remove(&key);
                self.assembly.adjusted.push(format!("{key} is omitted: {said}"));
            } else {
                return Some(said);
            }
        }
        Some("too many settings are rejected".into())
    }

    /// Takes back all that a key of theirs has set, for what is said against one of its settings.
    fn refuse(&mut self, key: &str, said: &str) {
        let Some(owner) = self.owners.get(key).copied() else {
            return;
        };
        self.rows[owner].outcome = KeyOutcome::Cannot { why: format!("{key} would be refused: {said}") };
        let assembly = &mut self.assembly;
        self.owners.retain(|key, own| {
            let keeps = *own != owner;
            if !keeps {
                assembly.remove(key);
            }
            keeps
        });
    }

    fn config(&self) -> String {
        let nested = Value::Object(self.assembly.nested());
        serde_saphyr::to_string(&nested).unwrap_or_default()
    }
}
