//! Sequences that begin alike: a common prefix is computed once, before the other rows of each (`PrefixGrouper`,
//! arXiv:2506.05433; tree training in `AReaL`). Prefixes nest: a system prompt, the prompts behind it, the turns behind
//! each.
//!
//! A prefix ends before the first scored token of each sequence, so that every scored row belongs to one sequence: the
//! last token of a prompt, which predicts the first one of a completion, is a row of each completion.

use firebrick_core::sequence::Sequence;
use firebrick_models::routing::Routes;
use firebrick_plan::sharing_pays;
use std::ops::Range;

/// A run of a forest: tokens that consecutive sequences share, or those of one alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Indices of the sequences.
    pub members: Range<usize>,
    /// Positions of the tokens in each of them.
    pub positions: Range<usize>,
    /// The node before it in the sequences, by its smaller index.
    pub parent: Option<usize>,
}

impl Node {
    /// A whole sequence.
    pub(super) fn single(sequence: usize, tokens: usize) -> Self {
        Self { members: sequence..sequence + 1, positions: 0..tokens, parent: None }
    }
}

/// The forest of sequences with every shared run that pays ([`sharing_pays`]): depth-first, with a node for each sequence
/// that no other has. Only neighbors share a prefix.
pub fn forest(sequences: &[&Sequence]) -> Vec<Node> {
    let shared: Vec<usize> = sequences.windows(2).map(|pair| common_prefix(pair[0], pair[1])).collect();
    let lengths: Vec<usize> = sequences.iter().map(|sequence| sequence.tokens.len()).collect();
    let mut nodes = Vec::new();
    if !sequences.is_empty() {
        let mut trie = Trie::new(&shared, &lengths, 0..sequences.len());
        trie.choose(&mut vec![0]);
        trie.add_to(&mut nodes, 0, None);
    }
    nodes
}

/// The common prefixes of some sequences.
struct Trie {
    members: Range<usize>,
    /// Tokens that they begin with; all tokens of a single one.
    prefix: usize,
    /// Divided where neighbors share no more.
    parts: Vec<Trie>,
    /// For each prefix above, the empty one first: whether a run ends here if the last one ends there.
    ends: Vec<bool>,
}

impl Trie {
    /// Sequences i and i + 1 share `shared[i]` tokens.
    fn new(shared: &[usize], lengths: &[usize], members: Range<usize>) -> Self {
        let between = members.start..members.end - 1;
        let least = shared[between.clone()].iter().min();
        let prefix = *least.unwrap_or(&lengths[members.start]);
        let mut start = members.start;
        let divided = between.filter(|&i| shared[i] == prefix).map(|i| i + 1);
        let ends = divided.chain(least.map(|_| members.end));
        let parts = ends.map(|end| Self::new(shared, lengths, std::mem::replace(&mut start, end)..end)).collect();
        Self { members, prefix, parts, ends: Vec::new() }
    }

    /// Chooses the runs; gives the rows of the sequences behind each of the prefixes `above`.
    fn choose(&mut self, above: &mut Vec<usize>) -> Vec<usize> {
        let behind = |prefix: usize, above: &[usize]| above.iter().map(|end| prefix - end).collect::<Vec<_>>();
        if self.parts.is_empty() {
            self.ends = vec![true; above.len()];
            return behind(self.prefix, above);
        }
        above.push(self.prefix);
        let mut apart = vec![0; above.len()];
        for part in &mut self.parts {
            let rows = part.choose(above);
            apart.iter_mut().zip(rows).for_each(|(sum, rows)| *sum += rows);
        }
        above.pop();
        let rest = apart.pop().unwrap_or(0);
        let together = behind(self.prefix, above).into_iter().map(|rows| rows + rest);
        let rows = together.zip(apart).map(|(together, apart)| {
            let ends = sharing_pays(together as u64, apart as u64);
            self.ends.push(ends);
            if ends { together } else { apart }
        });
        rows.collect()
    }

    /// Adds the nodes behind a parent, where the last run ends at the prefix `above` of those above.
    fn add_to(&self, nodes: &mut Vec<Node>, above: usize, parent: Option<usize>) {
        let (mut above, mut parent) = (above, parent);
        if self.ends[above] {
            let first = parent.map_or(0, |parent: usize| nodes[parent].positions.end);
            nodes.push(Node { members: self.members.clone(), positions: first..self.prefix, parent });
            (above, parent) = (self.ends.len(), Some(nodes.len() - 1));
        }
        for part in &self.parts {
            part.add_to(nodes, above, parent);
        }
    }
}

/// Tokens that two sequences begin with, up to the first scored one and the last but one of each, on equal routes.
fn common_prefix(a: &Sequence, b: &Sequence) -> usize {
    let unscored = |s: &Sequence| s.positions.first().copied().unwrap_or(usize::MAX).min(s.tokens.len().max(1) - 1);
    let most = unscored(a).min(unscored(b));
    let row = |s: &Sequence, position: usize| -> Option<Vec<u16>> {
        let routes: &Routes = s.routes.as_ref()?;
        (position < routes.rows()).then(|| routes.row(position).to_vec())
    };
    let alike = |&position: &usize| a.tokens[position] == b.tokens[position] && row(a, position) == row(b, position);
    (0..most).take_while(alike).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sequence(prompt: &[u32], completion: &[u32]) -> Sequence {
        Sequence::completion(prompt, completion)
    }

    /// Members and positions of each node, and its parent.
    type Found = (Range<usize>, Range<usize>, Option<usize>);

    fn found(sequences: &[Sequence]) -> Vec<Found> {
        let nodes = forest(&sequences.iter().collect::<Vec<_>>());
        nodes.into_iter().map(|node| (node.members, node.positions, node.parent)).collect()
    }

    /// Rows of the forest.
    fn rows(sequences: &[Sequence]) -> usize {
        found(sequences).into_iter().map(|(_, positions, _)| positions.len()).sum()
    }

    const PROMPT: [u32; 30] = [1; 30];

    #[test]
    fn completions_of_a_prompt_share_all_of_it_but_its_last_token() {
        let group = |prompt: &[u32]| [sequence(prompt, &[7, 8]), sequence(prompt, &[7]), sequence(prompt, &[9, 9, 9])];
        let sequences = [group(&PROMPT[..20]), group(&[5; 11])].concat();
        let expected = [
            (0..3, 0..19, None),
            (0..1, 19..22, Some(0)),
            (1..2, 19..21, Some(0)),
            (2..3, 19..23, Some(0)),
            (3..6, 0..10, None),
            (3..4, 10..13, Some(4)),
            (4..5, 10..12, Some(4)),
            (5..6, 10..14, Some(4)),
        ];
        assert_eq!(found(&sequences), expected);
    }

    #[test]
    fn prefixes_nest() {
        let system = [9; 40];
        let with = |user: &[u32], answer: u32| sequence(&[&system[..], user].concat(), &[answer]);
        let turn = |first: &[u32], second: u32| with(&[first, &[second; 20]].concat(), 3);
        let sequences = [
            turn(&[1; 20], 4),
            turn(&[1; 20], 4),
            turn(&[1; 20], 5),
            turn(&[1; 20], 5),
            with(&[2; 20], 3),
            with(&[2; 20], 4),
        ];
        let shared: Vec<Found> = found(&sequences).into_iter().filter(|(members, ..)| members.len() > 1).collect();
        let expected = [
            (0..6, 0..40, None),
            (0..4, 40..60, Some(0)),
            (0..2, 60..79, Some(1)),
            (2..4, 60..79, Some(1)),
            (4..6, 40..59, Some(0)),
        ];
        assert_eq!(found(&sequences).len(), expected.len() + sequences.len());
        for (node, expected) in shared.into_iter().zip(expected) {
            assert_eq!((node.0, node.1), (expected.0, expected.1));
        }
        assert_eq!(rows(&sequences), 40 + 20 + 2 * (19 + 2 * 2) + 19 + 2 * 2);
    }

    #[test]
    fn a_run_that_saves_little_is_part_of_those_behind_it() {
        let pair = |shared: usize| [7, 8].map(|answer| sequence(&vec![1; shared + 1], &[answer; 79]));
        // 8 of 176 rows are not enough, 9 of 178 are
        assert_eq!(found(&pair(8)).len(), 2);
        assert_eq!(found(&pair(9)).len(), 3);
        // a template's tokens begin every prompt
        let prompt = |token: u32, answer: u32| sequence(&[&[0; 3][..], &[token; 20]].concat(), &[answer; 50]);
        let sequences: Vec<Sequence> = (1..9).flat_map(|token| [prompt(token, 1), prompt(token, 2)]).collect();
        let roots = found(&sequences).into_iter().filter(|(members, _, parent)| members.len() == 2 && parent.is_none());
        assert_eq!(roots.count(), 8);
    }

    #[test]
    fn identical_sequences_keep_their_scored_rows() {
        let same = sequence(&PROMPT, &[4, 5]);
        assert_eq!(found(&[same.clone(), same])[0], (0..2, 0..29, None));
    }

    #[test]
    fn a_prefix_ends_before_the_first_scored_token_and_where_tokens_or_routes_differ() {
        let scored = |positions: &[usize]| Sequence {
            tokens: PROMPT.to_vec(),
            positions: positions.to_vec(),
            ..Sequence::default()
        };
        let prefix = |a: Sequence, b: Sequence| Some(found(&[a, b])[0].clone()).filter(|n| n.0 == (0..2)).map(|n| n.1);
        assert_eq!(prefix(scored(&[22]), scored(&[21, 22])), Some(0..21));
        assert_eq!(prefix(scored(&[0]), scored(&[0])), None);
        assert_eq!(prefix(scored(&[]), scored(&[])), Some(0..29));
        let routed = |choice: u16| {
            let choices: Vec<u16> = (0..22).map(|row| if row == 21 { choice } else { 5 }).collect();
            let rows: Vec<&[u16]> = choices.iter().map(std::slice::from_ref).collect();
            Sequence { routes: Some(Routes::from_rows(&rows).into()), ..scored(&[22]) }
        };
        assert_eq!(prefix(routed(6), routed(6)), Some(0..22));
        assert_eq!(prefix(routed(6), routed(7)), Some(0..21));
        assert_eq!(prefix(routed(5), scored(&[22])), None);
    }

    #[test]
    fn nothing_is_divided_into_nothing() {
        assert_eq!(found(&[]), []);
        assert_eq!(found(&[sequence(&[1], &[])]), [(0..1, 0..1, None)]);
    }

    /// Rows of a forest: a run ends at a common prefix where that pays.
    fn chosen(shared: &[usize], lengths: &[usize], members: Range<usize>, before: usize) -> usize {
        let between = members.start..members.end - 1;
        let Some(&prefix) = shared[between.clone()].iter().min() else {
            return lengths[members.start] - before;
        };
        let parts = |before: usize| -> usize {
            let ends = between.clone().filter(|&i| shared[i] == prefix).map(|i| i + 1).chain([members.end]);
            let starts = std::iter::once(members.start).chain(ends.clone());
            starts.zip(ends).map(|(start, end)| chosen(shared, lengths, start..end, before)).sum()
        };
        let (together, apart) = (prefix - before + parts(prefix), parts(before));
        if sharing_pays(together as u64, apart as u64) { together } else { apart }
    }

    /// Sequences of few kinds of long pieces, so that they share prefixes of several lengths, some scored.
    fn branching() -> impl Strategy<Value = Vec<Sequence>> {
        let pieces = prop::collection::vec((0_u32..2, 1_usize..12), 1..7);
        let sequence = (pieces, prop::option::of(0_usize..40)).prop_map(|(pieces, scored)| {
            let tokens: Vec<u32> = pieces.into_iter().flat_map(|(token, count)| vec![token; count]).collect();
            let positions = scored.filter(|&position| position < tokens.len()).into_iter().collect();
            Sequence { tokens, positions, ..Sequence::default() }
        });
        prop::collection::vec(sequence, 0..12)
    }

    proptest! {
        #[test]
        fn a_forest_expands_to_its_sequences_and_shares_where_that_pays(mut sequences in branching()) {
            sequences.sort_by(|a, b| a.tokens.cmp(&b.tokens));
            let nodes = found(&sequences);
            let (mut paths, mut leaves) = (Vec::<Vec<u32>>::new(), Vec::new());
            for (index, (members, positions, parent)) in nodes.iter().enumerate() {
                prop_assert!(parent.is_none_or(|parent| parent < index));
                let mut path = parent.map_or(Vec::new(), |parent: usize| paths[parent].clone());
                prop_assert_eq!(path.len(), positions.start);
                path.extend(&sequences[members.start].tokens[positions.clone()]);
                for member in &sequences[members.clone()] {
                    prop_assert_eq!(&member.tokens[..path.len()], &path[..]);
                    let unscored = member.positions.first().is_none_or(|&scored| path.len() <= scored);
                    prop_assert!(members.len() == 1 || (unscored && path.len() < member.tokens.len()));
                }
                if members.len() == 1 {
                    prop_assert_eq!(&path, &sequences[members.start].tokens);
                    leaves.push(members.start);
                }
                paths.push(path);
            }
            prop_assert_eq!(leaves, (0..sequences.len()).collect::<Vec<_>>());
            if !sequences.is_empty() {
                let shared: Vec<usize> =
                    sequences.windows(2).map(|pair| common_prefix(&pair[0], &pair[1])).collect();
                let lengths: Vec<usize> = sequences.iter().map(|s| s.tokens.len()).collect();
                prop_assert_eq!(rows(&sequences), chosen(&shared, &lengths, 0..sequences.len(), 0));
            }
        }
    }
}
