//! A batch cut into micro-batches that cost about the same, none above its token budget.

use super::Sequence;
use super::partition::{Capacity, best_fit, by_size, largest_differencing, longest_first};
use firebrick_core::world::deal::balanced;
use firebrick_core::{Error, Result};
use firebrick_models::attention::Grouping;
use firebrick_plan::Layout;

/// Costs are counted in this many parts of a token.
const COST_UNIT: f64 = 1024.0;

/// The most costly micro-batch over the mean one, or over the longest sequence, where they count as balanced.
const BALANCED: f64 = 1.05;

/// Limits of micro-batches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MicroBatchLimits {
    /// Most tokens of a micro-batch: real ones where they are packed, padding included where they are padded.
    pub max_tokens: usize,
    /// Most sequences of one, where a fixed micro-batch size is asked for.
    pub max_sequences: Option<usize>,
    /// Layout of the rows.
    pub layout: Layout,
    /// Cost of a key to a query, as a share of a token's cost without attention.
    pub key_cost: f64,
    /// The config key of the budget, for messages.
    pub key: &'static str,
}

/// Sequences of one optimizer step or one scoring pass, and the micro-batches that they are cut into.
#[derive(Clone, Debug)]
pub struct Batch<'a> {
    sequences: &'a [Sequence],
    micros: Vec<Vec<usize>>,
    cut: MicroBatchLimits,
}

/// Statistics of a division into micro-batches. Those of several batches add up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BatchStats {
    /// Micro-batches.
    pub micro_batches: usize,
    /// Tokens of the sequences.
    pub tokens: usize,
    /// Rows that matmuls, norms and the MLP work on.
    pub rows: usize,
    /// Rows that attention works on.
    pub attended: usize,
    /// Rows of the largest micro-batch.
    pub largest: usize,
    /// The budget that none of them exceeds.
    pub budget: usize,
    /// Cost of the most costly micro-batch over the mean one's; the worst of several batches.
    pub imbalance: f64,
}

impl BatchStats {
    /// Adds another batch's.
    pub fn absorb(&mut self, other: Self) {
        *self = Self {
            micro_batches: self.micro_batches + other.micro_batches,
            tokens: self.tokens + other.tokens,
            rows: self.rows + other.rows,
            attended: self.attended + other.attended,
            largest: self.largest.max(other.largest),
            budget: self.budget.max(other.budget),
            imbalance: self.imbalance.max(other.imbalance),
        };
    }

    /// Share of the rows of token-wise work that is padding.
    pub fn padding(&self) -> f64 {
        padding(self.tokens, self.rows)
    }

    /// Share of the rows of attention that is padding.
    pub fn attention_padding(&self) -> f64 {
        padding(self.tokens, self.attended)
    }
}

fn padding(tokens: usize, rows: usize) -> f64 {
    1.0 - tokens as f64 / rows.max(1) as f64
}

impl MicroBatchLimits {
    /// Cost of a sequence: its tokens, and every key for every query.
    fn cost(&self, length: usize) -> u64 {
        let length = length as f64;
        (COST_UNIT * length * (1.0 + self.key_cost * length)) as u64
    }

    /// Cost of a micro-batch of sequences of these lengths.
    fn micro_cost(&self, lengths: impl ExactSizeIterator<Item = usize>) -> u64 {
        match self.layout {
            Layout::Padded => lengths.len() as u64 * lengths.max().map_or(0, |width| self.cost(width)),
            Layout::Packed => lengths.map(|n| self.cost(n)).sum(),
        }
    }

    fn capacity(&self) -> Capacity {
        Capacity { size: self.max_tokens, count: self.max_sequences.unwrap_or(usize::MAX) }
    }
}

impl<'a> Batch<'a> {
    /// Cuts sequences into as few micro-batches as the budget allows, about equally costly, the largest first: memory
    /// that it takes is there for the others, and where it is too much, little work is lost. A sequence longer than the
    /// budget is refused.
    ///
    /// # Errors
    /// `Error::Budget` for a sequence that is longer than the budget, with its tokens and the key.
    pub fn pack(sequences: &'a [Sequence], cut: MicroBatchLimits) -> Result<Self> {
        Self::pack_for(sequences, cut, 1)
    }

    /// Packs for several ranks, each of which takes a part of the micro-batches ([`deal`](Self::deal)): a multiple of
    /// their number, if there are as many sequences. Every rank cuts the same.
    ///
    /// # Errors
    /// As [`pack`](Self::pack).
    pub fn pack_for(sequences: &'a [Sequence], cut: MicroBatchLimits, ranks: usize) -> Result<Self> {
        let lengths: Vec<usize> = sequences.iter().map(|s| s.tokens.len()).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest > cut.max_tokens {
            return Err(Error::Budget { tokens: longest, budget: cut.max_tokens, key: cut.key });
        }
        let mut micros = match cut.layout {
            Layout::Packed => packed(&lengths, cut, ranks),
            Layout::Padded => padded(&lengths, cut),
        };
        spread_out(&mut micros, &lengths, cut, ranks);
        for micro in &mut micros {
            // those of one length stand together
            micro.sort_by_key(|&i| (std::cmp::Reverse(lengths[i]), i));
        }
        let rows = |micro: &Vec<usize>| cut.layout.rows(micro.iter().map(|&i| lengths[i]));
        micros.sort_by_key(|micro| (std::cmp::Reverse(rows(micro)), micro.first().copied()));
        Ok(Self { sequences, micros, cut })
    }

    /// Indices of the sequences of each micro-batch.
    pub fn indices(&self) -> &[Vec<usize>] {
        &self.micros
    }

    /// The micro-batches of each of `ranks` ranks, by index: of about equal cost, in as few rounds as possible. Where
    /// there are too few, some ranks have none.
    pub fn deal(&self, ranks: usize) -> Vec<Vec<usize>> {
        let costs = self.micros.iter().map(|micro| self.cut.micro_cost(self.lengths(micro)));
        balanced(&costs.collect::<Vec<_>>(), ranks)
    }

    fn lengths(&self, micro: &[usize]) -> impl ExactSizeIterator<Item = usize> {
        micro.iter().map(|&i| self.sequences[i].tokens.len())
    }

    /// The sequences of each micro-batch.
    pub fn micros(&self) -> Vec<Vec<&'a Sequence>> {
        let micro = |indices: &Vec<usize>| indices.iter().map(|&i| &self.sequences[i]).collect();
        self.micros.iter().map(micro).collect()
    }

    /// Statistics of the division if packed sequences attend in these groups.
    pub fn stats(&self, grouping: Grouping) -> BatchStats {
        let mut stats =
            BatchStats { micro_batches: self.micros.len(), budget: self.cut.max_tokens, ..BatchStats::default() };
        let (mut most, mut sum) = (0, 0);
        for micro in &self.micros {
            let lengths: Vec<usize> = self.lengths(micro).collect();
            let rows = self.cut.layout.rows(lengths.iter().copied());
            stats.tokens += lengths.iter().sum::<usize>();
            stats.rows += rows;
            stats.largest = stats.largest.max(rows);
            stats.attended += match self.cut.layout {
                Layout::Padded => rows,
                Layout::Packed => grouping.split(&lengths).map(|group| group.sequences.len() * group.width).sum(),
            };
            let cost = self.cut.micro_cost(self.lengths(micro));
            (most, sum) = (cost.max(most), sum + cost);
        }
        let mean = sum as f64 / self.micros.len().max(1) as f64;
        stats.imbalance = if sum > 0 { most as f64 / mean } else { 1.0 };
        stats
    }
}

/// Any sequences together: as many micro-batches as best-fit decreasing needs, or one more where that leaves no room
/// for the balance. Differencing by cost breaks a budget that is all but used up; by tokens it hardly does, and costs
/// follow tokens closely; the greedy way keeps any bound. The first of these that is balanced is taken, or else the one
/// that comes closest.
fn packed(lengths: &[usize], cut: MicroBatchLimits, ranks: usize) -> Vec<Vec<usize>> {
    let capacity = cut.capacity();
    let costs: Vec<u64> = lengths.iter().map(|&n| cut.cost(n)).collect();
    let tokens: Vec<u64> = lengths.iter().map(|&n| n as u64).collect();
    let longest = costs.iter().copied().max().unwrap_or(0) as f64;
    let imbalance = |parts: &[Vec<usize>]| {
        let cost = |part: &Vec<usize>| part.iter().map(|&i| costs[i]).sum::<u64>();
        let most = parts.iter().map(cost).max().unwrap_or(0) as f64;
        let mean = costs.iter().sum::<u64>() as f64 / parts.len().max(1) as f64;
        most / mean.max(longest)
    };
    let mut best = best_fit(lengths, capacity);
    let fewest = best.len().next_multiple_of(ranks.max(1));
    if fewest > best.len()
        && let Some(more) = longest_first(&costs, lengths, fewest, capacity)
    {
        best = more;
    }
    // a fixed size is asked for to have as few as it allows
    let more = usize::from(cut.max_sequences.is_none());
    for parts in [fewest, fewest + ranks].into_iter().take(1 + more) {
        let greedy = longest_first(&costs, lengths, parts, capacity);
        let partitions = [largest_differencing(&costs, parts), largest_differencing(&tokens, parts)];
        for partition in partitions.into_iter().chain(greedy) {
            if capacity.hold_all(&partition, lengths) && imbalance(&partition) < imbalance(&best) {
                best = partition;
            }
            if imbalance(&best) <= BALANCED {
                return best;
            }
        }
    }
    best
}

/// Sequences of similar length together, the longest first: as few micro-batches as the budget allows, and of these
/// cuts the one whose most costly micro-batch costs least.
fn padded(lengths: &[usize], cut: MicroBatchLimits) -> Vec<Vec<usize>> {
    let order = by_size(lengths);
    let fewest = filled(&order, lengths, cut, u64::MAX);
    let cost = |micro: &Vec<usize>| cut.micro_cost(micro.iter().map(|&i| lengths[i]));
    let costs = |micros: &[Vec<usize>]| micros.iter().map(cost).max().unwrap_or(0);
    let (mut low, mut high) = (0, costs(&fewest));
    let mut best = fewest;
    while low < high {
        let middle = low.midpoint(high);
        let micros = filled(&order, lengths, cut, middle);
        if micros.len() <= best.len() && costs(&micros) <= middle {
            (best, high) = (micros, middle);
        } else {
            low = middle + 1;
        }
    }
    best
}

/// Micro-batches filled one after the other up to the budget and a cost.
fn filled(order: &[usize], lengths: &[usize], cut: MicroBatchLimits, most: u64) -> Vec<Vec<usize>> {
    let mut micros: Vec<Vec<usize>> = Vec::new();
    let mut width = 0;
    for &i in order {
        let fits = micros.last().is_some_and(|m| {
            let count = m.len() + 1;
            count.saturating_mul(width) <= cut.max_tokens
                && cut.max_sequences.is_none_or(|n| count <= n)
                && cut.cost(width).saturating_mul(count as u64) <= most
        });
        match micros.last_mut() {
            Some(micro) if fits => micro.push(i),
            _ => {
                width = lengths[i].max(1);
                micros.push(vec![i]);
            }
        }
    }
    micros
}

/// Cuts the most costly micro-batches in two until there are a multiple of `ranks`, or no micro-batch has two
/// sequences: none of the ranks is then idle while another works. Parts without sequences are dropped.
fn spread_out(micros: &mut Vec<Vec<usize>>, lengths: &[usize], cut: MicroBatchLimits, ranks: usize) {
    if ranks <= 1 {
        return;
    }
    micros.retain(|micro| !micro.is_empty());
    while !micros.len().is_multiple_of(ranks) {
        let cost = |micro: &Vec<usize>| cut.micro_cost(micro.iter().map(|&i| lengths[i]));
        let several = micros.iter_mut().filter(|micro| micro.len() > 1);
        let Some(most) = several.max_by_key(|micro| cost(micro)) else {
            return;
        };
        most.sort_by_key(|&i| (std::cmp::Reverse(lengths[i]), i));
        // alternately where they are packed, the longer ones together where they are padded
        let half = match cut.layout {
            Layout::Padded => most.split_off(most.len().div_ceil(2)),
            Layout::Packed => {
                let mut place = 0;
                most.extract_if(.., |_| {
                    place += 1;
                    place % 4 / 2 == 1
                })
                .collect()
            }
        };
        micros.push(half);
    }
}

#[cfg(test)]
mod tests;
