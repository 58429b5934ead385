//! `tokens.jsonl`: tokens of completions in a report.

use super::lines::{self, Lines, ReadResult, Span};
use super::numbers::Number;
use super::selection::scattered;
use super::text::cost;
use firebrick_engine::Result;
use firebrick_engine::metrics::TokenRecord;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

/// Bytes of all tokens in a report.
pub const TOKEN_BYTES: usize = 1_500_000;

/// Fewest bytes of a completion's tokens; of many completions, fewer show theirs.
const MIN_BYTES: usize = 8_000;

/// Approximate bytes of a token's numbers in the data block.
const NUMBER_BYTES: usize = 27;

/// Significant digits of a token's numbers.
const DIGITS: usize = 3;

/// A completion: step, draw, index in its group.
pub type CompletionKey = (u64, u64, u64);

/// The tokens of a completion: lists with an entry per token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokensView {
    /// The characters that each token adds to the text.
    pub pieces: Vec<String>,
    /// Log-prob under the sampling distribution.
    pub sampler: Vec<Number>,
    /// Log-prob of the trainer, if it computes it.
    pub trainer: Option<Vec<Number>>,
    /// The trainer's probability minus the sampler's.
    pub mismatch: Option<Vec<Number>>,
    /// Advantage.
    pub advantage: OneOrEach,
    /// Indices of tokens that are not trained on.
    pub masked: Vec<usize>,
    /// Further tokens that the report omits.
    pub left_out: usize,
}

/// One number for all tokens, or one per token.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum OneOrEach {
    /// The number of all tokens.
    One(Number),
    /// One per token.
    Each(Vec<Number>),
}

/// Positions of completions in the file, and the limit of shown tokens.
#[derive(Debug, Default)]
pub struct TokenIndex {
    spans: HashMap<CompletionKey, Span>,
    /// Bytes per completion.
    room: usize,
}

#[derive(Deserialize)]
struct TokenSummary {
    step: u64,
    /// Absent on the first line.
    draw: Option<u64>,
    #[serde(default)]
    sample: u64,
}

impl TokenIndex {
    /// Reads the positions of completions.
    pub fn read(path: &Path) -> Result<(Self, ReadResult)> {
        let mut spans = HashMap::new();
        let result = lines::read(path, |line: TokenSummary, span| {
            if let Some(draw) = line.draw {
                spans.insert((line.step, draw, line.sample), span);
            }
            true
        })?;
        Ok((Self { spans, room: 0 }, result))
    }

    /// Number of completions with tokens.
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// The groups with tokens, by step and draw.
    pub fn groups(&self) -> BTreeSet<(u64, u64)> {
        let keys = self.spans.keys();
        keys.map(|(step, draw, _)| (*step, *draw)).collect()
    }

    /// Keeps completions of `groups`, evenly spread, up to `room` bytes.
    pub fn keep(&mut self, groups: &BTreeSet<(u64, u64)>, room: usize) {
        self.spans.retain(|(step, draw, _), _| groups.contains(&(*step, *draw)));
        let mut sizes: BTreeMap<(u64, u64), usize> = BTreeMap::new();
        for (step, draw, _) in self.spans.keys() {
            *sizes.entry((*step, *draw)).or_default() += 1;
        }
        let mut sizes: Vec<_> = sizes.into_iter().enumerate().collect();
        sizes.sort_by(|(a, _), (b, _)| scattered(*a).total_cmp(&scattered(*b)));
        let (most, mut taken) = ((room / MIN_BYTES).max(1), 0);
        let kept: BTreeSet<(u64, u64)> = sizes
            .into_iter()
            .map(|(_, group)| group)
            .filter(|(_, size)| {
                let fits = taken == 0 || taken + size <= most;
                taken += if fits { *size } else { 0 };
                fits
            })
            .map(|(group, _)| group)
            .collect();
        self.spans.retain(|(step, draw, _), _| kept.contains(&(*step, *draw)));
        self.room = room / self.spans.len().max(1);
    }

    /// The first tokens of a completion, up to its bytes.
    pub fn tokens(&self, key: CompletionKey, lines: &mut Lines) -> Option<TokensView> {
        let record: TokenRecord = lines.at(*self.spans.get(&key)?)?;
        let mut left = self.room;
        let within = record.pieces.iter().take_while(|piece| {
            let bytes = NUMBER_BYTES + piece.chars().map(cost).sum::<usize>();
            let fits = bytes <= left;
            left = left.saturating_sub(bytes);
            fits
        });
        let count = within.count();
        let numbers =
            |column: &[Option<f32>]| -> Vec<Number> { column.iter().take(count).copied().map(number).collect() };
        let masked = record.mask.iter().take(count).enumerate();
        Some(TokensView {
            sampler: numbers(&record.sampler_logp),
            trainer: record.trainer_logp.as_deref().map(numbers),
            mismatch: record.mismatch.as_deref().map(numbers),
            advantage: OneOrEach::new(numbers(&record.advantage)),
            masked: masked.filter(|(_, kept)| **kept == 0).map(|(at, _)| at).collect(),
            left_out: record.tokens.saturating_sub(count),
            pieces: record.pieces.into_iter().take(count).collect(),
        })
    }
}

impl OneOrEach {
    fn new(each: Vec<Number>) -> Self {
        match each.first() {
            Some(first) if each.iter().all(|other| other == first) => Self::One(*first),
            _ => Self::Each(each),
        }
    }
}

/// A number of three significant digits.
fn number(value: Option<f32>) -> Number {
    let rounded = value.and_then(|value| format!("{value:.*e}", DIGITS - 1).parse().ok());
    rounded.into()
}
