use super::*;
use crate::optim::config::Moments;
use burn::tensor::{DType, Device, Tensor, TensorData};

const KINDS: [MomentKind; 3] = [MomentKind::F32, MomentKind::Bf16, MomentKind::Block8];

/// Numbers between -1 and 1.
fn random(n: usize, seed: u64) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 * 2_f64.powi(-52) - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn cast<T: Real>(values: &[f64]) -> Vec<T> {
    values.iter().map(|&v| T::from_f64(v)).collect()
}

fn config() -> OptimConfig {
    OptimConfig { lr: 1e-2, weight_decay: 0.1, ..OptimConfig::default() }
}

fn at(step: u64, decays: bool) -> UpdateAt {
    UpdateAt { step, lr: 1e-2, decays }
}

fn on_flex(values: &[f64], dtype: DType) -> Tensor<2> {
    let data = TensorData::new(values.to_vec(), [1, values.len()]);
    Tensor::from_data(data, (&Device::flex(), dtype))
}

/// The largest difference of values and moments between the host and tensors on flex, after 20 steps.
fn difference<T: Real>(mut moments: HostMoments, dtype: DType, decays: bool) -> f64 {
    let (config, n, clip) = (config(), moments.len(), 0.37);
    let start = random(n, 1);
    let mut host: Vec<T> = cast(&start);
    let mut value = on_flex(&start, dtype);
    let mut kept: Option<Moments> = None;
    for step in 1..=20 {
        let gradient = random(n, 100 + step);
        let at = at(step, decays);
        update(&config, at, clip, &mut host, &cast::<T>(&gradient), &mut moments);
        let (after, m) = config.update(at, value, on_flex(&gradient, dtype) * clip, kept.take());
        (value, kept) = (after, Some(m));
    }
    let Moments { first, second } = kept.unwrap();
    let theirs = [value, first, second].map(|t| t.try_into_vec_as::<f64>().unwrap());
    let host: Vec<f64> = host.into_iter().map(T::to_f64).collect();
    let [first, second] = match &moments {
        HostMoments::F64(moments) => moments.clone(),
        other => other.to_f32().map(|values| values.into_iter().map(f64::from).collect()),
    };
    let pairs = [host, first, second].into_iter().flatten();
    pairs.zip(theirs.into_iter().flatten()).fold(0.0, |worst, (a, b)| worst.max((a - b).abs()))
}

#[test]
fn f32_and_f64_are_the_update_on_tensors() {
    for decays in [true, false] {
        let single = HostMoments::zeros(MomentKind::F32, 1000);
        let single = difference::<f32>(single, DType::F32, decays);
        assert!(single <= 2e-6, "{single:e}");
        let double = difference::<f64>(HostMoments::zeros_f64(1000), DType::F64, decays);
        assert!(double <= 1e-12, "{double:e}");
    }
}

/// Fits `weights` to noise-free observations by full-batch steps; its mean squared error.
fn least_squares<T: Real>(mut moments: HostMoments) -> f64 {
    let (d, rows) = (moments.len(), 2 * moments.len());
    let x = random(d * rows, 3);
    let truth = random(d, 4);
    let dot = |row: &[f64], w: &[f64]| row.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
    let config = OptimConfig { weight_decay: 0.0, ..config() };
    let mut weights: Vec<T> = vec![T::ZERO; d];
    let mut error = 0.0;
    for step in 1..=400 {
        let w: Vec<f64> = weights.iter().map(|w| w.to_f64()).collect();
        let (mut gradient, mut squares) = (vec![0.0; d], 0.0);
        for row in x.chunks(d) {
            let residual = dot(row, &w) - dot(row, &truth);
            squares += residual * residual;
            for (g, x) in gradient.iter_mut().zip(row) {
                *g += 2.0 * residual * x / rows as f64;
            }
        }
        error = squares / rows as f64;
        let gradient: Vec<T> = cast(&gradient);
        update(&config, at(step, false), 1.0, &mut weights, &gradient, &mut moments);
    }
    error
}

#[test]
fn narrow_moments_train_nearly_as_well() {
    let d = 300;
    let [single, narrow @ ..] = KINDS.map(|kind| least_squares::<f32>(HostMoments::zeros(kind, d)));
    // weights of variance 1/3 times inputs of variance 1/3: it starts at 33
    assert!(single < 2e-3, "{single:e}");
    let double = least_squares::<f64>(HostMoments::zeros_f64(d));
    assert!((double / single - 1.0).abs() < 1e-3, "{double:e} {single:e}");
    // measured: 1.4 times with bf16, 2.0 with 8 bits
    let wide = least_squares::<f64>(HostMoments::zeros(MomentKind::Block8, d));
    for error in narrow.into_iter().chain([wide]) {
        assert!(error < 3.0 * single, "{error:e} {single:e}");
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let n = 3 * GRAIN + BLOCK + 17;
    let gradient: Vec<f32> = cast(&random(n, 5));
    for kind in KINDS {
        let run = |threads| {
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
                let mut value: Vec<f32> = cast(&random(n, 6));
                let mut moments = HostMoments::zeros(kind, n);
                for step in 1..=2 {
                    let at = at(step, true);
                    update(&config(), at, 1.0, &mut value, &gradient, &mut moments);
                }
                (value, moments)
            })
        };
        assert!(run(1) == run(3), "{kind:?}");
    }
}

#[test]
fn checkpoints_in_f32_give_back_the_same_moments() {
    for n in [1, BLOCK, 3 * BLOCK + 5] {
        for kind in KINDS {
            let mut moments = HostMoments::zeros(kind, n);
            let mut value: Vec<f32> = cast(&random(n, 7));
            for step in 1..=3 {
                let gradient: Vec<f32> = cast(&random(n, 8 + step));
                update(&config(), at(step, true), 1.0, &mut value, &gradient, &mut moments);
            }
            assert_eq!(HostMoments::from_f32(kind, moments.to_f32()), moments);
        }
    }
}

#[test]
fn bf16_moments_round_to_nearest_even() {
    let first = vec![1.0 + 2_f32.powi(-8), 1.0 + 3.0 * 2_f32.powi(-8), f32::NAN];
    let moments = HostMoments::from_f32(MomentKind::Bf16, [first, vec![0.0; 3]]);
    let [first, _] = moments.to_f32();
    assert_eq!(first[..2], [1.0, 1.0 + 2_f32.powi(-6)]);
    assert!(first[2].is_nan());
}

#[test]
fn bytes_are_those_of_the_kind() {
    let n = 1000;
    let bytes = KINDS.map(|kind| HostMoments::zeros(kind, n).bytes());
    assert_eq!(bytes, [8000, 4000, 2000 + 2 * 4 * 4]);
    assert_eq!(HostMoments::zeros_f64(n).bytes(), 16000);
    assert!(KINDS.iter().all(|&kind| HostMoments::zeros(kind, 0).is_empty()));
}

#[test]
fn a_gradient_that_is_not_finite_does_not_panic() {
    for kind in KINDS {
        let mut moments = HostMoments::zeros(kind, 300);
        let mut value = vec![1.0_f32; 300];
        let mut gradient = vec![1.0_f32; 300];
        (gradient[0], gradient[1]) = (f32::NAN, f32::INFINITY);
        update(&config(), at(1, true), 1.0, &mut value, &gradient, &mut moments);
        assert!(value[0].is_nan() && value[BLOCK..].iter().all(|v| v.is_finite()));
    }
}
