//! The rows of a batch sorted by the experts that were chosen for them.

use crate::shapes::int_tensor;
use burn::tensor::{Device, Int, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// The choices of a batch's tokens, sorted by expert. Choice j of token t has index `t · per_token + j`.
#[derive(Clone, Debug)]
pub struct ExpertRows {
    per_token: usize,
    starts: Arc<[usize]>,
    choices: Arc<[u32]>,
    places: Arc<[u32]>,
    indices: [Tensor<1, Int>; 2],
}

impl ExpertRows {
    /// Sorts choices: `experts[t · per_token + j]` is the index of the j-th expert of token t, below `count`. Rows of
    /// one expert keep the order of their tokens.
    pub fn new(experts: &[u32], per_token: usize, count: usize, device: &Device) -> Self {
        let mut starts = vec![0; count + 1];
        for &expert in experts {
            starts[expert as usize + 1] += 1;
        }
        for expert in 0..count {
            starts[expert + 1] += starts[expert];
        }
        let mut next = starts.clone();
        let mut choices = vec![0; experts.len()];
        let mut places = vec![0; experts.len()];
        for (choice, &expert) in experts.iter().enumerate() {
            let row = next[expert as usize];
            next[expert as usize] += 1;
            choices[row] = choice as u32;
            places[choice] = row as u32;
        }
        let tokens = choices.iter().map(|&c| c as i32 / per_token as i32).collect();
        let order = places.iter().map(|&p| p as i32).collect();
        Self {
            per_token,
            indices: [tokens, order].map(|values| int_tensor(values, device)),
            starts: starts.into(),
            choices: choices.into(),
            places: places.into(),
        }
    }

    /// Number of sorted rows: choices of all tokens.
    pub fn rows(&self) -> usize {
        self.choices.len()
    }

    /// Choices of each token.
    #[inline]
    pub fn per_token(&self) -> usize {
        self.per_token
    }

    /// First row of each expert, and the end of the last: `[experts + 1]`.
    #[inline]
    pub fn starts(&self) -> &[usize] {
        &self.starts
    }

    /// The choice of each sorted row.
    #[inline]
    pub fn choices(&self) -> &[u32] {
        &self.choices
    }

    /// The sorted row of each choice.
    #[inline]
    pub fn places(&self) -> &[u32] {
        &self.places
    }

    /// The token of each sorted row, and the sorted row of each choice, on the device: `[rows]` each.
    pub fn indices(&self) -> &[Tensor<1, Int>; 2] {
        &self.indices
    }

    /// Rows of each expert.
    pub fn counts(&self) -> Vec<usize> {
        self.groups().map(|(_, rows)| rows.len()).collect()
    }

    /// Experts and their rows.
    pub fn groups(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let rows = self.starts.windows(2).map(|pair| pair[0]..pair[1]);
        rows.enumerate()
    }

    /// Experts that have rows, and their rows.
    pub fn used(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        self.groups().filter(|(_, rows)| !rows.is_empty())
    }

    /// The token and the expert of each sorted row.
    pub fn tokens_and_experts(&self) -> impl Iterator<Item = (usize, usize)> {
        self.groups().flat_map(move |(expert, rows)| rows.map(move |row| (self.token(row), expert)))
    }

    /// The token of a sorted row.
    #[inline]
    pub fn token(&self, row: usize) -> usize {
        self.choices[row] as usize / self.per_token
    }
}

/// The rows that a product with experts reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertInput {
    /// A row a token, which each of its experts reads.
    Tokens,
    /// A row a choice, sorted.
    Sorted,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_an_expert_lie_one_behind_the_other_in_the_order_of_tokens() {
        let rows = ExpertRows::new(&[2, 0, 0, 3, 2, 0], 2, 4, &Device::flex());
        assert_eq!(rows.counts(), [3, 0, 2, 1]);
        assert_eq!(&rows.choices[..], [1, 2, 5, 0, 4, 3]);
        let places: Vec<(usize, usize)> = rows.tokens_and_experts().collect();
        let expected = [(0, 0), (1, 0), (2, 0), (0, 2), (2, 2), (1, 3)];
        assert_eq!(places, expected);
        for (choice, &place) in rows.places.iter().enumerate() {
            assert_eq!(rows.choices[place as usize] as usize, choice);
        }
    }
}
