//! Dry run: prompts, rewards and plan of a run, without weights. Nothing is loaded, trained or written.

use super::builder::TrainerBuilder;
use super::session::{Planned, Session};
use crate::Result;
use crate::config::{Mode, RunConfig};
use crate::data::{Prompt, PromptDataset};
use crate::hub::ModelFiles;
use crate::plan::estimate::{Estimate, Sizes};
use crate::task::{Completion, Example, Split, Task};
use firebrick_backends::DeviceInfo;
use firebrick_backends::collective::{Collective, Solo};
use std::path::PathBuf;
use std::sync::Arc;

/// Rendered prompts.
const MAX_RENDERED: u64 = 3;

/// Graded reference answers of an endless task.
const MAX_GRADED: u64 = 256;

/// Unrewarded reference answers in the report.
const MAX_UNREWARDED: usize = 5;

/// A run that was opened and planned, and not begun.
#[derive(Debug)]
pub struct DryRun {
    /// The device, which was opened.
    pub device: DeviceInfo,
    /// The run folder, which does not exist yet.
    pub output: PathBuf,
    /// Steps of the run.
    pub steps: u64,
    /// Training prompts; `None` of an endless task.
    pub prompts: Option<u64>,
    /// Training prompts that are longer than allowed.
    pub filtered: u64,
    /// Validation prompts.
    pub validation: usize,
    /// Prediction of the plan.
    pub estimate: Estimate,
    /// Device bytes that the plan may use, with a budget.
    pub budget: Option<u64>,
    /// The first prompts that the run would draw, as text with visible special tokens, and their lengths in tokens.
    pub rendered: Vec<(String, usize)>,
    /// Grades of the reference answers, if the task has answers.
    pub references: Option<References>,
    /// Bytes of all checkpoints that the run keeps, and of the reference policy.
    pub disk_bytes: u64,
}

/// Grades of a task's reference answers by its rules.
#[derive(Debug, Default)]
pub struct References {
    /// Graded answers.
    pub graded: usize,
    /// Answers that earn nothing in any form that was tried.
    pub unrewarded: usize,
    /// The first unrewarded answers or demonstrations.
    pub first: Vec<String>,
}

impl TrainerBuilder {
    /// Opens the device, reads and checks everything that the configuration names except weights, plans memory, renders
    /// prompts and grades the reference answers. Writes nothing.
    ///
    /// # Errors
    ///
    /// Those that [`build`](Self::build) gives before it loads weights.
    pub fn dry_run(mut self) -> Result<DryRun> {
        let solo: Arc<dyn Collective> = Arc::new(Solo);
        let session = self.open(&solo, ModelFiles::Tokenizer)?;
        let (planned, _) = session.plan()?;
        let prompts = &session.data.prompts;
        let has_prompts = session.mode == Mode::Rl;
        Ok(DryRun {
            device: session.info.clone(),
            output: session.config.output.clone(),
            steps: session.steps,
            prompts: prompts.examples(),
            filtered: prompts.filtered,
            validation: prompts.validation.len(),
            budget: planned.request.allowed(),
            rendered: if has_prompts { rendered(&session, prompts)? } else { Vec::new() },
            references: if has_prompts { references(prompts, &session.config)? } else { None },
            disk_bytes: disk_bytes(&session, &planned),
            estimate: planned.estimate(),
        })
    }
}

/// The first prompts of the run, decoded from their tokens.
fn rendered(session: &Session, prompts: &PromptDataset) -> Result<Vec<(String, usize)>> {
    let seed = session.config.trainer.seed;
    (0..MAX_RENDERED)
        .map(|draw| {
            let Prompt { tokens, .. } = prompts.draw(seed, draw)?;
            Ok((session.source.tokenizer.decode(&tokens, false)?, tokens.len()))
        })
        .collect()
}

/// Grades the task's reference answers: a demonstration, or the answer in the usual forms. Rules that no completion can
/// satisfy teach nothing.
fn references(prompts: &PromptDataset, config: &RunConfig) -> Result<Option<References>> {
    let task = prompts.task();
    let mut references = References::default();
    for split in [Split::Train, Split::Validation] {
        let count = task.len(split).unwrap_or(MAX_GRADED);
        for index in 0..count {
            let example = task.example(split, index)?;
            let Some(best) = best_of_references(task, &example, config.rollout.response_length)? else {
                continue;
            };
            references.graded += 1;
            if best <= 0.0 {
                references.unrewarded += 1;
                if references.first.len() < MAX_UNREWARDED {
                    references.first.push(example.solution.unwrap_or(example.answer));
                }
            }
        }
    }
    Ok((references.graded > 0).then_some(references))
}

/// Reward of the best form of an example's reference, if it has one.
fn best_of_references(task: &dyn Task, example: &Example, max_tokens: usize) -> Result<Option<f64>> {
    let answer = &example.answer;
    let mut forms: Vec<String> = example.solution.iter().cloned().collect();
    if !answer.is_empty() {
        forms.extend([
            answer.clone(),
            format!("\\boxed{{{answer}}}"),
            format!("#### {answer}"),
            format!("<answer>{answer}</answer>"),
        ]);
    }
    let mut best = None;
    for text in &forms {
        let completion = Completion { text, tokens: &[], finished: true, max_tokens, in_thought: false };
        let reward = task.reward(example, &completion)?;
        if reward.parts.is_empty() {
            // scored only by models or programs
            return Ok(None);
        }
        best = Some(best.map_or(reward.total, |best: f64| best.max(reward.total)));
    }
    Ok(best)
}

/// Bytes of the run folder: for each kept checkpoint, the best one, and one more while the next is written, the f32 weights, both
/// moments and, in half precision, the masters, of policy and critic; and the reference policy.
fn disk_bytes(session: &Session, planned: &Planned) -> u64 {
    let (config, work) = (&session.config, &planned.request.workload);
    let sizes = Sizes::new(&work.arch, work.lora.as_ref());
    let masters = u64::from(config.precision.is_half());
    let policy = 4 * sizes.trained() * (3 + masters);
    let critics = u64::from(session.critic_source.is_some());
    let best = u64::from(config.trainer.keep_best.is_some());
    let kept = config.trainer.max_ckpt_to_keep as u64 + 1 + best;
    let reference = if work.reference { 4 * sizes.total() } else { 0 };
    kept * policy * (1 + critics) + reference
}
