//! Built-in commands, and commands that only print.

use super::strings::{formatted, joined};
use super::value::{Mode, Text, Variable, number};
use super::{Flow, Shell};
use crate::error::ImportResult;
use crate::literal::has_word;
use brush_parser::ast::FunctionBody;
use std::sync::Arc;

/// Files of an installation, which set nothing for a run.
const INSTALLED: &str = "activate conda.sh .bashrc .bash_profile .profile profile setvars.sh set_env.sh modules.sh";

impl Shell<'_> {
    /// Starts a command: a function, a built-in, a program.
    pub(super) fn start(
        &mut self,
        mut words: Vec<Text>,
        environment: &[(String, Variable)],
        input: Option<Text>,
    ) -> ImportResult {
        self.deeper()?;
        let name = words[0].text.clone();
        let function: Option<Arc<(FunctionBody, usize)>> = self.scope.functions.get(&name).cloned();
        if let Some(function) = function {
            self.call(&function, words.split_off(1))?;
        } else if !self.control_flow(&name, &words[1..])?
            && !self.set_variables(&name, &words[1..], environment, input.as_ref())?
        {
            match self.output(&name, &words[1..], input.as_ref())? {
                Some(text) => {
                    self.scope.output.text.push(&text);
                    self.scope.status = Some(true);
                }
                None => self.program(words, environment, input)?,
            }
        }
        self.depth -= 1;
        Ok(())
    }

    /// Runs commands that change the control flow or the status.
    fn control_flow(&mut self, name: &str, arguments: &[Text]) -> ImportResult<bool> {
        let first = arguments.first().and_then(|argument| argument.text.parse::<usize>().ok());
        self.scope.status = match name {
            ":" | "true" => Some(true),
            "false" | "getopts" => Some(false),
            "test" => self.test(arguments)?,
            "[" => self.test(&arguments[..arguments.len().saturating_sub(1)])?,
            "exit" | "return" | "break" | "continue" => {
                self.scope.flow = match name {
                    "exit" => Flow::Exit,
                    "return" => Flow::Return,
                    "break" => Flow::Break(first.unwrap_or(1)),
                    _ => Flow::Continue,
                };
                if name == "return" { first.map_or(self.scope.status, |code| Some(code == 0)) } else { Some(true) }
            }
            "mkdir" | "sleep" | "wait" | "ulimit" | "shopt" | "trap" | "touch" | "umask" | "chmod" | "module" => {
                Some(true)
            }
            _ => return Ok(false),
        };
        Ok(true)
    }

    /// Runs commands that set variables.
    fn set_variables(
        &mut self,
        name: &str,
        arguments: &[Text],
        environment: &[(String, Variable)],
        input: Option<&Text>,
    ) -> ImportResult<bool> {
        let first = arguments.first();
        match name {
            "set" => {
                if let Some(at) = arguments.iter().position(|argument| argument.text == "--") {
                    self.scope.arguments = arguments[at + 1..].to_vec();
                }
            }
            "shift" => {
                let count = first.map_or(Some(1), |argument| argument.text.parse().ok()).unwrap_or(0);
                let count = self.scope.arguments.len().min(count);
                self.scope.arguments.drain(..count);
            }
            "printf" if first.is_some_and(|argument| argument.text == "-v") => {
                if let [_, name, format, values @ ..] = arguments {
                    let text = formatted(format, values);
                    let text =
                        text.unwrap_or_else(|| self.unknown("$(printf …)", "the output of the command printf", false));
                    self.scope.variables.insert(name.text.clone(), Variable::text(text));
                }
            }
            "unset" => arguments.iter().for_each(|argument| drop(self.scope.variables.remove(&argument.text))),
            "let" => {
                for argument in arguments {
                    self.arithmetic(&argument.text)?;
                }
            }
            "eval" => self.nested(&joined(arguments, " ").text)?,
            "source" | "." => {
                if let Some(first) = first {
                    self.source(first, &arguments[1..])?;
                }
            }
            "cd" | "pushd" | "popd" => {
                let is_option = |argument: &&Text| argument.text.starts_with('-') && argument.text != "-";
                let path =
                    arguments.iter().find(|argument| !is_option(argument)).map_or_else(|| Text::new("~"), Text::clone);
                let there = if name == "popd" || path.text == "-" {
                    self.unknown("$PWD", "the folder that the script runs in", false)
                } else {
                    self.absolute(&path)
                };
                self.scope.variables.insert("PWD".into(), Variable::text(there));
            }
            "read" | "mapfile" | "readarray" => {
                let prefixed = environment.iter().find(|(name, _)| name == "IFS").map(|(_, variable)| variable.clone());
                let separators = prefixed.or_else(|| self.scope.variables.get("IFS").cloned());
                self.read_input(name, arguments, separators.as_ref(), input);
            }
            _ => return Ok(false),
        }
        if !matches!(name, "eval" | "read") {
            self.scope.status = Some(true);
        }
        Ok(true)
    }

    fn read_input(&mut self, command: &str, arguments: &[Text], separators: Option<&Variable>, input: Option<&Text>) {
        let is_list = command != "read"
            || arguments.iter().any(|argument| argument.text.starts_with('-') && argument.text.ends_with('a'));
        let names: Vec<String> = arguments
            .iter()
            .map(|argument| argument.text.clone())
            .filter(|argument| !argument.starts_with('-'))
            .collect();
        let separators = separators.and_then(|variable| variable.at("0")).map(|text| text.text.clone());
        let mut fields = super::value::Fields::new(Mode::Words, separators.as_deref());
        if let Some(input) = input {
            fields.value(&input.with(input.text.trim_end_matches('\n')), false);
            fields.finish();
        }
        let mut parts = fields.done.into_iter();
        for (at, name) in names.iter().enumerate() {
            let value = match input {
                None => Variable::text(self.unknown(
                    &format!("${name}"),
                    &format!("the input that {name} is read from"),
                    false,
                )),
                Some(_) if is_list => Variable::list(parts.by_ref()),
                Some(_) if at + 1 == names.len() => Variable::text(joined(&parts.by_ref().collect::<Vec<_>>(), " ")),
                Some(_) => Variable::text(parts.next().unwrap_or_default()),
            };
            self.scope.variables.insert(name.clone(), value);
        }
        self.scope.status = input.map(|_| true);
    }

    /// Output of a command that only prints.
    fn output(&mut self, name: &str, words: &[Text], input: Option<&Text>) -> ImportResult<Option<Text>> {
        let plain: Vec<Text> = words.iter().filter(|word| !word.text.starts_with('-')).cloned().collect();
        let text = match (name, &plain[..]) {
            ("echo", _) => {
                let skipped =
                    words.iter().take_while(|word| matches!(word.text.as_str(), "-n" | "-e" | "-ne" | "-en")).count();
                joined(&words[skipped..], " ")
            }
            ("printf", [format, ..]) => match formatted(format, &words[1..]) {
                Some(text) => text,
                None => self.unknown("$(printf …)", "the output of the command printf", false),
            },
            ("pwd", _) => self.absolute(&Text::new(".")),
            ("realpath" | "readlink", [path]) => self.absolute(path),
            ("basename", [path, ..]) if path.is_known() => {
                let base = path.text.trim_end_matches('/');
                let base = base.rsplit_once('/').map_or(base, |(_, base)| base);
                let ending = plain.get(1).map_or("", |ending| ending.text.as_str());
                path.with(base.strip_suffix(ending).filter(|base| !base.is_empty()).unwrap_or(base))
            }
            ("dirname", [path]) => {
                let base = path.text.trim_end_matches('/');
                path.with(base.rsplit_once('/').map_or(".", |(folder, _)| if folder.is_empty() { "/" } else { folder }))
            }
            ("expr", _) => match self.arithmetic(&joined(words, " ").text)? {
                Some(number) => joined(words, " ").with(number.text),
                None => return Ok(None),
            },
            ("seq", bounds) => {
                let bounds: Vec<i64> = bounds.iter().filter_map(|bound| bound.text.parse().ok()).collect();
                let (from, by, to) = match bounds[..] {
                    [to] => (1, 1, to),
                    [from, to] => (from, 1, to),
                    [from, by, to] if by > 0 => (from, by, to),
                    _ => return Ok(None),
                };
                let numbers = (0..4096).map(|n| from + n * by).take_while(|n| *n <= to);
                joined(words, "").with(numbers.map(|n| n.to_string()).collect::<Vec<_>>().join("\n"))
            }
            ("cat", []) => input.cloned().unwrap_or_default(),
            _ => return Ok(None),
        };
        let ends = name != "printf" && name != "cat" && !words.iter().any(|word| word.text.starts_with("-n"));
        Ok(Some(text.with(format!("{}{}", text.text, if ends { "\n" } else { "" }))))
    }

    /// Absolute form of a path.
    fn absolute(&mut self, path: &Text) -> Text {
        let home = if path.text == "~" { self.variable("HOME") } else { None };
        let path = home.and_then(|variable| variable.at("0").cloned()).unwrap_or_else(|| path.clone());
        let mut absolute = match self.variable("PWD").and_then(|variable| variable.at("0").cloned()) {
            _ if path.text.starts_with(['/', '~']) || path.text.starts_with(|c| number(c).is_some()) => Text::default(),
            Some(value) => value,
            None => self.unknown("$PWD", "the folder that the script runs in", false),
        };
        if !absolute.text.is_empty() {
            absolute.text.push('/');
        }
        absolute.push(&path);
        let mut parts: Vec<&str> = Vec::new();
        for part in absolute.text.split('/') {
            match part {
                "." => {}
                "" if !parts.is_empty() => {}
                ".." if parts.last().is_some_and(|last| !last.starts_with(|c| number(c).is_some())) => {
                    parts.pop();
                }
                part => parts.push(part),
            }
        }
        let text = if parts == [""] { "/".to_owned() } else { parts.join("/") };
        absolute.with(text)
    }

    /// Runs `source FILE`, or records the file as missing.
    fn source(&mut self, path: &Text, arguments: &[Text]) -> ImportResult {
        if let Some(file) = self.find_file(&path.text) {
            let outer = std::mem::replace(&mut self.scope.arguments, arguments.to_vec());
            let visible = if arguments.is_empty() { outer.clone() } else { arguments.to_vec() };
            self.scope.arguments = visible;
            self.run(&file.name, &file.text)?;
            if self.scope.flow == Flow::Return {
                self.scope.flow = Flow::Next;
            }
            if !arguments.is_empty() {
                self.scope.arguments = outer;
            }
            return Ok(());
        }
        let written = self.written(&path.text);
        let base = written.rsplit('/').next().unwrap_or(&written);
        if has_word(INSTALLED, base)
            || ["/etc/", "/opt/", "venv/", "conda"].iter().any(|folder| written.contains(folder))
        {
            return Ok(());
        }
        self.add_missing_file("source", &written, false);
        self.obscure_variables(format!("{written}, sourced in line {},", self.line));
        Ok(())
    }

    /// Records an unknown source of variables.
    pub(super) fn obscure_variables(&mut self, place: String) {
        self.scope.sourced = Some(place);
        self.forget_variables();
    }

    /// Marks variables as unknown that a missing file may have set.
    pub(super) fn forget_variables(&mut self) {
        let Some(place) = self.scope.sourced.clone() else {
            return;
        };
        if self.branches.choose(&format!("source {place}")) {
            return;
        }
        let names: Vec<String> = self.scope.variables.keys().cloned().collect();
        for name in names {
            let needs = format!("the variable {name}, which {place} may set");
            let unknown = self.unknown(&format!("${name}"), &needs, false);
            if let Some(variable) = self.scope.variables.get_mut(&name) {
                variable.items.iter_mut().for_each(|(_, item)| *item = unknown.clone());
            }
        }
    }

    /// Runs a file.
    pub(super) fn run(&mut self, name: &str, text: &str) -> ImportResult {
        let program = super::parse(name, None, text)?;
        if !self.reading.used.iter().any(|used| used == name) {
            self.reading.used.push(name.to_owned());
        }
        let file = self.names.iter().position(|known| known == name).unwrap_or_else(|| {
            self.names.push(name.to_owned());
            self.names.len() - 1
        });
        let outer = (std::mem::replace(&mut self.file, file), self.line, std::mem::replace(&mut self.is_nested, false));
        self.calls.push((outer.0, outer.1));
        for list in &program.complete_commands {
            self.list(list)?;
        }
        self.calls.pop();
        (self.file, self.line, self.is_nested) = outer;
        Ok(())
    }
}
