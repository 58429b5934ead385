//! Configurations of other engines: every block, preset and key of five memory guides, and example runs of verl, TRL
//! and `NeMo RL`. Of each the account is complete, and the configuration is accepted and planned.

mod cases;
mod checked;
mod scripts;
mod trl;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use firebrick_backends::device::Backend;
use firebrick_backends::profile;
use firebrick_engine::config::{Mode, RunConfig, parse};
use firebrick_engine::plan::estimate::rules;
use firebrick_engine::planning;
use firebrick_engine::task::{RewardKind, TaskConfig};
use firebrick_import::{Engine, Imported, KeyOutcome, Options, SourceFile, import};
use serde_json::Value;

use crate::support::{checked, fixtures};

/// Bytes of the device that runs are planned for.
const CAPACITY: u64 = 141 << 30;

fn environment(name: &str) -> Option<String> {
    (name == "HOME").then(|| "/srv".to_owned())
}

fn folder() -> PathBuf {
    fixtures().join("import")
}

/// Files below `tests/fixtures/import` as one run.
fn read(names: &[&str]) -> (Vec<SourceFile>, Imported) {
    let read = |name: &&str| {
        let path = folder().join(name);
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{name}: {e}"));
        SourceFile::new(*name, text)
    };
    let files: Vec<SourceFile> = names.iter().map(read).collect();
    let imported = import(&files, &Options::default(), &environment);
    let imported = imported.unwrap_or_else(|e| panic!("{names:?}: {e}"));
    (files, imported)
}

/// The configuration, which has to be accepted.
fn accepted(name: &str, imported: &Imported) -> RunConfig {
    assert_eq!(imported.problem, None, "{name}:\n{}", imported.config);
    parse(&imported.config, &[]).unwrap_or_else(|e| panic!("{name}: {e}\n{}", imported.config))
}

/// Plans a configuration for a public model on a GPU. Folders that are named there are not here: a rule takes the place
/// of a reward model.
fn planned(name: &str, mut config: RunConfig, model: &str) {
    if let Some(critic) = &mut config.critic {
        critic.model.path = None;
    }
    if let Some(lora) = &mut config.model.lora {
        lora.path = None;
    }
    if let Some(TaskConfig::Dataset(task) | TaskConfig::Jsonl(task)) = &mut config.task {
        for reward in &mut task.rewards {
            if matches!(reward.kind, RewardKind::Model(_)) {
                reward.kind = RewardKind::Exact { ignore_case: false };
            }
        }
    }
    let arch = rules::public(model).unwrap_or_else(|e| panic!("{name}: {e}"));
    let arch = arch.in_precision(config.precision);
    let mut device = profile::assumed(Backend::Cuda);
    device.capacity_bytes = Some(CAPACITY);
    let request = planning::request(&config, Mode::Rl, &arch, device, None);
    let request = request.unwrap_or_else(|e| panic!("{name}: {e}"));
    let fit = request.as_configured().unwrap_or_else(|e| panic!("{name}: {e}"));
    assert!(fit.estimate.peak_bytes > 0, "{name}");
}

fn ending(file: &SourceFile) -> &str {
    file.name.rsplit_once('.').map_or("", |(_, ending)| ending)
}

/// Names of settings that a file mentions, found without the importer: dotted keys of overrides, words before a colon
/// or an equals sign.
fn mentioned(file: &SourceFile) -> BTreeSet<String> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_path = |key: &str| key.starts_with(char::is_alphabetic) && key.chars().all(|c| is_word(c) || c == '.');
    let mut found = BTreeSet::new();
    for line in file.text.lines() {
        if ending(file) == "sh" {
            let words = line.split_whitespace().map(|word| word.trim_start_matches(['+', '~']));
            let keys = words.filter_map(|word| word.split_once('=')).map(|(key, _)| key);
            found.extend(keys.filter(|key| key.contains('.') && is_path(key)).map(str::to_owned));
            let flags = line.split_whitespace().filter_map(|word| word.strip_prefix("--"));
            found.extend(flags.filter(|flag| flag.chars().all(is_word)).map(str::to_owned));
        } else {
            let sign = if ending(file) == "py" { '=' } else { ':' };
            let key = line.split_once(sign).map(|(key, _)| key.trim().trim_matches('"').trim_start_matches("- "));
            found.extend(key.filter(|key| is_path(key)).map(str::to_owned));
        }
    }
    found
}

/// Every setting of the files is a row, or a part of one's path or value; and no row is there twice.
fn complete(files: &[SourceFile], imported: &Imported) {
    let mut keys = BTreeSet::new();
    for row in &imported.rows {
        assert!(keys.insert(&row.key), "{} stands twice", row.key);
        assert!(row.place.is_some(), "{}", row.key);
        match &row.outcome {
            KeyOutcome::Mapped { settings, .. } => assert!(!settings.is_empty(), "{}", row.key),
            KeyOutcome::NotNeeded { why } | KeyOutcome::Cannot { why } => {
                assert!(!why.is_empty(), "{}", row.key);
            }
            KeyOutcome::Unknown { .. } => {}
        }
    }
    // names that a program or a script gives to values and objects of its own are no settings
    let own = |file: &SourceFile, name: &str| {
        !name.contains('.') && file.text.lines().any(|line| line.trim_start().starts_with(&format!("{name} = ")))
    };
    for file in files {
        let is_guide = file.name.starts_with("guides/");
        for name in mentioned(file) {
            let part = |row: &str| {
                row == name || row.ends_with(&format!(".{name}")) || row.split('.').any(|part| part == name)
            };
            let within = |value: &Value| value.to_string().contains(&name);
            let accounted = imported.rows.iter().any(|row| part(&row.key) || within(&row.value));
            assert!(accounted || (!is_guide && own(file, &name)), "{}: {name} is in no row", file.name);
        }
    }
}

fn unknown(imported: &Imported) -> Vec<&str> {
    let unknown = imported.rows.iter().filter(|row| matches!(row.outcome, KeyOutcome::Unknown { .. }));
    unknown.map(|row| row.key.as_str()).collect()
}

#[test]
fn every_block_and_preset_of_the_guides_is_accounted_for_accepted_and_planned() {
    let entries = std::fs::read_dir(folder().join("guides")).expect("guides");
    let mut names: Vec<String> =
        entries.map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    let mut engines: BTreeMap<&str, usize> = BTreeMap::new();
    for name in &names {
        let (files, imported) = read(&[&format!("guides/{name}")]);
        complete(&files, &imported);
        assert_eq!(unknown(&imported), [""; 0], "{name}");
        let engine = match &name[..3] {
            "001" => Engine::Nemo,
            "004" => Engine::GrpoGuide,
            _ => Engine::Verl,
        };
        assert_eq!(imported.engine, engine, "{name}");
        *engines.entry(engine.name()).or_default() += 1;
        planned(name, accepted(name, &imported), "Qwen2.5-7B");
    }
    assert_eq!(engines.len(), 3, "{engines:?}");
    checked("blocks and presets of the guides", names.len());
}

#[test]
fn every_key_of_the_engines_own_configurations_has_an_answer() {
    let path = folder().join("keys.tsv");
    let text = std::fs::read_to_string(&path).expect("keys.tsv");
    let mut cases = 0;
    for engine in [Engine::Verl, Engine::Trl, Engine::Nemo] {
        let own = text.lines().filter_map(|line| line.strip_prefix(&format!("{}\t", engine.name())));
        let own: Vec<&str> = own.collect();
        assert!(own.len() > 50, "{engine}: {}", own.len());
        let lines: serde_json::Map<String, Value> = own.iter().map(|key| ((*key).to_owned(), Value::Null)).collect();
        let file = SourceFile::new("keys.json", Value::Object(lines).to_string());
        let options = Options { engine: Some(engine), ..Options::default() };
        let imported = import(&[file], &options, &environment).unwrap_or_else(|e| panic!("{engine}: {e}"));
        assert_eq!(unknown(&imported), [""; 0], "{engine}");
        assert_eq!(imported.rows.len(), own.len(), "{engine}");
        accepted(engine.name(), &imported);
        cases += own.len();
    }
    checked("keys of other engines", cases);
}

#[test]
fn the_batch_sizes_of_the_guide_to_grpo_are_prompts_groups_and_micro_batches() {
    for (name, [prompts, group, micro]) in [
        ("guides/004_for_memory_constrained_training.py", [32, 4, 4]),
        ("guides/004_for_more_memory_available.py", [32, 8, 16]),
        ("guides/004_for_maximum_memory_efficiency.py", [64, 4, 4]),
    ] {
        let config = accepted(name, &read(&[name]).1);
        let found = [config.trainer.train_batch_size, config.rollout.n, config.memory.micro_batch_size.unwrap_or(0)];
        assert_eq!(found, [prompts, group, micro], "{name}");
    }
}

#[test]
fn example_runs_become_the_settings_that_they_mean() {
    let cases = cases::all();
    for case in &cases {
        let (files, imported) = read(case.files);
        let name = case.files.join(" + ");
        complete(&files, &imported);
        let config = accepted(&name, &imported);
        let resolved = serde_json::to_value(&config).expect("JSON");
        for (key, expected) in case.settings() {
            let found = resolved.pointer(&format!("/{}", key.replace('.', "/"))).unwrap_or(&Value::Null);
            let equal = match (found.as_f64(), expected.as_f64()) {
                (Some(found), Some(expected)) => (found - expected).abs() <= 1e-12 * expected.abs(),
                _ => *found == expected,
            };
            assert!(equal, "{name}: {key} is {found}, and should be {expected}\n{}", imported.config);
        }
        let missing: Vec<&str> = imported.missing.iter().map(|missing| missing.key.as_str()).collect();
        assert_eq!(missing, case.missing, "{name}");
        assert_eq!(unknown(&imported), case.unknown, "{name}");
        planned(&name, config, case.model);
    }
    checked("example runs of other engines", cases.len());
}

#[test]
fn an_imported_configuration_says_the_same_when_it_is_written_out_and_read_again() {
    for case in cases::all() {
        let (_, imported) = read(case.files);
        let config = accepted(case.files[0], &imported);
        let again = parse(&config.to_yaml().expect("YAML"), &[]).expect("its own YAML");
        assert_eq!(config.objective, again.objective, "{:?}", case.files);
        assert_eq!(config.optim, again.optim, "{:?}", case.files);
    }
}

#[test]
fn the_example_of_the_page_is_what_is_written() {
    let page = std::fs::read_to_string(crate::support::project().join("docs/guides/migrate.md")).expect("the page");
    let blocks = |language: &str| -> Vec<String> {
        let fence = format!("```{language}\n");
        let after = page.split(&fence).skip(1);
        after.map(|rest| rest.split("```").next().unwrap_or_default().to_owned()).collect()
    };
    let script = blocks("console").into_iter().find(|block| block.contains("verl.trainer.main_ppo")).expect("a script");
    let imported = import(&[SourceFile::new("run.sh", script)], &Options::default(), &environment).expect("verl");
    let mut config = accepted("the page's script", &imported);
    let shown = blocks("yaml").remove(0);
    let shown = parse(&shown, &[]).unwrap_or_else(|e| panic!("docs/guides/migrate.md: {e}"));
    // the script names no run folder
    config.output.clone_from(&shown.output);
    assert_eq!(config, shown, "{}", imported.config);
}

#[test]
fn rows_and_devices_that_a_file_does_not_say_can_be_told() {
    let text = std::fs::read_to_string(folder().join("trl/grpo_qwen2_5_1_5b.yaml")).expect("a fixture");
    let files = [SourceFile::new("grpo.yaml", text)];
    let options = Options { rows: Some(1_000), devices: Some(2), ..Options::default() };
    let imported = import(&files, &options, &environment).expect("TRL");
    let config = accepted("grpo.yaml", &imported);
    // 16 completions on each of 2 devices, 4 times; 16 a prompt
    assert_eq!(config.trainer.train_batch_size, 8);
    assert_eq!(config.trainer.steps, 125);
}
