//! Inputs of advantage estimators.

/// Data of a step's completions with rewards, one entry each.
#[derive(Clone, Copy, Debug)]
pub struct AdvantageInputs<'a> {
    /// Reward of every token.
    pub rewards: &'a [Vec<f64>],
    /// Mask of scored tokens.
    pub masks: &'a [Vec<bool>],
    /// Group of each: the completions of one prompt.
    pub groups: &'a [u64],
    /// True for the only completion with a reward in a group of several, which cannot be compared. Empty
    /// without any.
    pub lone: &'a [bool],
    /// Reward of the greedy completion of its prompt; empty without one.
    pub baselines: &'a [f64],
    /// A critic's value of every token; empty without a critic.
    pub values: &'a [Vec<f64>],
}

impl AdvantageInputs<'_> {
    /// Each completion's reward: the sum over its tokens.
    pub fn sequence_rewards(&self) -> Vec<f64> {
        self.rewards.iter().map(|rewards| rewards.iter().sum()).collect()
    }

    /// Returns true if it is the only one with a reward in a group of several.
    pub fn is_lone(&self, completion: usize) -> bool {
        self.lone.get(completion).copied().unwrap_or(false)
    }

    /// Number of scored tokens of each.
    pub fn lengths(&self) -> Vec<usize> {
        let scored = |mask: &Vec<bool>| mask.iter().filter(|m| **m).count();
        self.masks.iter().map(scored).collect()
    }

    /// Repeats one number per completion for each of its tokens.
    pub fn expand(&self, values: &[f64]) -> Vec<Vec<f64>> {
        let repeat = |(mask, value): (&Vec<bool>, &f64)| vec![*value; mask.len()];
        self.masks.iter().zip(values).map(repeat).collect()
    }
}
