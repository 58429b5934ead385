//! Log-probs and entropies of logits by tiles of the vocabulary, their gradient, and what the head needs of memory.

use super::{assert_near, cases, ints, numbers, on_gpus, precisions, stored, values};
use burn::tensor::{DType, Device, Tensor};
use firebrick_backends::kernels::{self, Scaling, ScoreGradients};

on_gpus!(scores_by_tiles_and_their_gradient_are_those_of_the_whole_row,);

/// Log-probs, entropies, and gradients of the logits.
fn formula(logits: &[f64], targets: &[i32], scaling: Scaling, [d_logp, d_entropy]: [&[f64]; 2]) -> [Vec<f64>; 3] {
    let vocab = logits.len() / targets.len();
    let mut all = [Vec::new(), Vec::new(), Vec::new()];
    for (row, logits) in logits.chunks(vocab).enumerate() {
        let target = targets[row] as usize;
        let capped = |x: f64| scaling.softcap.map_or(x, |cap| cap * (x / cap).tanh());
        let slope = |x: f64| {
            let t = scaling.softcap.map_or(0.0, |cap| (x / cap).tanh());
            (1.0 - t * t) / scaling.temperature
        };
        let z: Vec<f64> = logits.iter().map(|&x| capped(x) / scaling.temperature).collect();
        let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = z.iter().map(|z| (z - max).exp()).sum::<f64>().ln() + max;
        let mean: f64 = z.iter().map(|z| (z - lse).exp() * z).sum();
        all[0].push(z[target] - lse);
        all[1].push(lse - mean);
        for (i, &z) in z.iter().enumerate() {
            let p = (z - lse).exp();
            let hit = if i == target { d_logp[row] } else { 0.0 };
            let d = hit - p * (d_logp[row] + d_entropy[row] * (z - mean));
            all[2].push(d * slope(logits[i]));
        }
    }
    all
}

fn hold([rows, vocab, tile]: [usize; 3], scaling: Scaling, (dtype, tolerance): (DType, f64), device: &Device) {
    let what = format!("[{rows}, {vocab}] by {tile} in {dtype:?}, {scaling:?}");
    let (logits, raw) = stored(numbers(rows * vocab, 11, 8.0), [rows, vocab], dtype, device);
    let targets: Vec<i32> = (0..rows).map(|r| ((r * 31 + 5) % vocab) as i32).collect();
    let (d_logp, gs) = stored(numbers(rows, 12, 1.0), [rows], DType::F32, device);
    let (d_entropy, hs) = stored(numbers(rows, 13, 1.0), [rows], DType::F32, device);
    let ids = ints(&targets, device);
    let zeros = vec![0.0; rows];
    let with_entropy = formula(&raw, &targets, scaling, [&gs, &hs]);
    let without = formula(&raw, &targets, scaling, [&gs, &zeros]);

    let tiles = || (0..vocab).step_by(tile).map(|first| (first, tile.min(vocab - first)));
    let cut = |(first, width)| logits.clone().narrow(1, first, width);
    let running = tiles().fold(None, |running, (first, width)| {
        Some(kernels::score_tile(&cut((first, width)), first, &ids, running, scaling))
    });
    let scores = kernels::finish_scores(running.expect("a tile"));
    assert_near(&what, &values(scores.logp.clone()), &with_entropy[0], tolerance);
    assert_near(&what, &values(scores.entropy.clone()), &with_entropy[1], tolerance);
    for (d_entropy, expected) in [(Some(&d_entropy), &with_entropy[2]), (None, &without[2])] {
        let upstream = ScoreGradients { d_logp: &d_logp, d_entropy };
        let gradients = tiles().map(|(first, width)| {
            let logits = cut((first, width));
            kernels::tile_gradient(logits, first, &ids, &scores, upstream, scaling)
        });
        let found = Tensor::cat(gradients.collect(), 1);
        assert_near(&format!("{what}: gradient"), &values(found), expected, tolerance);
    }
    assert_near("the logits", &values(logits), &raw, 0.0);
}

fn scores_by_tiles_and_their_gradient_are_those_of_the_whole_row(device: &Device) {
    for precision in precisions(device) {
        for softcap in [None, Some(5.0)] {
            cases((1_usize..20, 2_usize..400, 1_usize..200), |(rows, vocab, tile)| {
                let scaling = Scaling { temperature: 0.7, softcap };
                hold([rows, vocab, tile.min(vocab)], scaling, precision, device);
            });
        }
    }
    let plain = Scaling { temperature: 1.0, softcap: None };
    hold([3, 5000, 2048], plain, (DType::F32, 1e-5), device);
}
