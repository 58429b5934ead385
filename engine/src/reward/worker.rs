//! Rewards during sampling: a thread scores each completion by the task's rules as it ends, and sends complete groups
//! to the task's programs.

use super::program::PendingScores;
use super::{Answer, CompletionId, ProgramResults, Programs};
use crate::Result;
use crate::data::Prompt;
use crate::task::{Reward, Split, Task};
use crate::turns::Outcome;
use firebrick_backends::heartbeat::wait_for;
use firebrick_models::Tokenizer;
use firebrick_sampler::{Sample, SamplingParams};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// A completion that has ended, and the outcome of its environment, if any.
type Ended = (Sample, Option<Outcome>);

/// Thread that scores completions as they end. Results do not depend on their order.
pub(crate) struct RewardWorker {
    ended: Sender<Ended>,
    thread: JoinHandle<(RewardJob, Scored)>,
}

/// Inputs of scoring, shared with the worker.
pub(crate) struct RewardJob {
    pub task: Arc<dyn Task>,
    pub tokenizer: Arc<Tokenizer>,
    /// Sampling parameters, with the stop strings.
    pub sampling: SamplingParams,
    pub prompts: Arc<Vec<Prompt>>,
    pub programs: Programs,
    /// Completions of a group.
    pub n: usize,
    pub max_tokens: usize,
    /// The first completion of the first prompt.
    pub first: CompletionId,
}

/// Texts and rewards by rules, by request and sample, and pending scores of programs by request.
#[derive(Default)]
struct Scored {
    rules: BTreeMap<(usize, usize), Result<(String, Reward)>>,
    pending: BTreeMap<usize, Result<Vec<PendingScores>>>,
}

impl RewardJob {
    fn by_rules(&self, (sample, outcome): &Ended) -> Result<(String, Reward)> {
        let reading = (self.tokenizer.as_ref(), &self.sampling);
        let answer = Answer::decoded(&self.prompts, sample, outcome.as_ref(), self.first, reading)?;
        let reward = answer.by_rules(self.task.as_ref(), self.max_tokens, Split::Train)?;
        Ok((answer.text, reward))
    }

    /// Sends a group to the programs, except completions that have failed already.
    fn submit(&self, mut group: Vec<Ended>, scored: &Scored) -> Result<Vec<PendingScores>> {
        group.sort_by_key(|(sample, _)| sample.sample);
        let answers = group.iter().filter_map(|(sample, outcome)| {
            let (text, _) = scored.rules.get(&(sample.request, sample.sample))?.as_ref().ok()?;
            Some(Answer::new(&self.prompts, sample, outcome.as_ref(), text.clone(), self.first))
        });
        self.programs.submit(&answers.collect::<Vec<_>>())
    }

    fn score(&self, completions: impl IntoIterator<Item = Ended>) -> Scored {
        let mut scored = Scored::default();
        let mut groups: BTreeMap<usize, Vec<Ended>> = BTreeMap::new();
        for ended in completions {
            let (request, place) = (ended.0.request, ended.0.sample);
            scored.rules.insert((request, place), self.by_rules(&ended));
            if self.programs.is_empty() {
                continue;
            }
            let group = groups.entry(request).or_default();
            group.push(ended);
            if group.len() == self.n {
                let pending = self.submit(std::mem::take(group), &scored);
                scored.pending.insert(request, pending);
            }
        }
        scored
    }
}

impl RewardWorker {
    pub fn start(job: RewardJob) -> Self {
        let (ended, completions) = channel();
        let thread = std::thread::spawn(move || {
            let scored = job.score(completions);
            (job, scored)
        });
        Self { ended, thread }
    }

    /// Sends a completion to the thread.
    pub fn take(&self, sample: Sample, outcome: Option<Outcome>) {
        // fails if the thread has panicked, which `finish` resumes
        let _ = self.ended.send((sample, outcome));
    }

    /// Waits for texts and rewards by rules, in the order of requests and samples, and for the results of programs. The
    /// first error is the first sample's; a panic in a task is resumed.
    pub fn finish(self) -> Result<(Vec<(String, Reward)>, ProgramResults)> {
        drop(self.ended);
        let waits = wait_for("the thread that scores completions by rules");
        let (job, scored) = self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        drop(waits);
        let rules = scored.rules.into_values().collect::<Result<_>>()?;
        let pending = scored.pending.into_values().collect::<Result<_>>()?;
        Ok((rules, job.programs.wait(pending)))
    }
}
