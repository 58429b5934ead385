//! `samples.jsonl`: rewards of all samples by step, and the texts of selected groups.

use super::excerpt::{Excerpt, TRUNCATED};
use super::lines::{self, Lines, ReadResult, Span};
use super::numbers::Number;
use super::reader::{AnswerReader, MAX_ANSWER_BYTES};
use super::selection::{GroupFacts, Tag, select};
use super::text::Text;
use super::tokens::{CompletionKey, TokenIndex, TokensView};
use firebrick_engine::Result;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

/// Most distinct rewards with a histogram row each.
const MAX_VALUES: usize = 12;

/// Rows of the histogram of more rewards.
const BINS: usize = 20;

/// Most columns of the histogram; beyond it, several steps share one.
const MAX_COLUMNS: usize = 500;

/// Longest prompt or completion, in bytes; a longer one is cut.
const MAX_SAMPLE_BYTES: usize = 16_384;

/// Texts of a run's selected samples, and statistics of all samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Samples {
    /// Samples of the run.
    pub total: usize,
    /// Groups of the run: the samples of one prompt in one step.
    pub total_groups: usize,
    /// Of all samples, those that ended at the length limit.
    pub truncated: usize,
    /// Of all groups, those of several samples with one reward.
    pub no_spread: usize,
    /// Shown samples.
    pub shown: usize,
    /// Longest uncut text, in bytes.
    pub longest_bytes: usize,
    /// Cut texts.
    pub cut: usize,
    /// Samples of the run with logged tokens.
    pub total_with_tokens: usize,
    /// Samples with shown tokens.
    pub with_tokens: usize,
    /// Shown groups, in the order of the run.
    pub groups: Vec<GroupView>,
}

/// The samples of one prompt.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupView {
    /// Training step.
    pub step: u64,
    /// Index of the prompt among the run's draws.
    pub draw: u64,
    /// Reasons for its selection.
    pub tags: BTreeSet<Tag>,
    /// The prompt.
    pub prompt: Text,
    /// Ground truth.
    pub answer: Text,
    /// Its samples.
    pub samples: Vec<SampleView>,
}

/// One completion.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SampleView {
    /// Index in the group.
    pub sample: u64,
    /// The completion.
    pub text: Text,
    /// Reward.
    pub reward: Number,
    /// Its parts.
    pub parts: Vec<(String, Number)>,
    /// Advantage of its tokens.
    pub advantage: Number,
    /// True if it ended at the length limit.
    pub truncated: bool,
    /// Completion tokens.
    pub tokens: u64,
    /// The answers that rules read in it, by the rule's name.
    pub read: Vec<(String, Option<Text>)>,
    /// Its tokens, if they were logged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by_token: Option<TokensView>,
}

/// Histogram of rewards by step.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RewardHistogram {
    /// Steps per column.
    pub steps_each: usize,
    /// The first step of every column.
    pub steps: Vec<u64>,
    /// The rewards if there are few; else the bounds of the rows, one more than rows.
    pub values: Vec<Number>,
    /// True if `values` are bounds.
    pub bounds: bool,
    /// Samples of each row, by column.
    pub counts: Vec<Vec<u32>>,
}

/// The fields of a line for the first pass.
#[derive(Deserialize)]
struct SampleSummary {
    step: u64,
    draw: u64,
    reward: Option<f64>,
    finish: String,
}

struct Row {
    reward: Option<f64>,
    truncated: bool,
    span: Span,
}

#[derive(Default)]
struct Index {
    groups: Vec<((u64, u64), Vec<Row>)>,
}

/// Limits of a run's samples in a report.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Samples.
    pub samples: usize,
    /// Approximate bytes of their texts.
    pub texts: usize,
    /// Approximate bytes of their tokens.
    pub tokens: usize,
}

/// The files of samples.
#[derive(Clone, Copy, Debug)]
pub struct Files<'a> {
    /// `samples.jsonl`.
    pub samples: &'a Path,
    /// `tokens.jsonl`.
    pub tokens: &'a Path,
}

/// Reads a run's samples, with their tokens in `tokens`.
pub fn read(
    files: Files<'_>,
    reader: &AnswerReader,
    limits: Limits,
    tokens: TokenIndex,
) -> Result<(Option<(Samples, RewardHistogram)>, ReadResult)> {
    let path = files.samples;
    let (index, result) = Index::read(path)?;
    if index.groups.is_empty() {
        return Ok((None, result));
    }
    let histogram = index.histogram();
    let samples = index.texts(files, reader, limits, tokens)?;
    Ok((Some((samples, histogram)), result))
}

impl Index {
    fn read(path: &Path) -> Result<(Self, ReadResult)> {
        let mut index = Self::default();
        let mut places: HashMap<(u64, u64), usize> = HashMap::new();
        let result = lines::read(path, |line: SampleSummary, span| {
            let groups = &mut index.groups;
            let place = *places.entry((line.step, line.draw)).or_insert_with(|| {
                groups.push(((line.step, line.draw), Vec::new()));
                groups.len() - 1
            });
            groups[place].1.push(Row { reward: line.reward, truncated: line.finish == TRUNCATED, span });
            true
        })?;
        index.groups.sort_by_key(|(key, _)| *key);
        Ok((index, result))
    }

    fn facts(&self, tokens: &BTreeSet<(u64, u64)>) -> Vec<GroupFacts> {
        let groups = self.groups.iter();
        groups
            .map(|(key, rows)| {
                let rewards: Vec<f64> = rows.iter().filter_map(|row| row.reward).collect();
                let equal = |pair: &[f64]| pair[0].partial_cmp(&pair[1]).is_some_and(Ordering::is_eq);
                let same = rewards.windows(2).all(equal);
                let mean = rewards.iter().sum::<f64>() / rewards.len() as f64;
                GroupFacts {
                    size: rows.len(),
                    truncated: rows.iter().filter(|row| row.truncated).count(),
                    mean: if mean.is_nan() { f64::NEG_INFINITY } else { mean },
                    no_spread: rewards.len() > 1 && same,
                    tokens: tokens.contains(key),
                }
            })
            .collect()
    }

    fn texts(
        &self,
        files: Files<'_>,
        reader: &AnswerReader,
        limits: Limits,
        mut tokens: TokenIndex,
    ) -> Result<Samples> {
        let facts = self.facts(&tokens.groups());
        let selected = select(&facts, limits.samples);
        let shown: usize = selected.keys().map(|&at| facts[at].size).sum();
        let longest = (limits.texts / (shown + 2 * selected.len()).max(1)).min(MAX_SAMPLE_BYTES);
        let mut samples = Samples {
            total: facts.iter().map(|group| group.size).sum(),
            total_groups: facts.len(),
            truncated: facts.iter().map(|group| group.truncated).sum(),
            no_spread: facts.iter().filter(|group| group.no_spread).count(),
            longest_bytes: longest,
            total_with_tokens: tokens.len(),
            ..Samples::default()
        };
        let groups = selected.keys().map(|&at| self.groups[at].0);
        tokens.keep(&groups.collect(), limits.tokens);
        let mut lines = Lines::open(files.samples)?;
        // without the file the index is empty
        let mut token_lines = match tokens.len() {
            0 => None,
            _ => Some(Lines::open(files.tokens)?),
        };
        for (at, tags) in selected {
            let ((step, draw), rows) = &self.groups[at];
            let rows: Vec<Excerpt> = rows.iter().filter_map(|row| lines.at(row.span)).collect();
            let Some(mut group) = group(tags, &rows, reader, longest) else {
                continue;
            };
            if let Some(lines) = &mut token_lines {
                for sample in &mut group.samples {
                    let key: CompletionKey = (*step, *draw, sample.sample);
                    sample.by_token = tokens.tokens(key, lines);
                    samples.with_tokens += usize::from(sample.by_token.is_some());
                }
            }
            samples.shown += group.samples.len();
            let texts = group.samples.iter().map(|sample| &sample.text);
            let cut = texts.chain([&group.prompt]);
            samples.cut += cut.filter(|text| matches!(text, Text::Cut { .. })).count();
            samples.groups.push(group);
        }
        Ok(samples)
    }

    fn histogram(&self) -> RewardHistogram {
        let groups = self.groups.iter();
        let rows = groups.flat_map(|((step, _), rows)| {
            let rewards = rows.iter().filter_map(|row| row.reward);
            rewards.map(|reward| (*step, reward))
        });
        let rows: Vec<(u64, f64)> = rows.collect();
        let steps: BTreeSet<u64> = rows.iter().map(|(step, _)| *step).collect();
        let steps: Vec<u64> = steps.into_iter().collect();
        let steps_each = steps.len().div_ceil(MAX_COLUMNS).max(1);
        let columns: HashMap<u64, usize> =
            steps.iter().enumerate().map(|(at, &step)| (step, at / steps_each)).collect();
        let (values, bounds) = rewards(&rows);
        let count = values.len() - usize::from(bounds && !values.is_empty());
        let mut counts = vec![vec![0; count]; steps.len().div_ceil(steps_each)];
        for (step, reward) in rows {
            let above = values.partition_point(|&value| value <= reward);
            counts[columns[&step]][above.saturating_sub(1).min(count - 1)] += 1;
        }
        RewardHistogram {
            steps_each,
            steps: steps.into_iter().step_by(steps_each).collect(),
            values: values.into_iter().map(Number::new).collect(),
            bounds,
            counts,
        }
    }
}

/// The rewards if there are few, else bounds between the smallest and the largest.
fn rewards(rows: &[(u64, f64)]) -> (Vec<f64>, bool) {
    let mut values: Vec<f64> = Vec::new();
    for &(_, reward) in rows {
        if values.len() <= MAX_VALUES && !values.contains(&reward) {
            values.push(reward);
        }
    }
    if values.len() <= MAX_VALUES {
        values.sort_by(f64::total_cmp);
        return (values, false);
    }
    let fold = |from, pick: fn(f64, f64) -> f64| rows.iter().map(|row| row.1).fold(from, pick);
    let (low, high) = (fold(f64::INFINITY, f64::min), fold(f64::NEG_INFINITY, f64::max));
    let width = (high - low) / BINS as f64;
    let bounds = (0..=BINS).map(|at| low + width * at as f64);
    (bounds.collect(), true)
}

fn group(tags: BTreeSet<Tag>, rows: &[Excerpt], reader: &AnswerReader, longest: usize) -> Option<GroupView> {
    let first = rows.first()?;
    Some(GroupView {
        step: first.step,
        draw: first.draw,
        tags,
        prompt: Text::new(&first.prompt, longest),
        answer: Text::new(&first.answer, MAX_ANSWER_BYTES),
        samples: rows.iter().map(|row| sample(row, reader, longest)).collect(),
    })
}

fn sample(row: &Excerpt, reader: &AnswerReader, longest: usize) -> SampleView {
    let parts = row.reward_parts.iter();
    SampleView {
        sample: row.sample,
        text: Text::new(&row.completion, longest),
        reward: row.reward.into(),
        parts: parts.map(|(name, value)| (name.clone(), (*value).into())).collect(),
        advantage: row.advantage.into(),
        truncated: row.is_truncated(),
        tokens: row.tokens,
        read: reader.read(row),
        by_token: None,
    }
}
