//! Python programs: the arguments of TRL's configurations and trainers, and settings that are assigned.
//!
//! Nothing is run. A program is followed as Python would run it without arguments: assignments, calls of its own
//! functions, defaults of `argparse` and of dataclasses, branches whose conditions are certain; of others both outcomes.

mod calls;
mod known;
mod values;

use super::entry::{Absent, Entry, EnvironmentLookup, Reading, SourceLocation};
use super::error::ImportError;
use super::ways::{Ways, Written, united};
use known::{Known, Thing};
use ruff_python_ast::token::TokenKind;
use ruff_python_ast::{ExceptHandler, Expr, Stmt, StmtClassDef, StmtFor, StmtFunctionDef, StmtIf, StmtTry};
use ruff_python_parser::{Mode, lexer};
use ruff_text_size::Ranged;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Key of the class whose arguments they are: it decides between TRL's algorithms.
pub(super) const CLASS: &str = "(class)";

/// Deepest nesting of expressions and blocks.
const DEEPEST: usize = 200;
/// Deepest nesting of calls.
const CALLS: usize = 16;
/// Most turns of a loop.
const TIMES: usize = 256;
/// Most statements of all ways together.
const STEPS: usize = 1_000_000;

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    Next,
    Continue,
    Break,
    Return,
    Exit,
}

/// A way through a program.
struct Program<'a> {
    file: &'a str,
    text: &'a str,
    /// Where lines begin.
    starts: &'a [usize],
    environment: EnvironmentLookup<'a>,
    ways: &'a mut Ways,
    /// Names of the module, and of the function that runs.
    names: Vec<BTreeMap<String, Known<'a>>>,
    /// Options of `argparse` parsers.
    parsers: Vec<Vec<(String, Known<'a>)>>,
    /// Functions that were called.
    called: BTreeSet<String>,
    flow: Flow,
    returned: Option<Known<'a>>,
    depth: usize,
    steps: usize,
    /// Lines of the configurations that were made.
    configs: Vec<usize>,
    found: Vec<Written>,
    assigned: Vec<Written>,
    /// What may have any setting.
    absent: Vec<Absent>,
}

/// What a program says.
pub(super) fn read(file: &str, text: &str, environment: EnvironmentLookup) -> Result<Reading, ImportError> {
    let starts: Vec<usize> = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
    let line = |at: usize| starts.partition_point(|start| *start <= at);
    let Scan { deep, unclosed } = scan(text);
    if let Some(deep) = deep {
        return Err(ImportError::at(file, Some(deep), "brackets, blocks and signs are nested too deeply"));
    }
    let module = ruff_python_parser::parse_module(text).map_err(|error| {
        let detail = error.error.to_string();
        let is_quote = ["quote", "unterminated"].iter().any(|own| detail.contains(own));
        match unclosed.filter(|_| !is_quote) {
            Some(unclosed) => ImportError::at(file, Some(unclosed), "a bracket that begins here is never closed"),
            None if is_quote => {
                let at = line(error.location.start().to_usize());
                ImportError::at(file, Some(at), "a quote that begins here is never closed")
            }
            None => ImportError::at(
                file,
                Some(line(error.location.start().to_usize())),
                format!("expected Python, found a mistake here: {detail}"),
            ),
        }
    })?;
    let body = &module.syntax().body;
    let place = |stmt: &Stmt| SourceLocation { file: file.to_owned(), line: Some(line(stmt.start().to_usize())) };
    let definitions = body.iter().filter_map(|stmt| match stmt {
        Stmt::FunctionDef(own) => Some((own.name.to_string(), place(stmt))),
        Stmt::ClassDef(own) => Some((own.name.to_string(), place(stmt))),
        _ => None,
    });
    let mut reading = Reading { definitions: definitions.collect(), ..Reading::default() };
    let (mut runs, mut assigned): (Vec<Vec<Written>>, Vec<Vec<Written>>) = (Vec::new(), Vec::new());
    let (mut steps, mut second) = (0, None);
    Ways::follow(file, |ways| {
        let mut program = Program::new(file, text, &starts, environment, ways, steps);
        program.block(body)?;
        program.uncalled(body)?;
        steps = program.steps;
        reading.join(Reading { absent: program.absent, ..Reading::default() });
        second = second.or_else(|| match program.configs[..] {
            [first, second, ..] => Some((first, second)),
            _ => None,
        });
        for (into, own) in [(&mut runs, program.found), (&mut assigned, program.assigned)] {
            if !own.is_empty() && !into.contains(&own) {
                into.push(own);
            }
        }
        Ok(())
    })?;
    if let Some((first, second)) = second {
        return Err(ImportError::at(
            file,
            Some(second),
            format!(
                "a second configuration is made here, and the first in line {first}; a run has one: keep the one to import"
            ),
        ));
    }
    if runs.iter().flatten().all(|(entry, _)| entry.key.starts_with("load_dataset")) {
        runs = assigned;
    }
    if runs.is_empty() {
        let detail = "no settings found: expected a call such as GRPOConfig(…) with keyword arguments";
        return Err(ImportError::at(file, None, detail));
    }
    // a way without a configuration is none of a run
    let has_config = |run: &[Written]| run.iter().any(|(entry, _)| entry.key == CLASS);
    if runs.iter().any(|run| has_config(run)) {
        runs.retain(|run| has_config(run));
    }
    Ok(Reading { entries: united(&runs), ..reading })
}

/// What a parser's own stack does not bear, and what its message would not name.
#[derive(Default)]
struct Scan {
    /// A line whose brackets, blocks and signs are nested too deeply.
    deep: Option<usize>,
    /// The line of a bracket that is never closed.
    unclosed: Option<usize>,
}

fn scan(text: &str) -> Scan {
    let mut lexer = lexer::lex(text, Mode::Module);
    // signs since the last comma, in each bracket that is open, and the bracket's line
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
        if blocks + open.iter().map(|(signs, _)| signs).sum::<usize>() > DEEPEST {
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
        ways: &'a mut Ways,
        steps: usize,
    ) -> Self {
        Self {
            file,
            text,
            starts,
            environment,
            ways,
            names: vec![BTreeMap::new()],
            parsers: Vec::new(),
            called: BTreeSet::new(),
            flow: Flow::Next,
            returned: None,
            depth: 0,
            steps,
            configs: Vec::new(),
            found: Vec::new(),
            assigned: Vec::new(),
            absent: Vec::new(),
        }
    }

    fn line(&self, node: &impl Ranged) -> usize {
        let at = node.start().to_usize();
        self.starts.partition_point(|start| *start <= at)
    }

    fn choose(&mut self, question: &str) -> bool {
        self.ways.choose(question)
    }

    /// A node as it is written, on one line.
    fn written(&self, node: &impl Ranged) -> String {
        let text = &self.text[node.start().to_usize()..node.end().to_usize()];
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn place(&self, line: usize) -> SourceLocation {
        SourceLocation { file: self.file.to_owned(), line: Some(line) }
    }

    fn bind(&mut self, name: &str, mut known: Known<'a>, line: usize) {
        known.lines.insert((self.file.to_owned(), line));
        if let Some(names) = self.names.last_mut() {
            names.insert(name.to_owned(), known);
        }
    }

    /// What a name stands for.
    fn owner(&mut self, expr: &Expr) -> Option<&mut Known<'a>> {
        let name = expr.as_name_expr()?.id.as_str();
        self.names.iter_mut().rev().find_map(|names| names.get_mut(name))
    }

    fn block(&mut self, body: &'a [Stmt]) -> Result<(), ImportError> {
        for stmt in body {
            if self.flow != Flow::Next {
                break;
            }
            self.steps += 1;
            if self.steps > STEPS {
                let detail = "it does too much to be followed; does a loop end?";
                return Err(ImportError::at(self.file, Some(self.line(stmt)), detail));
            }
            self.statement(stmt)?;
        }
        Ok(())
    }

    fn statement(&mut self, stmt: &'a Stmt) -> Result<(), ImportError> {
        match stmt {
            Stmt::FunctionDef(own) => self.bind(&own.name, Known::new(Thing::Function(own)), self.line(stmt)),
            Stmt::ClassDef(own) => self.bind(&own.name, Known::new(Thing::Class(own)), self.line(stmt)),
            Stmt::Assign(own) => {
                let value = self.value(&own.value)?;
                for target in &own.targets {
                    self.assign(target, value.clone(), &own.value)?;
                }
            }
            Stmt::AnnAssign(own) => {
                if let Some(value) = &own.value {
                    let known = self.value(value)?;
                    self.assign(&own.target, known, value)?;
                }
            }
            Stmt::AugAssign(own) => {
                let (before, by) = (self.value(&own.target)?, self.value(&own.value)?);
                let after = self.operate(own.op, before, by, stmt);
                self.assign(&own.target, after, &own.value)?;
            }
            Stmt::Expr(own) => drop(self.value(&own.value)?),
            Stmt::If(own) => self.if_statement(own)?,
            Stmt::For(own) => self.for_statement(own)?,
            Stmt::While(own) => {
                let test = self.value(&own.test)?;
                if test.truth() != Some(false) {
                    self.turn(&own.body)?;
                }
            }
            Stmt::With(own) => {
                for item in &own.items {
                    let known = self.value(&item.context_expr)?;
                    if let Some(target) = &item.optional_vars {
                        self.assign(target, known, &item.context_expr)?;
                    }
                }
                self.block(&own.body)?;
            }
            Stmt::Try(own) => self.try_statement(own)?,
            Stmt::Match(own) => {
                for case in &own.cases {
                    if self.choose(&format!("case {}", self.line(case))) {
                        return self.block(&case.body);
                    }
                }
            }
            Stmt::Return(own) => {
                self.returned = own.value.as_ref().map(|value| self.value(value)).transpose()?;
                self.flow = Flow::Return;
            }
            Stmt::Raise(_) => self.flow = Flow::Exit,
            Stmt::Break(_) => self.flow = Flow::Break,
            Stmt::Continue(_) => self.flow = Flow::Continue,
            _ => {}
        }
        Ok(())
    }

    fn assign(&mut self, target: &'a Expr, known: Known<'a>, value: &'a Expr) -> Result<(), ImportError> {
        let line = self.line(target);
        match target {
            Expr::Name(own) => self.bind(&own.id, known.clone(), line),
            Expr::Tuple(_) | Expr::List(_) => {
                let targets = match target {
                    Expr::Tuple(own) => &own.elts,
                    Expr::List(own) => &own.elts,
                    _ => return Ok(()),
                };
                let parts = known.parts(targets.len());
                for (at, target) in targets.iter().enumerate() {
                    let part =
                        parts.get(at).cloned().unwrap_or_else(|| Known::new(Thing::Written(self.written(target))));
                    self.assign(target, part, value)?;
                }
                return Ok(());
            }
            Expr::Attribute(own) => {
                let object = self.value(&own.value)?;
                if let Thing::Object(prefix) = &object.thing {
                    self.setting(&format!("{prefix}{}", own.attr), known, value, line);
                    return Ok(());
                }
                if let (Thing::Space(mut space), Some(owner)) = (object.thing, self.owner(&own.value)) {
                    space.insert(own.attr.to_string(), known);
                    owner.thing = Thing::Space(space);
                    return Ok(());
                }
            }
            Expr::Subscript(own) => {
                let (key, written) = (self.value(&own.slice)?, self.written(&*own.value));
                if let Some(owner) = self.owner(&own.value) {
                    *owner = match (key.thing, owner.fields()) {
                        (Thing::Value(Value::String(key)), Some(mut fields)) => {
                            fields.insert(key, known);
                            Known::of_fields(fields)
                        }
                        _ => Known::new(Thing::Written(written)),
                    };
                }
                return Ok(());
            }
            _ => return Ok(()),
        }
        let written = self.written(target);
        let lines = known.lines.clone();
        let entry = Entry::new(written, self.given(&known, value, false), &self.place(line));
        self.assigned.push((entry, lines));
        Ok(())
    }

    /// Runs a branch. One that ends the program before a configuration is made is no branch that a run takes.
    fn branch(&mut self, body: &'a [Stmt]) -> Result<bool, ImportError> {
        let (names, found) = (self.names.clone(), self.found.len());
        self.block(body)?;
        let leaves = self.flow == Flow::Exit && self.found.len() == found;
        if leaves {
            (self.names, self.flow) = (names, Flow::Next);
        }
        Ok(!leaves)
    }

    fn if_statement(&mut self, own: &'a StmtIf) -> Result<(), ImportError> {
        let elses = own.elif_else_clauses.iter().map(|arm| (arm.test.as_ref(), &arm.body));
        for (test, body) in std::iter::once((Some(&*own.test), &own.body)).chain(elses) {
            let holds = match test {
                None => true,
                Some(test) => match self.value(test)?.truth() {
                    Some(holds) => holds,
                    None => self.choose(&self.written(test)),
                },
            };
            if holds && self.branch(body)? {
                return Ok(());
            }
        }
        Ok(())
    }

    fn for_statement(&mut self, own: &'a StmtFor) -> Result<(), ImportError> {
        let line = self.line(own);
        let unknown = Known::new(Thing::Written(self.written(&*own.target)));
        let items = match self.value(&own.iter)?.items() {
            Some(items) if items.len() <= TIMES => items,
            _ => vec![unknown],
        };
        // of a loop that makes configurations a run is one turn
        let body = self.written(own);
        let makes = known::CALLS.iter().any(|(call, _)| body.contains(&format!("{call}(")));
        let last = items.len().saturating_sub(1);
        for (at, mut item) in items.into_iter().enumerate() {
            if makes && at < last && !self.choose(&format!("turn {at} of line {line}")) {
                continue;
            }
            item.lines.insert((self.file.to_owned(), line));
            self.assign(&own.target, item, &own.iter)?;
            if !self.turn(&own.body)? || makes {
                break;
            }
        }
        Ok(())
    }

    /// One turn of a loop; whether others follow.
    fn turn(&mut self, body: &'a [Stmt]) -> Result<bool, ImportError> {
        self.block(body)?;
        let follows = matches!(self.flow, Flow::Next | Flow::Continue);
        if matches!(self.flow, Flow::Continue | Flow::Break) {
            self.flow = Flow::Next;
        }
        Ok(follows)
    }

    fn try_statement(&mut self, own: &'a StmtTry) -> Result<(), ImportError> {
        let handlers = own.handlers.iter().filter_map(ExceptHandler::as_except_handler);
        let sets =
            |stmt: &Stmt| matches!(stmt, Stmt::Assign(_) | Stmt::AnnAssign(_) | Stmt::AugAssign(_) | Stmt::If(_));
        let handler = handlers.clone().find(|handler| handler.body.iter().any(sets));
        match handler {
            Some(handler) if !self.choose(&format!("try {}", self.line(own))) => {
                self.branch(&handler.body)?;
            }
            _ => {
                self.branch(&own.body)?;
                self.block(&own.orelse)?;
            }
        }
        self.block(&own.finalbody)
    }

    /// Runs functions that make a configuration and that nothing here calls, such as those of a command line's library.
    fn uncalled(&mut self, body: &'a [Stmt]) -> Result<(), ImportError> {
        self.flow = Flow::Next;
        let functions = body.iter().filter_map(Stmt::as_function_def_stmt);
        let makes = |own: &StmtFunctionDef| {
            known::CALLS.iter().any(|(call, _)| self.written(own).contains(&format!("{call}(")))
        };
        let functions: Vec<&StmtFunctionDef> = functions.filter(|own| makes(own)).collect();
        for own in functions {
            if !self.called.contains(own.name.as_str()) {
                self.call(own, Vec::new(), BTreeMap::new())?;
            }
        }
        Ok(())
    }
}

/// The fields of a dataclass with their defaults.
fn fields(class: &StmtClassDef) -> impl Iterator<Item = (&str, &Expr, usize)> {
    class.body.iter().filter_map(|stmt| match stmt {
        Stmt::AnnAssign(own) => {
            Some((own.target.as_name_expr()?.id.as_str(), own.value.as_deref()?, own.start().to_usize()))
        }
        Stmt::Assign(own) => {
            Some((own.targets.first()?.as_name_expr()?.id.as_str(), &*own.value, own.start().to_usize()))
        }
        _ => None,
    })
}
