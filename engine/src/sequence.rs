//! A sequence that is trained on or scored, and what is known of its scored tokens.

/// A sequence and the tokens of it that are scored.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    /// Prompt and completion.
    pub tokens: Vec<u32>,
    /// Positions whose next token is scored, ascending. The last position has no next token; it is scored for its
    /// entropy alone.
    pub positions: Vec<usize>,
    /// Weight of each scored token: mask and normaliser in one.
    pub weights: Vec<f64>,
    /// Advantage of each; zeros where empty.
    pub advantages: Vec<f64>,
    /// Log-prob of each under the policy the update starts from; the current one's own where empty.
    pub old_logp: Vec<f32>,
    /// Log-prob of each under the reference policy, where one is used.
    pub ref_logp: Vec<f32>,
    /// Log-prob of each under the distribution that it was drawn from, where the loss looks at it.
    pub sampler_logp: Vec<f32>,
    /// Importance-sampling correction of each; 1 where empty.
    pub correction: Vec<f64>,
    /// 1 for those that the policy term keeps; all where empty.
    pub keep: Vec<f64>,
    /// 1 for those that the objective has chosen out of the whole step; none where empty.
    pub chosen: Vec<f64>,
    /// Weight of each one's entropy in the loss; no bonus where empty.
    pub bonus: Vec<f64>,
    /// The critic's value of each before its update, where a critic is updated.
    pub values: Vec<f32>,
    /// What each turned out to be worth, where a critic is updated.
    pub returns: Vec<f64>,
    /// Weight of each in the value loss, where that is another than `weights`: with a critic that shares the policy's trunk.
    pub value_weights: Vec<f64>,
    /// Which sample it is.
    pub id: SampleId,
}

/// Which sample a sequence is, whatever batch it stands in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SampleId {
    /// Index of its prompt among the run's draws.
    pub prompt_index: u64,
    /// Index in its group.
    pub sample: usize,
}

impl Sequence {
    /// A sequence whose completion is scored and nothing known of it yet.
    #[must_use]
    pub fn completion(prompt: &[u32], completion: &[u32]) -> Self {
        let positions = (prompt.len() - 1..prompt.len() - 1 + completion.len()).collect();
        Self {
            tokens: [prompt, completion].concat(),
            positions,
            ..Self::default()
        }
    }

    /// The token that a position predicts; 0 behind the last one.
    #[must_use]
    pub fn target(&self, position: usize) -> u32 {
        self.tokens.get(position + 1).copied().unwrap_or(0)
    }
}
