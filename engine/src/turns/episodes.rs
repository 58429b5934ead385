//! Rollouts of a step with their environments, which decide on each turn what follows.

use super::outcome::{Outcome, Reply};
use super::pool::{EnvironmentAnswer, EnvironmentJob, EnvironmentRequest, Pool};
use super::template::{TurnTemplate, turn};
use super::thought::{behind_thought, opens_thought};
use crate::data::{Prompt, encode_prompt};
use crate::task::{Environment, EnvironmentError, Environments, Example, PromptText, ToolCalls, Turn};
use crate::{Error, Result};
use firebrick_models::Tokenizer;
use firebrick_models::random::{DrawKey, Stream};
use firebrick_models::tokenizer::Message;
use firebrick_sampler::{FinishReason, GenerationRequest, Next, Sample, Turns};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Attempts at a rollout whose own environment fails.
const MAX_TRIES: usize = 2;

/// Limits of rollouts, and the ends of turns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum turns of the model; `None`: as many as there is room for.
    pub max_assistant_turns: Option<usize>,
    /// Maximum characters of an answer; longer ones are truncated.
    pub max_tool_response_length: Option<usize>,
    /// Ids that end a turn.
    pub stop_ids: Vec<u32>,
    /// Strings that end a turn.
    pub stop: Vec<String>,
    /// Maximum tokens of a prompt, with additions of the environment.
    pub prompt_length: usize,
}

/// Rollouts of some prompts, `n` per prompt, with an environment each.
pub struct Episodes<'a> {
    environments: &'a dyn Environments,
    template: &'a TurnTemplate,
    limits: Limits,
    /// Examples of the task, for resets.
    examples: Vec<Example>,
    prompts: Vec<Prompt>,
    /// Key of the first prompt.
    first: DrawKey,
    /// Seeds of each prompt's environments.
    seeds: Vec<u32>,
    n: usize,
    rollouts: Vec<Episode>,
    pool: Option<Pool>,
    /// Tokens and remaining room of the rollouts that wait for an environment.
    waiting: BTreeMap<usize, (Vec<u32>, usize)>,
    /// The first rollout whose environment's code failed, and the reason.
    fault: Option<(usize, String)>,
}

/// One rollout.
struct Episode {
    /// `None` during a request, and at the end.
    environment: Option<Box<dyn Environment>>,
    /// Failures of its own environments.
    failures: usize,
    /// Text returned by its environment's `reset`.
    greeting: Option<Greeting>,
    outcome: Outcome,
}

impl<'a> Episodes<'a> {
    /// Begins the rollouts of prompts; `key` is that of the first. Resets an environment for each, and adds their texts
    /// to the prompts.
    ///
    /// # Errors
    /// If a prompt cannot be rendered again; `Error::Environment` if a reset raises.
    pub fn begin(
        environments: &'a dyn Environments,
        template: &'a TurnTemplate,
        limits: Limits,
        prompts: &[Prompt],
        n: usize,
        key: DrawKey,
        tokenizer: &Tokenizer,
    ) -> Result<Self> {
        let workers = environments.workers();
        let examples: Vec<Example> = prompts.iter().map(|prompt| prompt.example.clone()).collect();
        let indices = u64::from(key.prompt_index)..;
        let seeds: Vec<u32> =
            indices.take(prompts.len()).map(|index| Stream::new(key.seed, index).next_u32()).collect();
        let mut resets = reset_all(environments, &examples, &seeds, n).into_iter();
        let mut episodes = Self {
            environments,
            template,
            limits,
            examples,
            prompts: prompts.to_vec(),
            first: key,
            seeds,
            n,
            rollouts: Vec::with_capacity(prompts.len() * n),
            pool: (workers > 0).then(|| Pool::new(workers)),
            waiting: BTreeMap::new(),
            fault: None,
        };
        for at in 0..prompts.len() {
            for reset in resets.by_ref().take(n) {
                let index = episodes.rollouts.len();
                let outcome = Outcome::default();
                episodes.rollouts.push(Episode { environment: None, failures: 0, greeting: None, outcome });
                episodes.install(index, reset);
            }
            episodes.check()?;
            episodes.add_greetings(at, tokenizer)?;
        }
        Ok(episodes)
    }

    /// Checks the code of all environments.
    ///
    /// # Errors
    /// `Error::Environment` for the first that raised, or returned an invalid value.
    pub fn check(&self) -> Result<()> {
        let Some((index, reason)) = &self.fault else { return Ok(()) };
        let prompt = &self.prompts[index / self.n];
        Err(Error::Environment {
            step: u64::from(self.first.step),
            prompt_index: u64::from(self.first.prompt_index) + (index / self.n) as u64,
            row: prompt.row,
            sample: index % self.n,
            prompt: prompt.text.clone(),
            reason: reason.clone(),
        })
    }

    /// The prompts, with the texts of resets.
    pub fn prompts(&self) -> &[Prompt] {
        &self.prompts
    }

    /// Requests per rollout, if rollouts of a group have different prompts.
    pub fn requests(&self, per_prompt: &[GenerationRequest]) -> Option<Vec<GenerationRequest>> {
        self.rollouts.iter().find(|episode| episode.outcome.prompt.is_some())?;
        let requests = (0..self.rollouts.len()).map(|index| {
            let group = &per_prompt[index / self.n];
            GenerationRequest {
                tokens: self.prompt(index).tokens.clone(),
                key: DrawKey { sample: group.key.sample + (index % self.n) as u32, ..group.key },
                max_new_tokens: group.max_new_tokens,
            }
        });
        Some(requests.collect())
    }

    /// The prompt of a rollout.
    fn prompt(&self, index: usize) -> &Prompt {
        self.rollouts[index].outcome.prompt.as_deref().unwrap_or(&self.prompts[index / self.n])
    }

    /// Outcome of a rollout.
    pub fn outcome(&self, request: usize, sample: usize) -> &Outcome {
        &self.rollouts[request * self.n + sample].outcome
    }

    /// Outcomes of all rollouts, in the order of prompts and samples.
    pub fn into_outcomes(self) -> Vec<Outcome> {
        self.rollouts.into_iter().map(|episode| episode.outcome).collect()
    }

    /// A fresh environment for a rollout.
    fn reset(&self, index: usize) -> Reset {
        let prompt = index / self.n;
        reset(self.environments, &self.examples[prompt], self.seeds[prompt], index)
    }

    /// Gives a rollout an environment, or fresh ones until [`MAX_TRIES`]. Returns false if all fail, or if the text of
    /// the reset differs from the one that is already in the prompt.
    fn install(&mut self, index: usize, mut reset: Reset) -> bool {
        let (environment, greeting) = loop {
            match reset {
                Ok(reset) => break reset,
                Err(error) if !self.may_retry(index, &error) => return false,
                Err(_) => {}
            }
            self.rollouts[index].outcome.retries += 1;
            reset = self.reset(index);
        };
        let episode = &mut self.rollouts[index];
        if let Some(before) = episode.greeting.replace(greeting.clone()).filter(|before| *before != greeting) {
            episode.outcome.lost = Some(format!(
                "its environment failed, and `reset` of the next one returned {greeting} after {before}; draw at random with \
                 `random`, `numpy.random` or `torch`, which are seeded before `reset`"
            ));
            return false;
        }
        episode.environment = Some(environment);
        true
    }

    /// Adds the texts of resets to the prompt of a group: the first one to the shared prompt, different ones to a
    /// separate prompt. Rollouts with too long prompts are lost.
    fn add_greetings(&mut self, at: usize, tokenizer: &Tokenizer) -> Result<()> {
        let max_tokens = self.limits.prompt_length;
        let group = &mut self.rollouts[at * self.n..(at + 1) * self.n];
        let Some(first) = group.iter().find_map(|episode| episode.greeting.clone()) else { return Ok(()) };
        let plain = self.prompts[at].clone();
        let shared = with_greeting(&plain, &first, max_tokens, tokenizer)?;
        if let Ok(prompt) = &shared {
            self.prompts[at] = prompt.clone();
        }
        for episode in group {
            let separate = match &episode.greeting {
                Some(greeting) if *greeting != first => {
                    with_greeting(&plain, greeting, max_tokens, tokenizer)?.map(|prompt| Some(Arc::new(prompt)))
                }
                Some(_) => shared.clone().map(|_| None),
                None => continue,
            };
            match separate {
                Ok(prompt) => episode.outcome.prompt = prompt,
                Err(reason) => episode.outcome.lost = Some(reason),
            }
        }
        Ok(())
    }

    /// Text of a rollout's last turn, and its tool calls outside of thoughts.
    fn read(&self, index: usize, sample: &Sample) -> Result<(String, ToolCalls)> {
        let text = self.template.text(&sample.tokens[sample.turn_start()..], &self.limits.stop_ids)?;
        let opened = opens_thought(&self.template.tokenizer, &self.prompt(index).text, sample)?;
        let calls = self.template.calls(behind_thought(&text, opened));
        Ok((text, calls))
    }

    /// Messages of a rollout, with those of the prompt.
    fn messages(&self, index: usize) -> Vec<Message> {
        let mut messages = match &self.prompt(index).example.prompt {
            PromptText::Chat(messages) => messages.clone(),
            PromptText::Text(_) => Vec::new(),
        };
        messages.extend(self.rollouts[index].outcome.turns.iter().cloned());
        messages
    }

    /// Sends a request to the environment of a rollout, here or in its thread.
    fn ask(&mut self, index: usize, request: EnvironmentRequest) -> Next {
        let Some(environment) = self.rollouts[index].environment.take() else {
            return Next::End;
        };
        let job = EnvironmentJob { episode: index, environment, request };
        match &mut self.pool {
            Some(pool) => {
                pool.push(job);
                Next::Wait
            }
            None => self.handle(job.run()),
        }
    }

    /// Handles an environment's answer.
    fn handle(&mut self, answer: EnvironmentAnswer) -> Next {
        let index = answer.episode;
        let (tokens, room) = self.waiting.remove(&index).unwrap_or_default();
        let episode = &mut self.rollouts[index];
        match answer.answer {
            Ok(Reply::End(reward, object)) => {
                episode.outcome.reward = reward;
                episode.outcome.object = object;
                self.finish(index, &tokens);
                Next::End
            }
            Ok(Reply::Messages(mut observation)) => {
                episode.environment = Some(answer.environment);
                episode.outcome.failed_calls += observation.failed_calls;
                if let Some(max_chars) = self.limits.max_tool_response_length {
                    let messages = observation.messages.into_iter();
                    observation.messages = messages.map(|message| truncated(message, max_chars)).collect();
                }
                let last = tokens.last().copied();
                let ended = last.filter(|id| self.limits.stop_ids.contains(id));
                let conversation = self.messages(index);
                match self.template.between(ended, &conversation, &observation.messages) {
                    Ok(between) if between.len() < room => {
                        self.rollouts[index].outcome.turns.append(&mut observation.messages);
                        Next::Append(between)
                    }
                    // no room for the answer and a turn after it
                    Ok(_) => self.cut_short(index, tokens),
                    Err(error) => {
                        let error = EnvironmentError::new(format!("its answer cannot be written: {error}"));
                        self.retry(index, &error)
                    }
                }
            }
            Err(error) => self.retry(index, &error),
        }
    }

    /// Ends a rollout at its length limit.
    fn cut_short(&mut self, index: usize, tokens: Vec<u32>) -> Next {
        let Some(environment) = self.rollouts[index].environment.take() else {
            return Next::Cut;
        };
        let job = EnvironmentJob { episode: index, environment, request: EnvironmentRequest::Reward };
        self.waiting.insert(index, (tokens, 0));
        match self.handle(job.run()) {
            Next::End => Next::Cut,
            other => other,
        }
    }

    /// Restarts a rollout with a fresh environment, or gives it up.
    fn retry(&mut self, index: usize, error: &EnvironmentError) -> Next {
        self.rollouts[index].environment = None;
        if !self.may_retry(index, error) {
            return Next::End;
        }
        self.rollouts[index].outcome.restart();
        let reset = self.reset(index);
        if self.install(index, reset) { Next::Restart } else { Next::End }
    }

    /// Counts a failure and returns true if there is another try, with a warning. Failures of another environment are
    /// not counted, and those of the user's code are final.
    fn may_retry(&mut self, index: usize, error: &EnvironmentError) -> bool {
        let (n, first) = (self.n, self.first);
        let episode = &mut self.rollouts[index];
        episode.failures += usize::from(error.own);
        if error.of_code {
            self.fault.get_or_insert((index, error.reason.clone()));
        } else if episode.failures < MAX_TRIES {
            if error.own {
                tracing::warn!(
                    "step {}, draw {}, sample {}: its environment failed, and the rollout begins again: {}",
                    first.step,
                    first.prompt_index as usize + index / n,
                    index % n,
                    error.reason
                );
            }
            return true;
        }
        episode.outcome.lost = Some(error.reason.clone());
        false
    }

    /// Compares a finished rollout with the template's text of it. Removes the stop string from its last turn, for
    /// rewards.
    fn finish(&mut self, index: usize, completion: &[u32]) {
        let tokens = [&self.prompt(index).tokens, completion].concat();
        let writes = self.template.writes(&tokens, &self.messages(index));
        let outcome = &mut self.rollouts[index].outcome;
        outcome.differs_from_template = !writes.unwrap_or(false);
        if let Some(last) = outcome.turns.last_mut() {
            let text = last.text().into_owned();
            if let Some(end) = self.limits.stop.iter().filter_map(|stop| text.find(stop.as_str())).min() {
                *last = turn(&text[..end]);
            }
        }
    }
}

/// Text that `reset` adds to the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Greeting(Option<String>);

impl fmt::Display for Greeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(text) => write!(f, "{text:?}"),
            None => f.write_str("None"),
        }
    }
}

/// A prompt with a text added to its last user message, or the error that it is too long.
fn with_greeting(
    prompt: &Prompt,
    greeting: &Greeting,
    max_tokens: usize,
    tokenizer: &Tokenizer,
) -> Result<Result<Prompt, String>> {
    let Some(text) = &greeting.0 else { return Ok(Ok(prompt.clone())) };
    let mut example = prompt.example.clone();
    if let PromptText::Chat(messages) = &mut example.prompt
        && let Some(last) = messages.iter_mut().rev().find(|m| m.role() == "user")
    {
        last.push_text(text);
    }
    let (text, tokens) = encode_prompt(tokenizer, &example)?;
    let count = tokens.len();
    if count > max_tokens {
        return Ok(Err(format!(
            "with its environment's first text, the prompt has {count} tokens, and rollout.prompt_length is {max_tokens}"
        )));
    }
    Ok(Ok(Prompt { example, text, tokens, row: prompt.row }))
}

/// An environment that was reset, and the text that it returned.
type Reset = Result<(Box<dyn Environment>, Greeting), EnvironmentError>;

/// A fresh environment for the rollout with an index.
fn reset(environments: &dyn Environments, example: &Example, seed: u32, index: usize) -> Reset {
    let mut environment = environments.make(index % environments.workers().max(1));
    environment.seed(seed);
    let greeting = environment.reset(example)?;
    Ok((environment, Greeting(greeting)))
}

/// Environments of all rollouts, reset in a thread per worker.
fn reset_all(environments: &dyn Environments, examples: &[Example], seeds: &[u32], n: usize) -> Vec<Reset> {
    let count = examples.len() * n;
    let one = |index: usize| reset(environments, &examples[index / n], seeds[index / n], index);
    let workers = environments.workers();
    if workers == 0 {
        return (0..count).map(one).collect();
    }
    let mut resets: Vec<(usize, Reset)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers)
            .map(|worker| {
                let indices = (worker..count).step_by(workers);
                scope.spawn(move || indices.map(|i| (i, one(i))).collect::<Vec<_>>())
            })
            .collect();
        let join = threads.into_iter().map(std::thread::ScopedJoinHandle::join);
        join.flat_map(|resets| resets.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    resets.sort_by_key(|(index, _)| *index);
    resets.into_iter().map(|(_, reset)| reset).collect()
}

impl Turns for Episodes<'_> {
    fn turn(&mut self, sample: &Sample, room: usize) -> Next {
        let index = sample.request * self.n + sample.sample;
        // after a failure of the user's code, the other rollouts end too
        if self.rollouts[index].outcome.lost.is_some() || self.fault.is_some() {
            return Next::End;
        }
        let read = self.read(index, sample);
        let outcome = &mut self.rollouts[index].outcome;
        let (text, calls) = match read {
            Ok(read) => read,
            Err(error) => {
                outcome.lost = Some(format!("a turn cannot be decoded: {error}"));
                return Next::End;
            }
        };
        outcome.turns.push(turn(&text));
        let ended = sample.finish == FinishReason::Stop;
        let max_turns = self.limits.max_assistant_turns.unwrap_or(usize::MAX);
        let request = if ended && sample.turns() < max_turns {
            outcome.tool_calls += calls.len();
            EnvironmentRequest::Turn(Turn { text, calls })
        } else {
            EnvironmentRequest::Reward
        };
        self.waiting.insert(index, (sample.tokens.clone(), room));
        self.ask(index, request)
    }

    fn awaited(&mut self) -> Vec<((usize, usize), Next)> {
        let mut answers = self.pool.as_mut().map_or_else(Vec::new, Pool::wait);
        // in the order of rollouts, not of answers
        answers.sort_by_key(|answer| answer.episode);
        let n = self.n;
        let place = |answer: &EnvironmentAnswer| (answer.episode / n, answer.episode % n);
        answers.into_iter().map(|answer| (place(&answer), self.handle(answer))).collect()
    }
}

/// A message with at most `max_chars` characters of text.
fn truncated(message: Message, max_chars: usize) -> Message {
    let text = message.text().into_owned();
    match text.char_indices().nth(max_chars) {
        Some((at, _)) => message.with_content(format!("{}...", &text[..at])),
        None => message,
    }
}
