//! What a script does, command by command: assignments, branches, loops, functions.

use super::simple::is_elsewhere;
use super::value::{Mode, Variable};
use super::{Flow, Shell};
use crate::error::ImportError;
use crate::literal::has_word;
use brush_parser::ast::{
    AndOr, AndOrList, CaseClauseCommand, CaseItemPostAction, Command, CompoundCommand, CompoundList, CompoundListItem,
    ForClauseCommand, IfClauseCommand, Pipeline, SeparatorOperator, SourceLocation, UnexpandedArithmeticExpr,
};
use std::sync::Arc;

/// Most times that a loop is run.
const TIMES: usize = 256;

/// Commands that set nothing: whether they run makes no difference to a run's settings.
pub(super) const INERT: &str = "echo printf mkdir rm cp mv ln ls touch chmod sleep wait kill pkill wget curl pip pip3 apt apt-get git \
    tar unzip huggingface-cli hf ulimit nvidia-smi npu-smi true : false test [ tee grep which trap shopt \
    conda module";

impl Shell<'_> {
    pub(super) fn list(&mut self, list: &CompoundList) -> Result<(), ImportError> {
        for item in &list.0 {
            if self.scope.flow != Flow::Next {
                break;
            }
            match item.1 {
                SeparatorOperator::Async => self.apart(|shell| shell.and_or(&item.0))?,
                SeparatorOperator::Sequence => self.and_or(&item.0)?,
            }
        }
        Ok(())
    }

    /// Runs something whose variables are lost.
    pub(super) fn apart(&mut self, run: impl FnOnce(&mut Self) -> Result<(), ImportError>) -> Result<(), ImportError> {
        let before = self.scope.clone();
        run(self)?;
        let (status, output) = (self.scope.status, std::mem::take(&mut self.scope.output));
        self.scope = before;
        (self.scope.status, self.scope.output) = (status, output);
        Ok(())
    }

    /// Runs a branch. One that ends the script before it has started a run is no branch that a run takes.
    fn branch(&mut self, body: &CompoundList) -> Result<bool, ImportError> {
        let (before, launches) = (self.scope.clone(), self.launches.len());
        self.list(body)?;
        let leaves = self.scope.flow == Flow::Exit && self.launches.len() == launches;
        if leaves {
            self.scope = before;
        }
        Ok(!leaves)
    }

    fn and_or(&mut self, list: &AndOrList) -> Result<(), ImportError> {
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
                Some(own) => own,
                None if self.pipeline_is_inert(pipeline) => continue,
                None => self.choose_asked(),
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

    fn pipeline(&mut self, pipeline: &Pipeline) -> Result<(), ImportError> {
        if let [only] = &pipeline.seq[..] {
            self.command(only)?;
        } else {
            for (at, command) in pipeline.seq.iter().enumerate() {
                let output = std::mem::take(&mut self.scope.output);
                self.apart(|shell| shell.command(command))?;
                self.scope.output = output;
                if at + 1 == pipeline.seq.len() {
                    self.scope.output.spoil();
                }
            }
            self.scope.status = None;
        }
        if pipeline.bang {
            self.scope.status = self.scope.status.map(|own| !own);
        }
        Ok(())
    }

    fn command(&mut self, command: &Command) -> Result<(), ImportError> {
        self.deeper()?;
        if let (false, Some(span)) = (self.is_nested, command.location()) {
            self.line = span.start.line;
        }
        match command {
            Command::Simple(simple) => self.simple(simple)?,
            Command::Compound(compound, redirects) => {
                let output = self.scope.output.clone();
                self.compound(compound)?;
                if redirects.iter().flat_map(|own| &own.0).any(is_elsewhere) {
                    self.scope.output = output;
                }
            }
            Command::Function(function) => {
                let body = Arc::new((function.body.clone(), self.file));
                self.scope.functions.insert(function.fname.value.clone(), body);
                self.scope.status = Some(true);
            }
            Command::ExtendedTest(test, _) => {
                let mut asked = String::new();
                self.scope.status = self.extended(&test.expr, &mut asked)?;
                self.asked = asked;
            }
        }
        self.depth -= 1;
        Ok(())
    }

    pub(super) fn compound(&mut self, compound: &CompoundCommand) -> Result<(), ImportError> {
        match compound {
            CompoundCommand::Arithmetic(own) => {
                let value = self.whole(&own.expr.value)?;
                self.asked.clone_from(&own.expr.value);
                self.scope.status = value.map(|value| value != 0);
            }
            CompoundCommand::BraceGroup(own) => self.list(&own.list)?,
            CompoundCommand::Subshell(own) => self.apart(|shell| shell.list(&own.list))?,
            CompoundCommand::Coprocess(own) => self.apart(|shell| shell.command(&own.body))?,
            CompoundCommand::IfClause(own) => self.if_clause(own)?,
            CompoundCommand::CaseClause(own) => self.case_clause(own)?,
            CompoundCommand::ForClause(own) => self.for_clause(own)?,
            CompoundCommand::WhileClause(own) => self.repeat(&own.1.list, |shell| shell.asks(&own.0, true))?,
            CompoundCommand::UntilClause(own) => self.repeat(&own.1.list, |shell| shell.asks(&own.0, false))?,
            CompoundCommand::ArithmeticForClause(own) => {
                let raw = |part: &Option<UnexpandedArithmeticExpr>| part.as_ref().map(|own| own.value.clone());
                self.optional(raw(&own.initializer).as_ref())?;
                let (condition, updater) = (raw(&own.condition), raw(&own.updater));
                let mut is_first = true;
                self.repeat(&own.body.list, |shell| {
                    if !std::mem::replace(&mut is_first, false) {
                        shell.optional(updater.as_ref())?;
                    }
                    let value = shell.optional(condition.as_ref())?;
                    shell.asked = condition.clone().unwrap_or_default();
                    Ok(if condition.is_none() { Some(true) } else { value.map(|value| value != 0) })
                })?;
            }
        }
        Ok(())
    }

    /// Whether a condition holds, where that is certain.
    fn asks(&mut self, condition: &CompoundList, wanted: bool) -> Result<Option<bool>, ImportError> {
        self.list(condition)?;
        Ok(self.scope.status.map(|own| own == wanted))
    }

    fn if_clause(&mut self, own: &IfClauseCommand) -> Result<(), ImportError> {
        let elses = own.elses.iter().flatten().map(|arm| (arm.condition.as_ref(), &arm.body));
        let arms: Vec<_> = std::iter::once((Some(&own.condition), &own.then)).chain(elses).collect();
        let is_inert = arms.iter().all(|(_, body)| self.is_inert(body));
        for (condition, body) in arms {
            let holds = match condition {
                None => true,
                Some(condition) => match self.asks(condition, true)? {
                    Some(holds) => holds,
                    None if is_inert => return Ok(()),
                    None => self.choose_asked(),
                },
            };
            if self.scope.flow != Flow::Next || holds && self.branch(body)? {
                return Ok(());
            }
        }
        self.scope.status = Some(true);
        Ok(())
    }

    fn case_clause(&mut self, own: &CaseClauseCommand) -> Result<(), ImportError> {
        let value = self.text(&own.value.value, Mode::Value)?;
        let known = self.without_unset(&value);
        if known.is_none() && own.cases.iter().all(|item| item.cmd.as_ref().is_none_or(|body| self.is_inert(body))) {
            return Ok(());
        }
        let mut falls = false;
        for item in &own.cases {
            let mut matches = falls;
            for pattern in &item.patterns {
                matches = matches
                    || match (&known, self.pattern(Some(&pattern.value), "^(?:", ")$")?) {
                        _ if pattern.value == "*" => true,
                        (Some(known), Some(regex)) => regex.is_match(known),
                        _ => self.choose(&format!("{} is {}", value.text, pattern.value)),
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

    fn for_clause(&mut self, own: &ForClauseCommand) -> Result<(), ImportError> {
        let values = match &own.values {
            Some(words) => self.fields(words)?,
            None => self.scope.arguments.clone(),
        };
        let mut values = values.into_iter().take(TIMES);
        let (name, place) = (own.variable_name.clone(), self.place());
        self.repeat(&own.body.list, |shell| {
            let Some(mut value) = values.next() else {
                return Ok(Some(false));
            };
            value.lines.insert(place);
            shell.scope.variables.insert(name.clone(), Variable::text(value));
            Ok(Some(true))
        })
    }

    /// Runs a loop as long as `goes_on`; once where that is not certain.
    fn repeat(
        &mut self,
        body: &CompoundList,
        mut goes_on: impl FnMut(&mut Self) -> Result<Option<bool>, ImportError>,
    ) -> Result<(), ImportError> {
        let line = self.line;
        for turn in 0..TIMES {
            let certain = goes_on(self)?;
            let runs = match certain {
                Some(runs) => runs,
                None => turn == 0 && !self.is_inert(body) && self.choose_asked(),
            };
            if !runs {
                if turn == 0 {
                    self.name_options(body);
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

    /// The options of a loop over the script's arguments, none of which are given.
    fn name_options(&mut self, body: &CompoundList) {
        let options: Vec<&str> = commands(body)
            .filter_map(|command| match command {
                Command::Compound(CompoundCommand::CaseClause(own), _) => Some(&own.cases),
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

    /// Whether running these commands or not makes no difference.
    fn is_inert(&self, body: &CompoundList) -> bool {
        let each = body.0.iter().flat_map(|item| item.0.iter());
        each.into_iter().all(|(_, pipeline)| self.pipeline_is_inert(pipeline))
    }

    fn pipeline_is_inert(&self, pipeline: &Pipeline) -> bool {
        pipeline.seq.iter().all(|command| match command {
            Command::Simple(simple) => {
                let name = simple.word_or_name.as_ref().map(|word| word.value.as_str());
                name.is_some_and(|name| has_word(INERT, name) && !self.scope.functions.contains_key(name))
                    && !self.scope.output.is_taken
            }
            Command::Compound(CompoundCommand::IfClause(own), _) => {
                let elses = own.elses.iter().flatten().map(|arm| &arm.body);
                elses.chain([&own.then]).all(|body| self.is_inert(body))
            }
            Command::Compound(CompoundCommand::BraceGroup(own), _) => self.is_inert(&own.list),
            Command::Compound(..) | Command::Function(_) => false,
            Command::ExtendedTest(..) => true,
        })
    }
}

/// All commands of a list, without those of other lists within.
fn commands(list: &CompoundList) -> impl Iterator<Item = &Command> {
    list.0.iter().flat_map(|item| item.0.iter()).flat_map(|(_, pipeline)| &pipeline.seq)
}
