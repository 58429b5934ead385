//! The tokens of highest entropy: forks in a text, where most of what is learnt is decided (arXiv:2506.01939).

/// Which tokens of a step have an entropy at or above the quantile 1 − `share` (between two of them: on the line between
/// their values). The threshold is one of f32 numbers, as scores are.
#[must_use]
pub fn high_entropy_mask(entropies: &[f64], share: f64) -> Vec<bool> {
    let mut sorted: Vec<f32> = entropies.iter().map(|&h| h as f32).collect();
    sorted.sort_by(f32::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else {
        return Vec::new();
    };
    let place = (1.0 - share).clamp(0.0, 1.0) * last as f64;
    let (below, above) = (
        f64::from(sorted[place.floor() as usize]),
        f64::from(sorted[place.ceil() as usize]),
    );
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
