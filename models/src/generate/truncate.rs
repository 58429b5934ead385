//! Draws from a truncated distribution: top-k, then top-p, then min-p, as transformers orders them.

use super::Sampling;
use super::choose::Chosen;

/// Draws from one row of `z` = logits / temperature with the uniform number `u`. Ties at a boundary are kept by token id.
pub(super) fn draw_truncated(z: &[f32], sampling: &Sampling, u: f32) -> Chosen {
    let max = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |i: usize| f64::from(z[i] - max).exp();
    let full: f64 = (0..z.len()).map(weight).sum();
    let kept = kept(z, &weight, sampling);
    let mass: f64 = kept.iter().map(|&i| weight(i)).sum();

    let threshold = f64::from(u) * mass;
    let mut below = 0.0;
    let reached = kept.iter().position(|&i| {
        below += weight(i);
        below >= threshold
    });
    let token = kept[reached.unwrap_or(kept.len() - 1)];
    let centred = f64::from(z[token] - max);
    Chosen {
        token: token as u32,
        logp: (centred - mass.ln()) as f32,
        full_logp: (centred - full.ln()) as f32,
    }
}

/// The tokens that survive, in order of their ids.
fn kept(z: &[f32], weight: &impl Fn(usize) -> f64, sampling: &Sampling) -> Vec<usize> {
    let mut order: Vec<usize> = (0..z.len()).collect();
    order.sort_by(|&a, &b| z[b].total_cmp(&z[a]).then(a.cmp(&b)));
    if let Some(k) = sampling.top_k {
        order.truncate(k.max(1));
    }
    if sampling.top_p < 1.0 {
        let mass: f64 = order.iter().map(|&i| weight(i)).sum();
        let mut before = 0.0;
        let keep = order
            .iter()
            .take_while(|&&i| {
                let keep = before < sampling.top_p * mass;
                before += weight(i);
                keep
            })
            .count();
        order.truncate(keep.max(1));
    }
    // the likeliest token has weight 1
    order.retain(|&i| weight(i) >= sampling.min_p);
    order.sort_unstable();
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(top_k: Option<usize>, top_p: f64, min_p: f64) -> Sampling {
        Sampling {
            top_k,
            top_p,
            min_p,
            ..Sampling::default()
        }
    }

    /// p = 0.5, 0.25, 0.125, 0.125
    fn row() -> Vec<f32> {
        [0.5_f32, 0.25, 0.125, 0.125].map(f32::ln).to_vec()
    }

    #[test]
    fn each_truncation_keeps_what_it_says() {
        let weight = |i: usize| f64::from(row()[i] - row()[0]).exp();
        assert_eq!(kept(&row(), &weight, &sampling(Some(2), 1.0, 0.0)), [0, 1]);
        assert_eq!(kept(&row(), &weight, &sampling(None, 0.7, 0.0)), [0, 1]);
        assert_eq!(kept(&row(), &weight, &sampling(None, 0.8, 0.0)), [0, 1, 2]);
        assert_eq!(kept(&row(), &weight, &sampling(None, 1.0, 0.3)), [0, 1]);
        assert_eq!(kept(&row(), &weight, &sampling(None, 1e-9, 0.0)), [0]);
    }

    #[test]
    fn both_log_probs_are_exact() {
        let chosen = draw_truncated(&row(), &sampling(Some(2), 1.0, 0.0), 0.9);
        assert_eq!(chosen.token, 1);
        assert!(
            (chosen.logp - (1.0_f32 / 3.0).ln()).abs() < 1e-6,
            "{chosen:?}"
        );
        assert!(
            (chosen.full_logp - 0.25_f32.ln()).abs() < 1e-6,
            "{chosen:?}"
        );
    }

    #[test]
    fn the_uniform_number_inverts_the_cumulative_distribution() {
        let draw = |u| draw_truncated(&row(), &sampling(None, 0.99, 0.0), u).token;
        assert_eq!(
            [draw(0.01), draw(0.49), draw(0.51), draw(0.76), draw(0.99)],
            [0, 0, 1, 2, 3]
        );
    }
}
