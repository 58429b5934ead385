//! What advantages are computed from.

/// What is known of the completions of a step that have a reward, one entry each.
#[derive(Clone, Copy, Debug)]
pub struct AdvantageInputs<'a> {
    /// Reward of every token.
    pub rewards: &'a [Vec<f64>],
    /// Which tokens are scored.
    pub masks: &'a [Vec<bool>],
    /// The group each belongs to: completions of one prompt.
    pub groups: &'a [u64],
    /// Which are the only ones with a reward in a group of several: there is nothing to compare them with. Empty
    /// without any.
    pub lone: &'a [bool],
    /// Reward of the greedy completion of its prompt; empty without one.
    pub baselines: &'a [f64],
    /// A critic's value of every token; empty without a critic.
    pub values: &'a [Vec<f64>],
}

impl AdvantageInputs<'_> {
    /// Each completion's reward: the sum over its tokens.
    #[must_use]
    pub fn sequence_rewards(&self) -> Vec<f64> {
        self.rewards.iter().map(|own| own.iter().sum()).collect()
    }

    /// Whether it is the only one with a reward in a group of several.
    #[must_use]
    pub fn is_lone(&self, completion: usize) -> bool {
        self.lone.get(completion).copied().unwrap_or(false)
    }

    /// Number of scored tokens of each.
    #[must_use]
    pub fn lengths(&self) -> Vec<usize> {
        let scored = |mask: &Vec<bool>| mask.iter().filter(|m| **m).count();
        self.masks.iter().map(scored).collect()
    }

    /// One number a completion, repeated for each of its tokens.
    #[must_use]
    pub fn expand(&self, values: &[f64]) -> Vec<Vec<f64>> {
        let of = |(mask, value): (&Vec<bool>, &f64)| vec![*value; mask.len()];
        self.masks.iter().zip(values).map(of).collect()
    }
}
