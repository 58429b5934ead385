//! A reward model: a checkpoint with one label that scores a prompt with its completion.
//!
//! The score of a sequence is the head's number at its last real token, as transformers' `…ForSequenceClassification`
//! reads it: the last one that is not the padding token of the model's config.

use super::answer::CompletionId;
use super::reader::{RewardReader, refusal};
use crate::Result;
use crate::executor::{BoundaryLog, Residency, ResidentModel, Runtime, kept_values};
use crate::hub::{ModelFiles, model_folder};
use crate::learner::values_placed;
use crate::plan::{MemoryConfig, Role, Zero};
use crate::sequence::Sequence;
use crate::task::RewardModelConfig;
use crate::world::World;
use burn::tensor::Device;
use firebrick_backends::accounts::Accounts;
use firebrick_backends::{Precision, PrecisionExt, device};
use firebrick_models::arch::HeadKind;
use firebrick_models::decoder::RankShard;
use firebrick_models::{Arch, Checkpoint, Tokenizer};
use std::sync::Arc;

/// Resources that the models of a run share.
#[derive(Clone, Copy)]
pub struct SharedResources<'a> {
    /// The run's device.
    pub device: &'a Device,
    /// The `memory` section.
    pub memory: &'a MemoryConfig,
    /// The run's accounts.
    pub accounts: &'a Arc<Accounts>,
    /// The run's boundary log, if it has one.
    pub log: Option<&'a Arc<BoundaryLog>>,
    /// The run's precision.
    pub precision: Precision,
    /// The policy's tokenizer.
    pub tokenizer: &'a Arc<Tokenizer>,
    /// The ranks of the run.
    pub world: &'a World,
}

/// A loaded reward model.
#[derive(Debug)]
pub struct RewardModel {
    /// Tokenization of prompts with completions.
    pub reader: RewardReader,
    model: ResidentModel,
    runtime: Runtime,
    pad: Option<u32>,
    /// True once it has warned of a completion without a score.
    warned: bool,
}

/// Architecture of a reward model, from its config file.
///
/// # Errors
/// `Error::Config` for a folder without a reward model, `Error::Hub` if it cannot be fetched.
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
    /// Loads a reward model onto its device, and moves it to its idle place.
    ///
    /// # Errors
    /// As [`architecture`]; `Error::Config` also for another vocabulary than the policy's, or a precision that the
    /// device lacks; `Error::Device` if its device cannot be opened, `Error::Model` if weights cannot be loaded, and
    /// those of its plan.
    pub fn open(name: &str, config: &RewardModelConfig, shared: SharedResources<'_>) -> Result<Self> {
        let SharedResources { memory, precision, world, .. } = shared;
        let arch = architecture(name, config)?.in_precision(precision);
        let checkpoint = Checkpoint::open(&model_folder(&config.path, ModelFiles::All)?)?.in_precision(precision);
        let reader = RewardReader::open(name, config, &arch, memory, shared.tokenizer)?;
        let opened = config.device.map(device::open).transpose()?;
        let device = opened.as_ref().map_or(shared.device, |(device, _)| device);
        precision.check(device).map_err(|e| refusal(name, &config.path, e.to_string()))?;
        let mut plan = memory.scorer_plan(&arch, config.score_tokens, config.param_offload)?;
        let mut runtime = Runtime::new(device).with_prefetch(memory.prefetch);
        if device == shared.device {
            runtime = runtime.with_accounts(Arc::clone(shared.accounts)).with_limit(memory.limit.map(|limit| limit.0));
            if let Some(log) = shared.log {
                runtime = runtime.with_log(Arc::clone(log));
            }
        } else {
            plan.zero = Zero::Off;
        }
        if plan.zero == Zero::Stage3 {
            runtime = runtime.with_world(world.clone());
        }
        let world = runtime.world().clone();
        let values = kept_values(&plan, &arch, &world);
        let decoder = checkpoint.load_shard(RankShard { share: None, values: Some(&values) }, device)?;
        let model = ResidentModel::new(decoder, plan, Role::RewardModel, &runtime.accounts);
        let mut model = model.shared_by(&world);
        model.set_residency(Residency::Idle)?;
        model.decoder.check_computed()?;
        Ok(Self { reader, model, runtime, pad: checkpoint.pad_id(), warned: false })
    }

    /// Warns, the first time, of a completion without a score.
    pub(super) fn warn_once(&mut self, id: CompletionId, reason: &str) {
        if !std::mem::replace(&mut self.warned, true) {
            tracing::warn!(
                "step {}, draw {}, sample {}: {reason}; it has no score, and reward/{}/missing counts such completions",
                id.step,
                id.prompt_index,
                id.sample,
                self.reader.name
            );
        }
    }

    /// Scores token rows in their order, in batches under its budget, with the model on its device. Ranks that shard
    /// its weights call it together, each with its own rows, and score the rows of all, so that all gather weights
    /// equally often.
    ///
    /// # Errors
    /// If a rank failed or is gone; `Error::Budget` for a row beyond its budget of tokens; `Error::OutOfMemory`
    /// above `memory.limit`; `Error::Model` and `Error::Device` if the device fails.
    pub fn score(&mut self, rows: Vec<Vec<u32>>) -> Result<Vec<f64>> {
        self.model.set_residency(Residency::Pass)?;
        let scores = if self.runtime.world().is_solo() { self.scores(rows) } else { self.scores_of_ranks(&rows) };
        self.model.set_residency(Residency::Idle)?;
        scores
    }

    /// Scores of this rank's rows, computed with those of all ranks.
    fn scores_of_ranks(&self, rows: &[Vec<u32>]) -> Result<Vec<f64>> {
        let world = self.runtime.world();
        let ranks = world.gather::<Vec<Vec<u32>>>(rows)?;
        let start = ranks[..world.rank()].iter().map(Vec::len).sum::<usize>();
        let scores = self.scores(ranks.concat())?;
        Ok(scores[start..start + rows.len()].to_vec())
    }

    fn scores(&self, rows: Vec<Vec<u32>>) -> Result<Vec<f64>> {
        let last_real = |row: &[u32]| match self.pad {
            Some(pad) => row.iter().rposition(|&id| id != pad).unwrap_or(0),
            None => row.len() - 1,
        };
        let sequences: Vec<Sequence> = rows
            .into_iter()
            .map(|row| Sequence { positions: vec![last_real(&row)], tokens: row, ..Sequence::default() })
            .collect();
        let scores = values_placed(&self.model, &self.runtime, &sequences)?;
        Ok(scores.iter().map(|values| f64::from(values[0])).collect())
    }
}
