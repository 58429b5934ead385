//! Tokens that are chosen on the device, under every truncation.

use super::{cases, numbers, on_gpus, precisions, stored, values};
use burn::tensor::{DType, Device, Tensor};
use firebrick_backends::kernels::{self, SampleOptions, Truncation};

on_gpus!(
    tokens_are_drawn_from_what_is_kept_with_both_log_probs,
    a_vocabulary_of_152_064_tokens_is_drawn_from_whole_and_truncated,
    draws_are_those_of_the_cpus_kernel,
    a_row_without_numbers_still_gives_a_token_of_the_vocabulary,
);

const TEMPERATURE: f64 = 0.9;

/// What is left of a row, in order of ids; the largest weight is 1. By sorting everything.
fn kept(weights: &[f64], cut: Truncation) -> Vec<usize> {
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]).then(a.cmp(&b)));
    order.truncate(cut.top_k.unwrap_or(usize::MAX));
    if cut.top_p < 1.0 {
        let share = cut.top_p * order.iter().map(|&i| weights[i]).sum::<f64>();
        let mut before = 0.0;
        order.retain(|&i| {
            let keep = before == 0.0 || before < share;
            before += weights[i];
            keep
        });
    }
    order.retain(|&i| weights[i] >= cut.min_p);
    order.sort_unstable();
    order
}

/// The chosen rows of some logits, and the uniform numbers that they were drawn with.
fn choose(logits: &Tensor<2>, truncation: Truncation, greedy: bool) -> (Vec<f64>, Vec<f32>) {
    let rows = logits.dims()[0];
    let uniforms: Vec<f32> = (0..rows).map(|r| (r as f32 + 0.37) / rows as f32).collect();
    let choice = SampleOptions { temperature: TEMPERATURE, truncation, uniforms: (!greedy).then_some(&uniforms) };
    let found = kernels::sample_rows_on_device(logits, choice);
    (values(found), uniforms)
}

/// Weights over that of the largest logit.
fn weights(row: &[f64]) -> Vec<f64> {
    let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weight = |z: &f64| ((z - largest) / TEMPERATURE).exp();
    row.iter().map(weight).collect()
}

/// Holds a token and its log-probs against a row's weights. `slack`: the share of the whole by which a running sum in
/// f32 may be off.
fn hold_row(weights: &[f64], cut: Truncation, found: &[f64], u: f32, slack: f64) {
    let kept = kept(weights, cut);
    let token = found[0] as usize;
    assert!(kept.contains(&token), "{token} was left out by {cut:?}");
    let full: f64 = weights.iter().sum();
    let mass: f64 = kept.iter().map(|&i| weights[i]).sum();
    let upto = kept.iter().take_while(|&&i| i <= token);
    let after: f64 = upto.map(|&i| weights[i]).sum();
    let (threshold, slack) = (f64::from(u) * mass, slack * mass);
    assert!(
        after >= threshold - slack && after - weights[token] <= threshold + slack,
        "{token} is drawn at {u} by {cut:?}: {after} of {mass}"
    );
    let logp = weights[token].ln();
    for (found, total) in [(found[1], mass), (found[2], full)] {
        let expected = logp - total.ln();
        assert!((found - expected).abs() < 1e-4, "{cut:?}: {found} is {expected}");
    }
}

fn hold_draws(logits: &Tensor<2>, raw: &[f64], cut: Truncation, slack: f64) {
    let vocab = logits.dims()[1];
    let (found, uniforms) = choose(logits, cut, false);
    for ((row, found), &u) in raw.chunks(vocab).zip(found.chunks(3)).zip(&uniforms) {
        hold_row(&weights(row), cut, found, u, slack);
    }
}

fn hold_likeliest(logits: &Tensor<2>, raw: &[f64]) {
    let vocab = logits.dims()[1];
    let (found, _) = choose(logits, Truncation::default(), true);
    for (row, found) in raw.chunks(vocab).zip(found.chunks(3)) {
        let weights = weights(row);
        let first = weights.iter().position(|&w| w >= 1.0);
        assert_eq!(Some(found[0] as usize), first, "the first of the likeliest");
        let expected = -weights.iter().sum::<f64>().ln();
        for found in &found[1..] {
            assert!((found - expected).abs() < 1e-4, "{found} is {expected}");
        }
    }
}

const fn cut(top_k: Option<usize>, top_p: f64, min_p: f64) -> Truncation {
    Truncation { top_k, top_p, min_p }
}

const CUTS: [Truncation; 9] = [
    cut(None, 1.0, 0.0),
    cut(Some(1), 1.0, 0.0),
    cut(Some(5), 1.0, 0.0),
    cut(Some(1 << 20), 1.0, 0.0),
    cut(None, 0.7, 0.0),
    cut(None, 1e-6, 0.0),
    cut(None, 1.0, 0.2),
    cut(Some(40), 0.83, 0.05),
    cut(Some(3), 0.95, 0.0),
];

/// Logits of few values, so that every boundary has ties.
fn tied(n: usize, salt: u32) -> Vec<f64> {
    let round = |x: &f64| (x * 2.0).round() / 2.0;
    numbers(n, salt, 4.0).iter().map(round).collect()
}

fn tokens_are_drawn_from_what_is_kept_with_both_log_probs(device: &Device) {
    for (dtype, _) in precisions(device) {
        cases((1_usize..9, 1_usize..1500), |(rows, vocab)| {
            let shape = [rows, vocab];
            let (ties, raw_ties) = stored(tied(rows * vocab, 41), shape, dtype, device);
            let (many, raw_many) = stored(numbers(rows * vocab, 42, 9.0), shape, dtype, device);
            hold_likeliest(&ties, &raw_ties);
            hold_likeliest(&many, &raw_many);
            for cut in CUTS {
                hold_draws(&ties, &raw_ties, cut, 1e-5);
                hold_draws(&many, &raw_many, cut, 1e-5);
            }
        });
    }
}

fn a_vocabulary_of_152_064_tokens_is_drawn_from_whole_and_truncated(device: &Device) {
    let shape = [3, 152_064];
    let raw = numbers(shape[0] * shape[1], 43, 12.0);
    let (logits, raw) = stored(raw, shape, DType::F32, device);
    hold_likeliest(&logits, &raw);
    for cut in [CUTS[0], cut(Some(50), 0.95, 0.0), cut(None, 0.9, 0.0), cut(None, 1.0, 0.05)] {
        hold_draws(&logits, &raw, cut, 1e-4);
    }
}

fn draws_are_those_of_the_cpus_kernel(device: &Device) {
    let (rows, vocab) = (40, 777);
    let own = |device: &Device| stored(numbers(rows * vocab, 44, 6.0), [rows, vocab], DType::F32, device).0;
    let logits = own(device);
    for greedy in [false, true] {
        let (found, uniforms) = choose(&logits, Truncation::default(), greedy);
        let uniforms = (!greedy).then_some(&uniforms[..]);
        let expected = kernels::sample_rows(&own(&Device::flex()), TEMPERATURE, uniforms);
        for (found, expected) in found.chunks(3).zip(expected) {
            assert_eq!(found[0] as u32, expected.token);
            assert!((found[1] - f64::from(expected.logp)).abs() < 1e-4);
        }
    }
}

fn a_row_without_numbers_still_gives_a_token_of_the_vocabulary(device: &Device) {
    let (logits, _) = stored(vec![f64::NAN; 2 * 35], [2, 35], DType::F32, device);
    for cut in [CUTS[0], CUTS[7]] {
        for greedy in [false, true] {
            let (found, _) = choose(&logits, cut, greedy);
            assert!(found[0] < 35.0 && found[3] < 35.0, "{found:?}");
        }
    }
}
