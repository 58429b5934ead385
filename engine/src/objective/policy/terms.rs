//! What a policy loss sees of the tokens, and what it returns.

use crate::objective::sequence_reduction::SequenceReduction;
use crate::objective::token_loss::{Metric, Reduce, TokenInputs, token_mean};
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

/// What the probability ratio is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceSamplingLevel {
    /// Each token.
    Token,
    /// The sequence: the geometric mean of its tokens' ratios (GSPO).
    Sequence,
    /// The same in value; each token's gradient goes to itself alone (GSPO-token).
    SequenceToken,
    /// The sequence as one action: the product of its tokens' ratios (RLOO).
    SequenceProduct,
}

/// Per-token loss and what happened, `[tokens]` each.
#[derive(Clone, Debug)]
pub struct PolicyTerms {
    /// To be minimised.
    pub loss: Tensor<1>,
    /// 1 where the ratio was clipped.
    pub clipped: Tensor<1>,
    /// 1 where the loss was held back on the other side: by the dual clip, or by GMPO's clip of negative advantages.
    pub clipped_lower: Tensor<1>,
    /// What the loss reports of its own.
    pub metrics: Vec<Metric>,
}

/// What a policy term looks at, `[tokens]` each.
pub(in crate::objective) struct Ratios<'a> {
    /// Log-prob under the current policy.
    pub logp: Tensor<1>,
    /// logp − old, token by token.
    pub difference: Tensor<1>,
    /// Its exponent at the configured level, clamped to ±20.
    pub log_ratio: Tensor<1>,
    /// What is known of the tokens.
    pub inputs: &'a TokenInputs,
    /// Where sequences begin and end, for losses that do not separate.
    pub segments: Option<&'a SequenceReduction>,
    /// What the ratio is of.
    pub level: ImportanceSamplingLevel,
}

impl Ratios<'_> {
    /// Where sequences begin and end.
    pub fn segments(&self) -> &SequenceReduction {
        self.segments
            .expect("a loss that does not separate gets whole sequences")
    }

    /// A mean over what has a ratio: tokens, or sequences where all tokens of one have the same.
    pub fn mean(&self, name: &'static str, values: Tensor<1>) -> Metric {
        match self.level {
            ImportanceSamplingLevel::Token | ImportanceSamplingLevel::SequenceToken => {
                token_mean(name, values)
            }
            ImportanceSamplingLevel::Sequence | ImportanceSamplingLevel::SequenceProduct => {
                self.sequence_mean(name, values)
            }
        }
    }

    /// A mean over sequences of their tokens' means.
    pub fn sequence_mean(&self, name: &'static str, values: Tensor<1>) -> Metric {
        Metric {
            name,
            reduce: Reduce::SequenceMean,
            sum: self.segments().mean(values.inner()).sum(),
        }
    }
}
