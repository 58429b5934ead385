//! Python programs: the arguments of TRL's configurations and trainers, and assigned settings.
//!
//! Nothing is run. The reader follows a program as Python would run it without arguments: assignments, calls of its
//! functions, defaults of `argparse` and dataclasses, and branches; both outcomes of a condition that is not certain.

mod calls;
mod known;
mod values;

use super::branches::{Branches, TracedEntry, merge_paths};
use super::entry::{Entry, EnvironmentLookup, MissingFile, ParsedSource, SourceLocation};
use super::error::{ImportError, ImportResult};
use known::{PyKind, PyValue};
use ruff_python_ast::token::TokenKind;
use ruff_python_ast::{
    ExceptHandler, Expr, ExprList, ExprTuple, Stmt, StmtClassDef, StmtFor, StmtFunctionDef, StmtIf, StmtTry,
};
use ruff_python_parser::{Mode, lexer};
use ruff_text_size::Ranged;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Key of the configuration class, which decides between TRL's algorithms.
pub(super) const CLASS: &str = "(class)";

/// Deepest nesting of expressions and blocks.
const MAX_NESTING: usize = 200;
/// Deepest nesting of calls.
const MAX_CALL_DEPTH: usize = 16;
/// Most iterations of a loop.
const MAX_ITERATIONS: usize = 256;
/// Most statements of all paths together.
const MAX_STEPS: usize = 1_000_000;

/// Control flow after a statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    Next,
    Continue,
    Break,
    Return,
    Exit,
}

/// A path through a program.
struct Program<'a> {
    file: &'a str,
    text: &'a str,
    /// Byte offsets of lines.
    starts: &'a [usize],
    environment: EnvironmentLookup<'a>,
    branches: &'a mut Branches,
    /// Names of the module, and of the function that runs.
    names: Vec<BTreeMap<String, PyValue<'a>>>,
    /// Options of `argparse` parsers.
    parsers: Vec<Vec<(String, PyValue<'a>)>>,
    /// Functions that were called.
    called: BTreeSet<String>,
    flow: Flow,
    returned: Option<PyValue<'a>>,
    depth: usize,
    steps: usize,
    /// Lines of the configurations that were made.
    configs: Vec<usize>,
    entries: Vec<TracedEntry>,
    assigned: Vec<TracedEntry>,
    /// Objects that may hold any setting.
    absent: Vec<MissingFile>,
}

/// Parses a program.
pub(super) fn read(file: &str, text: &str, environment: EnvironmentLookup) -> ImportResult<ParsedSource> {
    let starts: Vec<usize> = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
    let line = |at: usize| starts.partition_point(|start| *start <= at);
    let Scan { deep, unclosed } = scan(text);
    if let Some(deep) = deep {
        return Err(ImportError::at(file, Some(deep), "brackets, blocks and signs are nested too deeply"));
    }
    let module = ruff_python_parser::parse_module(text).map_err(|error| {
        let detail = error.error.to_string();
        let is_quote = ["quote", "unterminated"].iter().any(|word| detail.contains(word));
        let at = Some(line(error.location.start().to_usize()));
        match unclosed.filter(|_| !is_quote) {
            Some(unclosed) => ImportError::at(file, Some(unclosed), "a bracket that begins here is never closed"),
            None if is_quote => ImportError::at(file, at, "a quote that begins here is never closed"),
            None => ImportError::at(file, at, format!("expected Python, found a mistake here: {detail}")),
        }
    })?;
    let body = &module.syntax().body;
    let place = |stmt: &Stmt| SourceLocation { file: file.to_owned(), line: Some(line(stmt.start().to_usize())) };
    let definitions = body.iter().filter_map(|stmt| match stmt {
        Stmt::FunctionDef(definition) => Some((definition.name.to_string(), place(stmt))),
        Stmt::ClassDef(definition) => Some((definition.name.to_string(), place(stmt))),
        _ => None,
    });
    let mut reading = ParsedSource { definitions: definitions.collect(), ..ParsedSource::default() };
    let (mut runs, mut assigned): (Vec<Vec<TracedEntry>>, Vec<Vec<TracedEntry>>) = (Vec::new(), Vec::new());
    let (mut steps, mut second) = (0, None);
    Branches::explore(file, |branches| {
        let mut program = Program::new(file, text, &starts, environment, branches, steps);
        program.block(body)?;
        program.follow_uncalled(body)?;
        steps = program.steps;
        reading.merge(ParsedSource { absent: program.absent, ..ParsedSource::default() });
        second = second.or_else(|| match program.configs[..] {
            [first, second, ..] => Some((first, second)),
            _ => None,
        });
        for (into, run) in [(&mut runs, program.entries), (&mut assigned, program.assigned)] {
            if !run.is_empty() && !into.contains(&run) {
                into.push(run);
            }
        }
        Ok(())
    })?;
    if let Some((first, second)) = second {
        let detail = format!(
            "a second configuration is made here, and the first in line {first}; a run has one: keep the one to import"
        );
        return Err(ImportError::at(file, Some(second), detail));
    }
    if runs.iter().flatten().all(|(entry, _)| entry.key.starts_with("load_dataset")) {
        runs = assigned;
    }
    if runs.is_empty() {
        let detail = "no settings found: expected a call such as GRPOConfig(…) with keyword arguments";
        return Err(ImportError::at(file, None, detail));
    }
    // a path without a configuration starts no run
    let has_config = |run: &[TracedEntry]| run.iter().any(|(entry, _)| entry.key == CLASS);
    if runs.iter().any(|run| has_config(run)) {
        runs.retain(|run| has_config(run));
    }
    Ok(ParsedSource { entries: merge_paths(&runs), ..reading })
}

/// Checks before parsing: nesting beyond the parser's stack, and unclosed brackets.
#[derive(Default)]
struct Scan {
    /// The first line with too deeply nested brackets, blocks and operators.
    deep: Option<usize>,
    /// The line of a bracket that is never closed.
    unclosed: Option<usize>,
}

fn scan(text: &str) -> Scan {
    let mut lexer = lexer::lex(text, Mode::Module);
    // operators since the last comma in each open bracket, and the bracket's line
    let mut open = vec![(0_usize, 1_usize)];
    let (mut line, mut blocks, mut unclosed) = (1, 0_usize, None);
    loop {
        let top = open.len() - 1;
        match lexer.next_token() {
            TokenKind::EndOfFile => {
                return Scan { deep: None, unclosed: unclosed.or((top > 0).then(|| open[top].1)) };
            }
            TokenKind::Lpar | TokenKind::Lsqb | TokenKind::Lbrace => open.push((1, line)),
            TokenKind::Rpar | TokenKind::Rsqb | TokenKind::Rbrace if top > 0 => {
                open.pop();
            }
            TokenKind::Comma => open[top].0 = 1,
            TokenKind::Newline => {
                unclosed = unclosed.or((top > 0).then(|| open[top].1));
                line += 1;
                open = vec![(0, line)];
            }
            TokenKind::NonLogicalNewline => line += 1,
            TokenKind::Indent => blocks += 1,
            TokenKind::Dedent => blocks = blocks.saturating_sub(1),
            kind => open[top].0 += usize::from(kind.is_operator() || kind.is_keyword()),
        }
        if blocks + open.iter().map(|(signs, _)| signs).sum::<usize>() > MAX_NESTING {
            return Scan { deep: Some(line), unclosed: None };
        }
    }
}

impl<'a> Program<'a> {
    fn new(
        file: &'a str,
        text: &'a str,
        starts: &'a [usize],
        environment: EnvironmentLookup<'a>,
        branches: &'a mut Branches,
        steps: usize,
    ) -> Self {
        Self {
            file,
            text,
            starts,
            environment,
            branches,
            names: vec![BTreeMap::new()],
            parsers: Vec::new(),
            called: BTreeSet::new(),
            flow: Flow::Next,
            returned: None,
            depth: 0,
            steps,
            configs: Vec::new(),
            entries: Vec::new(),
            assigned: Vec::new(),
            absent: Vec::new(),
        }
    }

    fn line(&self, node: &impl Ranged) -> usize {
        let at = node.start().to_usize();
        self.starts.partition_point(|start| *start <= at)
    }

    /// Source text of a node, on one line.
    fn written(&self, node: &impl Ranged) -> String {
        let text = &self.text[node.start().to_usize()..node.end().to_usize()];
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn place(&self, line: usize) -> SourceLocation {
        SourceLocation { file: self.file.to_owned(), line: Some(line) }
    }

    fn bind(&mut self, name: &str, mut known: PyValue<'a>, line: usize) {
        known.lines.insert((self.file.to_owned(), line));
        if let Some(names) = self.names.last_mut() {
            names.insert(name.to_owned(), known);
        }
    }

    /// The variable of a name.
    fn variable(&mut self, expr: &Expr) -> Option<&mut PyValue<'a>> {
        let name = expr.as_name_expr()?.id.as_str();
        self.names.iter_mut().rev().find_map(|names| names.get_mut(name))
    }

    fn block(&mut self, body: &'a [Stmt]) -> ImportResult {
        for stmt in body {
            if self.flow != Flow::Next {
                break;
            }
            self.steps += 1;
            if self.steps > MAX_STEPS {
                let detail = "it does too much to be followed; does a loop end?";
                return Err(ImportError::at(self.file, Some(self.line(stmt)), detail));
            }
            self.statement(stmt)?;
        }
        Ok(())
    }

    fn statement(&mut self, statement: &'a Stmt) -> ImportResult {
        let line = self.line(statement);
        match statement {
            Stmt::FunctionDef(stmt) => self.bind(&stmt.name, PyValue::new(PyKind::Function(stmt)), line),
            Stmt::ClassDef(stmt) => self.bind(&stmt.name, PyValue::new(PyKind::Class(stmt)), line),
            Stmt::Assign(stmt) => {
                let value = self.value(&stmt.value)?;
                for target in &stmt.targets {
                    self.assign(target, value.clone(), &stmt.value)?;
                }
            }
            Stmt::AnnAssign(stmt) => {
                if let Some(value) = &stmt.value {
                    let known = self.value(value)?;
                    self.assign(&stmt.target, known, value)?;
                }
            }
            Stmt::AugAssign(stmt) => {
                let (before, by) = (self.value(&stmt.target)?, self.value(&stmt.value)?);
                let after = self.operate(stmt.op, before, by, statement);
                self.assign(&stmt.target, after, &stmt.value)?;
            }
            Stmt::Expr(stmt) => drop(self.value(&stmt.value)?),
            Stmt::If(stmt) => self.if_statement(stmt)?,
            Stmt::For(stmt) => self.for_statement(stmt)?,
            Stmt::While(stmt) => {
                let test = self.value(&stmt.test)?;
                if test.truth() != Some(false) {
                    self.iteration(&stmt.body)?;
                }
            }
            Stmt::With(stmt) => {
                for item in &stmt.items {
                    let known = self.value(&item.context_expr)?;
                    if let Some(target) = &item.optional_vars {
                        self.assign(target, known, &item.context_expr)?;
                    }
                }
                self.block(&stmt.body)?;
            }
            Stmt::Try(stmt) => self.try_statement(stmt)?,
            Stmt::Match(stmt) => {
                for case in &stmt.cases {
                    if self.branches.choose(&format!("case {}", self.line(case))) {
                        return self.block(&case.body);
                    }
                }
            }
            Stmt::Return(stmt) => {
                self.returned = stmt.value.as_ref().map(|value| self.value(value)).transpose()?;
                self.flow = Flow::Return;
            }
            Stmt::Raise(_) => self.flow = Flow::Exit,
            Stmt::Break(_) => self.flow = Flow::Break,
            Stmt::Continue(_) => self.flow = Flow::Continue,
            _ => {}
        }
        Ok(())
    }

    fn assign(&mut self, to: &'a Expr, known: PyValue<'a>, value: &'a Expr) -> ImportResult {
        let line = self.line(to);
        match to {
            Expr::Name(target) => self.bind(&target.id, known.clone(), line),
            Expr::Tuple(ExprTuple { elts: targets, .. }) | Expr::List(ExprList { elts: targets, .. }) => {
                let parts = known.parts(targets.len());
                for (at, target) in targets.iter().enumerate() {
                    let part =
                        parts.get(at).cloned().unwrap_or_else(|| PyValue::new(PyKind::Written(self.written(target))));
                    self.assign(target, part, value)?;
                }
                return Ok(());
            }
            Expr::Attribute(target) => {
                let object = self.value(&target.value)?;
                if let PyKind::Object(prefix) = &object.kind {
                    self.setting(&format!("{prefix}{}", target.attr), known, value, line);
                    return Ok(());
                }
                if let (PyKind::Space(mut fields), Some(owner)) = (object.kind, self.variable(&target.value)) {
                    fields.insert(target.attr.to_string(), known);
                    owner.kind = PyKind::Space(fields);
                    return Ok(());
                }
            }
            Expr::Subscript(target) => {
                let (key, written) = (self.value(&target.slice)?, self.written(&*target.value));
                if let Some(owner) = self.variable(&target.value) {
                    *owner = match (key.kind, owner.fields()) {
                        (PyKind::Value(Value::String(key)), Some(mut fields)) => {
                            fields.insert(key, known);
                            PyValue::from_fields(fields)
                        }
                        _ => PyValue::new(PyKind::Written(written)),
                    };
                }
                return Ok(());
            }
            _ => return Ok(()),
        }
        let written = self.written(to);
        let lines = known.lines.clone();
        let entry = Entry::new(written, self.source_value(&known, value, false), &self.place(line));
        self.assigned.push((entry, lines));
        Ok(())
    }

    /// Follows a branch. Discards it, and returns false, if it ends the program before it makes a configuration.
    fn branch(&mut self, body: &'a [Stmt]) -> ImportResult<bool> {
        let (names, settings) = (self.names.clone(), self.entries.len());
        self.block(body)?;
        let exits = self.flow == Flow::Exit && self.entries.len() == settings;
        if exits {
            (self.names, self.flow) = (names, Flow::Next);
        }
        Ok(!exits)
    }

    fn if_statement(&mut self, statement: &'a StmtIf) -> ImportResult {
        let elses = statement.elif_else_clauses.iter().map(|arm| (arm.test.as_ref(), &arm.body));
        for (test, body) in std::iter::once((Some(&*statement.test), &statement.body)).chain(elses) {
            let holds = match test {
                None => true,
                Some(test) => match self.value(test)?.truth() {
                    Some(holds) => holds,
                    None => self.branches.choose(&self.written(test)),
                },
            };
            if holds && self.branch(body)? {
                return Ok(());
            }
        }
        Ok(())
    }

    fn for_statement(&mut self, statement: &'a StmtFor) -> ImportResult {
        let line = self.line(statement);
        let unknown = PyValue::new(PyKind::Written(self.written(&*statement.target)));
        let items = match self.value(&statement.iter)?.items() {
            Some(items) if items.len() <= MAX_ITERATIONS => items,
            _ => vec![unknown],
        };
        // a loop over configurations makes one run per iteration
        let makes = self.calls_settings(statement);
        let last = items.len().saturating_sub(1);
        for (at, mut item) in items.into_iter().enumerate() {
            if makes && at < last && !self.branches.choose(&format!("turn {at} of line {line}")) {
                continue;
            }
            item.lines.insert((self.file.to_owned(), line));
            self.assign(&statement.target, item, &statement.iter)?;
            if !self.iteration(&statement.body)? || makes {
                break;
            }
        }
        Ok(())
    }

    /// Follows one iteration of a loop; returns true if others follow.
    fn iteration(&mut self, body: &'a [Stmt]) -> ImportResult<bool> {
        self.block(body)?;
        let follows = matches!(self.flow, Flow::Next | Flow::Continue);
        if matches!(self.flow, Flow::Continue | Flow::Break) {
            self.flow = Flow::Next;
        }
        Ok(follows)
    }

    fn try_statement(&mut self, statement: &'a StmtTry) -> ImportResult {
        let handlers = statement.handlers.iter().filter_map(ExceptHandler::as_except_handler);
        let sets =
            |stmt: &Stmt| matches!(stmt, Stmt::Assign(_) | Stmt::AnnAssign(_) | Stmt::AugAssign(_) | Stmt::If(_));
        let handler = handlers.clone().find(|handler| handler.body.iter().any(sets));
        match handler {
            Some(handler) if !self.branches.choose(&format!("try {}", self.line(statement))) => {
                self.branch(&handler.body)?;
            }
            _ => {
                self.branch(&statement.body)?;
                self.block(&statement.orelse)?;
            }
        }
        self.block(&statement.finalbody)
    }

    /// Follows functions that make a configuration and are never called, such as those of a command line library.
    fn follow_uncalled(&mut self, body: &'a [Stmt]) -> ImportResult {
        self.flow = Flow::Next;
        let functions = body.iter().filter_map(Stmt::as_function_def_stmt);
        let makes_config = |function: &&StmtFunctionDef| self.calls_settings(*function);
        let functions: Vec<&StmtFunctionDef> = functions.filter(makes_config).collect();
        for function in functions {
            if !self.called.contains(function.name.as_str()) {
                self.call(function, Vec::new(), BTreeMap::new())?;
            }
        }
        Ok(())
    }

    /// Returns true if a node contains a call that makes settings.
    fn calls_settings(&self, node: &impl Ranged) -> bool {
        let body = self.written(node);
        known::SETTING_CALLS.iter().any(|(call, _)| body.contains(&format!("{call}(")))
    }
}

/// The fields of a dataclass with their defaults.
fn class_fields(class: &StmtClassDef) -> impl Iterator<Item = (&str, &Expr, usize)> {
    class.body.iter().filter_map(|stmt| {
        let (target, value) = match stmt {
            Stmt::AnnAssign(field) => (&*field.target, field.value.as_deref()?),
            Stmt::Assign(field) => (field.targets.first()?, &*field.value),
            _ => return None,
        };
        Some((target.as_name_expr()?.id.as_str(), value, stmt.start().to_usize()))
    })
}
