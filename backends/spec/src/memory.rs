//! Where bytes live, and what they are held for.

use serde::{Deserialize, Serialize};

/// Where bytes live.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Home {
    /// The device that computes.
    #[default]
    Device,
    /// Host memory. On a CPU backend, or where host and device share one memory, this frees nothing.
    Host,
}

/// What bytes are held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Weights of the policy.
    Parameters,
    /// f32 copies of weights that an optimizer on the host keeps.
    MasterWeights,
    /// Accumulated gradients.
    Gradients,
    /// The optimizer's moments.
    Moments,
    /// Inputs that segments keep for their second run.
    KeptInputs,
    /// The graph of whatever segments are traced at the time.
    LiveGraph,
    /// Attention scores.
    Attention,
    /// The head's logits and their like, a chunk of rows at a time.
    Head,
    /// Keys and values of sequences that are being sampled.
    KvCache,
    /// Weights of the reference policy.
    Reference,
    /// Weights of the critic.
    Critic,
    /// Weights of reward models.
    RewardModel,
    /// Everything else that a phase needs: ids, masks, running activations, transfers.
    Buffers,
    /// Gathered weights and reduced gradients of several devices.
    Communication,
    /// What the backend and the program hold whatever runs.
    Overhead,
}

impl Category {
    /// All categories, in the order in which they are reported.
    pub const ALL: [Self; 15] = [
        Self::Parameters,
        Self::MasterWeights,
        Self::Gradients,
        Self::Moments,
        Self::KeptInputs,
        Self::LiveGraph,
        Self::Attention,
        Self::Head,
        Self::KvCache,
        Self::Reference,
        Self::Critic,
        Self::RewardModel,
        Self::Buffers,
        Self::Communication,
        Self::Overhead,
    ];

    /// Its name in files and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::MasterWeights => "master_weights",
            Self::Gradients => "gradients",
            Self::Moments => "moments",
            Self::KeptInputs => "kept_inputs",
            Self::LiveGraph => "live_graph",
            Self::Attention => "attention",
            Self::Head => "head",
            Self::KvCache => "kv_cache",
            Self::Reference => "reference",
            Self::Critic => "critic",
            Self::RewardModel => "reward_model",
            Self::Buffers => "buffers",
            Self::Communication => "communication",
            Self::Overhead => "overhead",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn categories_stand_at_their_own_index() {
        for (i, category) in Category::ALL.into_iter().enumerate() {
            assert_eq!(category as usize, i);
            let json = serde_json::to_value(category).unwrap();
            assert_eq!(json, category.name());
        }
    }
}
