//! Multi-turn rollouts in a run: checks of template, task and settings, and sampling with environments.

use crate::checkpoint::PolicySource;
use crate::config::{MultiTurn, RolloutConfig, RunConfig};
use crate::data::Prompt;
use crate::objective::Needs;
use crate::task::{PromptText, Split, TOOLS, Task};
use crate::turns::{Episodes, Limits, Outcome, TurnTemplate, tool_format};
use crate::{Error, Result};
use firebrick_models::random::DrawKey;
use firebrick_sampler::{Generated, GenerationRequest, Generator, Next, Sample, SchedulerConfig, Turns};
use std::borrow::Cow;
use std::cell::RefCell;

/// Name of the reward part of environments.
pub(super) const ENVIRONMENT: &str = "environment";

/// Template of a run whose task has environments, checked with its first conversation.
///
/// # Errors
/// [`Error::Config`] for a template that is not prefix-preserving, and for settings that environments do not support.
pub(super) fn turn_template(
    config: &RunConfig,
    needs: Needs,
    task: &dyn Task,
    source: &PolicySource,
) -> Result<Option<TurnTemplate>> {
    let Some(environments) = task.environments() else {
        if config.rollout.multi_turn == MultiTurn::default() {
            return Ok(None);
        }
        return Err(Error::Config(
                "rollout.multi_turn limits the turns of an environment, and the task has none; remove it, or set task.environment"
                    .into(),
        ));
    };
    let bad = |what: &str| Err(Error::Config(what.to_owned()));
    if needs.greedy {
        return bad(
            "objective.adv_estimator: remax samples a greedy completion of each prompt, which has no environment; choose another \
             estimator, such as grpo or rloo",
        );
    }
    if task.rewards().is_some_and(|list| list.models().next().is_some()) {
        return bad(
            "a reward model reads one turn of the assistant, and rollouts with an environment have several; remove `kind: model` from \
             task.rewards, or the environment",
        );
    }
    let split = [Split::Train, Split::Validation].into_iter().find(|split| !task.is_empty(*split));
    let Some(split) = split else { return Ok(None) };
    let example = task.example(split, 0)?;
    let PromptText::Chat(messages) = &example.prompt else {
        return bad(
            "an environment answers in a conversation, but the task's prompts are plain text; write them as messages",
        );
    };
    let tools = example.fields.column(TOOLS).unwrap_or(environments.tools());
    let (turns, tokenizer) = (&config.rollout.multi_turn, &source.tokenizer);
    let format = tool_format(tokenizer, tools, messages, turns.format)?;
    let template = TurnTemplate::new(tokenizer, &source.ends.ids, tools, messages, format, turns.tool_role)?;
    // a model that starts from random weights has no format of its own
    if config.model.path.is_some() {
        tracing::info!("tool calls are read in the format {} (rollout.multi_turn.format)", format.name());
        if !template.reads_tools(messages) {
            tracing::warn!(
                "the chat template does not write the tools: describe them, and that calls are written as {}, in \
                 task.system_prompt or in the string that `reset` returns, or set model.chat_template to a file that writes \
                 `tools`",
                format.example()
            );
        }
    }
    Ok(Some(template))
}

/// Environments of the rollouts of some prompts.
pub(super) struct EnvironmentSession<'a>(RefCell<Episodes<'a>>);

impl<'a> EnvironmentSession<'a> {
    /// Resets an environment per rollout; `first` is the key of the first prompt.
    pub fn begin(
        template: &'a TurnTemplate,
        task: &'a dyn Task,
        rollout: &RolloutConfig,
        source: &PolicySource,
        prompts: &[Prompt],
        n: usize,
        first: DrawKey,
    ) -> Result<Self> {
        let Some(environments) = task.environments() else { unreachable!("a template is made for environments") };
        let limits = Limits {
            max_assistant_turns: rollout.multi_turn.max_assistant_turns,
            max_tool_response_length: rollout.multi_turn.max_tool_response_length,
            stop_ids: source.ends.ids.clone(),
            stop: rollout.stop.clone(),
            prompt_length: rollout.prompt_length,
        };
        let episodes = Episodes::begin(environments, template, limits, prompts, n, first, &source.tokenizer)?;
        Ok(Self(RefCell::new(episodes)))
    }

    /// The prompts, with additions of environments.
    pub fn prompts(&self) -> Vec<Prompt> {
        self.0.borrow().prompts().to_vec()
    }

    /// Outcome of a completion that has ended.
    pub fn outcome(&self, sample: &Sample) -> Outcome {
        self.0.borrow().outcome(sample.request, sample.sample).clone()
    }

    /// Samples completions of as many turns as the environments answer.
    pub fn run(
        &self,
        generator: &Generator<'_>,
        requests: &[GenerationRequest],
        n: usize,
        limits: &SchedulerConfig,
        ended: impl FnMut(&Sample),
    ) -> Result<Generated> {
        let episodes = &self.0;
        // a turn is prefilled from the end of the one before
        let limits = SchedulerConfig { keep_completions: true, ..*limits };
        let per_rollout = episodes.borrow().requests(requests);
        let mut turns = Shared { episodes, group: per_rollout.as_ref().map(|_| n) };
        let Some(requests) = per_rollout else {
            let generated = generator.run_turns(requests, n, &limits, &mut turns, ended)?;
            episodes.borrow().check()?;
            return Ok(generated);
        };
        // each rollout is a request: restore its place in the group
        let mut ended = ended;
        let mut ended = |sample: &Sample| ended(&placed(sample, Some(n)));
        let mut generated = generator.run_turns(&requests, 1, &limits, &mut turns, &mut ended)?;
        episodes.borrow().check()?;
        for sample in &mut generated.samples {
            (sample.request, sample.sample) = (sample.request / n, sample.request % n);
        }
        Ok(generated)
    }

    /// Outcomes of the rollouts, in the order of prompts and samples.
    pub fn outcomes(self) -> Vec<Outcome> {
        self.0.into_inner().into_outcomes()
    }
}

/// Episodes that the sampler asks between turns.
struct Shared<'e, 'a> {
    episodes: &'e RefCell<Episodes<'a>>,
    /// Rollouts of a group, if each rollout is a request.
    group: Option<usize>,
}

impl Turns for Shared<'_, '_> {
    fn turn(&mut self, sample: &Sample, room: usize) -> Next {
        self.episodes.borrow_mut().turn(&placed(sample, self.group), room)
    }

    fn awaited(&mut self) -> Vec<((usize, usize), Next)> {
        let mut answers = self.episodes.borrow_mut().awaited();
        if let Some(n) = self.group {
            for ((request, sample), _) in &mut answers {
                (*request, *sample) = (*request * n + *sample, 0);
            }
        }
        answers
    }
}

/// A sample with its prompt and its place in the group, if each rollout was a request.
fn placed(sample: &Sample, group: Option<usize>) -> Cow<'_, Sample> {
    match group {
        None => Cow::Borrowed(sample),
        Some(n) => Cow::Owned(Sample { request: sample.request / n, sample: sample.request % n, ..sample.clone() }),
    }
}
