//! Attention of packed sequences, against the same in tensor operations.

use super::{assert_same, leaf, numbers};
use crate::kernels::{AttentionShape, Families, Family, attention};
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
