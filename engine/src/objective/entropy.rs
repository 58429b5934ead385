//! The tokens of highest entropy: forks in a text, where most of what is learnt is decided (arXiv:2506.01939).

/// Which tokens of a step have an entropy at or above the quantile 1 − `share` (between two of them: on the line between
/// their values).
#[must_use]
pub fn highest(entropies: &[f64], share: f64) -> Vec<bool> {
    let mut sorted = entropies.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else {
        return Vec::new();
    };
    let place = (1.0 - share).clamp(0.0, 1.0) * last as f64;
    let (below, above) = (
        sorted[place.floor() as usize],
        sorted[place.ceil() as usize],
    );
    let threshold = below + (above - below) * place.fract();
    entropies.iter().map(|&h| h >= threshold).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_tokens_is_kept_and_all_of_it_is_everything() {
        let entropies = [0.1, 0.9, 0.5, 0.7, 0.3];
        assert_eq!(
            highest(&entropies, 0.4),
            [false, true, false, true, false],
            "the threshold lies between 0.5 and 0.7"
        );
        assert!(highest(&entropies, 1.0).iter().all(|&kept| kept));
        assert!(highest(&[], 0.5).is_empty());
    }
}
