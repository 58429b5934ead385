//! A reward model: a checkpoint with one label that scores a prompt with its completion.
//!
//! The score of a sequence is the head's number at its last real token, as transformers' `…ForSequenceClassification`
//! reads it: the last one that is not the padding token of the model's config.

use super::answer::CompletionId;
use super::reader::{RewardReader, refusal};
use crate::Result;
use crate::executor::{BoundaryLog, Executor, Residency, ResidentModel, Runtime, kept_values, values_all};
use crate::hub::{ModelFiles, model_folder};
use crate::learner::score_cut;
use crate::plan::{MemoryConfig, Role, Zero};
use crate::sequence::Sequence;
use crate::task::RewardModelConfig;
use crate::world::World;
use burn::tensor::Device;
use firebrick_backends::accounts::Accounts;
use firebrick_backends::{Precision, PrecisionExt, device};
use firebrick_models::arch::HeadKind;
use firebrick_models::decoder::RankPart;
use firebrick_models::{Arch, Checkpoint, Tokenizer};
use std::sync::Arc;

/// What the models of a run share.
#[derive(Clone, Copy)]
pub struct Surroundings<'a> {
    /// The run's device.
    pub device: &'a Device,
    /// The `memory` section.
    pub memory: &'a MemoryConfig,
    /// The run's accounts.
    pub accounts: &'a Arc<Accounts>,
    /// The run's log of boundaries, where it has one.
    pub log: Option<&'a Arc<BoundaryLog>>,
    /// The run's precision.
    pub precision: Precision,
    /// The policy's tokenizer.
    pub tokenizer: &'a Arc<Tokenizer>,
    /// The ranks of the run.
    pub world: &'a World,
}

/// A reward model in its place.
#[derive(Debug)]
pub struct RewardModel {
    reader: RewardReader,
    placed: ResidentModel,
    runtime: Runtime,
    pad: Option<u32>,
    /// Whether it has been said that a completion has no score.
    warned: bool,
}

/// The architecture of a reward model's folder, from its config alone.
///
/// # Errors
/// `Error::Config` for a folder that is no reward model's, `Error::Hub` where it cannot be fetched.
pub fn architecture(name: &str, config: &RewardModelConfig) -> Result<Arch> {
    let refused = |what: &str| {
        Err(refusal(
            name,
            &config.path,
            format!(
                "{what}; a reward model must be a …ForSequenceClassification checkpoint with one label, as saved by TRL's \
                 RewardTrainer or transformers with num_labels=1"
            ),
        ))
    };
    let folder = model_folder(&config.path, ModelFiles::Config)?;
    let arch = Checkpoint::architecture(&folder).map_err(|e| refusal(name, &config.path, e.to_string()))?;
    match arch.head {
        HeadKind::Scalar { bias: false } => Ok(arch),
        HeadKind::Scalar { bias: true } => refused("it is a …ForTokenClassification model, which scores every token"),
        HeadKind::LanguageModel => refused("it is a causal language model and has no score head"),
    }
}

impl RewardModel {
    /// Loads a reward model onto its device, and sends it to where it waits.
    ///
    /// # Errors
    /// As [`architecture`]; `Error::Config` too for another vocabulary than the policy's, or a precision that the
    /// device lacks; `Error::Device` where its device cannot be opened, `Error::Model` where weights cannot be loaded,
    /// and those of its plan.
    pub fn open(name: &str, config: &RewardModelConfig, around: Surroundings<'_>) -> Result<Self> {
        let arch = architecture(name, config)?.in_precision(around.precision);
        let folder = model_folder(&config.path, ModelFiles::All)?;
        let checkpoint = Checkpoint::open(&folder)?.in_precision(around.precision);
        let reader = RewardReader::open(name, config, &arch, around.memory, around.tokenizer)?;
        let own = config.device.map(device::open).transpose()?;
        let device = own.as_ref().map_or(around.device, |(device, _)| device);
        let precision = around.precision.check(device);
        precision.map_err(|e| refusal(name, &config.path, e.to_string()))?;
        let is_own = device != around.device;
        let accounts = if is_own { Accounts::new() } else { Arc::clone(around.accounts) };
        let memory = around.memory;
        let limit = memory.limit.map(|limit| limit.0);
        let mut runtime = Runtime::new(device)
            .with_accounts(accounts)
            .with_prefetch(memory.prefetch)
            .with_limit(limit.filter(|_| !is_own));
        if let Some(log) = around.log.filter(|_| !is_own) {
            runtime = runtime.with_log(Arc::clone(log));
        }
        let mut plan = memory.scorer_plan(&arch, config.score_tokens, config.param_offload)?;
        if is_own {
            plan.zero = Zero::Off;
        }
        if plan.zero == Zero::Stage3 {
            runtime = runtime.with_world(around.world.clone());
        }
        let world = runtime.world().clone();
        let values = kept_values(&plan, &arch, &world);
        let part = RankPart { share: None, values: Some(&values) };
        let decoder = checkpoint.load_part(part, device)?;
        let placed = ResidentModel::new(decoder, plan, Role::RewardModel, &runtime.accounts);
        let mut placed = placed.shared_by(&world);
        placed.set_residency(Residency::Idle)?;
        placed.decoder.check_computed()?;
        Ok(Self { reader, placed, runtime, pad: checkpoint.pad_id(), warned: false })
    }

    /// Its name among the rewards.
    #[must_use]
    pub fn name(&self) -> &str {
        self.reader.name()
    }

    /// How it reads prompts with completions.
    #[must_use]
    pub fn reader(&self) -> &RewardReader {
        &self.reader
    }

    /// Says, the first time, why a completion has no score.
    pub(super) fn warn_once(&mut self, id: CompletionId, reason: &str) {
        if !std::mem::replace(&mut self.warned, true) {
            tracing::warn!(
                "step {}, draw {}, sample {}: {reason}; it has no score, and reward/{}/missing counts such completions",
                id.step,
                id.prompt_index,
                id.sample,
                self.name()
            );
        }
    }

    /// Scores of token rows, in their order, in batches under its budget. The model visits its device for that. Ranks
    /// that share its weights out call it together, each with rows of its own: all are dealt out anew, so that all
    /// gather as often.
    ///
    /// # Errors
    /// Where a rank failed or is gone; `Error::Budget` for a row beyond its budget of tokens; `Error::OutOfMemory`
    /// above `memory.limit`; `Error::Model` and `Error::Device` where the device fails.
    pub fn score(&mut self, rows: Vec<Vec<u32>>) -> Result<Vec<f64>> {
        self.placed.set_residency(Residency::Pass)?;
        let scored = if self.runtime.world().is_solo() { self.scored(rows) } else { self.scored_together(&rows) };
        self.placed.set_residency(Residency::Idle)?;
        scored
    }

    /// Scores of this rank's rows, among those of all.
    fn scored_together(&self, rows: &[Vec<u32>]) -> Result<Vec<f64>> {
        let world = self.runtime.world();
        let all = world.gather::<Vec<Vec<u32>>>(rows)?;
        let before = all[..world.rank()].iter().map(Vec::len).sum::<usize>();
        let scores = self.scored(all.concat())?;
        Ok(scores[before..before + rows.len()].to_vec())
    }

    fn scored(&self, rows: Vec<Vec<u32>>) -> Result<Vec<f64>> {
        let last_real = |row: &[u32]| match self.pad {
            Some(pad) => row.iter().rposition(|&id| id != pad).unwrap_or(0),
            None => row.len() - 1,
        };
        let sequences: Vec<Sequence> = rows
            .into_iter()
            .map(|row| Sequence { positions: vec![last_real(&row)], tokens: row, ..Sequence::default() })
            .collect();
        let ResidentModel { decoder, plan, .. } = &self.placed;
        let executor = Executor::new(plan, &self.runtime, 1.0).for_role(Role::RewardModel);
        let cut = score_cut(plan, decoder.arch());
        let scores = values_all(&executor, decoder, &sequences, cut)?;
        Ok(scores.iter().map(|own| f64::from(own[0])).collect())
    }
}
