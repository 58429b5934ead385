//! The command that starts a run: its launcher, program and settings.

use super::command::{Form, Launch};
use super::run::INERT;
use super::strings::joined;
use super::value::{Place, Text, Unknown, Variable, number};
use super::{Flow, Shell};
use crate::branches::{TracedEntry, merge_paths};
use crate::entry::{Entry, MissingFile, PROGRAM, SourceLocation, SourceValue};
use crate::error::{ImportError, ImportResult};
use crate::literal::{has_word, hydra, word as literal_word};
use crate::source_file::{SourceFile, is_known};
use serde_json::Value;
use std::collections::BTreeSet;

/// Words of TRL's launch commands.
const TRL_WORDS: [&str; 4] = ["trl", "grpo", "rloo", "ppo"];

/// Programs that start another.
const WRAPPERS: &str = "nohup time exec command builtin env sudo nice ionice timeout stdbuf setsid srun mpirun mpiexec numactl \
    uv poetry pdm pixi conda mamba micromamba singularity apptainer docker podman ray ssh nsys";
/// Programs that start a Python program on several devices.
const LAUNCHERS: [&str; 3] = ["torchrun", "accelerate", "deepspeed"];
const MODULES: [&str; 4] =
    ["torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher.runner"];
const SHELLS: [&str; 5] = ["bash", "sh", "zsh", "dash", "sbatch"];

/// The settings of a command.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Settings {
    at: Vec<Place>,
    form: Form,
    is_line: bool,
    entries: Vec<TracedEntry>,
    absent: Vec<MissingFile>,
}

impl Settings {
    fn new(at: Vec<Place>, form: Form, is_line: bool) -> Self {
        Self { at, form, is_line, entries: Vec::new(), absent: Vec::new() }
    }
}

/// Returns true if a text looks like a list of overrides.
pub(crate) fn looks_like_overrides(text: &str) -> bool {
    let lines = text.lines().map(str::trim);
    let mut lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.next().is_some_and(is_dotted)
}

/// The key and value of an override.
fn split_override(word: &str) -> Option<(&str, &str)> {
    if let Some(key) = word.strip_prefix('~') {
        let (key, value) = key.split_once('=').unwrap_or((key, ""));
        return is_key(key).then_some((key, value));
    }
    let (key, value) = word.trim_start_matches('+').split_once('=')?;
    is_key(key).then_some((key, value))
}

/// Returns true for an override with a dotted key, which a shell assignment never has.
fn is_dotted(word: &str) -> bool {
    split_override(word).is_some_and(|(key, _)| key.contains('.'))
}

fn is_key(key: &str) -> bool {
    let part = |c: char| c.is_ascii_alphanumeric() || "_./@-".contains(c);
    key.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && key.chars().all(part)
}

fn has_ending(path: &str, ending: &str) -> bool {
    path.rsplit_once('.').is_some_and(|(_, suffix)| suffix == ending)
}

/// Returns true if a word is a program that a wrapper starts.
fn starts_program(word: &str) -> bool {
    let name = base(word);
    name.starts_with("python")
        || LAUNCHERS.contains(&name)
        || SHELLS.contains(&name)
        || name == "trl"
        || has_ending(name, "py")
        || has_ending(name, "sh")
}

fn base(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

impl Shell<'_> {
    /// Starts a program.
    pub(super) fn program(
        &mut self,
        mut words: Vec<Text>,
        environment: &[(String, Variable)],
        input: Option<Text>,
    ) -> ImportResult {
        self.scope.status = None;
        if has_word(WRAPPERS, base(&words[0].text)) {
            if let Some(at) = words.iter().position(|word| starts_program(&word.text)) {
                words.drain(..at);
            } else if let Some(text) =
                words.last().filter(|word| base(&words[0].text) == "ssh" && word.text.contains(' '))
            {
                return self.nested(&text.text.clone());
            }
        }
        let name = base(&words[0].text).to_owned();
        if is_dotted(&words[0].text) {
            self.launches.push(self.launch(Form::Overrides, true, Vec::new(), words));
            return Ok(());
        }
        if SHELLS.contains(&name.as_str()) || has_ending(&name, "sh") {
            let from = usize::from(!has_ending(&name, "sh"));
            return self.script(&words[from..], environment, input);
        }
        let is_silent = name.starts_with("python")
            && words.iter().any(|word| word.text == "-c")
            && !words.iter().any(|word| word.text.contains("print") || word.text.contains("stdout"));
        self.scope.output.is_unknown |= !is_silent;
        let module = words.iter().position(|word| MODULES.contains(&word.text.as_str()));
        let (program, launcher, arguments) = if LAUNCHERS.contains(&name.as_str()) || module.is_some() {
            let from = module.unwrap_or(0) + 1;
            let is_program = |at: &usize| {
                has_ending(&words[*at].text, "py") || matches!(words[*at - 1].text.as_str(), "-m" | "--module")
            };
            let at = (from..words.len()).find(is_program).unwrap_or(words.len());
            (words.get(at), words[from..at].to_vec(), words.get(at + 1..).unwrap_or_default().to_vec())
        } else {
            let is_named = name == "trl" || name.starts_with("python");
            let named = words[1..].iter().find(|word| is_named && !word.text.starts_with('-'));
            (named.or(words.first()), Vec::new(), words[1..].to_vec())
        };
        let program = program.map(|program| self.written(&program.text));
        let has = |wanted: fn(&str) -> bool| arguments.iter().any(|argument| wanted(&argument.text));
        let is_trl = |word: &Text| {
            !word.text.starts_with("--") && word.text.split(['/', '.', '_', '-']).any(|part| TRL_WORDS.contains(&part))
        };
        let form = if has(is_dotted) {
            Form::Overrides
        } else if has(|argument| argument.starts_with("--"))
            && !has(|argument| argument == "vllm-serve")
            && (words.iter().any(is_trl) || has(is_flag))
        {
            Form::Flags
        } else if launcher.iter().any(|word| word.text.starts_with("--n")) {
            Form::Devices
        } else {
            if !has_word(INERT, &name) && !name.starts_with("python") {
                // it may be a function of a missing file
                self.forget_variables();
            }
            return Ok(());
        };
        let launch = self.launch(form, false, launcher, arguments);
        self.launches.push(Launch { program, ..launch });
        Ok(())
    }

    fn launch(&self, form: Form, is_line: bool, launcher: Vec<Text>, arguments: Vec<Text>) -> Launch {
        let at = self.calls.iter().copied().chain([self.place()]).collect();
        Launch { at, form, is_line, launcher, arguments, program: None, absent: None }
    }

    /// `bash FILE` and `bash -c TEXT`, with the following words as arguments.
    fn script(&mut self, words: &[Text], environment: &[(String, Variable)], input: Option<Text>) -> ImportResult {
        let flags = words.iter().take_while(|word| word.text.starts_with(['-', '+'])).count();
        let is_text = words[..flags].iter().any(|word| !word.text.starts_with("--") && word.text.contains('c'));
        // `sbatch --wrap TEXT`
        if let Some(at) = words.iter().position(|word| word.text.starts_with("--wrap")) {
            let inline = words[at].text.split_once('=').map(|(_, text)| text);
            let text = inline.or_else(|| Some(words.get(at + 1)?.text.as_str())).unwrap_or_default().to_owned();
            return self.in_subshell(|shell| shell.nested(&text));
        }
        let rest = &words[flags..];
        let Some(first) = rest.first() else {
            let Some(input) = input else {
                return Ok(());
            };
            return self.in_subshell(|shell| shell.nested(&input.text));
        };
        let file = self.find_file(&first.text);
        if file.is_none() && !is_text {
            let form = if rest.iter().any(|word| is_dotted(&word.text)) { Form::Overrides } else { Form::Script };
            let absent = Some(self.written(&first.text));
            let launch = self.launch(form, false, Vec::new(), rest[1..].to_vec());
            self.launches.push(Launch { absent, ..launch });
            self.scope.output.is_unknown = true;
            return Ok(());
        }
        self.in_subshell(|shell| {
            // it sees only exported variables
            shell.scope.variables.retain(|_, variable| variable.exported);
            shell.scope.variables.extend(environment.iter().cloned());
            shell.scope.functions.clear();
            shell.scope.arguments = rest[1..].to_vec();
            match file.filter(|_| !is_text) {
                Some(file) => {
                    shell.scope.name.clone_from(&file.name);
                    shell.run(&file.name, &file.text)
                }
                None => {
                    // the first argument is the name of the text
                    shell.scope.arguments = rest.get(2..).unwrap_or_default().to_vec();
                    shell.nested(&first.text)
                }
            }
        })?;
        self.scope.flow = Flow::Next;
        self.scope.status = None;
        Ok(())
    }

    /// The input file with the longest common path suffix.
    pub(super) fn find_file(&self, path: &str) -> Option<SourceFile> {
        if let Some(made) = self.written_files.iter().rfind(|made| made.name == path) {
            return Some(made.clone());
        }
        let common_parts = |file: &SourceFile| {
            let parts = file.name.rsplit('/').zip(path.rsplit('/'));
            parts.take_while(|(a, b)| a == b).count()
        };
        let best = self.files.iter().max_by_key(|file| common_parts(file));
        best.filter(|file| common_parts(file) > 0).cloned()
    }

    pub(super) fn add_missing_file(&mut self, by: &str, file: &str, has_settings: bool) {
        let place = SourceLocation { file: self.names[self.file].clone(), line: Some(self.line) };
        let absent = MissingFile { by: by.to_owned(), file: file.to_owned(), place, has_settings };
        if !self.reading.absent.contains(&absent) {
            self.reading.absent.push(absent);
        }
    }

    /// Source text of a string.
    pub(super) fn written(&self, text: &str) -> String {
        let unknown = |c: char| self.unknowns.get(number(c)?);
        text.chars().map(|c| unknown(c).map_or_else(|| c.to_string(), |known| known.written.clone())).collect()
    }

    fn source_value(&self, text: &str, read: fn(&str) -> Value) -> SourceValue {
        let unknown: Option<&Unknown> = text.chars().find_map(|c| self.unknowns.get(number(c)?));
        match unknown {
            Some(unknown) => SourceValue::unresolved(self.written(text), &unknown.needs),
            None => SourceValue::Known(read(text)),
        }
    }

    /// The settings of a command, in their order.
    pub(super) fn settings(&mut self, launch: Launch) -> ImportResult<Settings> {
        let (file, line) = *launch.at.last().unwrap_or(&(0, 1));
        let place = SourceLocation { file: self.names[file].clone(), line: Some(line) };
        let mut settings = Settings::new(launch.at, launch.form, launch.is_line);
        if let Some(file) = launch.absent {
            settings.absent.push(MissingFile { by: "bash".into(), file, place: place.clone(), has_settings: true });
        }
        if let Some(program) = launch.program {
            settings.entries.push((Entry::new(PROGRAM, SourceValue::Known(program.into()), &place), BTreeSet::new()));
        }
        for (key, values, word) in flags(&launch.launcher) {
            self.flag(&key.replace('-', "_"), &values, &word, &place, &mut settings)?;
        }
        if launch.form == Form::Flags {
            for (key, values, word) in flags(&launch.arguments) {
                self.flag(&key.replace('-', "_"), &values, &word, &place, &mut settings)?;
            }
            return Ok(settings);
        }
        let mut arguments = launch.arguments.iter().peekable();
        while let Some(argument) = arguments.next() {
            if argument.text.starts_with("--config") {
                let (flag, value) = match argument.text.split_once('=') {
                    Some((flag, value)) => (flag, argument.with(value)),
                    None => (argument.text.as_str(), arguments.next().cloned().unwrap_or_default()),
                };
                self.flag(flag, &[value], argument, &place, &mut settings)?;
            } else if let Some((key, text)) = split_override(&argument.text) {
                let value = self.source_value(text, hydra);
                let entries = if argument.text.starts_with('~') {
                    vec![Entry { removes: true, ..Entry::new(key, value, &place) }]
                } else {
                    Entry::flattened(key, value, &place)
                };
                let lines = self.lines(argument);
                settings.entries.extend(entries.into_iter().map(|entry| (entry, lines.clone())));
            } else if argument.text.chars().next().and_then(number).is_some() {
                self.note(format!("{} may have further settings", self.written(&argument.text)));
            }
        }
        Ok(settings)
    }

    fn lines(&self, text: &Text) -> BTreeSet<(String, usize)> {
        text.lines.iter().map(|(file, line)| (self.names[*file].clone(), *line)).collect()
    }

    fn flag(
        &mut self,
        key: &str,
        values: &[Text],
        word: &Text,
        place: &SourceLocation,
        into: &mut Settings,
    ) -> ImportResult {
        if let ("config" | "--config" | "config_file" | "--config-name", [value]) = (key, values) {
            let path = if key == "--config-name" { format!("{}.yaml", value.text) } else { value.text.clone() };
            if let Some(file) = self.find_file(&path) {
                let reading = file.read(self.files, self.environment)?;
                self.reading.used.push(file.name);
                self.reading.used.extend(reading.used);
                into.entries.extend(reading.entries.into_iter().map(|entry| (entry, BTreeSet::new())));
            } else if key != "--config-name" {
                // the tables have rows for keys, but not for `--config`
                let by = if key == "--config" { key } else { "" };
                let file = self.written(&value.text);
                // a launcher's file has the number of devices; its row reports it as missing
                let has_settings = key != "config_file";
                into.absent.push(MissingFile { by: by.into(), file, place: place.clone(), has_settings });
            }
            if key == "--config" {
                return Ok(());
            }
        }
        let parse = if key.starts_with("--config") { literal_word } else { hydra };
        // a parser of dataclasses has a second flag that turns a switch off
        let negated = key.strip_prefix("no_").filter(|word| values.is_empty() && !is_known(key) && is_known(word));
        let key = negated.unwrap_or(key);
        let value = match values {
            [] => SourceValue::Known(Value::Bool(negated.is_none())),
            [one] => self.source_value(&one.text, parse),
            words if words.iter().all(Text::is_known) => {
                SourceValue::Known(words.iter().map(|one| literal_word(&one.text)).collect())
            }
            words => self.source_value(&joined(words, " ").text, literal_word),
        };
        let mut lines = self.lines(word);
        lines.extend(values.iter().flat_map(|value| self.lines(value)));
        into.entries.extend(Entry::flattened(key, value, place).into_iter().map(|entry| (entry, lines.clone())));
        Ok(())
    }
}

/// Returns true if a word is a flag of an engine.
fn is_flag(word: &str) -> bool {
    let key = word.strip_prefix("--").map(|flag| flag.split_once('=').map_or(flag, |(key, _)| key));
    key.is_some_and(is_known)
}

/// `--key value`, `--key=value` and `--key` alone; several values of one key are a list.
fn flags(words: &[Text]) -> Vec<(String, Vec<Text>, Text)> {
    let mut flags = Vec::new();
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        let Some(flag) = word.text.strip_prefix("--") else {
            continue;
        };
        if let Some((key, value)) = flag.split_once('=') {
            flags.push((key.to_owned(), vec![word.with(value)], word.clone()));
            continue;
        }
        let mut values = Vec::new();
        while let Some(value) = words.next_if(|next| !next.text.starts_with("--") && next.text != "-m") {
            values.push(value.clone());
        }
        flags.push((flag.to_owned(), values, word.clone()));
    }
    flags
}

/// Merges the runs of all paths through a script: settings that differ between them get candidates.
pub(super) fn merge_launches(file: &str, paths: Vec<Vec<Settings>>) -> ImportResult<(Vec<Entry>, Vec<MissingFile>)> {
    let form = paths.iter().flatten().map(|command| command.form).max();
    let mut runs: Vec<Settings> = Vec::new();
    for mut path in paths {
        path.retain(|command| Some(command.form) == form);
        let (lines, mut commands): (Vec<_>, Vec<_>) = path.into_iter().partition(|command| command.is_line);
        let first = commands.first().map(|command| command.at.clone());
        if let Some(second) = commands.iter().find(|command| Some(&command.at) != first.as_ref()) {
            let line = |at: &[Place]| at.first().map(|(_, line)| *line);
            return Err(ImportError::at(
                file,
                line(&second.at),
                format!(
                    "a second command with settings begins here, and the first in line {}; a run has one: keep the one to import",
                    first.as_deref().and_then(line).unwrap_or(1)
                ),
            ));
        }
        let lines: Vec<_> = lines.into_iter().flat_map(|command| command.entries).collect();
        if commands.is_empty() && !lines.is_empty() {
            commands.push(Settings::new(Vec::new(), Form::Overrides, true));
        }
        for mut run in commands {
            run.entries.extend(lines.iter().cloned());
            if !runs.contains(&run) {
                runs.push(run);
            }
        }
    }
    let absent: Vec<MissingFile> = runs.first().map(|run| run.absent.clone()).unwrap_or_default();
    if runs.iter().all(|run| run.entries.is_empty()) {
        let detail = match absent.first() {
            Some(MissingFile { file, .. }) => {
                format!("its settings are in {file}, which is not among the files: import it with this one")
            }
            None => "no settings found: expected a command with key=value settings, as in `python3 -m verl.trainer.main_ppo \
                     data.train_batch_size=256`, or with --key value ones, as in `trl grpo --learning_rate 1e-6`"
                .to_owned(),
        };
        return Err(ImportError::at(file, absent.first().and_then(|file| file.place.line), detail));
    }
    let runs: Vec<Vec<TracedEntry>> = runs.into_iter().map(|run| run.entries).collect();
    Ok((merge_paths(&runs), absent))
}
