//! The entropy bonus, and the selection of the tokens of highest entropy (arXiv:2506.01939).

/// A bonus for the entropy of the policy's distributions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EntropyBonus {
    /// With one weight (verl's `entropy_coeff`).
    Fixed {
        /// The weight.
        coef: f64,
    },
    /// With a weight that follows the entropy.
    Adaptive(AdaptiveEntropy),
}

/// A weight that moves by `delta` an optimizer step: up while the entropy is at or below its target, down while it is
/// above, where there is no bonus at all (Skywork-OR1, arXiv:2505.22312; TRL's `use_adaptive_entropy`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptiveEntropy {
    /// The weight that it starts from, between `min` and `max`.
    pub start: f64,
    /// Target entropy, in nats.
    pub target: f64,
    /// Least weight.
    pub min: f64,
    /// Largest weight.
    pub max: f64,
    /// Change an optimizer step.
    pub delta: f64,
}

/// Mask of a step's tokens with an entropy at or above the quantile 1 − `share`, linearly interpolated (TRL's
/// `get_high_entropy_mask`). The threshold is rounded to f32, as scores are.
pub fn high_entropy_mask(entropies: &[f64], share: f64) -> Vec<bool> {
    let mut sorted: Vec<f32> = entropies.iter().map(|&h| h as f32).collect();
    sorted.sort_by(f32::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else {
        return Vec::new();
    };
    let place = (1.0 - share).clamp(0.0, 1.0) * last as f64;
    let (below, above) = (f64::from(sorted[place.floor() as usize]), f64::from(sorted[place.ceil() as usize]));
    let threshold = f64::from((below + (above - below) * place.fract()) as f32);
    entropies.iter().map(|&h| h >= threshold).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_tokens_is_kept_and_all_of_it_is_everything() {
        let entropies = [0.125, 0.875, 0.5, 0.75, 0.25];
        assert_eq!(
            high_entropy_mask(&entropies, 0.4),
            [false, true, false, true, false],
            "the threshold lies between 0.5 and 0.75"
        );
        assert!(high_entropy_mask(&entropies, 1.0).iter().all(|&kept| kept));
        assert!(high_entropy_mask(&[], 0.5).is_empty());
    }
}
