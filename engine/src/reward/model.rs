//! A reward model: a checkpoint with one label that scores a prompt with its completion.
//!
//! The score of a sequence is the head's number at its last real token, as transformers' `…ForSequenceClassification`
//! reads it: the last one that is not the padding token of the model's config.

use crate::executor::{BoundaryLog, Executor, Residency, ResidentModel, Runtime, kept_values, values_all};
use crate::hub::{ModelFiles, model_folder};
use crate::learner::score_cut;
use crate::plan::{MemoryConfig, Role, Zero};
use crate::sequence::Sequence;
use crate::task::{Example, PromptText, RewardInput, RewardModelConfig};
use crate::world::World;
use crate::world::codec::Reader;
use crate::{Error, Result};
use burn::tensor::Device;
use firebrick_backends::accounts::Accounts;
use firebrick_backends::{Precision, PrecisionExt, device};
use firebrick_models::arch::HeadKind;
use firebrick_models::decoder::RankPart;
use firebrick_models::tokenizer::{ChatOptions, Control, Message};
use firebrick_models::{Arch, Checkpoint, Tokenizer};
use std::path::Path;
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

/// A prompt with a completion, as a reward model may read it.
#[derive(Clone, Copy, Debug)]
pub struct ScoredCompletion<'a> {
    /// The prompt before tokenization.
    pub example: &'a Example,
    /// Its text, rendered.
    pub prompt_text: &'a str,
    /// Its tokens, the policy's.
    pub prompt_tokens: &'a [u32],
    /// The completion's text, without special tokens.
    pub completion: &'a str,
    /// Its tokens, the policy's.
    pub completion_tokens: &'a [u32],
}

/// A reward model in its place.
#[derive(Debug)]
pub struct RewardModel {
    name: String,
    input: RewardInput,
    placed: ResidentModel,
    runtime: Runtime,
    /// Its own; none where it reads the policy's ids.
    tokenizer: Option<Tokenizer>,
    /// The policy's.
    policy: Arc<Tokenizer>,
    pad: Option<u32>,
    context: usize,
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

fn refusal(name: &str, path: &Path, detail: impl std::fmt::Display) -> Error {
    Error::Config(format!("reward `{name}` ({}): {detail}", path.display()))
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
        let tokenizer = Self::vocabulary(name, config, &arch, around.tokenizer)?;
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
        Ok(Self {
            name: name.to_owned(),
            input: config.input,
            placed,
            runtime,
            tokenizer,
            policy: Arc::clone(around.tokenizer),
            pad: checkpoint.pad_id(),
            context: arch.max_positions,
        })
    }

    /// The tokenizer that it reads with; none where it reads the policy's ids, which must then mean the same to it.
    fn vocabulary(
        name: &str,
        config: &RewardModelConfig,
        arch: &Arch,
        policy: &Tokenizer,
    ) -> Result<Option<Tokenizer>> {
        let refused = |detail: String| Err(refusal(name, &config.path, detail));
        let own = Tokenizer::from_dir(&model_folder(&config.path, ModelFiles::Tokenizer)?);
        if config.input == RewardInput::Tokens {
            if policy.vocab_size() > arch.vocab_size {
                return refused(format!(
                    "`input: tokens` passes it the policy's token ids, of which there are {}, but its embedding has {} \
                     rows; use `input: text` or `chat`, which use the reward model's tokenizer",
                    policy.vocab_size(),
                    arch.vocab_size
                ));
            }
            let differing = own.as_ref().ok().and_then(|own| own.differing_id(policy));
            return match differing {
                None => Ok(None),
                Some((id, [own, other])) => refused(format!(
                    "`input: tokens` passes it the policy's token ids, but id {id} is {own} to it and {other} to the \
                     policy; use `input: text` or `chat`, which use the reward model's tokenizer"
                )),
            };
        }
        let own = own.map_err(|e| {
            let advice = "it has no tokenizer, so only `input: tokens` is possible";
            refusal(name, &config.path, format!("{e}; {advice}"))
        })?;
        let own = own.for_embedding(arch.vocab_size);
        if config.input == RewardInput::Chat && !own.has_chat_template() {
            return refused(
                "`input: chat` needs a chat template, but its tokenizer has none; use `input: text`".into(),
            );
        }
        Ok(Some(own))
    }

    /// Its name among the rewards.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The token ids that it reads of a prompt with its completion.
    ///
    /// # Errors
    /// `Error::Model` where the template or the tokenizer refuses the texts.
    pub fn read(&self, reading: &ScoredCompletion<'_>) -> Result<Vec<u32>> {
        let Some(tokenizer) = &self.tokenizer else {
            return Ok([reading.prompt_tokens, reading.completion_tokens].concat());
        };
        let example = reading.example;
        let mut messages = match (self.input, &example.prompt) {
            (RewardInput::Chat, PromptText::Text(text)) => vec![Message::new("user", text)],
            (RewardInput::Chat, PromptText::Chat(messages)) => messages.clone(),
            (RewardInput::Auto, PromptText::Chat(messages)) if tokenizer.has_chat_template() => messages.clone(),
            _ => {
                let text = format!("{}{}", reading.prompt_text, reading.completion);
                return Ok(tokenizer.encode_text(&text, &self.control(tokenizer, reading)?, true)?);
            }
        };
        messages.push(Message::new("assistant", reading.completion));
        let options = ChatOptions { special_tokens: example.special_tokens(), ..ChatOptions::default() };
        Ok(tokenizer.encode_chat(&messages, options)?.1)
    }

    /// Where its special tokens are control tokens in the policy's prompt followed by the completion: in what the
    /// policy's chat template has written.
    fn control(&self, tokenizer: &Tokenizer, reading: &ScoredCompletion<'_>) -> Result<Control> {
        let (example, text) = (reading.example, reading.prompt_text);
        let control = match &example.prompt {
            PromptText::Text(_) => example.control.clone(),
            PromptText::Chat(messages) => self.policy.control(text, messages, 0, example.chat_options(), tokenizer)?,
        };
        Ok(match control {
            Control::Everywhere => Control::In(std::iter::once(0..text.len()).collect()),
            within @ Control::In(_) => within,
        })
    }

    /// Why a sequence of so many tokens cannot be scored, where it cannot.
    pub fn refuses(&self, tokens: usize) -> Option<String> {
        let (name, budget) = (&self.name, self.placed.plan.score_tokens);
        if tokens == 0 {
            Some(format!("reward `{name}` has no tokens to read"))
        } else if tokens > self.context {
            Some(format!(
                "reward `{name}` needs {tokens} tokens for it, but its context is {} (max_position_embeddings); lower \
                 rollout.response_length or rollout.prompt_length",
                self.context
            ))
        } else if tokens > budget {
            Some(format!(
                "reward `{name}` needs {tokens} tokens for it, but its budget is {budget}; raise its score_tokens (or \
                 memory.score_tokens) to {tokens}"
            ))
        } else {
            None
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
        let all =
            world.gather(|to| to.list(rows.iter(), |to, row| to.tokens(row)), |from| from.list(Reader::tokens))?;
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
