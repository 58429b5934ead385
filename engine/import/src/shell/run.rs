//! Commands of a script: assignments, branches, loops, functions.

use super::simple::redirects_output;
use super::value::{Mode, Variable};
use super::{Flow, Shell};
use crate::error::ImportResult;
use crate::literal::has_word;
use brush_parser::ast::{
    AndOr, AndOrList, CaseClauseCommand, CaseItemPostAction, Command, CompoundCommand, CompoundList, CompoundListItem,
    ForClauseCommand, IfClauseCommand, Pipeline, SeparatorOperator, SourceLocation, UnexpandedArithmeticExpr,
};
use std::sync::Arc;

/// Most iterations of a loop.
const MAX_ITERATIONS: usize = 256;

/// Commands without an effect on settings.
pub(super) const INERT: &str = "echo printf mkdir rm cp mv ln ls touch chmod sleep wait kill pkill wget curl pip pip3 apt apt-get git \
    tar unzip huggingface-cli hf ulimit nvidia-smi npu-smi true : false test [ tee grep which trap shopt \
    conda module";

impl Shell<'_> {
    pub(super) fn list(&mut self, list: &CompoundList) -> ImportResult {
        for item in &list.0 {
            if self.scope.flow != Flow::Next {
                break;
            }
            match item.1 {
                SeparatorOperator::Async => self.in_subshell(|shell| shell.and_or(&item.0))?,
                SeparatorOperator::Sequence => self.and_or(&item.0)?,
            }
        }
        Ok(())
    }

    /// Runs something in a subshell, whose variables are lost.
    pub(super) fn in_subshell(&mut self, run: impl FnOnce(&mut Self) -> ImportResult) -> ImportResult {
        let before = self.scope.clone();
        run(self)?;
        let (status, output) = (self.scope.status, std::mem::take(&mut self.scope.output));
        self.scope = before;
        (self.scope.status, self.scope.output) = (status, output);
        Ok(())
    }

    /// Follows a branch. Discards it, and returns false, if it ends the script before it starts a run.
    fn branch(&mut self, body: &CompoundList) -> ImportResult<bool> {
        let (before, launches) = (self.scope.clone(), self.launches.len());
        self.list(body)?;
        let exits = self.scope.flow == Flow::Exit && self.launches.len() == launches;
        if exits {
            self.scope = before;
        }
        Ok(!exits)
    }

    fn and_or(&mut self, list: &AndOrList) -> ImportResult {
        self.pipeline(&list.first)?;
        for more in &list.additional {
            if self.scope.flow != Flow::Next {
                break;
            }
            let (pipeline, runs_after) = match more {
                AndOr::And(pipeline) => (pipeline, true),
                AndOr::Or(pipeline) => (pipeline, false),
            };
            let succeeded = match self.scope.status {
                Some(success) => success,
                None if self.pipeline_is_inert(pipeline) => continue,
                None => self.choose_question(),
            };
            self.scope.status = Some(succeeded);
            if succeeded == runs_after {
                let item = AndOrList { first: pipeline.clone(), additional: Vec::new() };
                let body = vec![CompoundListItem(item, SeparatorOperator::Sequence)];
                if !self.branch(&CompoundList(body))? {
                    self.scope.status = None;
                }
            }
        }
        Ok(())
    }

    fn pipeline(&mut self, pipeline: &Pipeline) -> ImportResult {
        if let [only] = &pipeline.seq[..] {
            self.command(only)?;
        } else {
            for (at, command) in pipeline.seq.iter().enumerate() {
                let output = std::mem::take(&mut self.scope.output);
                self.in_subshell(|shell| shell.command(command))?;
                self.scope.output = output;
                if at + 1 == pipeline.seq.len() {
                    self.scope.output.is_unknown = true;
                }
            }
            self.scope.status = None;
        }
        if pipeline.bang {
            self.scope.status = self.scope.status.map(|success| !success);
        }
        Ok(())
    }

    fn command(&mut self, command: &Command) -> ImportResult {
        self.deeper()?;
        if let (false, Some(span)) = (self.is_nested, command.location()) {
            self.line = span.start.line;
        }
        match command {
            Command::Simple(simple) => self.simple(simple)?,
            Command::Compound(compound, redirects) => {
                let output = self.scope.output.clone();
                self.compound(compound)?;
                if redirects.iter().flat_map(|list| &list.0).any(redirects_output) {
                    self.scope.output = output;
                }
            }
            Command::Function(function) => {
                let body = Arc::new((function.body.clone(), self.file));
                self.scope.functions.insert(function.fname.value.clone(), body);
                self.scope.status = Some(true);
            }
            Command::ExtendedTest(test, _) => {
                let mut question = String::new();
                self.scope.status = self.extended(&test.expr, &mut question)?;
                self.question = question;
            }
        }
        self.depth -= 1;
        Ok(())
    }

    pub(super) fn compound(&mut self, compound: &CompoundCommand) -> ImportResult {
        match compound {
            CompoundCommand::Arithmetic(clause) => {
                let value = self.integer(&clause.expr.value)?;
                self.question.clone_from(&clause.expr.value);
                self.scope.status = value.map(|value| value != 0);
            }
            CompoundCommand::BraceGroup(clause) => self.list(&clause.list)?,
            CompoundCommand::Subshell(clause) => self.in_subshell(|shell| shell.list(&clause.list))?,
            CompoundCommand::Coprocess(clause) => self.in_subshell(|shell| shell.command(&clause.body))?,
            CompoundCommand::IfClause(clause) => self.if_clause(clause)?,
            CompoundCommand::CaseClause(clause) => self.case_clause(clause)?,
            CompoundCommand::ForClause(clause) => self.for_clause(clause)?,
            CompoundCommand::WhileClause(clause) => {
                self.repeat(&clause.1.list, |shell| shell.condition(&clause.0, true))?;
            }
            CompoundCommand::UntilClause(clause) => {
                self.repeat(&clause.1.list, |shell| shell.condition(&clause.0, false))?;
            }
            CompoundCommand::ArithmeticForClause(clause) => {
                let raw =
                    |part: &Option<UnexpandedArithmeticExpr>| part.as_ref().map(|expression| expression.value.clone());
                self.optional_integer(raw(&clause.initializer).as_ref())?;
                let (condition, updater) = (raw(&clause.condition), raw(&clause.updater));
                let mut is_first = true;
                self.repeat(&clause.body.list, |shell| {
                    if !std::mem::replace(&mut is_first, false) {
                        shell.optional_integer(updater.as_ref())?;
                    }
                    let value = shell.optional_integer(condition.as_ref())?;
                    shell.question = condition.clone().unwrap_or_default();
                    Ok(if condition.is_none() { Some(true) } else { value.map(|value| value != 0) })
                })?;
            }
        }
        Ok(())
    }

    /// Runs a condition; returns true if its success is `wanted`, `None` if that is not certain.
    fn condition(&mut self, condition: &CompoundList, wanted: bool) -> ImportResult<Option<bool>> {
        self.list(condition)?;
        Ok(self.scope.status.map(|success| success == wanted))
    }

    fn if_clause(&mut self, clause: &IfClauseCommand) -> ImportResult {
        let elses = clause.elses.iter().flatten().map(|arm| (arm.condition.as_ref(), &arm.body));
        let arms: Vec<_> = std::iter::once((Some(&clause.condition), &clause.then)).chain(elses).collect();
        let is_inert = arms.iter().all(|(_, body)| self.is_inert(body));
        for (condition, body) in arms {
            let holds = match condition {
                None => true,
                Some(condition) => match self.condition(condition, true)? {
                    Some(holds) => holds,
                    None if is_inert => return Ok(()),
                    None => self.choose_question(),
                },
            };
            if self.scope.flow != Flow::Next || holds && self.branch(body)? {
                return Ok(());
            }
        }
        self.scope.status = Some(true);
        Ok(())
    }

    fn case_clause(&mut self, clause: &CaseClauseCommand) -> ImportResult {
        let value = self.text(&clause.value.value, Mode::Value)?;
        let known = self.without_unset(&value);
        if known.is_none() && clause.cases.iter().all(|item| item.cmd.as_ref().is_none_or(|body| self.is_inert(body))) {
            return Ok(());
        }
        let mut falls = false;
        for item in &clause.cases {
            let mut matches = falls;
            for pattern in &item.patterns {
                matches = matches
                    || match (&known, self.pattern(Some(&pattern.value), "^(?:", ")$")?) {
                        _ if pattern.value == "*" => true,
                        (Some(known), Some(regex)) => regex.is_match(known),
                        _ => self.branches.choose(&format!("{} is {}", value.text, pattern.value)),
                    };
            }
            if !matches {
                continue;
            }
            let taken = item.cmd.as_ref().map_or(Ok(true), |body| self.branch(body))?;
            match item.post_action {
                CaseItemPostAction::ExitCase if taken => return Ok(()),
                CaseItemPostAction::UnconditionallyExecuteNextCaseItem => falls = true,
                _ => falls = false,
            }
        }
        Ok(())
    }

    fn for_clause(&mut self, clause: &ForClauseCommand) -> ImportResult {
        let values = match &clause.values {
            Some(words) => self.fields(words)?,
            None => self.scope.arguments.clone(),
        };
        let mut values = values.into_iter().take(MAX_ITERATIONS);
        let (name, place) = (clause.variable_name.clone(), self.place());
        self.repeat(&clause.body.list, |shell| {
            let Some(mut value) = values.next() else {
                return Ok(Some(false));
            };
            value.lines.insert(place);
            shell.scope.variables.insert(name.clone(), Variable::text(value));
            Ok(Some(true))
        })
    }

    /// Runs a loop while `goes_on` returns true; once if that is not certain.
    fn repeat(
        &mut self,
        body: &CompoundList,
        mut goes_on: impl FnMut(&mut Self) -> ImportResult<Option<bool>>,
    ) -> ImportResult {
        let line = self.line;
        for iteration in 0..MAX_ITERATIONS {
            let certain = goes_on(self)?;
            let runs = match certain {
                Some(runs) => runs,
                None => iteration == 0 && !self.is_inert(body) && self.choose_question(),
            };
            if !runs {
                if iteration == 0 {
                    self.note_options(body);
                }
                break;
            }
            self.list(body)?;
            self.line = line;
            match std::mem::replace(&mut self.scope.flow, Flow::Next) {
                Flow::Break(levels) if levels > 1 => {
                    self.scope.flow = Flow::Break(levels - 1);
                    break;
                }
                Flow::Break(_) => break,
                flow @ (Flow::Return | Flow::Exit) => {
                    self.scope.flow = flow;
                    break;
                }
                Flow::Next | Flow::Continue => {}
            }
            if certain.is_none() {
                break;
            }
        }
        self.scope.status = Some(true);
        Ok(())
    }

    /// Adds a note on the options of a loop over the script's arguments, which are all absent.
    fn note_options(&mut self, body: &CompoundList) {
        let options: Vec<&str> = commands(body)
            .filter_map(|command| match command {
                Command::Compound(CompoundCommand::CaseClause(clause), _) => Some(&clause.cases),
                _ => None,
            })
            .flatten()
            .flat_map(|item| &item.patterns)
            .map(|pattern| pattern.value.as_str())
            .filter(|pattern| pattern.starts_with('-'))
            .collect();
        if !options.is_empty() {
            self.note(format!("the script's options {} are not given, so its defaults are taken", options.join(", ")));
        }
    }

    /// Returns true if these commands have no effect on settings.
    fn is_inert(&self, body: &CompoundList) -> bool {
        let pipelines = body.0.iter().flat_map(|item| item.0.iter());
        pipelines.into_iter().all(|(_, pipeline)| self.pipeline_is_inert(pipeline))
    }

    fn pipeline_is_inert(&self, pipeline: &Pipeline) -> bool {
        pipeline.seq.iter().all(|command| match command {
            Command::Simple(simple) => {
                let name = simple.word_or_name.as_ref().map(|word| word.value.as_str());
                name.is_some_and(|name| has_word(INERT, name) && !self.scope.functions.contains_key(name))
                    && !self.scope.output.is_captured
            }
            Command::Compound(CompoundCommand::IfClause(clause), _) => {
                let elses = clause.elses.iter().flatten().map(|arm| &arm.body);
                elses.chain([&clause.then]).all(|body| self.is_inert(body))
            }
            Command::Compound(CompoundCommand::BraceGroup(clause), _) => self.is_inert(&clause.list),
            Command::Compound(..) | Command::Function(_) => false,
            Command::ExtendedTest(..) => true,
        })
    }
}

/// Commands of a list, without those of nested lists.
fn commands(list: &CompoundList) -> impl Iterator<Item = &Command> {
    list.0.iter().flat_map(|item| item.0.iter()).flat_map(|(_, pipeline)| &pipeline.seq)
}
