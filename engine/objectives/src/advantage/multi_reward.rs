//! Several rewards, each normalised by itself (GDPO, arXiv:2601.05242), so that one with a wide range does not outweigh
//! the others.

use super::groups::{group_members, mean, std};

/// Each reward less its group's mean over its group's standard deviation, their weighted sum, and that less its mean
/// over its standard deviation in the whole step. `None`: a reward that does not apply to a completion; one to which
/// none applies has no advantage.
///
/// `parts[i]` holds completion i's rewards in the order of `weights`.
pub fn normalize_then_sum(parts: &[Vec<Option<f64>>], weights: &[f64], groups: &[u64], eps: f64) -> Vec<f64> {
    let mut sums: Vec<Option<f64>> =
        parts.iter().map(|rewards| rewards.iter().any(Option::is_some).then_some(0.0)).collect();
    for members in group_members(groups) {
        for (k, weight) in weights.iter().enumerate() {
            let known: Vec<f64> = members.iter().filter_map(|&i| parts[i][k]).collect();
            // a reward that one member alone has cannot be compared with anything, unless that member is the group
            if known.len() < 2 && members.len() > 1 {
                continue;
            }
            let (centre, spread) = (mean(&known), std(&known));
            for &i in &members {
                if let (Some(sum), Some(reward)) = (&mut sums[i], parts[i][k]) {
                    *sum += weight * (reward - centre) / (spread + eps);
                }
            }
        }
    }
    let known: Vec<f64> = sums.iter().flatten().copied().collect();
    let (centre, spread) = (mean(&known), std(&known));
    let normal = |sum: &Option<f64>| sum.map_or(0.0, |sum| (sum - centre) / (spread + eps));
    sums.iter().map(normal).collect()
}
