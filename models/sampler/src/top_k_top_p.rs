//! Sampling from a truncated distribution on the host: top-k, then top-p, then min-p, in transformers' order.

use super::sampling_params::SamplingParams;
use super::sequence::SampledToken;
use std::cmp::Ordering;

/// Tokens that top-p sorts first; four times as many follow each time.
const INITIAL_SORT: usize = 64;

/// Samples from one row of `z` = logits / temperature with the uniform number `u` in (0, 1). Of equally likely tokens
/// at a boundary, those with the smallest ids are kept.
pub(super) fn sample_truncated(z: &[f32], sampling: &SamplingParams, u: f32) -> SampledToken {
    let max = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = z.iter().map(|z| f64::from(z - max).exp()).collect();
    let full: f64 = weights.iter().sum();
    let kept = kept(&weights, sampling);
    let mass: f64 = kept.iter().map(|&i| weights[i]).sum();

    let threshold = f64::from(u) * mass;
    let mut below = 0.0;
    let reached = kept.iter().position(|&i| {
        below += weights[i];
        below >= threshold
    });
    let token = kept[reached.unwrap_or(kept.len() - 1)];
    let centred = f64::from(z[token] - max);
    SampledToken { token: token as u32, logp: (centred - mass.ln()) as f32, full_logp: (centred - full.ln()) as f32 }
}

/// The tokens that are not truncated, by id. `weights` are probabilities over that of the likeliest token.
fn kept(weights: &[f64], sampling: &SamplingParams) -> Vec<usize> {
    let likelier = |a: &usize, b: &usize| weights[*b].total_cmp(&weights[*a]).then(a.cmp(b));
    let mut order: Vec<usize> = (0..weights.len()).collect();
    if let Some(k) = sampling.top_k.filter(|&k| k < order.len()) {
        order.select_nth_unstable_by(k, likelier);
        order.truncate(k.max(1));
    }
    if sampling.top_p < 1.0 {
        let share = sampling.top_p * order.iter().map(|&i| weights[i]).sum::<f64>();
        let keep = nucleus(&mut order, weights, share, likelier);
        order.truncate(keep);
    }
    // the likeliest token has weight 1
    order.retain(|&i| weights[i] >= sampling.min_p);
    order.sort_unstable();
    order
}

/// Moves the likeliest tokens to the front and returns how many of them reach the sum `share`. Only as many are sorted
/// as needed.
fn nucleus(order: &mut [usize], weights: &[f64], share: f64, likelier: impl Fn(&usize, &usize) -> Ordering) -> usize {
    let (mut sorted, mut before) = (0, 0.0);
    let mut size = INITIAL_SORT;
    while sorted < order.len() {
        let rest = &mut order[sorted..];
        let next = size.min(rest.len());
        if next < rest.len() {
            rest.select_nth_unstable_by(next, &likelier);
        }
        rest[..next].sort_unstable_by(&likelier);
        for &i in &rest[..next] {
            if before >= share {
                return sorted.max(1);
            }
            before += weights[i];
            sorted += 1;
        }
        size *= 4;
    }
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(top_k: Option<usize>, top_p: f64, min_p: f64) -> SamplingParams {
        SamplingParams { top_k, top_p, min_p, ..SamplingParams::default() }
    }

    /// p = 0.5, 0.25, 0.125, 0.125
    fn row() -> Vec<f32> {
        [0.5_f32, 0.25, 0.125, 0.125].map(f32::ln).to_vec()
    }

    #[test]
    fn each_truncation_keeps_what_it_says() {
        let weights: Vec<f64> = row().iter().map(|z| f64::from(z - row()[0]).exp()).collect();
        let kept = |top_k, top_p, min_p| kept(&weights, &sampling(top_k, top_p, min_p));
        assert_eq!(kept(Some(2), 1.0, 0.0), [0, 1]);
        assert_eq!(kept(None, 0.7, 0.0), [0, 1]);
        assert_eq!(kept(None, 0.8, 0.0), [0, 1, 2]);
        assert_eq!(kept(None, 1.0, 0.3), [0, 1]);
        assert_eq!(kept(None, 1e-9, 0.0), [0]);
        assert_eq!(kept(Some(9), 1.0, 0.0), [0, 1, 2, 3]);
    }

    /// [`kept`] by sorting everything.
    fn sorted(weights: &[f64], s: &SamplingParams) -> Vec<usize> {
        let mut order: Vec<usize> = (0..weights.len()).collect();
        order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]).then(a.cmp(&b)));
        order.truncate(s.top_k.unwrap_or(usize::MAX));
        let share = s.top_p * order.iter().map(|&i| weights[i]).sum::<f64>();
        let mut before = 0.0;
        order.retain(|&i| {
            let keep = before == 0.0 || s.top_p >= 1.0 || before < share;
            before += weights[i];
            keep && weights[i] >= s.min_p
        });
        order.sort_unstable();
        order
    }

    #[test]
    fn a_part_of_the_order_gives_what_the_whole_order_gives() {
        let mut stream = firebrick_models::random::Stream::new(5, 0);
        for _ in 0..200 {
            let length = 1 + stream.below(900) as usize;
            // few values, so that there are ties
            let mut weights: Vec<f64> = (0..length).map(|_| f64::from(stream.below(40)) / 40.0).collect();
            weights[stream.below(length as u32) as usize] = 1.0;
            let k = Some(1 + stream.below(500) as usize).filter(|k| k % 3 > 0);
            let s = sampling(k, f64::from(stream.uniform()), f64::from(stream.uniform()) * 0.3);
            assert_eq!(kept(&weights, &s), sorted(&weights, &s), "{s:?}");
        }
    }

    #[test]
    fn both_log_probs_are_exact() {
        let chosen = sample_truncated(&row(), &sampling(Some(2), 1.0, 0.0), 0.9);
        assert_eq!(chosen.token, 1);
        assert!((chosen.logp - (1.0_f32 / 3.0).ln()).abs() < 1e-6, "{chosen:?}");
        assert!((chosen.full_logp - 0.25_f32.ln()).abs() < 1e-6, "{chosen:?}");
    }

    #[test]
    fn the_uniform_number_inverts_the_cumulative_distribution() {
        let draw = |u| sample_truncated(&row(), &sampling(None, 0.99, 0.0), u).token;
        assert_eq!([draw(0.01), draw(0.49), draw(0.51), draw(0.76), draw(0.99)], [0, 0, 1, 2, 3]);
    }
}
