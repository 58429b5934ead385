//! `tokens.jsonl`: some groups of every step with their tokens, for `trainer.log_tokens`.
//!
//! The file is bounded: where the lines of a step would make it larger than [`TokenSettings::max_bytes`], every second
//! of its steps is dropped, and of the steps to come only every second is kept, and so on. Its first line says of which
//! steps it is. What it holds follows from the run alone: one that was killed and resumed has the lines of one that
//! never stopped.

use super::report::RolloutReport;
use crate::checkpoint::RunDir;
use crate::rollout::Rollout;
use crate::{Error, Result};
use firebrick_models::Tokenizer;
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::sync::Arc;

/// The part of the file's room that the lines of one step may take.
const STEP_SHARE: u64 = 8;

/// Tokens of a completion that are kept at most; its first.
const MOST_TOKENS: usize = 4096;

/// Tokens looked at together where the characters of a token are found: more than one character is ever spread over.
const WINDOW: usize = 8;

/// More bytes than the first line takes.
const HEADER_ROOM: u64 = 128;

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenSettings {
    /// Groups a step; 0: there is no file.
    pub groups: usize,
    /// Bytes of the file at most.
    pub max_bytes: u64,
}

impl TokenSettings {
    /// So many groups a step in a file of at most 64 MiB.
    pub fn new(groups: usize) -> Self {
        Self { groups, max_bytes: 64 << 20 }
    }
}

/// A line of the file but the first: a completion. All lists have one entry a token; of numbers that are not finite,
/// null is written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// Training step.
    pub step: u64,
    /// Index of the prompt among the run's draws.
    pub draw: u64,
    /// Index in the group.
    pub sample: usize,
    /// Tokens of the completion, those included that are left out here.
    pub tokens: usize,
    /// The characters that each token adds to the text; special tokens by their names. A token that only begins a
    /// character has none, the one that ends it has the character.
    pub pieces: Vec<String>,
    /// Log-prob under the distribution that the token was drawn from.
    pub sampler_logp: Vec<Option<f32>>,
    /// Log-prob under the policy before the update, as the trainer computes it: `update.old_log_probs: trainer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trainer_logp: Option<Vec<Option<f32>>>,
    /// The trainer's probability less the sampler's before top-k, top-p and min-p.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mismatch: Option<Vec<Option<f32>>>,
    /// Advantage.
    pub advantage: Vec<Option<f32>>,
    /// 1 for tokens that are trained on, 0 for others.
    pub mask: Vec<u8>,
}

/// The first line. It is one of step 0, so that it stays where later steps are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Header {
    step: u64,
    /// Steps from one that is kept to the next, from step 1 on.
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
    /// The file's name.
    pub const FILE: &'static str = "tokens.jsonl";

    /// Begins the file of a run, or continues with one that was [rewound](super::Recorder::rewind).
    ///
    /// # Errors
    /// [`Error::Io`] where the file cannot be read or written.
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

    /// Keeps the first groups of a step: those whose rewards differ before the others, each in the order of their
    /// prompts.
    ///
    /// # Errors
    /// [`Error::Io`] where the file cannot be written; [`Error`] of the tokenizer where a token cannot be decoded.
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

    /// Drops every second step until there is room for more bytes. Step 1 alone leaves room for another step's share.
    fn thin(&mut self, run: &RunDir, more: u64) -> Result<()> {
        let text = read(run)?;
        let mut rows: Vec<(u64, &str)> = text
            .lines()
            .filter_map(|line| Some((serde_json::from_str::<Step>(line).ok()?.step, line)))
            .filter(|(step, _)| *step > 0)
            .collect();
        let size = |rows: &[(u64, &str)]| -> u64 {
            let bytes = rows.iter().map(|(_, line)| line.len() as u64 + 1);
            HEADER_ROOM + bytes.sum::<u64>()
        };
        while size(&rows) + more > self.settings.max_bytes && rows.iter().any(|(step, _)| *step > 1) {
            self.header.every *= 2;
            rows.retain(|(step, _)| self.keeps(*step));
        }
        let lines: Vec<&str> = rows.into_iter().map(|(_, line)| line).collect();
        self.write(run, &lines)
    }

    /// Writes the file anew: the header and these lines.
    fn write(&mut self, run: &RunDir, lines: &[&str]) -> Result<()> {
        let header = serde_json::to_string(&self.header).expect("three integers");
        let text: String = [header.as_str()].iter().chain(lines).flat_map(|line| [line, "\n"]).collect();
        self.bytes = text.len() as u64;
        run.write(Self::FILE, text.as_bytes())
    }

    /// The lines of a step, of so many tokens a completion that they take no more than a step's share.
    fn lines(&self, step: u64, report: &RolloutReport) -> Result<String> {
        let groups = groups(&report.rollouts, self.settings.groups);
        let mut most = MOST_TOKENS;
        loop {
            let mut text = String::new();
            for rollout in groups.iter().copied().flatten() {
                let record = record(step, rollout, &self.tokenizer, most)?;
                text += &serde_json::to_string(&record).expect("floats, integers and strings");
                text.push('\n');
            }
            if most == 0 || text.len() as u64 <= self.settings.max_bytes / STEP_SHARE {
                return Ok(text);
            }
            most /= 2;
        }
    }
}

/// The groups that are kept.
fn groups(rollouts: &[Rollout], most: usize) -> Vec<&[Rollout]> {
    let groups = rollouts.chunk_by(|a, b| a.prompt_index == b.prompt_index);
    let mut groups: Vec<&[Rollout]> = groups.collect();
    let flat = |group: &&[Rollout]| {
        let mut rewards = group.iter().filter_map(|rollout| rollout.reward).map(f64::to_bits);
        let first = rewards.next();
        rewards.all(|reward| Some(reward) == first)
    };
    groups.sort_by_key(flat);
    groups.truncate(most);
    groups
}

/// The first `most` tokens of a completion.
fn record(step: u64, rollout: &Rollout, tokenizer: &Tokenizer, most: usize) -> Result<TokenRecord> {
    let count = rollout.completion.len().min(most);
    let numbers = |column: &[f64]| -> Vec<Option<f32>> {
        let own = column.iter().take(count);
        own.map(|&value| finite(value)).collect()
    };
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

/// The characters that each token adds. Tokens are decoded with some before them, because how a token reads depends on
/// those.
fn pieces(tokens: &[u32], tokenizer: &Tokenizer) -> Result<Vec<String>> {
    let mut pieces = Vec::with_capacity(tokens.len());
    // the first token of the window, and the first whose characters are still to be told
    let (mut start, mut told) = (0, 0);
    for at in 0..tokens.len() {
        let before = tokenizer.decode(&tokens[start..told], false)?;
        let with = tokenizer.decode(&tokens[start..=at], false)?;
        // a character whose bytes are not all there is read as U+FFFD
        let begun = with.ends_with('\u{fffd}') && at + 1 < tokens.len() && at - told < WINDOW;
        if begun {
            pieces.push(String::new());
            continue;
        }
        let new = with.strip_prefix(before.as_str());
        pieces.push(match new {
            Some(new) => new.to_owned(),
            // a decoder that reads the tokens before differently: the token by itself
            None => tokenizer.decode(&tokens[told..=at], false)?,
        });
        (start, told) = (told, at + 1);
    }
    Ok(pieces)
}

/// The file's text without a line that a kill cut off; empty where there is no file.
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
