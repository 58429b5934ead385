//! Rewards while completions are sampled: a thread scores each by the task's rules as it ends, and hands complete groups
//! to the task's programs.

use crate::data::Prompt;
use crate::reward::{Answer, Asked, CompletionId, ProgramResults, Programs, Purpose};
use crate::task::{Reward, Task};
use crate::turns::{Outcome, opens_thought};
use crate::{Error, Result};
use firebrick_models::Tokenizer;
use firebrick_models::tokenizer::Message;
use firebrick_sampler::{FinishReason, Sample, SamplingParams, text_before_stop};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// Texts and rewards of completions by the rules, by request and sample.
type RuleRewards = BTreeMap<(usize, usize), Result<(String, Reward)>>;

/// A completion that has ended, and what came of it where it had an environment.
#[derive(Clone, Debug)]
pub(super) struct Ended {
    pub sample: Sample,
    pub outcome: Option<Outcome>,
}

impl Ended {
    fn view(&self) -> EnvironmentView<'_> {
        EnvironmentView::of(self.outcome.as_ref())
    }
}

/// What a completion has of its environment.
#[derive(Clone, Copy, Default)]
pub(super) struct EnvironmentView<'a> {
    prompt: Option<&'a Prompt>,
    turns: &'a [Message],
    object: Option<&'a Value>,
}

impl<'a> EnvironmentView<'a> {
    pub fn of(outcome: Option<&'a Outcome>) -> Self {
        outcome.map_or_else(Self::default, |own| Self {
            prompt: own.prompt.as_deref(),
            turns: &own.turns,
            object: own.object.as_ref(),
        })
    }
}

/// Thread that scores completions as they end. Results do not depend on their order.
pub(super) struct RewardWorker {
    samples: Sender<Ended>,
    thread: JoinHandle<RewardResults>,
}

/// Inputs of scoring, shared with the worker.
pub(super) struct RewardJob {
    pub task: Arc<dyn Task>,
    pub tokenizer: Arc<Tokenizer>,
    /// What ended the completions.
    pub sampling: SamplingParams,
    pub prompts: Arc<Vec<Prompt>>,
    pub programs: Programs,
    /// Completions of a group.
    pub n: usize,
    pub max_tokens: usize,
    /// The step, and the index of its first prompt.
    pub step: u64,
    pub first: u64,
}

/// Scores of rules, and pending scores of programs.
#[derive(Default)]
pub(super) struct RewardResults {
    rules: RuleRewards,
    asked: BTreeMap<usize, Result<Asked>>,
}

/// A completion as rules, models and programs take it, in a step whose first prompt has this index.
pub(super) fn answer<'a>(
    prompts: &'a [Prompt],
    sample: &'a Sample,
    view: EnvironmentView<'a>,
    text: String,
    step: u64,
    first: u64,
) -> Answer<'a> {
    Answer {
        prompt: view.prompt.unwrap_or(&prompts[sample.request]),
        text,
        last_turn: None,
        turns: view.turns,
        environment: view.object,
        tokens: &sample.tokens,
        finished: sample.finish == FinishReason::Stop,
        in_thought: false,
        id: CompletionId { step, prompt_index: first + sample.request as u64, sample: sample.sample },
    }
}

/// The text of a completion, and of its last turn where it has several: without what ended it.
pub(super) fn texts(
    tokenizer: &Tokenizer,
    sampling: &SamplingParams,
    sample: &Sample,
) -> Result<(String, Option<String>)> {
    let (tokens, turn) = (&sample.tokens, sample.turn_start());
    let whole = text_before_stop(tokenizer, sampling, tokens, turn)?;
    let last = (!sample.inserted.is_empty()).then(|| text_before_stop(tokenizer, sampling, &tokens[turn..], 0));
    Ok((whole, last.transpose()?))
}

/// Whether the last turn of a completion ends inside a thought, which the text before it or its beginning opens. Tags
/// that are special tokens, which a completion's text has not, count too.
pub(super) fn ends_in_thought(tokenizer: &Tokenizer, prompt: &Prompt, sample: &Sample) -> Result<bool> {
    let turn = tokenizer.decode(&sample.tokens[sample.turn_start()..], false)?;
    if turn.contains("</think>") {
        return Ok(false);
    }
    Ok(opens_thought(tokenizer, &prompt.text, sample)? || turn.trim_start().starts_with("<think>"))
}

impl RewardJob {
    fn score(&self, ended: &Ended) -> Result<(String, Reward)> {
        let sample = &ended.sample;
        let (text, last_turn) = texts(&self.tokenizer, &self.sampling, sample)?;
        let (step, first) = (self.step, self.first);
        let mut answer = answer(&self.prompts, sample, ended.view(), text, step, first);
        answer.last_turn = last_turn;
        answer.in_thought = ends_in_thought(&self.tokenizer, answer.prompt, sample)?;
        let reward = answer.by_rules(self.task.as_ref(), self.max_tokens, Purpose::Training)?;
        Ok((answer.text, reward))
    }

    /// Asks the programs about a group; where one of its completions has failed already, about none.
    fn ask(&self, mut group: Vec<Ended>, rules: &RuleRewards) -> Result<Asked> {
        group.sort_by_key(|own| own.sample.sample);
        let answers = group.iter().filter_map(|ended| {
            let sample = &ended.sample;
            let scored = rules.get(&(sample.request, sample.sample))?;
            let (text, _) = scored.as_ref().ok()?;
            let text = text.clone();
            let (step, first) = (self.step, self.first);
            let view = ended.view();
            Some(answer(&self.prompts, sample, view, text, step, first))
        });
        self.programs.ask(&answers.collect::<Vec<_>>())
    }

    fn judge(&self, coming: impl IntoIterator<Item = Ended>) -> RewardResults {
        let mut judged = RewardResults::default();
        let mut groups: BTreeMap<usize, Vec<Ended>> = BTreeMap::new();
        for ended in coming {
            let (request, place) = (ended.sample.request, ended.sample.sample);
            judged.rules.insert((request, place), self.score(&ended));
            if self.programs.is_empty() {
                continue;
            }
            let group = groups.entry(request).or_default();
            group.push(ended);
            if group.len() == self.n {
                let asked = self.ask(std::mem::take(group), &judged.rules);
                judged.asked.insert(request, asked);
            }
        }
        judged
    }
}

impl RewardWorker {
    pub fn start(judging: RewardJob) -> Self {
        let (samples, coming) = channel::<Ended>();
        let thread = std::thread::spawn(move || judging.judge(coming));
        Self { samples, thread }
    }

    /// Hands a completion over.
    pub fn take(&self, ended: Ended) {
        // a thread that is gone has panicked, which `finish` passes on
        let _ = self.samples.send(ended);
    }

    /// Waits for the last of the rules' rewards. A panic in a task is resumed here.
    pub fn finish(self) -> RewardResults {
        drop(self.samples);
        match self.thread.join() {
            Ok(judged) => judged,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl RewardResults {
    /// Texts and rewards by the rules, by request and sample, and what the programs say of them, which is waited for.
    /// The first error is the first sample's.
    pub fn wait(self) -> Result<(Vec<(String, Reward)>, ProgramResults)> {
        let rules = self.rules.into_values().collect::<Result<_, Error>>()?;
        let mut asked = Asked::default();
        for group in self.asked.into_values() {
            asked.extend(group?);
        }
        Ok((rules, asked.said()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Example;
    use std::ops::Range;

    #[test]
    fn a_completion_ends_inside_a_thought_that_what_is_before_it_or_its_beginning_opens() {
        let tokenizer = Tokenizer::characters("<>/think 14\n").expect("a tokenizer");
        let ends = |prompt: &str, completion: &str, between: Option<Range<usize>>| {
            let encode = |text: &str| tokenizer.encode(text, false).expect("tokens");
            let prompt =
                Prompt { example: Example::text(prompt, ""), text: prompt.into(), tokens: encode(prompt), row: None };
            let sample = Sample {
                request: 0,
                sample: 0,
                tokens: encode(completion),
                inserted: between.into_iter().collect(),
                logps: Vec::new(),
                full_logps: Vec::new(),
                finish: FinishReason::Length,
                routes: None,
            };
            ends_in_thought(&tokenizer, &prompt, &sample).expect("decoded")
        };
        for (prompt, completion, expected) in [
            ("1 <think>", "4", true),
            ("1 <think>\n", "4", true),
            ("1 <think>\n", "4</think> 1", false),
            ("1 <think> </think>\n", "4", false),
            ("1", "<think>4", true),
            ("1", "\n<think>4 </think>", false),
            ("1 <think> 4", "4", false),
            ("1", "4 <think> 1", false),
        ] {
            assert_eq!(ends(prompt, completion, None), expected, "{prompt:?}, {completion:?}");
        }
        // of several turns the last one counts, and what the template writes before it
        let turns = "4</think> 1 <think>\n14";
        assert!(ends("1 <think>", turns, Some(10..20)));
        assert!(!ends("1 <think>", "4 1\n14", Some(1..4)));
    }
}
