//! The rollouts of a step with their environments: what comes after each turn.

use super::outcome::{Outcome, Played};
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

/// Times that a rollout is tried whose environment fails by itself.
const TRIES: usize = 2;

/// How long rollouts may get, and what ends a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most turns of the model; none: as many as there is room for.
    pub max_assistant_turns: Option<usize>,
    /// Most characters of an answer; longer ones are cut.
    pub max_tool_response_length: Option<usize>,
    /// Ids that end a turn.
    pub stop_ids: Vec<u32>,
    /// Strings that end a turn.
    pub stop: Vec<String>,
    /// Most tokens of a prompt, with what the environment adds to it.
    pub prompt_length: usize,
}

/// The rollouts of some prompts, `n` of each, with an environment each.
pub struct Episodes<'a> {
    environments: &'a dyn Environments,
    template: &'a TurnTemplate,
    limits: Limits,
    /// The examples as the task has them, for resets.
    examples: Vec<Example>,
    prompts: Vec<Prompt>,
    /// The key of the first prompt.
    first: DrawKey,
    /// Seeds of each prompt's environments.
    seeds: Vec<u32>,
    n: usize,
    rollouts: Vec<Episode>,
    pool: Option<Pool>,
    /// Of the rollouts that an environment is asked about: their tokens so far and the room that they leave.
    waiting: BTreeMap<usize, (Vec<u32>, usize)>,
    /// The first rollout whose environment's code failed, and how.
    fault: Option<(usize, String)>,
}

/// One rollout.
struct Episode {
    /// None while it is asked, and at the end.
    environment: Option<Box<dyn Environment>>,
    /// Failures of its own environments.
    failures: usize,
    /// What its environment returned when it was reset.
    greeting: Option<Greeting>,
    outcome: Outcome,
}

impl<'a> Episodes<'a> {
    /// Begins the rollouts of prompts, of which `key` is the first's: resets an environment for each, and adds to the
    /// prompts what they say.
    ///
    /// # Errors
    /// Where a prompt cannot be rendered again; `Error::Environment` where a reset raises.
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
        let examples: Vec<Example> = prompts.iter().map(|own| own.example.clone()).collect();
        let indices = u64::from(key.prompt_index)..;
        let seeds: Vec<u32> =
            indices.take(prompts.len()).map(|index| Stream::new(key.seed, index).next_u32()).collect();
        let begun = reset_all(environments, &examples, &seeds, n);
        let mut own = Self {
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
        let mut begun = begun.into_iter();
        for at in 0..prompts.len() {
            for begun in begun.by_ref().take(n) {
                own.add(begun);
            }
            own.check()?;
            own.add_to_prompts(at, tokenizer)?;
        }
        Ok(own)
    }

    /// Whether the code of all environments did what it should.
    ///
    /// # Errors
    /// `Error::Environment` for the first that raised, or returned what it may not.
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

    /// The prompts, with what environments have said at the beginning.
    #[must_use]
    pub fn prompts(&self) -> &[Prompt] {
        &self.prompts
    }

    /// A request for each rollout, where those of a group have different prompts.
    #[must_use]
    pub fn requests(&self, of_prompts: &[GenerationRequest]) -> Option<Vec<GenerationRequest>> {
        self.rollouts.iter().find(|own| own.outcome.prompt.is_some())?;
        let requests = (0..self.rollouts.len()).map(|index| {
            let group = &of_prompts[index / self.n];
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

    /// What came of a rollout.
    #[must_use]
    pub fn outcome(&self, request: usize, sample: usize) -> &Outcome {
        &self.rollouts[request * self.n + sample].outcome
    }

    /// What came of all of them, in the order of prompts and samples.
    #[must_use]
    pub fn into_outcomes(self) -> Vec<Outcome> {
        self.rollouts.into_iter().map(|own| own.outcome).collect()
    }

    /// Adds a rollout with its environment.
    fn add(&mut self, begun: Begun) {
        let index = self.rollouts.len();
        self.rollouts.push(Episode { environment: None, failures: 0, greeting: None, outcome: Outcome::default() });
        self.take(index, begun);
    }

    /// Gives a rollout the environment that began, or fresh ones, as often as it may be tried. False where its tries
    /// are used up, or where it says something else than before, to a prompt that is sampled from already.
    fn take(&mut self, index: usize, mut begun: Begun) -> bool {
        let prompt = index / self.n;
        let (environment, greeting) = loop {
            let error = match begun {
                Ok(begun) => break begun,
                Err(error) => error,
            };
            if !self.may_fail(index, &error) {
                return false;
            }
            self.rollouts[index].outcome.retries += 1;
            begun = reset(self.environments, &self.examples[prompt], self.seeds[prompt], index);
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

    /// Adds what resets returned to the prompt of a group: what the first did, to all; another's words, to its own. What
    /// gets too long is lost.
    fn add_to_prompts(&mut self, at: usize, tokenizer: &Tokenizer) -> Result<()> {
        let most = self.limits.prompt_length;
        let group = &mut self.rollouts[at * self.n..(at + 1) * self.n];
        let Some(first) = group.iter().find_map(|own| own.greeting.clone()) else { return Ok(()) };
        let plain = self.prompts[at].clone();
        let shared = with_words(&plain, &first, most, tokenizer)?;
        if let Ok(prompt) = &shared {
            self.prompts[at] = prompt.clone();
        }
        for episode in group {
            let own = match &episode.greeting {
                Some(greeting) if *greeting != first => {
                    with_words(&plain, greeting, most, tokenizer)?.map(|own| Some(Arc::new(own)))
                }
                Some(_) => shared.clone().map(|_| None),
                None => continue,
            };
            match own {
                Ok(prompt) => episode.outcome.prompt = prompt,
                Err(reason) => episode.outcome.lost = Some(reason),
            }
        }
        Ok(())
    }

    /// The words of the last turn of a rollout and the calls in them, of which those in its thought are none.
    fn read(&self, index: usize, sample: &Sample) -> Result<(String, ToolCalls)> {
        let text = self.template.words(&sample.tokens[sample.turn_start()..], &self.limits.stop_ids)?;
        let opened = opens_thought(self.template.tokenizer(), &self.prompt(index).text, sample)?;
        let calls = self.template.calls(behind_thought(&text, opened));
        Ok((text, calls))
    }

    /// The messages of a rollout, the prompt's first.
    fn messages(&self, index: usize) -> Vec<Message> {
        let mut messages = match &self.prompt(index).example.prompt {
            PromptText::Chat(messages) => messages.clone(),
            PromptText::Text(_) => Vec::new(),
        };
        messages.extend(self.rollouts[index].outcome.turns.iter().cloned());
        messages
    }

    /// Asks the environment of a rollout, here or in its thread.
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
            None => self.take_answer(job.run()),
        }
    }

    /// What follows from an environment's answer.
    fn take_answer(&mut self, done: EnvironmentAnswer) -> Next {
        let index = done.episode;
        let (tokens, room) = self.waiting.remove(&index).unwrap_or_default();
        let episode = &mut self.rollouts[index];
        match done.answer {
            Ok(Played::Ended(reward, object)) => {
                episode.outcome.reward = reward;
                episode.outcome.object = object;
                self.finish(index, &tokens);
                Next::End
            }
            Ok(Played::GoesOn(mut observation)) => {
                episode.environment = Some(done.environment);
                episode.outcome.failed_calls += observation.failed_calls;
                if let Some(most) = self.limits.max_tool_response_length {
                    observation.messages = observation.messages.into_iter().map(|own| shortened(own, most)).collect();
                }
                let last = tokens.last().copied();
                let ended = last.filter(|id| self.limits.stop_ids.contains(id));
                let told = self.messages(index);
                match self.template.between(ended, &told, &observation.messages) {
                    Ok(between) if between.len() < room => {
                        self.rollouts[index].outcome.turns.append(&mut observation.messages);
                        Next::Append(between)
                    }
                    // no room for the answer and a turn after it
                    Ok(_) => self.cut_short(index, tokens),
                    Err(error) => {
                        let error = EnvironmentError::new(format!("its answer cannot be written: {error}"));
                        self.failed(index, &error)
                    }
                }
            }
            Err(error) => self.failed(index, &error),
        }
    }

    /// Ends a rollout at its length limit.
    fn cut_short(&mut self, index: usize, tokens: Vec<u32>) -> Next {
        let Some(environment) = self.rollouts[index].environment.take() else {
            return Next::Cut;
        };
        let job = EnvironmentJob { episode: index, environment, request: EnvironmentRequest::Reward };
        self.waiting.insert(index, (tokens, 0));
        match self.take_answer(job.run()) {
            Next::End => Next::Cut,
            other => other,
        }
    }

    /// Tries a rollout again with a fresh environment, or gives it up.
    fn failed(&mut self, index: usize, error: &EnvironmentError) -> Next {
        self.rollouts[index].environment = None;
        if !self.may_fail(index, error) {
            return Next::End;
        }
        self.rollouts[index].outcome.restart();
        let prompt = index / self.n;
        let begun = reset(self.environments, &self.examples[prompt], self.seeds[prompt], index);
        if self.take(index, begun) { Next::Restart } else { Next::End }
    }

    /// Counts a failure; whether there is another try, of which a warning says why. Failures that are another
    /// environment's are not counted, and one of the code is final.
    fn may_fail(&mut self, index: usize, error: &EnvironmentError) -> bool {
        let (n, first) = (self.n, self.first);
        let episode = &mut self.rollouts[index];
        episode.failures += usize::from(error.own);
        if error.of_code {
            self.fault.get_or_insert((index, error.reason.clone()));
        } else if episode.failures < TRIES {
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

    /// Compares a whole rollout with what the template writes of it. Its last turn ends before the stop string that ended
    /// it, for rewards.
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

/// A prompt with words added to its user's last message, or why it is too long.
fn with_words(prompt: &Prompt, words: &Greeting, most: usize, tokenizer: &Tokenizer) -> Result<Result<Prompt, String>> {
    let Some(text) = &words.0 else { return Ok(Ok(prompt.clone())) };
    let mut example = prompt.example.clone();
    if let PromptText::Chat(messages) = &mut example.prompt
        && let Some(last) = messages.iter_mut().rev().find(|m| m.role() == "user")
    {
        last.push_text(text);
    }
    let (text, tokens) = encode_prompt(tokenizer, &example)?;
    let found = tokens.len();
    if found > most {
        return Ok(Err(format!(
            "with its environment's first text, the prompt has {found} tokens, and rollout.prompt_length is {most}"
        )));
    }
    Ok(Ok(Prompt { example, text, tokens, row: prompt.row }))
}

/// An environment that was reset, and what it said; or why it could not begin.
type Begun = Result<(Box<dyn Environment>, Greeting), EnvironmentError>;

/// A fresh environment for the rollout with this number.
fn reset(environments: &dyn Environments, example: &Example, seed: u32, index: usize) -> Begun {
    let mut environment = environments.make(index % environments.workers().max(1));
    environment.seed(seed);
    let greeting = environment.reset(example)?;
    Ok((environment, Greeting(greeting)))
}

/// Environments of all rollouts, those of each worker in a thread.
fn reset_all(environments: &dyn Environments, examples: &[Example], seeds: &[u32], n: usize) -> Vec<Begun> {
    let count = examples.len() * n;
    let one = |index: usize| reset(environments, &examples[index / n], seeds[index / n], index);
    let workers = environments.workers();
    if workers == 0 {
        return (0..count).map(one).collect();
    }
    let mut begun: Vec<(usize, Begun)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers)
            .map(|worker| {
                let own = (worker..count).step_by(workers);
                scope.spawn(move || own.map(|i| (i, one(i))).collect::<Vec<_>>())
            })
            .collect();
        let join = threads.into_iter().map(std::thread::ScopedJoinHandle::join);
        join.flat_map(|own| own.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    begun.sort_by_key(|(index, _)| *index);
    begun.into_iter().map(|(_, own)| own).collect()
}

impl Turns for Episodes<'_> {
    fn turn(&mut self, sample: &Sample, room: usize) -> Next {
        let index = sample.request * self.n + sample.sample;
        // where the code of one has failed, nothing is made of the others
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
        let most = self.limits.max_assistant_turns.unwrap_or(usize::MAX);
        let request = if ended && sample.turns() < most {
            outcome.tool_calls += calls.len();
            EnvironmentRequest::Turn(Turn { text, calls })
        } else {
            EnvironmentRequest::Reward
        };
        self.waiting.insert(index, (sample.tokens.clone(), room));
        self.ask(index, request)
    }

    fn awaited(&mut self) -> Vec<((usize, usize), Next)> {
        let mut done = self.pool.as_mut().map_or_else(Vec::new, Pool::wait);
        // in the order of the rollouts, whatever that of the answers
        done.sort_by_key(|own| own.episode);
        let n = self.n;
        done.into_iter()
            .map(|own| {
                let place = (own.episode / n, own.episode % n);
                (place, self.take_answer(own))
            })
            .collect()
    }
}

/// A message whose text ends after some characters.
fn shortened(message: Message, most: usize) -> Message {
    let text = message.text().into_owned();
    match text.char_indices().nth(most) {
        Some((at, _)) => message.with_content(format!("{}...", &text[..at])),
        None => message,
    }
}
