//! Placement and category of bytes, and their model.

use serde::{Deserialize, Serialize};

/// Placement of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Home {
    /// The device that computes.
    #[default]
    Device,
    /// Host memory. On a CPU backend, or where host and device share one memory, this frees nothing.
    Host,
}

impl Home {
    /// Both placements, in the order in which they are reported.
    pub const ALL: [Self; 2] = [Self::Device, Self::Host];

    /// Its name in files and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
        }
    }
}

/// Category of bytes.
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
    /// Constant memory of the backend and the program.
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

/// A model of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The model that is trained.
    Policy,
    /// The frozen model that KL terms compare with.
    Reference,
    /// The model that says what a state is worth, trained beside the policy.
    Critic,
    /// A frozen model whose score of a completion is part of its reward.
    RewardModel,
}

impl Role {
    /// All roles, in the order in which they are reported.
    pub const ALL: [Self; 4] = [Self::Policy, Self::Reference, Self::Critic, Self::RewardModel];

    /// Category of its weights.
    pub fn category(self) -> Category {
        match self {
            Self::Policy => Category::Parameters,
            Self::Reference => Category::Reference,
            Self::Critic => Category::Critic,
            Self::RewardModel => Category::RewardModel,
        }
    }

    /// Its name in files and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::Reference => "reference",
            Self::Critic => "critic",
            Self::RewardModel => "reward_model",
        }
    }
}

/// Holder of bytes: their category, placement and model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize)]
pub struct Account {
    /// Category of the bytes.
    pub category: Category,
    /// Placement of the bytes.
    pub home: Home,
    /// Their model.
    pub model: Role,
}

impl Account {
    /// Number of accounts.
    pub const COUNT: usize = Role::ALL.len() * Category::ALL.len() * Home::ALL.len();

    /// Its place among all accounts, below [`COUNT`](Self::COUNT).
    pub fn index(self) -> usize {
        let Self { category, home, model } = self;
        (model as usize * Category::ALL.len() + category as usize) * Home::ALL.len() + home as usize
    }

    /// Every account, in the order of their places.
    pub fn all() -> impl Iterator<Item = Self> {
        Role::ALL.into_iter().flat_map(|model| {
            Category::ALL
                .into_iter()
                .flat_map(move |category| Home::ALL.into_iter().map(move |home| Self { category, home, model }))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn categories_roles_and_homes_are_at_their_own_index() {
        for (i, category) in Category::ALL.into_iter().enumerate() {
            assert_eq!(category as usize, i);
            let json = serde_json::to_value(category).unwrap();
            assert_eq!(json, category.name());
        }
        for (i, role) in Role::ALL.into_iter().enumerate() {
            assert_eq!(role as usize, i);
            assert_eq!(serde_json::to_value(role).unwrap(), role.name());
        }
        for (i, home) in Home::ALL.into_iter().enumerate() {
            assert_eq!(home as usize, i);
            assert_eq!(serde_json::to_value(home).unwrap(), home.name());
        }
    }

    #[test]
    fn accounts_are_at_their_own_index() {
        for (index, account) in Account::all().enumerate() {
            assert_eq!(account.index(), index, "{account:?}");
        }
        assert_eq!(Account::all().count(), Account::COUNT);
    }
}
