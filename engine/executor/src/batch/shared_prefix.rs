//! Sequences that begin alike: their common prefix is computed once, before the other rows of each (`PrefixGrouper`,
//! arXiv:2506.05433; tree training in `AReaL`).
//!
//! A prefix ends before the first scored token of each sequence, so that every scored row belongs to one sequence: the
//! last token of a prompt, which predicts the first one of a completion, is a row of each completion.

use firebrick_core::sequence::Sequence;
use firebrick_models::routing::Routes;
use std::ops::Range;

/// Consecutive sequences with a common prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    /// Their indices.
    pub members: Range<usize>,
    /// Tokens of the prefix; 0 where a sequence shares none.
    pub prefix: usize,
}

/// Divides sequences into trees so that they have the fewest rows in all. Only neighbors share a prefix.
pub fn trees(sequences: &[&Sequence]) -> Vec<Tree> {
    let shared: Vec<usize> = sequences.windows(2).map(|pair| common_prefix(pair[0], pair[1])).collect();
    if sequences.is_empty() { Vec::new() } else { fewest_rows(&shared, 0..sequences.len()).0 }
}

/// The trees of some sequences, and the rows that they save. Sequences i and i + 1 share `shared[i]` tokens.
fn fewest_rows(shared: &[usize], members: Range<usize>) -> (Vec<Tree>, usize) {
    let between = members.start..members.end - 1;
    let Some(&prefix) = shared[between.clone()].iter().min() else {
        return (vec![Tree { members, prefix: 0 }], 0);
    };
    let together = prefix * between.len();
    let (mut trees, mut apart, mut start) = (Vec::new(), 0, members.start);
    let ends = between.filter(|&i| shared[i] == prefix).map(|i| i + 1);
    for end in ends.chain([members.end]) {
        let (part, saved) = fewest_rows(shared, start..end);
        trees.extend(part);
        (apart, start) = (apart + saved, end);
    }
    if together > apart { (vec![Tree { members, prefix }], together) } else { (trees, apart) }
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

    fn found(sequences: &[Sequence]) -> Vec<(Range<usize>, usize)> {
        let trees = trees(&sequences.iter().collect::<Vec<_>>());
        trees.into_iter().map(|tree| (tree.members, tree.prefix)).collect()
    }

    #[test]
    fn completions_of_a_prompt_share_all_of_it_but_its_last_token() {
        let group = |prompt: &[u32]| [sequence(prompt, &[7, 8]), sequence(prompt, &[7]), sequence(prompt, &[9, 9, 9])];
        let sequences = [group(&[1, 2, 3, 4]), group(&[1, 5, 6])].concat();
        assert_eq!(found(&sequences), [(0..3, 3), (3..6, 2)]);
    }

    #[test]
    fn identical_sequences_keep_their_scored_rows() {
        assert_eq!(found(&[sequence(&[1, 2, 3], &[4, 5]), sequence(&[1, 2, 3], &[4, 5])]), [(0..2, 2)]);
    }

    #[test]
    fn a_prefix_ends_before_the_first_scored_token_and_where_tokens_or_routes_differ() {
        let scored = |positions: &[usize]| Sequence {
            tokens: vec![1, 2, 3, 4],
            positions: positions.to_vec(),
            ..Sequence::default()
        };
        assert_eq!(found(&[scored(&[2]), scored(&[1, 2])]), [(0..2, 1)]);
        assert_eq!(found(&[scored(&[0]), scored(&[0])]), [(0..1, 0), (1..2, 0)]);
        assert_eq!(found(&[scored(&[]), scored(&[])]), [(0..2, 3)]);
        let routed = |choices: &[u16]| Sequence {
            routes: Some(Routes::from_rows(&choices.iter().map(std::slice::from_ref).collect::<Vec<_>>()).into()),
            ..scored(&[2])
        };
        assert_eq!(found(&[routed(&[5, 6]), routed(&[5, 6])]), [(0..2, 2)]);
        assert_eq!(found(&[routed(&[5, 6]), routed(&[5, 7])]), [(0..2, 1)]);
        assert_eq!(found(&[routed(&[5]), scored(&[2])]), [(0..1, 0), (1..2, 0)]);
    }

    #[test]
    fn a_longer_prefix_of_few_is_left_for_a_shorter_one_of_many_where_that_saves_more() {
        let system = [1; 50];
        let with = |user: u32, answer: u32| sequence(&[&system[..], &[user]].concat(), &[answer]);
        assert_eq!(found(&[with(2, 3), with(2, 4), with(5, 3), with(5, 4)]), [(0..4, 50)]);
        let prompt = [2; 200];
        let with = |user: u32, answer: u32| sequence(&[&[9], &[user], &prompt[..]].concat(), &[answer]);
        assert_eq!(found(&[with(2, 3), with(2, 4), with(5, 3), with(5, 4)]), [(0..2, 201), (2..4, 201)]);
    }

    #[test]
    fn nothing_is_divided_into_nothing() {
        assert_eq!(found(&[]), []);
        assert_eq!(found(&[sequence(&[1], &[])]), [(0..1, 0)]);
    }

    proptest! {
        #[test]
        fn trees_cover_the_sequences_in_their_order(tokens in prop::collection::vec(prop::collection::vec(0_u32..2, 1..8), 0..12)) {
            let mut sequences: Vec<Sequence> =
                tokens.into_iter().map(|tokens| Sequence { tokens, ..Sequence::default() }).collect();
            sequences.sort_by(|a, b| a.tokens.cmp(&b.tokens));
            let mut next = 0;
            for (members, prefix) in found(&sequences) {
                prop_assert_eq!(members.start, next);
                next = members.end;
                let first = &sequences[members.start].tokens;
                for sequence in &sequences[members] {
                    prop_assert!(prefix < sequence.tokens.len());
                    prop_assert_eq!(&sequence.tokens[..prefix], &first[..prefix]);
                }
            }
            prop_assert_eq!(next, sequences.len());
        }
    }
}
