//! Attention of packed sequences, against the same in tensor operations.

use super::{assert_same, leaf, numbers};
use crate::{AttentionShape, PrefixGroup, PrefixGroups, attention};
use burn::tensor::activation::softmax;
use burn::tensor::{Device, Tensor, TensorData};
use std::ops::Range;

/// Attention of one sequence of rows in tensor operations, `[rows, heads, dim]`: a sink is one more column of scores,
/// which is left out.
fn plain_attention([q, k, v]: &[Tensor<3>; 3], sinks: Option<&Tensor<2>>, shape: &AttentionShape) -> Tensor<3> {
    let ([rows, heads, _], [_, kv, _]) = (q.dims(), k.dims());
    let device = q.device();
    let mut hidden = Vec::new();
    for query in 0..rows {
        for key in 0..rows {
            hidden.push(key > query || shape.window.is_some_and(|w| key + w <= query));
        }
    }
    let mask = Tensor::<2, burn::tensor::Bool>::from_data(TensorData::new(hidden, [rows, rows]), &device);
    let out = (0..heads).map(|head| {
        let of = |t: &Tensor<3>, h: usize| {
            let [rows, _, dim] = t.dims();
            t.clone().narrow(1, h, 1).reshape([rows, dim])
        };
        let (q, k, v) = (of(q, head), of(k, head / (heads / kv)), of(v, head / (heads / kv)));
        let mut scores = q.matmul(k.transpose()) * shape.scale;
        if let Some(cap) = shape.softcap {
            scores = (scores / cap).tanh() * cap;
        }
        let mut scores = scores.mask_fill(mask.clone(), -1e9);
        if let Some(sinks) = sinks {
            let column = sinks.clone().narrow(1, head, 1).expand([rows, 1]);
            scores = Tensor::cat(vec![scores, column], 1);
        }
        let mixed = softmax(scores, 1).narrow(1, 0, rows).matmul(v);
        let [rows, dim] = mixed.dims();
        mixed.reshape([rows, 1, dim])
    });
    Tensor::cat(out.collect(), 1)
}

/// Attention of packed rows, every sequence spelled out.
fn packed_attention(qkv: [&Tensor<3>; 3], sinks: Option<&Tensor<2>>, shape: &AttentionShape) -> Tensor<3> {
    let cut = |t: &Tensor<3>, rows: &Range<usize>| t.clone().narrow(0, rows.start, rows.len());
    let mut parts = Vec::new();
    for PrefixGroup { prefix, members } in shape.groups.groups.iter() {
        if !prefix.is_empty() {
            let alone = qkv.map(|t| cut(t, prefix));
            parts.push(plain_attention(&alone, sinks, shape));
        }
        for member in members {
            let whole = qkv.map(|t| match prefix.len() {
                0 => cut(t, member),
                _ => Tensor::cat(vec![cut(t, prefix), cut(t, member)], 0),
            });
            let out = plain_attention(&whole, sinks, shape);
            parts.push(out.narrow(0, prefix.len(), member.len()));
        }
    }
    Tensor::cat(parts, 0)
}

/// Prefix groups laid out one after the other: the lengths of a prefix and of its members.
pub(super) fn groups(lengths: &[(usize, &[usize])]) -> Vec<PrefixGroup> {
    let mut at = 0;
    let mut next = |n: usize| {
        at += n;
        at - n..at
    };
    let group = |&(prefix, members): &(usize, &[usize])| PrefixGroup {
        prefix: next(prefix),
        members: members.iter().map(|&n| next(n)).collect(),
    };
    lengths.iter().map(group).collect()
}

#[test]
fn attention_is_its_formula_over_packed_sequences_and_shared_prefixes() {
    type Case<'a> = (&'a [(usize, &'a [usize])], [usize; 3], Option<usize>, Option<f64>);
    let cases: [Case<'_>; 7] = [
        (&[(0, &[1])], [1, 1, 4], None, None),
        (&[(0, &[5, 130]), (0, &[64]), (0, &[1])], [4, 2, 8], None, None),
        (&[(0, &[70, 200])], [6, 2, 10], Some(17), None),
        (&[(0, &[33, 90])], [2, 2, 16], None, Some(2.0)),
        (&[(0, &[129])], [3, 1, 6], Some(64), Some(1.5)),
        (&[(37, &[5, 90, 1]), (0, &[20]), (100, &[3, 64])], [4, 2, 8], None, None),
        (&[(80, &[30, 7, 70]), (3, &[90])], [2, 1, 12], Some(40), Some(2.0)),
    ];
    for (lengths, [heads, kv, dim], window, softcap) in cases {
        let shape = AttentionShape {
            groups: PrefixGroups::new(groups(lengths), &Device::flex()),
            window,
            scale: 1.7 / (dim as f64).sqrt(),
            softcap,
        };
        let rows = lengths.iter().map(|(p, m)| p + m.iter().sum::<usize>()).sum();
        let q = numbers([rows, heads, dim], 10) * 2.0;
        let (k, v) = (numbers([rows, kv, dim], 11) * 2.0, numbers([rows, kv, dim], 12));
        let sinks = numbers([1, heads], 14) * 3.0;
        compare([&q, &k, &v], None, &shape, lengths);
        compare([&q, &k, &v], Some(&sinks), &shape, lengths);
    }
}

/// The kernel beside tensor operations, and all gradients.
fn compare(inputs: [&Tensor<3>; 3], sinks: Option<&Tensor<2>>, shape: &AttentionShape, lengths: &[(usize, &[usize])]) {
    let kernel = |qkv: [&Tensor<3>; 3], sinks: Option<&Tensor<2>>| attention(qkv, sinks, shape);
    let plain = |qkv: [&Tensor<3>; 3], sinks: Option<&Tensor<2>>| packed_attention(qkv, sinks, shape);
    let (actual, expected) = (kernel(inputs, sinks), plain(inputs, sinks));
    assert_same("values", &actual, &expected);
    let weights = numbers(inputs[0].dims(), 13).autodiff();
    let [a, b] = [(); 2].map(|()| (inputs.map(leaf), sinks.map(leaf)));
    let actual = kernel(a.0.each_ref(), a.1.as_ref()) * weights.clone();
    let actual = actual.sum().backward();
    let wanted = plain(b.0.each_ref(), b.1.as_ref()) * weights;
    let wanted = wanted.sum().backward();
    let what = format!("{lengths:?}, window {:?}, cap {:?}, sinks {}", shape.window, shape.softcap, sinks.is_some());
    for (name, (a, b)) in ["dq", "dk", "dv"].iter().zip(a.0.iter().zip(&b.0)) {
        let (actual, wanted) = (a.grad(&actual), b.grad(&wanted));
        let what = format!("{name} of {what}");
        assert_same(&what, &actual.expect("a leaf"), &wanted.expect("a leaf"));
    }
    if let Some((a, b)) = a.1.zip(b.1) {
        let (actual, wanted) = (a.grad(&actual), b.grad(&wanted));
        let what = format!("sinks of {what}");
        assert_same(&what, &actual.expect("a leaf"), &wanted.expect("a leaf"));
    }
}
