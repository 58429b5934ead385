use super::*;
use burn::tensor::{DType, Device, Tensor, TensorData};
use serde::Deserialize;

/// bitsandbytes 0.50.2 on CPU: `tests/fixtures/scripts/make_block8.py`.
const GOLDEN: &str = include_str!("../../../../../tests/fixtures/optim/block8.json");

#[derive(Deserialize)]
struct Golden {
    seed: u64,
    count: usize,
    signed: Case,
    unsigned: Case,
}

#[derive(Deserialize)]
struct Case {
    map: Vec<f32>,
    plain: Output,
    negated: Option<Output>,
}

#[derive(Deserialize)]
struct Output {
    codes: String,
    absmax: Vec<f32>,
}

impl Output {
    fn codes(&self) -> Vec<u8> {
        let byte = |i| u8::from_str_radix(&self.codes[i..i + 2], 16).unwrap();
        (0..self.codes.len()).step_by(2).map(byte).collect()
    }
}

fn golden() -> Golden {
    serde_json::from_str(GOLDEN).unwrap()
}

/// `inputs` of the script.
fn inputs(seed: u64, count: usize, signed: bool) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let number = (state >> 40) as f64 * 2_f64.powi(-24);
        let number = if signed { 2.0 * number - 1.0 } else { number };
        (number * 2_f64.powi(-(((state >> 36) & 15) as i32))) as f32
    };
    (0..count).map(|_| next()).collect()
}

/// Two whole blocks and a tail, in a block of zeros, one with a small scale and one with a negative largest value.
fn mixed(signed: bool) -> Vec<f32> {
    let mut values = inputs(7, 5 * BLOCK + 19, signed);
    values[BLOCK..2 * BLOCK].fill(0.0);
    values[2 * BLOCK..3 * BLOCK].iter_mut().for_each(|v| *v *= 1e-30);
    values[3 * BLOCK..4 * BLOCK].iter_mut().for_each(|v| *v *= 1e37);
    values[4] = if signed { -2.0 } else { 2.0 };
    values
}

fn on_flex(values: &[f32], shape: [usize; 2]) -> Tensor<2> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &Device::flex())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn maps_are_those_of_bitsandbytes() {
    let golden = golden();
    for (case, signed) in [(golden.signed, true), (golden.unsigned, false)] {
        assert_eq!(bits(&Codebook::get(signed).values), bits(&case.map));
    }
}

#[test]
fn codes_are_those_of_bitsandbytes_but_for_the_sign_of_a_scale() {
    let golden = golden();
    let (mut plain, mut negated) = (0, 0);
    for (case, signed) in [(&golden.signed, true), (&golden.unsigned, false)] {
        let inputs = inputs(golden.seed, golden.count, signed);
        let ours = HostBlock8::quantise(&inputs, signed);
        for (i, codes) in ours.codes.chunks(BLOCK).enumerate() {
            let theirs = if ours.scales[i] < 0.0 {
                negated += 1;
                case.negated.as_ref().unwrap()
            } else {
                plain += 1;
                &case.plain
            };
            assert_eq!(ours.scales[i].abs().to_bits(), theirs.absmax[i].to_bits());
            let mut theirs = theirs.codes()[i * BLOCK..][..codes.len()].to_vec();
            if !signed {
                let values = &inputs[i * BLOCK..];
                theirs.iter_mut().zip(values).filter(|(_, v)| **v > 0.0).for_each(|(code, _)| *code = (*code).max(1));
            }
            assert_eq!(codes, theirs);
        }
    }
    assert!(plain > 10 && negated > 2, "both signs occur: {plain}, {negated}");
}

#[test]
fn the_cell_table_finds_what_a_search_finds() {
    for signed in [true, false] {
        let book = Codebook::get(signed);
        let check = |x: f32| {
            let expected = book.midpoints.partition_point(|&m| m < x);
            assert_eq!(usize::from(book.nearest(x)), expected, "{x:e}");
        };
        for cell in FIRST_CELL..LAST_CELL {
            for end in [cell << CELL_SHIFT, ((cell + 1) << CELL_SHIFT) - 1] {
                check(f32::from_bits(end));
                check(-f32::from_bits(end));
            }
        }
        for m in &book.midpoints[..255] {
            for x in [m.next_down(), *m, m.next_up()] {
                check(x);
            }
        }
        for x in [0.0, -0.0, f32::MIN_POSITIVE, -1e-40, 1.0, -1.0] {
            check(x);
        }
    }
}

#[test]
fn each_value_is_within_half_a_gap_of_its_block() {
    for signed in [true, false] {
        let values = mixed(signed);
        let back = HostBlock8::quantise(&values, signed).dequantise();
        let map = Codebook::get(signed).values;
        for (block, back) in values.chunks(BLOCK).zip(back.chunks(BLOCK)) {
            let top = block.iter().fold(0.0_f32, |top, v| top.max(v.abs()));
            for (value, back) in block.iter().zip(back) {
                let x = (value / top).abs();
                let at = map.partition_point(|&m| m < x).clamp(1, 255);
                // negative numbers have 0.993 as their largest entry, positive ones 1; the sign of the scale swaps them
                let gap = (map[at] - map[at - 1]).max(if x > 0.99 { 0.015 } else { 0.0 });
                let bound = top * (gap / 2.0 + 1e-6);
                assert!((value - back).abs() <= bound, "{value:e} {back:e} of {top:e}");
            }
            let largest = block.iter().position(|v| v.abs() >= top).unwrap();
            assert_eq!(block[largest].to_bits(), back[largest].to_bits(), "the largest is exact");
        }
    }
}

#[test]
fn quantising_again_changes_nothing() {
    for signed in [true, false] {
        for n in [1, 255, 256, 257, 5 * BLOCK + 19] {
            let once = HostBlock8::quantise(&mixed(signed)[..n], signed);
            assert_eq!(HostBlock8::quantise(&once.dequantise(), signed), once);
        }
        // every code at every scale from the smallest to the largest
        for exponent in -103..128 {
            for scale in [2_f32.powi(exponent), -1.1 * 2_f32.powi(exponent - 1)] {
                let scale = if signed { scale } else { scale.abs() };
                let mut grid = vec![0.0; 256];
                let codes: Vec<u8> = (0..=255).collect();
                Codebook::get(signed).dequantise(&codes, scale, &mut grid);
                let again = HostBlock8::quantise(&grid, signed);
                assert_eq!((again.scales[0], again.codes), (scale, codes));
            }
        }
    }
}

#[test]
fn zeros_stay_zeros_and_what_is_too_small_becomes_zero() {
    for signed in [true, false] {
        for value in [0.0, 1e-45, 4.9e-32] {
            let zeros = HostBlock8::quantise(&[value; 300], signed);
            assert_eq!(zeros, HostBlock8::zeros(300, signed));
            assert!(zeros.dequantise().iter().all(|&v| v == 0.0));
        }
        assert_eq!(HostBlock8::zeros(300, signed).bytes(), 300 + 2 * 4);
        assert!(HostBlock8::quantise(&[], signed).dequantise().is_empty());
    }
}

#[test]
fn a_block_that_is_not_finite_is_nan_and_the_others_are_not() {
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = mixed(true);
        values[5] = bad;
        let host = HostBlock8::quantise(&values, true);
        let device = DeviceBlock8::quantise(&on_flex(&values, [1, values.len()]), true);
        for back in [host.dequantise(), device.dequantise().try_into_vec_as().unwrap()] {
            assert!(back[..BLOCK].iter().all(|v| v.is_nan()));
            assert!(back[BLOCK..].iter().all(|v| v.is_finite()));
        }
        let again = HostBlock8::quantise(&host.dequantise(), true);
        assert_eq!(again.codes, host.codes);
    }
}

#[test]
fn a_device_gives_the_codes_of_the_host() {
    for signed in [true, false] {
        for (rows, columns) in [(1, 1), (3, 100), (7, 256), (5, 129), (1, 5 * BLOCK + 19)] {
            let values: Vec<f32> = mixed(signed).into_iter().cycle().take(rows * columns).collect();
            let host = HostBlock8::quantise(&values, signed);
            let device = DeviceBlock8::quantise(&on_flex(&values, [rows, columns]), signed);
            assert_eq!(device.download().unwrap(), host);
            assert_eq!(device.dims(), [rows, columns]);
            let back: Vec<f32> = device.dequantise().try_into_vec_as().unwrap();
            assert_eq!(back, host.dequantise());
            let there = DeviceBlock8::upload(&host, [rows, columns], &Device::flex());
            assert_eq!(there.download().unwrap(), host);
            assert_eq!(there.bytes(), device.bytes());
            assert!(device.bytes() - host.bytes() < BLOCK);
            assert_eq!(there.dequantise().try_into_vec_as::<f32>().unwrap(), back);
        }
    }
}

#[test]
fn a_device_works_through_large_matrices_in_slices() {
    let (rows, columns) = (1 << 10, (1 << 10) + 5);
    let values = inputs(11, rows * columns, true);
    let device = DeviceBlock8::quantise(&on_flex(&values, [rows, columns]), true);
    let host = HostBlock8::quantise(&values, true);
    assert_eq!(device.download().unwrap(), host);
    let back: Vec<f32> = device.dequantise().try_into_vec_as().unwrap();
    assert_eq!(back, host.dequantise());
}

#[test]
fn a_device_gives_back_the_float_type_it_was_given() {
    let values = on_flex(&mixed(true)[..300], [3, 100]).cast(DType::F64);
    let back = DeviceBlock8::quantise(&values, true).dequantise();
    assert_eq!(back.dtype(), DType::F64);
}

#[test]
fn a_second_moment_above_zero_stays_above_zero() {
    let mut values = vec![1.0; BLOCK];
    (values[0], values[1]) = (1e-12, 0.0);
    let back = HostBlock8::quantise(&values, false).dequantise();
    assert!(back[0] > 0.0 && back[0] < 4e-7);
    assert_eq!(back[1].to_bits(), 0);
}
