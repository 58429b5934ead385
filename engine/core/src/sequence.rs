//! Sequences that are trained on or scored, and what is known of their tokens.

use firebrick_models::routing::Routes;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// Declares [`TokenColumns`], and what is done to all columns alike. A new column is one line here, and wherever it is
/// computed and used.
macro_rules! token_columns {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// Values of tokens by column: `None` if not computed. A rollout and a [`Sequence`] have columns of numbers, a
        /// micro-batch has them as tensors `[tokens]` without a graph.
        #[derive(Clone, Debug, Deserialize, Serialize)]
        pub struct TokenColumns<C> {
            $($(#[$doc])* pub $name: Option<C>,)+
        }

        impl<C> Default for TokenColumns<C> {
            fn default() -> Self {
                Self { $($name: None,)+ }
            }
        }

        impl<C> TokenColumns<C> {
            /// Every column that is there, converted.
            pub fn map<D>(&self, convert: impl Fn(&C) -> D) -> TokenColumns<D> {
                TokenColumns { $($name: self.$name.as_ref().map(&convert),)+ }
            }
        }

        impl TokenColumns<Vec<f64>> {
            /// Columns of sequences one behind the other; `counts` are their scored tokens. A column that one of them
            /// has, all have that score tokens.
            ///
            /// # Panics
            /// If a sequence lacks a column that another one has.
            pub fn concat(parts: &[&Self], counts: &[usize]) -> Self {
                Self { $($name: concat(stringify!($name), parts.iter().map(|part| &part.$name), counts),)+ }
            }
        }
    };
}

token_columns! {
    /// Weight of the token in the loss: mask and normaliser in one. The loss is the sum of weight · per-token loss.
    weight,
    /// Advantage; 0 where absent.
    advantage,
    /// Log-prob under the policy that the update starts from (`old_log_probs`); the current one's own (detached) where
    /// absent.
    old_logp,
    /// Log-prob under the reference policy (`ref_log_prob`).
    ref_logp,
    /// Log-prob under the distribution that the sampler drew the token from, after top-k, top-p and min-p: with what
    /// probability it was drawn. The trainer has no such distribution, so nothing of it is compared with this one.
    sampler_logp,
    /// Log-prob under the sampler's full distribution at the same temperature, before top-k, top-p and min-p: the one
    /// that the trainer computes too. Whatever asks whether sampler and trainer agree compares with it. (The ratio to
    /// `sampler_logp` is the product of the kept masses. It falls exponentially with length though nothing is off
    /// policy.)
    full_logp,
    /// Importance-sampling weight of the policy loss, and of it alone (`rollout_is_weights`); 1 where absent.
    correction,
    /// 1 for tokens that the policy loss keeps, 0 for the others; all are kept where absent.
    keep,
    /// 1 for tokens that the objective has chosen out of the whole optimizer step; none where absent.
    chosen,
    /// Weight of the token's entropy in the loss, the coefficient in it; no bonus where absent.
    bonus,
    /// The critic's value of the state that the token was drawn in, before its update.
    value,
    /// The return: what the critic learns.
    returns,
    /// Weight of the token in the value loss, where that is another than `weight`: with a critic that shares the
    /// policy's trunk.
    value_weight,
}

/// A column of sequences one behind the other.
fn concat<'c>(
    name: &str,
    parts: impl Iterator<Item = &'c Option<Vec<f64>>> + Clone,
    counts: &[usize],
) -> Option<Vec<f64>> {
    parts.clone().any(Option::is_some).then(|| {
        let values_of = |(part, &count): (&'c Option<Vec<f64>>, &usize)| {
            let values = part.as_deref().unwrap_or_default();
            assert!(
                values.len() == count,
                "the column `{name}` has {} values for {count} scored tokens of a sequence: a column is computed for \
                 every sequence or for none",
                values.len()
            );
            values
        };
        parts.zip(counts).flat_map(values_of).copied().collect()
    })
}

impl TokenColumns<Vec<f64>> {
    /// The columns of the tokens that a mask keeps.
    #[must_use]
    pub fn select(&self, mask: &[bool]) -> Self {
        self.map(|column| column.iter().zip(mask).filter(|(_, kept)| **kept).map(|(v, _)| *v).collect())
    }
}

/// Numbers of the scoring passes as a column.
pub fn column(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| f64::from(v)).collect()
}

/// A sequence and the tokens of it that are scored.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    /// Prompt and completion.
    pub tokens: Vec<u32>,
    /// Positions whose next token is scored, ascending. The last position has no next token; it is scored for its
    /// entropy alone.
    pub positions: Vec<usize>,
    /// Columns of the scored tokens, in the order of their positions.
    pub columns: TokenColumns<Vec<f64>>,
    /// Which sample it is.
    pub id: SampleId,
    /// The experts that its first tokens go through; routers choose for the others, and for all where absent.
    pub routes: Option<Arc<Routes>>,
}

/// Identity of a sequence's sample, the same in every batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SampleId {
    /// Index of its prompt among the run's draws.
    pub prompt_index: u64,
    /// Index in its group.
    pub sample: usize,
}

impl Sequence {
    /// A sequence whose completion is scored and nothing known of it yet.
    pub fn completion(prompt: &[u32], completion: &[u32]) -> Self {
        let scored: Range<usize> = prompt.len() - 1..prompt.len() - 1 + completion.len();
        Self { tokens: [prompt, completion].concat(), positions: scored.collect(), ..Self::default() }
    }

    /// The token that a position predicts; 0 behind the last one.
    pub fn target(&self, position: usize) -> u32 {
        self.tokens.get(position + 1).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns(weight: &[f64], advantage: Option<&[f64]>) -> TokenColumns<Vec<f64>> {
        TokenColumns {
            weight: Some(weight.to_vec()),
            advantage: advantage.map(<[f64]>::to_vec),
            ..TokenColumns::default()
        }
    }

    #[test]
    fn columns_of_sequences_stand_one_behind_the_other() {
        let (a, b) = (columns(&[1.0, 2.0], Some(&[0.5, -0.5])), columns(&[3.0], Some(&[0.0])));
        let joined = TokenColumns::concat(&[&a, &b], &[2, 1]);
        assert_eq!(joined.weight, Some(vec![1.0, 2.0, 3.0]));
        assert_eq!(joined.advantage, Some(vec![0.5, -0.5, 0.0]));
        assert_eq!(joined.ref_logp, None);
    }

    #[test]
    fn a_sequence_without_scored_tokens_needs_no_columns() {
        let (a, none) = (columns(&[1.0], None), TokenColumns::default());
        let joined = TokenColumns::concat(&[&none, &a], &[0, 1]);
        assert_eq!(joined.weight, Some(vec![1.0]));
    }

    #[test]
    #[should_panic(expected = "`advantage` has 0 values for 1 scored tokens")]
    fn a_column_that_one_sequence_lacks_is_refused() {
        let (a, b) = (columns(&[1.0], Some(&[0.5])), columns(&[3.0], None));
        let _ = TokenColumns::concat(&[&a, &b], &[1, 1]);
    }

    #[test]
    fn a_mask_selects_tokens_of_every_column() {
        let kept = columns(&[1.0, 2.0, 3.0], Some(&[4.0, 5.0, 6.0])).select(&[true, false, true]);
        assert_eq!(kept.weight, Some(vec![1.0, 3.0]));
        assert_eq!(kept.advantage, Some(vec![4.0, 6.0]));
    }
}
