//! `tokens.jsonl`: some groups of every step with their tokens, for `trainer.log_tokens`.
//!
//! The size of the file is bounded: if the lines of a step would exceed [`TokenSettings::max_bytes`], every second of
//! its steps is removed, and only every second of the following steps is kept, and so on. Its first line has the
//! interval of steps. Its contents depend only on the run: a resumed run has the lines of one that was never killed.

use super::report::RolloutReport;
use crate::checkpoint::RunDir;
use crate::rollout::Rollout;
use crate::{Error, Result};
use firebrick_models::Tokenizer;
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::sync::Arc;

/// The lines of one step may take `1 / STEP_SHARE` of the file.
const STEP_SHARE: u64 = 8;

/// Maximum logged tokens of a completion.
const MAX_TOKENS: usize = 4096;

/// Maximum tokens of one character.
const WINDOW: usize = 8;

/// Upper bound on the bytes of the first line.
const HEADER_BYTES: u64 = 128;

/// Limits of the token log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenSettings {
    /// Groups per step; 0 disables the file.
    pub groups: usize,
    /// Maximum bytes of the file.
    pub max_bytes: u64,
}

impl TokenSettings {
    /// A number of groups per step, in a file of at most 64 MiB.
    pub fn new(groups: usize) -> Self {
        Self { groups, max_bytes: 64 << 20 }
    }
}

/// A completion: a line of the file after the first. All lists have one entry per token; numbers that are not finite
/// are null.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// Training step.
    pub step: u64,
    /// Index of the prompt among the run's draws.
    pub draw: u64,
    /// Index in the group.
    pub sample: usize,
    /// Tokens of the completion, also those that are not logged.
    pub tokens: usize,
    /// Characters that each token adds to the text; special tokens by their names. A character of several tokens
    /// belongs to the last one.
    pub pieces: Vec<String>,
    /// Log-prob under the distribution that the token was sampled from.
    pub sampler_logp: Vec<Option<f32>>,
    /// Log-prob under the policy before the update, with `update.old_log_probs: trainer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trainer_logp: Option<Vec<Option<f32>>>,
    /// Probability of the trainer minus that of the sampler before top-k, top-p and min-p.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mismatch: Option<Vec<Option<f32>>>,
    /// Advantage.
    pub advantage: Vec<Option<f32>>,
    /// 1 for trained tokens, 0 for others.
    pub mask: Vec<u8>,
}

/// The first line, of step 0, so that it stays when later steps are removed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Header {
    step: u64,
    /// Interval of kept steps, from step 1 on.
    every: u64,
    max_bytes: u64,
}

/// The step of any line.
#[derive(Deserialize)]
struct Step {
    step: u64,
}

/// Writes `tokens.jsonl`.
pub struct TokenLog {
    settings: TokenSettings,
    tokenizer: Arc<Tokenizer>,
    header: Header,
    bytes: u64,
}

impl TokenLog {
    /// Name of the file.
    pub const FILE: &'static str = "tokens.jsonl";

    /// Creates the file of a run, or continues one that was [rewound](super::Recorder::rewind).
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read or written.
    pub fn open(run: &RunDir, settings: TokenSettings, tokenizer: Arc<Tokenizer>) -> Result<Self> {
        let text = read(run)?;
        let first = text.lines().next();
        let header = first.and_then(|line| serde_json::from_str::<Header>(line).ok());
        let header =
            Header { step: 0, every: header.map_or(1, |header| header.every.max(1)), max_bytes: settings.max_bytes };
        let mut log = Self { settings, tokenizer, header, bytes: text.len() as u64 };
        if settings.groups > 0 && text.is_empty() {
            log.write(run, &[])?;
        }
        Ok(log)
    }

    /// Logs the first groups of a step: those whose rewards differ before the others, in the order of their prompts.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written; [`Error`] of the tokenizer if a token cannot be decoded.
    pub fn step(&mut self, run: &RunDir, step: u64, report: &RolloutReport) -> Result<()> {
        if self.settings.groups == 0 || !self.keeps(step) {
            return Ok(());
        }
        let lines = self.lines(step, report)?;
        if self.bytes + lines.len() as u64 > self.settings.max_bytes {
            self.thin(run, lines.len() as u64)?;
        }
        if self.keeps(step) {
            run.append_text(Self::FILE, lines.as_bytes())?;
            self.bytes += lines.len() as u64;
        }
        Ok(())
    }

    fn keeps(&self, step: u64) -> bool {
        (step.max(1) - 1).is_multiple_of(self.header.every)
    }

    /// Removes every second step until there is room for more bytes. Step 1 alone leaves room for another step's share.
    fn thin(&mut self, run: &RunDir, more: u64) -> Result<()> {
        let text = read(run)?;
        let mut rows: Vec<(u64, &str)> = text
            .lines()
            .filter_map(|line| Some((serde_json::from_str::<Step>(line).ok()?.step, line)))
            .filter(|(step, _)| *step > 0)
            .collect();
        let size = |rows: &[(u64, &str)]| -> u64 {
            let bytes = rows.iter().map(|(_, line)| line.len() as u64 + 1);
            HEADER_BYTES + bytes.sum::<u64>()
        };
        while size(&rows) + more > self.settings.max_bytes && rows.iter().any(|(step, _)| *step > 1) {
            self.header.every *= 2;
            rows.retain(|(step, _)| self.keeps(*step));
        }
        let lines: Vec<&str> = rows.into_iter().map(|(_, line)| line).collect();
        self.write(run, &lines)
    }

    /// Writes the header and these lines.
    fn write(&mut self, run: &RunDir, lines: &[&str]) -> Result<()> {
        let header = serde_json::to_string(&self.header).expect("three integers");
        let text: String = [header.as_str()].iter().chain(lines).flat_map(|line| [line, "\n"]).collect();
        self.bytes = text.len() as u64;
        run.write(Self::FILE, text.as_bytes())
    }

    /// Lines of a step, with as many tokens per completion as fit into a step's share.
    fn lines(&self, step: u64, report: &RolloutReport) -> Result<String> {
        let groups = groups(&report.rollouts, self.settings.groups);
        let mut max_tokens = MAX_TOKENS;
        loop {
            let mut text = String::new();
            for rollout in groups.iter().copied().flatten() {
                let record = record(step, rollout, &self.tokenizer, max_tokens)?;
                text += &serde_json::to_string(&record).expect("floats, integers and strings");
                text.push('\n');
            }
            if max_tokens == 0 || text.len() as u64 <= self.settings.max_bytes / STEP_SHARE {
                return Ok(text);
            }
            max_tokens /= 2;
        }
    }
}

/// The logged groups.
fn groups(rollouts: &[Rollout], count: usize) -> Vec<&[Rollout]> {
    let mut groups: Vec<&[Rollout]> = rollouts.chunk_by(|a, b| a.prompt_index == b.prompt_index).collect();
    let has_equal_rewards = |group: &&[Rollout]| {
        let mut rewards = group.iter().filter_map(|rollout| rollout.reward).map(f64::to_bits);
        let first = rewards.next();
        rewards.all(|reward| Some(reward) == first)
    };
    groups.sort_by_key(has_equal_rewards);
    groups.truncate(count);
    groups
}

/// Record of the first `max_tokens` tokens of a completion.
fn record(step: u64, rollout: &Rollout, tokenizer: &Tokenizer, max_tokens: usize) -> Result<TokenRecord> {
    let count = rollout.completion.len().min(max_tokens);
    let numbers = |column: &[f64]| column.iter().take(count).map(|&value| finite(value)).collect::<Vec<_>>();
    let columns = &rollout.columns;
    let trainer = columns.old_logp.as_deref();
    let full = columns.full_logp.as_deref();
    let mismatch = trainer.zip(full).map(|(trainer, full)| {
        let pairs = trainer.iter().zip(full).take(count);
        pairs.map(|(t, s)| finite(t.exp() - s.exp())).collect()
    });
    let advantage = columns.advantage.as_deref().unwrap_or_default();
    Ok(TokenRecord {
        step,
        draw: rollout.prompt_index,
        sample: rollout.sample,
        tokens: rollout.completion.len(),
        pieces: pieces(&rollout.completion[..count], tokenizer)?,
        sampler_logp: numbers(rollout.sampler_logp()),
        trainer_logp: trainer.map(numbers),
        mismatch,
        advantage: numbers(advantage),
        mask: rollout.mask.iter().take(count).map(|&kept| u8::from(kept)).collect(),
    })
}

fn finite(value: f64) -> Option<f32> {
    let value = value as f32;
    value.is_finite().then_some(value)
}

/// Characters that each token adds. Tokens are decoded with some earlier ones, on which their text depends.
fn pieces(tokens: &[u32], tokenizer: &Tokenizer) -> Result<Vec<String>> {
    let mut pieces = Vec::with_capacity(tokens.len());
    // first token of the window, and first token without a piece
    let (mut start, mut next) = (0, 0);
    for at in 0..tokens.len() {
        let before = tokenizer.decode(&tokens[start..next], false)?;
        let with = tokenizer.decode(&tokens[start..=at], false)?;
        // an incomplete character is decoded as U+FFFD
        let is_incomplete = with.ends_with('\u{fffd}') && at + 1 < tokens.len() && at - next < WINDOW;
        if is_incomplete {
            pieces.push(String::new());
            continue;
        }
        pieces.push(match with.strip_prefix(before.as_str()) {
            Some(new) => new.to_owned(),
            // the decoder reads the earlier tokens differently: decode the token alone
            None => tokenizer.decode(&tokens[next..=at], false)?,
        });
        (start, next) = (next, at + 1);
    }
    Ok(pieces)
}

/// Text of the file; empty if there is no file.
fn read(run: &RunDir) -> Result<String> {
    let path = run.path().join(TokenLog::FILE);
    match std::fs::read(&path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(Error::io("read", &path)(error)),
    }
}

#[cfg(test)]
mod tests;
