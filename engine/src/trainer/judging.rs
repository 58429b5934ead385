//! Judging while completions are sampled: a thread of its own scores each by the task's rules as it ends, and hands each group whose
//! last completion has ended to the task's programs.

use crate::data::Prompt;
use crate::reward::{Answer, Asked, CompletionId, Programs, Purpose, Said};
use crate::task::{Reward, Task};
use crate::{Error, Result};
use firebrick_models::Tokenizer;
use firebrick_models::generate::{FinishReason, Sample};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// Texts and rewards of completions by the rules, by request and sample.
type RuleRewards = BTreeMap<(usize, usize), Result<(String, Reward)>>;

/// Judges completions as they come. The results do not depend on their order.
pub(super) struct JudgingThread {
    samples: Sender<Sample>,
    thread: JoinHandle<Judged>,
}

/// What judging needs, shared with its thread.
pub(super) struct Judging {
    pub task: Arc<dyn Task>,
    pub tokenizer: Arc<Tokenizer>,
    pub prompts: Arc<Vec<Prompt>>,
    pub programs: Programs,
    /// Completions of a group.
    pub n: usize,
    pub max_tokens: usize,
    /// The step, and the index of its first prompt.
    pub step: u64,
    pub first: u64,
}

/// Completions judged by the rules, and by the programs once they are waited for.
#[derive(Default)]
pub(super) struct Judged {
    rules: RuleRewards,
    asked: BTreeMap<usize, Result<Asked>>,
}

/// A completion as rules, models and programs take it, in a step whose first prompt has this index.
pub(super) fn answer<'a>(
    prompts: &'a [Prompt],
    sample: &'a Sample,
    text: String,
    step: u64,
    first: u64,
) -> Answer<'a> {
    Answer {
        prompt: &prompts[sample.request],
        text,
        tokens: &sample.tokens,
        finished: sample.finish == FinishReason::Stop,
        id: CompletionId {
            step,
            prompt_index: first + sample.request as u64,
            sample: sample.sample,
        },
    }
}

impl Judging {
    fn score(&self, sample: &Sample) -> Result<(String, Reward)> {
        let text = self.tokenizer.decode(&sample.tokens, true)?;
        let answer = answer(&self.prompts, sample, text, self.step, self.first);
        let reward = answer.by_rules(self.task.as_ref(), self.max_tokens, Purpose::Training)?;
        Ok((answer.text, reward))
    }

    /// Asks the programs about a group; where one of its completions has failed already, about none.
    fn ask(&self, mut group: Vec<Sample>, rules: &RuleRewards) -> Result<Asked> {
        group.sort_by_key(|sample| sample.sample);
        let answers = group.iter().filter_map(|sample| {
            let scored = rules.get(&(sample.request, sample.sample))?;
            let (text, _) = scored.as_ref().ok()?;
            let text = text.clone();
            Some(answer(&self.prompts, sample, text, self.step, self.first))
        });
        self.programs.ask(&answers.collect::<Vec<_>>())
    }

    fn judge(&self, coming: impl IntoIterator<Item = Sample>) -> Judged {
        let mut judged = Judged::default();
        let mut groups: BTreeMap<usize, Vec<Sample>> = BTreeMap::new();
        for sample in coming {
            let (request, place) = (sample.request, sample.sample);
            judged.rules.insert((request, place), self.score(&sample));
            if self.programs.is_empty() {
                continue;
            }
            let group = groups.entry(request).or_default();
            group.push(sample);
            if group.len() == self.n {
                let asked = self.ask(std::mem::take(group), &judged.rules);
                judged.asked.insert(request, asked);
            }
        }
        judged
    }
}

impl JudgingThread {
    pub fn start(judging: Judging) -> Self {
        let (samples, coming) = channel::<Sample>();
        let thread = std::thread::spawn(move || judging.judge(coming));
        Self { samples, thread }
    }

    /// Hands a completion over.
    pub fn take(&self, sample: Sample) {
        // a thread that is gone has panicked, which `finish` passes on
        let _ = self.samples.send(sample);
    }

    /// Waits for the last of the rules' rewards. A panic in a task goes on here.
    pub fn finish(self) -> Judged {
        drop(self.samples);
        match self.thread.join() {
            Ok(judged) => judged,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl Judged {
    /// Texts and rewards by the rules, by request and sample, and what the programs say of them, which is waited for. The first
    /// error is the first sample's.
    pub fn wait(self) -> Result<(Vec<(String, Reward)>, Said)> {
        let rules = self.rules.into_values().collect::<Result<_, Error>>()?;
        let mut asked = Asked::default();
        for group in self.asked.into_values() {
            asked.extend(group?);
        }
        Ok((rules, asked.said()))
    }
}
