//! A batch cut into micro-batches that cost about the same, none above its token budget.

use super::partition::{Size, best_fit, by_size, largest_differencing, longest_first};
use super::shared_prefix::Node;
use super::{Sequence, nodes};
use firebrick_core::world::deal::balanced;
use firebrick_core::{Error, Result};
use firebrick_models::attention::Grouping;
use firebrick_plan::Layout;
use std::ops::Range;

/// Costs are counted in this many parts of a token.
const COST_UNIT: f64 = 1024.0;

/// The most costly micro-batch over the mean one, or over the longest sequence, where they count as balanced.
const BALANCED: f64 = 1.05;

/// Where ranks balance, a tree whose cost is above this part of a rank's is cut at a run that its parts can repeat.
const CUT_COST: u64 = 4;

/// The most rows that the parts of such a tree repeat if none stay together, as a part of its rows.
const CUT_ROWS: usize = 4;

/// Limits of micro-batches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MicroBatchLimits {
    /// Most tokens of a micro-batch: real ones where they are packed, padding included where they are padded.
    pub max_tokens: usize,
    /// Most sequences of one, where a fixed micro-batch size is asked for.
    pub max_sequences: Option<usize>,
    /// How sequences lie in rows.
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
    /// Tokens of the sequences, each with its prefix.
    pub tokens: usize,
    /// Tokens whose rows are computed: a shared prefix counts once.
    pub unique_tokens: usize,
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
            unique_tokens: self.unique_tokens + other.unique_tokens,
            rows: self.rows + other.rows,
            attended: self.attended + other.attended,
            largest: self.largest.max(other.largest),
            budget: self.budget.max(other.budget),
            imbalance: self.imbalance.max(other.imbalance),
        };
    }

    /// Share of the rows of token-wise work that is padding.
    pub fn padding(&self) -> f64 {
        padding(self.unique_tokens, self.rows)
    }

    /// Share of the rows of attention that is padding.
    pub fn attention_padding(&self) -> f64 {
        padding(self.unique_tokens, self.attended)
    }
}

fn padding(tokens: usize, rows: usize) -> f64 {
    1.0 - tokens as f64 / rows.max(1) as f64
}

impl MicroBatchLimits {
    /// Cost of a sequence of this many tokens, with every key for every query.
    fn cost(&self, length: usize) -> u64 {
        self.cost_of(&(0..length))
    }

    /// Cost of the rows of a sequence at some positions.
    fn cost_of(&self, positions: &Range<usize>) -> u64 {
        (COST_UNIT * positions.len() as f64 * (1.0 + self.key_cost * positions.end as f64)) as u64
    }

    fn capacity(&self) -> Size {
        Size { rows: self.max_tokens, sequences: self.max_sequences.unwrap_or(usize::MAX) }
    }
}

/// Sequences that go to one micro-batch.
struct Item {
    sequences: Vec<usize>,
    size: Size,
    cost: u64,
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

    /// [`pack`](Self::pack) for several ranks, each of which takes a part of the micro-batches ([`deal`](Self::deal)): a
    /// multiple of their number, where there are as many sequences. Every rank cuts the same.
    ///
    /// # Errors
    /// As [`pack`](Self::pack).
    pub fn pack_for(sequences: &'a [Sequence], cut: MicroBatchLimits, ranks: usize) -> Result<Self> {
        let lengths: Vec<usize> = sequences.iter().map(|s| s.tokens.len()).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest > cut.max_tokens {
            return Err(Error::Budget { tokens: longest, budget: cut.max_tokens, key: cut.key });
        }
        let mut batch = Self { sequences, micros: Vec::new(), cut };
        batch.micros = match cut.layout {
            Layout::Packed | Layout::SharedPrefix => batch.packed(&batch.items(None), ranks),
            Layout::Padded => padded(&lengths, cut),
        };
        batch.spread_out(ranks);
        if cut.layout == Layout::SharedPrefix && ranks > 1 {
            batch.cut_for_balance(ranks);
        }
        let mut micros = std::mem::take(&mut batch.micros);
        for micro in &mut micros {
            batch.arrange(micro);
        }
        micros.sort_by_cached_key(|micro| (std::cmp::Reverse(batch.rows(micro)), micro.first().copied()));
        batch.micros = micros;
        Ok(batch)
    }

    /// Indices of the sequences of each micro-batch.
    pub fn indices(&self) -> &[Vec<usize>] {
        &self.micros
    }

    /// The micro-batches of each of `ranks` ranks, by index: of about equal cost, in as few rounds as possible. Where
    /// there are too few, some ranks have none.
    pub fn deal(&self, ranks: usize) -> Vec<Vec<usize>> {
        let costs: Vec<u64> = self.micros.iter().map(|micro| self.cost(micro)).collect();
        balanced(&costs, ranks)
    }

    /// The sequences of each micro-batch.
    pub fn micros(&self) -> Vec<Vec<&'a Sequence>> {
        self.micros.iter().map(|micro| self.of(micro)).collect()
    }

    fn of(&self, micro: &[usize]) -> Vec<&'a Sequence> {
        micro.iter().map(|&i| &self.sequences[i]).collect()
    }

    fn lengths(&self, micro: &[usize]) -> Vec<usize> {
        micro.iter().map(|&i| self.sequences[i].tokens.len()).collect()
    }

    /// Puts sequences next to each other that attend together: of one length, or with a common prefix.
    fn arrange(&self, micro: &mut [usize]) {
        let tokens = |i: usize| &self.sequences[i].tokens;
        match self.cut.layout {
            Layout::Packed | Layout::Padded => micro.sort_by_key(|&i| (std::cmp::Reverse(tokens(i).len()), i)),
            Layout::SharedPrefix => micro.sort_by(|&a, &b| tokens(a).cmp(tokens(b)).then(a.cmp(&b))),
        }
    }

    /// The forest of arranged sequences.
    fn nodes(&self, micro: &[usize]) -> Vec<Node> {
        nodes(&self.of(micro), self.cut.layout)
    }

    /// Tokens of a micro-batch's rows.
    fn unique_tokens(&self, micro: &[usize]) -> usize {
        self.nodes(micro).into_iter().map(|node| node.positions.len()).sum()
    }

    /// Rows of a micro-batch.
    fn rows(&self, micro: &[usize]) -> usize {
        match self.cut.layout {
            Layout::Padded => micro.len() * self.lengths(micro).into_iter().max().unwrap_or(0),
            Layout::Packed | Layout::SharedPrefix => self.unique_tokens(micro),
        }
    }

    /// Cost of a micro-batch.
    fn cost(&self, micro: &[usize]) -> u64 {
        let (cut, lengths) = (self.cut, self.lengths(micro));
        match cut.layout {
            Layout::Padded => lengths.len() as u64 * lengths.iter().max().map_or(0, |&width| cut.cost(width)),
            Layout::Packed | Layout::SharedPrefix => {
                self.nodes(micro).into_iter().map(|node| cut.cost_of(&node.positions)).sum()
            }
        }
    }

    /// Sizes and costs of the cut, where packed sequences attend in these groups.
    pub fn stats(&self, grouping: Grouping) -> BatchStats {
        let mut stats =
            BatchStats { micro_batches: self.micros.len(), budget: self.cut.max_tokens, ..BatchStats::default() };
        let (mut most, mut sum) = (0, 0);
        for micro in &self.micros {
            let lengths = self.lengths(micro);
            let rows = self.rows(micro);
            stats.tokens += lengths.iter().sum::<usize>();
            stats.unique_tokens += self.unique_tokens(micro);
            stats.rows += rows;
            stats.largest = stats.largest.max(rows);
            stats.attended += match self.cut.layout {
                Layout::Padded | Layout::SharedPrefix => rows,
                Layout::Packed => grouping.split(&lengths).map(|group| group.sequences.len() * group.width).sum(),
            };
            let cost = self.cost(micro);
            (most, sum) = (cost.max(most), sum + cost);
        }
        let mean = sum as f64 / self.micros.len().max(1) as f64;
        stats.imbalance = if sum > 0 { most as f64 / mean } else { 1.0 };
        stats
    }

    /// The sequences that stay together: those of a tree, divided where it is above the budget, or where its cost is
    /// above a limit and its parts repeat few rows.
    fn items(&self, limit: Option<u64>) -> Vec<Item> {
        let mut all: Vec<usize> = (0..self.sequences.len()).collect();
        if self.cut.layout == Layout::SharedPrefix {
            self.arrange(&mut all);
        }
        let nodes = self.nodes(&all);
        // what stays together under each node, its rows counted from the node's first
        let mut under: Vec<Vec<Item>> = nodes.iter().map(|_| Vec::new()).collect();
        let mut items = Vec::new();
        for (index, node) in nodes.iter().enumerate().rev() {
            let mut parts = std::mem::take(&mut under[index]);
            parts.reverse();
            if node.members.len() == 1 {
                parts.push(Item {
                    sequences: vec![all[node.members.start]],
                    size: Size { rows: 0, sequences: 1 },
                    cost: 0,
                });
            }
            let parts = self.joined(parts, &node.positions, limit);
            match node.parent {
                Some(parent) => under[parent].extend(parts.into_iter().rev()),
                None => items.extend(parts.into_iter().rev()),
            }
        }
        items.reverse();
        items
    }

    /// The parts behind a run together with it, in as few items as the budget allows.
    fn joined(&self, parts: Vec<Item>, run: &Range<usize>, limit: Option<u64>) -> Vec<Item> {
        let cost = self.cut.cost_of(run);
        let with_run = |sequences, size: Size, behind: u64| {
            let size = Size { rows: size.rows + run.len(), ..size };
            Item { sequences, size, cost: behind + cost }
        };
        let rows = parts.iter().map(|part| part.size.rows).sum::<usize>();
        let costs = parts.iter().map(|part| part.cost).sum::<u64>();
        let repeated = run.len() * parts.len().saturating_sub(1);
        if limit.is_some_and(|limit| costs > limit && repeated <= rows / CUT_ROWS) {
            return parts.into_iter().map(|part| with_run(part.sequences, part.size, part.cost)).collect();
        }
        let sizes: Vec<Size> = parts.iter().map(|part| part.size).collect();
        let most = self.cut.capacity();
        let join = |together: Vec<usize>| {
            let size = together.iter().fold(Size::default(), |sum, &i| sum.and(sizes[i]));
            let costs = together.iter().map(|&i| parts[i].cost).sum();
            let mut sequences: Vec<usize> = together.into_iter().flat_map(|i| parts[i].sequences.clone()).collect();
            self.arrange(&mut sequences);
            with_run(sequences, size, costs)
        };
        best_fit(&sizes, Size { rows: most.rows - run.end, ..most }).into_iter().map(join).collect()
    }

    /// Cuts trees at short runs too, which their parts repeat, where the busiest rank then has less to do: a system
    /// prompt of all sequences would leave one rank with everything.
    fn cut_for_balance(&mut self, ranks: usize) {
        let all = self.micros.iter().map(|micro| self.cost(micro)).sum::<u64>();
        let busiest = |batch: &Self| {
            let cost = |rank: Vec<usize>| rank.into_iter().map(|micro| batch.cost(&batch.micros[micro])).sum::<u64>();
            batch.deal(ranks).into_iter().map(cost).max()
        };
        let items = self.items(Some(all / (CUT_COST * ranks as u64)));
        let mut other = Self { micros: self.packed(&items, ranks), ..self.clone() };
        other.spread_out(ranks);
        if busiest(&other) < busiest(self) {
            *self = other;
        }
    }

    /// Any sequences together: as many micro-batches as best-fit decreasing needs, or one more where that leaves no
    /// room for the balance. Differencing by cost breaks a budget that is all but used up; by tokens it hardly does, and
    /// costs follow tokens closely; the greedy way keeps any bound. The first of these that is balanced is taken, or
    /// else the one that comes closest.
    fn packed(&self, items: &[Item], ranks: usize) -> Vec<Vec<usize>> {
        let costs: Vec<u64> = items.iter().map(|item| item.cost).collect();
        let sizes: Vec<Size> = items.iter().map(|item| item.size).collect();
        let parts = of_equal_cost(&costs, &sizes, self.cut, ranks);
        let sequences = |part: Vec<usize>| {
            let mut micro: Vec<usize> = part.into_iter().flat_map(|i| items[i].sequences.clone()).collect();
            self.arrange(&mut micro);
            micro
        };
        parts.into_iter().map(sequences).collect()
    }

    /// Cuts the most costly micro-batches in two until there are a multiple of `ranks`, or no micro-batch has two
    /// sequences: none of the ranks is then idle while another works. Parts without sequences are dropped.
    fn spread_out(&mut self, ranks: usize) {
        let micros = std::mem::take(&mut self.micros);
        let mut micros = self.within_budget(micros);
        micros.retain(|micro| !micro.is_empty());
        while ranks > 1 && !micros.len().is_multiple_of(ranks) {
            let several = (0..micros.len()).filter(|&i| micros[i].len() > 1);
            let Some(most) = several.max_by_key(|&i| self.cost(&micros[i])) else {
                break;
            };
            let mut kept = micros.swap_remove(most);
            let half = self.half(&mut kept);
            micros.extend(self.within_budget(vec![kept, half]));
        }
        self.micros = micros;
    }

    /// Cuts micro-batches in two that are above the budget after all: a run that more sequences share may be too short
    /// for a part of them.
    fn within_budget(&self, micros: Vec<Vec<usize>>) -> Vec<Vec<usize>> {
        if self.cut.layout != Layout::SharedPrefix {
            return micros;
        }
        let (mut within, mut rest) = (Vec::with_capacity(micros.len()), micros);
        while let Some(mut micro) = rest.pop() {
            if micro.len() > 1 && self.rows(&micro) > self.cut.max_tokens {
                rest.push(self.half(&mut micro));
                rest.push(micro);
            } else {
                within.push(micro);
            }
        }
        within
    }

    /// Takes about half of the sequences of a micro-batch: alternate ones where they are packed, the shorter ones where
    /// they are padded; whole trees or branches where it has several.
    fn half(&self, micro: &mut Vec<usize>) -> Vec<usize> {
        self.arrange(micro);
        if self.cut.layout == Layout::Padded {
            return micro.split_off(micro.len().div_ceil(2));
        }
        let nodes = self.nodes(micro);
        let children = |parent| nodes.iter().enumerate().filter(move |(_, node)| node.parent == parent);
        let mut branches: Vec<(usize, &Node)> = children(None).collect();
        while let [(index, node)] = branches[..]
            && node.members.len() > 1
        {
            branches = children(Some(index)).collect();
        }
        let taken = |i: usize| (i + 1) % 4 / 2 == 1;
        let [mut kept, mut half] = [Vec::new(), Vec::new()];
        for (i, (_, node)) in branches.into_iter().enumerate() {
            if taken(i) { &mut half } else { &mut kept }.extend_from_slice(&micro[node.members.clone()]);
        }
        *micro = kept;
        half
    }
}

/// Items in parts of about one cost: see [`Batch::packed`].
fn of_equal_cost(costs: &[u64], sizes: &[Size], cut: MicroBatchLimits, ranks: usize) -> Vec<Vec<usize>> {
    let capacity = cut.capacity();
    let rows: Vec<u64> = sizes.iter().map(|size| size.rows as u64).collect();
    let longest = costs.iter().copied().max().unwrap_or(0) as f64;
    let imbalance = |parts: &[Vec<usize>]| {
        let cost = |part: &Vec<usize>| part.iter().map(|&i| costs[i]).sum::<u64>();
        let most = parts.iter().map(cost).max().unwrap_or(0) as f64;
        let mean = costs.iter().sum::<u64>() as f64 / parts.len().max(1) as f64;
        most / mean.max(longest)
    };
    let mut best = best_fit(sizes, capacity);
    let fewest = best.len().next_multiple_of(ranks.max(1));
    if fewest > best.len()
        && let Some(more) = longest_first(costs, sizes, fewest, capacity)
    {
        best = more;
    }
    // a fixed size is asked for to have as few as it allows
    let more = usize::from(cut.max_sequences.is_none());
    for parts in [fewest, fewest + ranks].into_iter().take(1 + more) {
        let greedy = longest_first(costs, sizes, parts, capacity);
        let differencing = [largest_differencing(costs, parts), largest_differencing(&rows, parts)];
        for candidate in differencing.into_iter().chain(greedy) {
            if capacity.holds_all(&candidate, sizes) && imbalance(&candidate) < imbalance(&best) {
                best = candidate;
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
    let cost = |micro: &Vec<usize>| {
        let widths = micro.iter().map(|&i| lengths[i]);
        micro.len() as u64 * widths.max().map_or(0, |width| cut.cost(width))
    };
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

#[cfg(test)]
mod tests;
