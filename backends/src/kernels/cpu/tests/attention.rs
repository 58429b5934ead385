//! Attention of packed sequences and of a decoding step, against the same in tensor operations.

use super::{assert_same, leaf, numbers};
use crate::kernels::{
    AttentionShape, DecodeShape, Decoded, Families, Family, Kin, attention, decode_attention,
    rotary,
};
use burn::tensor::activation::softmax;
use burn::tensor::{Device, Tensor, TensorData};
use std::ops::Range;

/// Attention of one sequence of rows in tensor operations, `[rows, heads, dim]`.
fn plain_attention([q, k, v]: &[Tensor<3>; 3], shape: &AttentionShape) -> Tensor<3> {
    let ([rows, heads, _], [_, kv, _]) = (q.dims(), k.dims());
    let device = q.device();
    let mut hidden = Vec::new();
    for query in 0..rows {
        for key in 0..rows {
            hidden.push(key > query || shape.window.is_some_and(|w| key + w <= query));
        }
    }
    let mask =
        Tensor::<2, burn::tensor::Bool>::from_data(TensorData::new(hidden, [rows, rows]), &device);
    let out = (0..heads).map(|head| {
        let of = |t: &Tensor<3>, h: usize| {
            let [rows, _, dim] = t.dims();
            t.clone().narrow(1, h, 1).reshape([rows, dim])
        };
        let (q, k, v) = (
            of(q, head),
            of(k, head / (heads / kv)),
            of(v, head / (heads / kv)),
        );
        let mut scores = q.matmul(k.transpose()) * shape.scale;
        if let Some(cap) = shape.softcap {
            scores = (scores / cap).tanh() * cap;
        }
        let mixed = softmax(scores.mask_fill(mask.clone(), -1e9), 1).matmul(v);
        let [rows, dim] = mixed.dims();
        mixed.reshape([rows, 1, dim])
    });
    Tensor::cat(out.collect(), 1)
}

/// The same of packed rows, every sequence spelled out.
fn packed_attention(
    q: &Tensor<3>,
    k: &Tensor<3>,
    v: &Tensor<3>,
    shape: &AttentionShape,
) -> Tensor<3> {
    let cut = |t: &Tensor<3>, rows: &Range<usize>| t.clone().narrow(0, rows.start, rows.len());
    let mut parts = Vec::new();
    for Family { prefix, members } in shape.families.all.iter() {
        if !prefix.is_empty() {
            let alone = [q, k, v].map(|t| cut(t, prefix));
            parts.push(plain_attention(&alone, shape));
        }
        for own in members {
            let whole = [q, k, v].map(|t| match prefix.len() {
                0 => cut(t, own),
                _ => Tensor::cat(vec![cut(t, prefix), cut(t, own)], 0),
            });
            let out = plain_attention(&whole, shape);
            parts.push(out.narrow(0, prefix.len(), own.len()));
        }
    }
    Tensor::cat(parts, 0)
}

/// Families laid out one after the other: the lengths of a prefix and of its members.
pub(super) fn families(lengths: &[(usize, &[usize])]) -> Vec<Family> {
    let mut at = 0;
    let mut next = |n: usize| {
        at += n;
        at - n..at
    };
    let family = |&(prefix, members): &(usize, &[usize])| Family {
        prefix: next(prefix),
        members: members.iter().map(|&n| next(n)).collect(),
    };
    lengths.iter().map(family).collect()
}

#[test]
fn attention_is_its_formula_over_packed_sequences_and_shared_prefixes() {
    type Case<'a> = (
        &'a [(usize, &'a [usize])],
        [usize; 3],
        Option<usize>,
        Option<f64>,
    );
    let cases: [Case<'_>; 7] = [
        (&[(0, &[1])], [1, 1, 4], None, None),
        (
            &[(0, &[5, 130]), (0, &[64]), (0, &[1])],
            [4, 2, 8],
            None,
            None,
        ),
        (&[(0, &[70, 200])], [6, 2, 10], Some(17), None),
        (&[(0, &[33, 90])], [2, 2, 16], None, Some(2.0)),
        (&[(0, &[129])], [3, 1, 6], Some(64), Some(1.5)),
        (
            &[(37, &[5, 90, 1]), (0, &[20]), (100, &[3, 64])],
            [4, 2, 8],
            None,
            None,
        ),
        (
            &[(80, &[30, 7, 70]), (3, &[90])],
            [2, 1, 12],
            Some(40),
            Some(2.0),
        ),
    ];
    for (lengths, [heads, kv, dim], window, softcap) in cases {
        let shape = AttentionShape {
            families: Families::new(families(lengths), &Device::flex()),
            window,
            scale: 1.7 / (dim as f64).sqrt(),
            softcap,
        };
        let rows = lengths
            .iter()
            .map(|(p, m)| p + m.iter().sum::<usize>())
            .sum();
        let q = numbers([rows, heads, dim], 10) * 2.0;
        let (k, v) = (
            numbers([rows, kv, dim], 11) * 2.0,
            numbers([rows, kv, dim], 12),
        );
        let kernel = |q: &Tensor<3>, k: &Tensor<3>, v: &Tensor<3>| {
            attention(q, k, v, &shape).expect("f32 on the CPU")
        };
        let expected = packed_attention(&q, &k, &v, &shape);
        assert_same("values", &kernel(&q, &k, &v), &expected);
        let weights = numbers(q.dims(), 13).autodiff();
        let a = [&q, &k, &v].map(leaf);
        let b = [&q, &k, &v].map(leaf);
        let found = (kernel(&a[0], &a[1], &a[2]) * weights.clone())
            .sum()
            .backward();
        let wanted = packed_attention(&b[0], &b[1], &b[2], &shape) * weights;
        let wanted = wanted.sum().backward();
        for (name, (a, b)) in ["dq", "dk", "dv"].iter().zip(a.iter().zip(&b)) {
            let what = format!("{name} of {lengths:?}, window {window:?}, cap {softcap:?}");
            let (found, wanted) = (a.grad(&found), b.grad(&wanted));
            assert_same(&what, &found.expect("a leaf"), &wanted.expect("a leaf"));
        }
    }
}

/// A cache whose rows `kin` say share a beginning do so.
fn shared_cache(kin: &[Kin], kv: usize, columns: usize, dim: usize, seed: u32) -> Tensor<4> {
    let mut cache = numbers([6, kv, columns, dim], seed);
    for Kin { prefix, members } in kin {
        let first = cache
            .clone()
            .slice([prefix.0..prefix.0 + 1, 0..kv, prefix.1.clone(), 0..dim]);
        for (row, own) in members {
            let at = own.start - prefix.1.len()..own.start;
            cache = cache.slice_assign([*row..row + 1, 0..kv, at, 0..dim], first.clone());
        }
    }
    cache
}

#[test]
fn decoding_writes_the_new_column_and_reads_live_ones_alone() {
    let (heads, kv, dim, columns) = (6, 2, 34, 50);
    let column = 40;
    let kin = [
        Kin {
            prefix: (4, 12..25),
            members: vec![
                (4, 25..column + 1),
                (0, 31..column + 1),
                (5, column..column + 1),
            ],
        },
        Kin {
            prefix: (2, 7..7),
            members: vec![(2, 7..column + 1)],
        },
        Kin {
            prefix: (1, 9..9),
            members: vec![(1, column..column + 1)],
        },
    ];
    let cache = [14, 15].map(|seed| shared_cache(&kin, kv, columns, dim, seed));
    let [q, k, v] = [heads, kv, kv].map(|n| numbers([6, n * dim], 16 + n as u32) * 2.0);
    let angle = numbers([6, 1, dim / 2], 7) * 3.0;
    let (cos, sin) = (angle.clone().cos(), angle.sin());
    let turned = |t: &Tensor<2>, n| {
        let t = t.clone().reshape([6, n, dim]);
        rotary(t.clone(), &cos, &sin).expect("f32 on the CPU")
    };
    let place = [0..6, 0..kv, column..column + 1, 0..dim];
    let as_column = |t: Tensor<3>| t.reshape([6, kv, 1, dim]);
    let new = [
        as_column(turned(&k, kv)),
        as_column(v.clone().reshape([6, kv, dim])),
    ];
    let decoded = Decoded::new(kin.to_vec(), 6, &Device::flex());
    for (window, softcap) in [
        (None, None),
        (None, Some(2.0)),
        (Some(20), None),
        (Some(3), None),
    ] {
        let shape = DecodeShape {
            decoded: &decoded,
            angles: [&cos, &sin],
            window,
            scale: 0.4,
            softcap,
        };
        let (found, written) =
            decode_attention([q.clone(), k.clone(), v.clone()], cache.clone(), &shape)
                .expect("f32 on the CPU");
        let queries = turned(&q, heads);
        let nothing = found.clone().slice([3..4, 0..heads * dim]);
        assert!(
            nothing.into_data().iter::<f32>().all(|v| v == 0.0),
            "a row in no family"
        );
        for Kin { prefix, members } in &kin {
            for (row, own) in members {
                let mut live = own.start - prefix.1.len()..own.end;
                live.start = live
                    .start
                    .max(live.end.saturating_sub(window.unwrap_or(usize::MAX)));
                let rows = *row..row + 1;
                let [keys, values] = [0, 1].map(|i| {
                    let own = [rows.clone(), 0..kv, 0..columns, 0..dim];
                    let full = cache[i].clone().slice_assign(place.clone(), new[i].clone());
                    let full = full.slice(own.clone());
                    let kept = written[i].clone().slice(own);
                    let upto = |t: Tensor<4>| t.reshape([kv * columns, dim]);
                    assert_same("the cache", &upto(kept), &upto(full.clone()));
                    full
                });
                for head in 0..heads {
                    let of = |t: &Tensor<4>| {
                        let at = head / (heads / kv);
                        let own = t.clone().slice([0..1, at..at + 1, live.clone(), 0..dim]);
                        own.reshape([live.len(), dim])
                    };
                    let q = queries
                        .clone()
                        .slice([rows.clone(), head..head + 1, 0..dim]);
                    let mut scores = q.reshape([1, dim]).matmul(of(&keys).transpose()) * 0.4;
                    if let Some(cap) = softcap {
                        scores = (scores / cap).tanh() * cap;
                    }
                    let expected = softmax(scores, 1).matmul(of(&values));
                    let own = found
                        .clone()
                        .slice([rows.clone(), head * dim..(head + 1) * dim]);
                    assert_same("a head", &own, &expected);
                }
            }
        }
    }
}
