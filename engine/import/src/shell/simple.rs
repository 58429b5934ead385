//! Simple commands: assignments, declarations, words with redirections, calls of functions.

use super::value::{Mode, Text};
use super::{Flow, Shell};
use crate::error::ImportResult;
use crate::source_file::SourceFile;
use brush_parser::ast::{
    Assignment, AssignmentName, AssignmentValue, CommandPrefixOrSuffixItem, FunctionBody, IoFileRedirectKind,
    IoFileRedirectTarget, IoRedirect, SimpleCommand, Word,
};

impl Shell<'_> {
    pub(super) fn simple(&mut self, simple: &SimpleCommand) -> ImportResult {
        let prefix = simple.prefix.iter().flat_map(|items| &items.0);
        let suffix = simple.suffix.iter().flat_map(|items| &items.0);
        let redirects: Vec<&IoRedirect> = (prefix.clone().chain(suffix.clone()))
            .filter_map(|item| match item {
                CommandPrefixOrSuffixItem::IoRedirect(redirect) => Some(redirect),
                _ => None,
            })
            .collect();
        let assignments = prefix.filter_map(|item| match item {
            CommandPrefixOrSuffixItem::AssignmentWord(assignment, _) => Some(assignment),
            _ => None,
        });
        let Some(name) = &simple.word_or_name else {
            self.scope.status = Some(true);
            for assignment in assignments {
                self.assign(assignment)?;
            }
            return Ok(());
        };
        let before = self.scope.variables.clone();
        let mut environment = Vec::new();
        for assignment in assignments {
            // the command's words do not see them
            self.assign(assignment)?;
            if let AssignmentName::VariableName(name) = &assignment.name {
                environment.extend(self.scope.variables.remove_entry(name));
            }
        }
        self.scope.variables = before;
        let mut input = None;
        for redirect in &redirects {
            match redirect {
                IoRedirect::HereDocument(_, document) if document.requires_expansion => {
                    input = Some(self.document(&document.doc.value)?);
                }
                IoRedirect::HereDocument(_, document) => input = Some(Text::new(&document.doc.value)),
                IoRedirect::HereString(_, word) => input = Some(self.text(&word.value, Mode::Value)?),
                _ => {}
            }
        }
        for redirect in redirects.iter().filter(|redirect| redirects_output(redirect)) {
            if let (IoRedirect::File(_, _, IoFileRedirectTarget::Filename(word)), Some(input)) = (redirect, &input)
                && ["cat", "tee"].contains(&name.value.as_str())
                && input.is_known()
            {
                let path = self.text(&word.value, Mode::Value)?.text;
                self.written_files.push(SourceFile::new(path, input.text.clone()));
            }
        }
        let output = self.scope.output.clone();
        let words = if self.declares(&name.value, suffix.clone())? {
            Vec::new()
        } else {
            let words = suffix.filter_map(|item| match item {
                CommandPrefixOrSuffixItem::Word(word) | CommandPrefixOrSuffixItem::AssignmentWord(_, word) => {
                    Some(word)
                }
                _ => None,
            });
            self.fields(std::iter::once(name).chain(words))?
        };
        if !words.is_empty() {
            self.question = words.iter().map(|word| word.text.as_str()).collect::<Vec<_>>().join(" ");
            self.start(words, &environment, input)?;
        }
        if redirects.into_iter().any(redirects_output) {
            self.scope.output = output;
        }
        Ok(())
    }

    /// Runs `export`, `local` and similar commands.
    fn declares<'c>(
        &mut self,
        command: &str,
        items: impl Iterator<Item = &'c CommandPrefixOrSuffixItem>,
    ) -> ImportResult<bool> {
        if !["export", "local", "declare", "typeset", "readonly"].contains(&command) {
            return Ok(false);
        }
        let mut is_mapping = false;
        for item in items {
            let name = match item {
                CommandPrefixOrSuffixItem::AssignmentWord(assignment, _) => {
                    let (AssignmentName::VariableName(name) | AssignmentName::ArrayElementName(name, _)) =
                        &assignment.name;
                    self.declare(command, name, is_mapping);
                    self.assign(assignment)?;
                    name.clone()
                }
                CommandPrefixOrSuffixItem::Word(Word { value, .. }) if value.starts_with('-') => {
                    is_mapping |= value.contains('A');
                    continue;
                }
                CommandPrefixOrSuffixItem::Word(word) => {
                    let name = self.text(&word.value, Mode::Value)?;
                    if !name.is_known() {
                        // `export $(cat FILE)`
                        let what = self.written(&name.text);
                        self.obscure_variables(format!("{what} in line {}", self.line));
                    }
                    self.declare(command, &name.text, is_mapping);
                    name.text
                }
                _ => continue,
            };
            if let (true, Some(variable)) = (command == "export", self.scope.variables.get_mut(&name)) {
                variable.exported = true;
            }
        }
        self.scope.status = Some(true);
        Ok(true)
    }

    fn declare(&mut self, command: &str, name: &str, is_mapping: bool) {
        if is_mapping {
            self.scope.mappings.insert(name.to_owned());
        }
        if command == "local" && !self.scope.locals.is_empty() {
            let before = self.scope.variables.remove(name);
            if let Some(locals) = self.scope.locals.last_mut() {
                locals.push((name.to_owned(), before));
            }
        }
    }

    fn assign(&mut self, assignment: &Assignment) -> ImportResult {
        let place = self.place();
        let (name, key) = match &assignment.name {
            AssignmentName::VariableName(name) => (name, "0".to_owned()),
            AssignmentName::ArrayElementName(name, index) => (name, self.key(name, index)?),
        };
        let before = self.scope.variables.get(name).cloned();
        let mut variable = before.unwrap_or_default();
        match &assignment.value {
            AssignmentValue::Scalar(word) => {
                let mut text = self.text(&word.value, Mode::Value)?;
                text.lines.insert(place);
                variable.put(key, text, assignment.append);
            }
            AssignmentValue::Array(words) => {
                if !assignment.append {
                    variable.items.clear();
                }
                variable.is_list = true;
                for (key, word) in words {
                    let items = match key {
                        Some(_) => vec![self.text(&word.value, Mode::Value)?],
                        None => self.fields([word])?,
                    };
                    for mut item in items {
                        item.lines.insert(place);
                        let key = match key {
                            Some(key) => self.key(name, &key.value)?,
                            None => variable.items.len().to_string(),
                        };
                        variable.put(key, item, false);
                    }
                }
            }
        }
        self.scope.variables.insert(name.clone(), variable);
        Ok(())
    }

    /// Calls a function of the script.
    pub(super) fn call(&mut self, function: &(FunctionBody, usize), arguments: Vec<Text>) -> ImportResult {
        let outer = std::mem::replace(&mut self.scope.arguments, arguments);
        let (line, file) = (self.line, std::mem::replace(&mut self.file, function.1));
        self.calls.push((file, line));
        self.scope.locals.push(Vec::new());
        self.compound(&function.0.0)?;
        for (name, before) in self.scope.locals.pop().into_iter().flatten().rev() {
            match before {
                Some(before) => drop(self.scope.variables.insert(name, before)),
                None => drop(self.scope.variables.remove(&name)),
            }
        }
        if matches!(self.scope.flow, Flow::Return) {
            self.scope.flow = Flow::Next;
        }
        self.calls.pop();
        (self.scope.arguments, self.line, self.file) = (outer, line, file);
        Ok(())
    }
}

/// Returns true if a redirection takes a command's standard output elsewhere.
pub(super) fn redirects_output(redirect: &IoRedirect) -> bool {
    match redirect {
        IoRedirect::File(descriptor, kind, _) => {
            let writes = !matches!(kind, IoFileRedirectKind::Read | IoFileRedirectKind::DuplicateInput);
            writes && descriptor.is_none_or(|number| number == 1)
        }
        IoRedirect::OutputAndError(..) => true,
        IoRedirect::HereDocument(..) | IoRedirect::HereString(..) => false,
    }
}
