//! Attention of packed sequences, against the same in tensor operations.

use super::{assert_same, leaf, numbers};
use crate::{AttentionShape, PrefixGroups, PrefixRun, PrefixTree, attention};
use burn::tensor::activation::softmax;
use burn::tensor::{DType, Device, Tensor, TensorData};
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
    for tree in shape.groups.trees() {
        for path in tree.paths() {
            let rows: Vec<&Range<usize>> = path.iter().map(|&run| &tree.runs()[run].rows).collect();
            let rows: Vec<_> = rows.into_iter().filter(|rows| !rows.is_empty()).collect();
            let Some(last) = path.last().map(|&run| tree.runs()[run].rows.len()).filter(|&n| n > 0) else {
                continue;
            };
            let whole = qkv.map(|t| Tensor::cat(rows.iter().map(|rows| cut(t, rows)).collect(), 0));
            let out = plain_attention(&whole, sinks, shape);
            let before = out.dims()[0] - last;
            parts.push(out.narrow(0, before, last));
        }
    }
    Tensor::cat(parts, 0)
}

/// Prefixes laid out one after the other: the lengths of each and of what is behind it in its members.
pub(super) fn groups(lengths: &[(usize, &[usize])]) -> Vec<PrefixTree> {
    let tree = |&(prefix, members): &(usize, &[usize])| {
        let members = members.iter().map(|&rows| (rows, Some(0)));
        std::iter::once((prefix, None)).chain(members).collect()
    };
    trees(&lengths.iter().map(tree).collect::<Vec<_>>())
}

/// Trees laid out one after the other: the length of each run, and its parent.
fn trees(runs: &[Vec<(usize, Option<usize>)>]) -> Vec<PrefixTree> {
    let mut at = 0;
    let mut run = |&(n, parent): &(usize, Option<usize>)| {
        at += n;
        PrefixRun { rows: at - n..at, parent }
    };
    runs.iter().map(|tree| PrefixTree::new(tree.iter().map(&mut run).collect())).collect()
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
    for (lengths, heads, window, softcap) in cases {
        hold(groups(lengths), heads, (window, softcap), DType::F32);
    }
}

#[test]
fn rows_see_their_path_through_prefixes_of_several_levels() {
    // a system prompt, two prompts, and completions of which one is an earlier turn of two; beside it another tree
    let forest = [
        vec![
            (70, None),
            (30, Some(0)),
            (9, Some(1)),
            (65, Some(1)),
            (5, Some(3)),
            (1, Some(3)),
            (3, Some(0)),
            (40, Some(6)),
            (2, Some(6)),
        ],
        vec![(4, None), (0, Some(0)), (66, Some(1)), (7, Some(1))],
    ];
    for (heads, window, softcap) in [
        ([4, 2, 8], None, None),
        ([2, 1, 12], Some(1), None),
        ([2, 1, 12], Some(40), Some(2.0)),
        ([2, 2, 6], Some(100), Some(1.5)),
    ] {
        hold(trees(&forest), heads, (window, softcap), DType::F64);
    }
}

fn hold(
    trees: Vec<PrefixTree>,
    [heads, kv, dim]: [usize; 3],
    (window, softcap): (Option<usize>, Option<f64>),
    dtype: DType,
) {
    let rows = trees.iter().flat_map(PrefixTree::runs).map(|run| run.rows.len()).sum();
    let groups = PrefixGroups::new(trees, &Device::flex());
    let shape = AttentionShape { groups, window, scale: 1.7 / (dim as f64).sqrt(), softcap };
    let stored = |heads: usize, salt, size: f64| (numbers([rows, heads, dim], salt) * size).cast(dtype);
    let (q, k, v) = (stored(heads, 10, 2.0), stored(kv, 11, 2.0), stored(kv, 12, 1.0));
    let sinks = (numbers([1, heads], 14) * 3.0).cast(dtype);
    compare([&q, &k, &v], None, &shape);
    compare([&q, &k, &v], Some(&sinks), &shape);
}

/// The kernel beside tensor operations, and all gradients.
fn compare(inputs: [&Tensor<3>; 3], sinks: Option<&Tensor<2>>, shape: &AttentionShape) {
    let kernel = |qkv: [&Tensor<3>; 3], sinks: Option<&Tensor<2>>| attention(qkv, sinks, shape);
    let plain = |qkv: [&Tensor<3>; 3], sinks: Option<&Tensor<2>>| packed_attention(qkv, sinks, shape);
    let (actual, expected) = (kernel(inputs, sinks), plain(inputs, sinks));
    assert_same("values", &actual, &expected);
    let weights = numbers(inputs[0].dims(), 13).cast(inputs[0].dtype()).autodiff();
    let [a, b] = [(); 2].map(|()| (inputs.map(leaf), sinks.map(leaf)));
    let actual = kernel(a.0.each_ref(), a.1.as_ref()) * weights.clone();
    let actual = actual.sum().backward();
    let wanted = plain(b.0.each_ref(), b.1.as_ref()) * weights;
    let wanted = wanted.sum().backward();
    let (trees, window, softcap) = (shape.groups.trees(), shape.window, shape.softcap);
    let what = format!("{trees:?}, window {window:?}, cap {softcap:?}, sinks {}", sinks.is_some());
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
