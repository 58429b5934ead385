use super::words::bytes;
use super::*;
use serde::Deserialize;
use std::collections::BTreeMap;

/// bitsandbytes 0.50.2 on CPU: `tests/fixtures/scripts/make_quantized.py`.
const GOLDEN: &str = include_str!("../../../../tests/fixtures/quantized/base.json");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Golden {
    format: String,
    #[serde(rename = "torch")]
    _torch: String,
    #[serde(rename = "bitsandbytes")]
    _bitsandbytes: String,
    seed: u64,
    nf4: Vec<f32>,
    scale_map: Vec<f32>,
    cases: Vec<Case>,
    #[serde(rename = "checkpoint")]
    _checkpoint: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Case {
    shape: [usize; 2],
    nf4: Nf4,
    int8: Int8,
}

#[derive(Deserialize)]
struct Nf4 {
    codes: String,
    scales: String,
    groups: Vec<f32>,
    offset: f32,
    widened: String,
    numbers: Option<Vec<f32>>,
}

#[derive(Deserialize)]
struct Int8 {
    codes: String,
    scales: Vec<f32>,
    widened: String,
    numbers: Option<Vec<f32>>,
}

fn golden() -> Golden {
    let golden: Golden = serde_json::from_str(GOLDEN).unwrap();
    assert_eq!(golden.format, "quantized-golden/1");
    golden
}

fn hex(text: &str) -> Vec<u8> {
    let byte = |i| u8::from_str_radix(&text[i..i + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}

/// `inputs` of the script.
fn inputs(seed: u64, [rows, columns]: [usize; 2]) -> Vec<f32> {
    let mut state = seed;
    let next = |i: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let number = 2.0 * ((state >> 40) as f64 * 2_f64.powi(-24)) - 1.0;
        let scaled = number * 2_f64.powi(-(((state >> 36) & 7) as i32));
        if (64..128).contains(&i) { 0.0 } else { scaled as f32 }
    };
    (0..rows * columns).map(next).collect()
}

/// `fnv` of the script.
fn fnv(values: &[f32]) -> String {
    let hash = bytes(values)
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |state: u64, byte| (state ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}")
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn maps_are_those_of_bitsandbytes_to_the_bit() {
    let golden = golden();
    assert_eq!(bits(&NF4), bits(&golden.nf4));
    assert_eq!(bits(&dynamic_map(true)), bits(&golden.scale_map));
}

#[test]
fn nf4_codes_scales_and_widened_numbers_are_those_of_bitsandbytes_to_the_bit() {
    let golden = golden();
    for Case { shape, nf4, .. } in &golden.cases {
        let layout = QuantizedLayout::new(BaseFormat::Nf4, *shape);
        let parts = Nf4Parts {
            codes: &hex(&nf4.codes),
            scales: &hex(&nf4.scales),
            groups: &nf4.groups,
            offset: nf4.offset,
            scale_map: &golden.scale_map,
            code_map: &golden.nf4,
        };
        let theirs = nf4_from_parts(*shape, parts).unwrap();
        let ours = quantize(&inputs(golden.seed, *shape), layout);
        assert_eq!(bits(ours.words()), bits(theirs.words()), "{shape:?}");
        let wide = widened(ours.words(), layout);
        assert_eq!(fnv(&wide), nf4.widened, "{shape:?}");
        if let Some(numbers) = &nf4.numbers {
            assert_eq!(bits(&wide), bits(numbers));
        }
        assert_eq!(ours.bytes(), layout.bytes());
    }
}

#[test]
fn int8_codes_scales_and_widened_numbers_are_those_of_bitsandbytes_to_the_bit() {
    let golden = golden();
    for Case { shape, int8, .. } in &golden.cases {
        let layout = QuantizedLayout::new(BaseFormat::Int8, *shape);
        let ours = quantize(&inputs(golden.seed, *shape), layout);
        let (codes, scales) = ours.words().split_at(layout.code_words());
        assert_eq!(bytes(codes)[..layout.numbers()], hex(&int8.codes), "{shape:?}");
        assert_eq!(bits(scales), bits(&int8.scales), "{shape:?}");
        let wide = widened(ours.words(), layout);
        assert_eq!(fnv(&wide), int8.widened, "{shape:?}");
        if let Some(numbers) = &int8.numbers {
            assert_eq!(bits(&wide), bits(numbers));
        }
    }
}

#[test]
fn rows_widen_alone_as_they_do_with_all_others() {
    for format in BaseFormat::ALL {
        let shape = [37, 43];
        let layout = QuantizedLayout::new(format, shape);
        let ours = quantize(&inputs(3, shape), layout);
        let whole = widened(ours.words(), layout);
        for (row, expected) in whole.chunks(shape[1]).enumerate() {
            let mut part = vec![0.0; shape[1]];
            widen_rows(ours.words(), layout, row, &mut part);
            assert_eq!(bits(&part), bits(expected), "{format}, row {row}");
        }
    }
}

#[test]
fn zeros_stay_zeros_and_what_is_not_finite_does_not_become_a_number() {
    for format in BaseFormat::ALL {
        let layout = QuantizedLayout::new(format, [4, 64]);
        let mut values = inputs(5, [4, 64]);
        values[128..192].fill(0.0);
        let wide = widened(quantize(&values, layout).words(), layout);
        assert!(wide[128..192].iter().all(|&value| value == 0.0), "{format}");
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            values[200] = bad;
            let wide = widened(quantize(&values, layout).words(), layout);
            assert!(wide[192..].iter().all(|value| !value.is_finite()), "{format}, {bad}");
        }
    }
}

#[test]
fn parts_of_other_lengths_are_refused_by_name() {
    let (codes, scales) = (vec![0; 32], vec![0; 1]);
    let map = dynamic_map(true);
    let parts =
        Nf4Parts { codes: &codes, scales: &scales, groups: &[1.0], offset: 0.5, scale_map: &map, code_map: &NF4 };
    assert!(nf4_from_parts([1, 64], parts).is_ok());
    let refused = |parts, part: &str| {
        let message = nf4_from_parts([1, 64], parts).unwrap_err();
        assert!(message.starts_with(part), "{message}");
    };
    refused(Nf4Parts { codes: &codes[1..], ..parts }, "weight has 31 elements");
    refused(Nf4Parts { scales: &[], ..parts }, "weight.absmax has 0");
    refused(Nf4Parts { groups: &[], ..parts }, "weight.nested_absmax has 0");
    refused(Nf4Parts { scale_map: &map[1..], ..parts }, "weight.nested_quant_map has 255");
    refused(Nf4Parts { code_map: &NF4[1..], ..parts }, "weight.quant_map has 15");
}
