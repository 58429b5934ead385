//! The optimizer's update, 8-bit moments, and the gradient of the embedding.

use super::{assert_near, cases, fused, numbers, on_gpus, precisions, stored, values};
use crate::devices::backend;
use burn::tensor::{DType, Device, Tensor};
use firebrick_backends::device::Backend;
use firebrick_backends::kernels::{self, AdamWBatch, AdamWSlice, AdamWStep, QuantizationMap, RowsByToken};

on_gpus!(
    an_update_is_its_formula_and_touches_no_other_row,
    updates_of_many_parameters_in_a_batch_are_those_of_each,
    sums_of_squares_are_those_of_the_numbers,
    blocks_of_8_bits_have_their_largest_value_and_the_nearest_entries,
    rows_are_added_to_their_tokens,
);

const STEP: AdamWStep =
    AdamWStep { clip: 0.5, betas: [0.9, 0.95], eps: 1e-8, second_root: 0.3, rate: 0.01, keep: 0.99 };

/// Value and moments of one number.
fn updated(p: f64, g: f64, [m, v]: [f64; 2]) -> [f64; 3] {
    let g = g * STEP.clip;
    let m = STEP.betas[0] * m + (1.0 - STEP.betas[0]) * g;
    let v = STEP.betas[1] * v + (1.0 - STEP.betas[1]) * g * g;
    let change = STEP.rate * m / (v.sqrt() / STEP.second_root + STEP.eps);
    [STEP.keep * p - change, m, v]
}

fn hold_update([rows, n]: [usize; 2], dtype: DType, tolerance: f64, device: &Device) {
    let shape = [rows, n];
    let (p, mut ps) = stored(numbers(rows * n, 21, 1.0), shape, DType::F32, device);
    let (g, gs) = stored(numbers(rows * n, 22, 1.0), shape, DType::F32, device);
    // all rows but the first
    let part = 1..rows;
    let mut state = vec![[0.0; 2]; (rows - 1) * n];
    let mut value = p.clone();
    let mut moments: Option<[Tensor<2>; 2]> = None;
    let mut stored = None;
    for _ in 0..3 {
        let moments_in = moments.map(|m| m.map(|t| t.cast(dtype)));
        let low = stored.unwrap_or_else(|| Tensor::zeros(shape, (device, dtype)));
        // from the second update on these are a kernel's results, without padding between rows; whoever holds them sees
        // no update
        let held = [value.clone(), low.clone()];
        let seen = || held.clone().map(|t| values(t.cast(DType::F32)));
        let before = seen();
        let mut batch = AdamWBatch::default();
        let slices = vec![AdamWSlice { rows: part.clone(), moments: moments_in }];
        let mut new = kernels::adamw(value, slices, &g, Some(low), &STEP, &mut batch);
        batch.launch();
        assert_eq!(seen(), before, "held by somebody else");
        value = new.value;
        stored = new.stored;
        for (i, state) in state.iter_mut().enumerate() {
            let [p, m, v] = updated(ps[n + i], gs[n + i], *state);
            ps[n + i] = p;
            *state = [m, v];
        }
        moments = new.moments.pop();
    }
    let what = format!("update of {shape:?} with moments in {dtype:?}");
    // the rows that are updated, once more as they are stored
    let low = values(stored.expect("asked for").cast(DType::F32));
    assert_near(&what, &low[n..], &values(value.clone())[n..], tolerance);
    assert!(low[..n].iter().all(|&x| x == 0.0), "{what}: another row");
    assert_near(&what, &values(value), &ps, tolerance);
    let [first, second] = moments.expect("three updates").map(values);
    let column = |i: usize| state.iter().map(|s| s[i]).collect::<Vec<f64>>();
    assert_near(&what, &first, &column(0), tolerance);
    assert_near(&what, &second, &column(1), tolerance);
    let before = numbers(rows * n, 21, 1.0);
    let rounded: Vec<f64> = before.iter().map(|&x| f64::from(x as f32)).collect();
    assert_near("a parameter that somebody else holds", &values(p), &rounded, 0.0);
}

fn an_update_is_its_formula_and_touches_no_other_row(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        cases((2_usize..30, 1_usize..90), |(rows, n)| {
            hold_update([rows, n], dtype, tolerance, device);
        });
    }
}

/// More matrices than a launch takes, of one number to three blocks of threads.
fn shapes(count: usize) -> impl Iterator<Item = [usize; 2]> {
    (0..count).map(|i| [1 + i * 7 % 13, 1 + i * i * 37 % 900])
}

fn updates_of_many_parameters_in_a_batch_are_those_of_each(device: &Device) {
    let halves = precisions(device).into_iter().map(|(dtype, _)| dtype).filter(|dtype| *dtype != DType::F32);
    let kinds: Vec<Option<DType>> = halves.map(Some).chain([None]).collect();
    let run = |together: bool| {
        let mut batch = AdamWBatch::default();
        let mut results = Vec::new();
        for (i, shape @ [rows, n]) in shapes(37).enumerate() {
            let [(value, _), (gradient, _)] =
                [31, 32].map(|seed| stored(numbers(rows * n, seed + i as u32, 1.0), shape, DType::F32, device));
            let low = kinds[i % kinds.len()].map(|dtype| Tensor::zeros(shape, (device, dtype)));
            // a parameter of one row has one slice; the second of others has moments
            let cut = rows.div_ceil(2);
            let moments = [33, 34].map(|seed| {
                let raw = numbers((rows - cut) * n, seed, 1.0).into_iter().map(f64::abs).collect();
                stored(raw, [rows - cut, n], DType::F32, device).0
            });
            let second = (cut < rows).then_some(AdamWSlice { rows: cut..rows, moments: Some(moments) });
            let slices = [AdamWSlice { rows: 0..cut, moments: None }].into_iter().chain(second).collect();
            let step = AdamWStep { rate: 0.01 * (1 + i) as f64, ..STEP };
            results.push(kernels::adamw(value, slices, &gradient, low, &step, &mut batch));
            if !together {
                batch.launch();
            }
        }
        batch.launch();
        let numbers = |result: kernels::AdamWOutput| {
            let low = result.stored.map(|low| low.cast(DType::F32));
            let tensors = [result.value].into_iter().chain(low).chain(result.moments.into_iter().flatten());
            tensors.map(values).collect::<Vec<_>>()
        };
        results.into_iter().map(numbers).collect::<Vec<_>>()
    };
    assert_eq!(run(true), run(false));
}

fn sums_of_squares_are_those_of_the_numbers(device: &Device) {
    let dtypes: Vec<DType> = precisions(device).into_iter().map(|(dtype, _)| dtype).chain([DType::F32]).collect();
    let (mut matrices, mut expected) = (Vec::new(), 0.0);
    for (i, shape @ [rows, n]) in shapes(150).enumerate() {
        let dtype = dtypes[i % dtypes.len()];
        let (matrix, numbers) = stored(numbers(rows * n, 41 + i as u32, 1.0), shape, dtype, device);
        expected += numbers.iter().map(|x| x * x).sum::<f64>();
        matrices.push(matrix);
    }
    let sums = kernels::sums_of_squares(&matrices).map(values);
    assert_eq!(sums.is_some(), backend(device) == Backend::Cuda);
    if let Some(sums) = sums {
        let sum = sums.iter().sum::<f64>();
        assert!((sum - expected).abs() < 1e-5 * expected, "{sum} instead of {expected}");
        assert!(kernels::sums_of_squares(&[]).is_none());
    }
}

fn blocks_of_8_bits_have_their_largest_value_and_the_nearest_entries(device: &Device) {
    // entries from −1 to 1, the last two far apart
    let entries: Vec<f64> = (0..255).map(|i| f64::from(i) / 200.0 - 0.9).chain([1.0]).collect();
    let midpoint = |i: usize| f64::midpoint(entries[i], entries[i + 1]);
    let middle = midpoint(127);
    let midpoints = (0..255).map(midpoint).chain([f64::INFINITY]).collect();
    let (midpoints, _) = stored(midpoints, [256], DType::F32, device);
    let (table, entries) = stored(entries, [256], DType::F32, device);
    let map = QuantizationMap { midpoints: &midpoints, middle: middle as f32, smallest: 1e-31 };
    for (dtype, _) in precisions(device) {
        cases((1_usize..9, 1_usize..200), |(rows, n)| {
            let mut raw = numbers(rows * n, 23, 3.0);
            // a block of zeros, where there are two
            raw.iter_mut().take(256).filter(|_| rows * n > 256).for_each(|x| *x = 0.0);
            let (x, xs) = stored(raw, [rows, n], dtype, device);
            let blocks = fused(|| kernels::quantize_blockwise(&x, &map));
            let scales = values(blocks.scales.clone());
            let back = fused(|| kernels::dequantize_blockwise(&blocks, &table, [rows, n], DType::F32));
            let back = values(back);
            for ((block, back), &scale) in xs.chunks(256).zip(back.chunks(256)).zip(&scales) {
                let largest = block.iter().fold(0.0, |a: f64, &x| if x.abs() > a.abs() { x } else { a });
                assert!((scale - largest).abs() == 0.0, "{scale} of {largest}");
                for (&x, &back) in block.iter().zip(back) {
                    let error = |entry: &f64| (entry * scale - x).abs();
                    let best = entries.iter().map(error).fold(f64::INFINITY, f64::min);
                    let found = (back - x).abs();
                    assert!(found <= best + 1e-6 * scale.abs(), "{back} for {x} of {scale}");
                }
            }
        });
    }
    let (x, _) = stored(vec![1.0, f64::NAN, 2.0], [1, 3], DType::F32, device);
    let blocks = fused(|| kernels::quantize_blockwise(&x, &map));
    assert!(values(blocks.scales)[0].is_nan());
}

fn rows_are_added_to_their_tokens(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        cases((1_usize..60, 1_usize..300), |(tokens, n)| {
            let vocab = 17;
            let ids: Vec<i32> = (0..tokens).map(|i| (i * i % vocab) as i32).collect();
            let (rows, rs) = stored(numbers(tokens * n, 24, 1.0), [tokens, n], dtype, device);
            let (sum, mut expected) = stored(numbers(vocab * n, 25, 1.0), [vocab, n], dtype, device);
            let before = expected.clone();
            for (row, &id) in rs.chunks(n).zip(&ids) {
                for (sum, x) in expected[id as usize * n..].iter_mut().zip(row) {
                    *sum += x;
                }
            }
            let segments = RowsByToken::new(&ids, device);
            let found = fused(|| kernels::scatter_add_rows(sum.clone(), &segments, &rows));
            assert_near("the sum", &values(found.clone()), &expected, tolerance);
            assert_near("the old sum", &values(sum), &before, 0.0);
            // once more to a kernel's own result, which has no padding between rows, while somebody else holds it
            let again = fused(|| kernels::scatter_add_rows(found.clone(), &segments, &rows));
            let twice: Vec<f64> = expected.iter().zip(&before).map(|(x, y)| 2.0 * x - y).collect();
            let again = values(again);
            assert_near("the sum of both", &again, &twice, 2.0 * tolerance);
            assert_near("the first sum", &values(found), &expected, tolerance);
        });
    }
}
