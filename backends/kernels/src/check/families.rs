//! Families of kernels on small tensors. Where an operation is only a kernel, its formula is here.

use super::{Family, Inputs};
use crate::operations::{
    adamw, attention, causal_convolution, dequantize_blockwise, gated_delta_rule, gated_rms_norm, glu, linear,
    paged_attention, quantize_blockwise, rms_norm, rotary, sample_rows, sample_rows_on_device, samples_on_device,
    scatter_add_rows, score_gradient, score_rows, write_kv,
};
use crate::shapes::int_tensor;
use crate::{
    AdamWBatch, AdamWSlice, AdamWStep, AttentionShape, BlockTables, DeltaHeads, KvPool, PackedWeights,
    PagedAttentionShape, PrefixGroups, PrefixTree, QuantizationMap, RotaryAngles, RowsByToken, SampleOptions, Scaling,
    ScoreGradients, SequenceBlocks, SequenceRows, SharedBlocks, SlotMapping, Truncation,
};
use burn::tensor::activation::softmax;
use burn::tensor::{DType, Tensor, TensorData};
use firebrick_spec::{Activation, BLOCK_SIZE, Operation};

/// Rows and columns of most tensors.
const ROWS: usize = 24;
const WIDTH: usize = 64;

/// Query heads, key heads, and elements of a head.
const HEADS: [usize; 3] = [4, 2, 32];

/// Largest relative L2 distance in f32, and that of codes of 8 bits, of which one may round to its neighbor.
const EXACT: f64 = 1e-4;
const ROUNDED: f64 = 1e-2;

/// Products with matrices, which every model uses.
pub(super) const LINEAR: (&str, f64, Family) = ("linear", EXACT, |x| {
    x.with_gradients([x.tensor([ROWS, WIDTH], 1), x.tensor([ROWS, WIDTH], 2)], |[x, w]| linear(x, w))
});

/// The name of an operation's family, the largest distance in f32, and its kernels.
pub(super) fn of(operation: Operation) -> (&'static str, f64, Family) {
    match operation {
        Operation::Norm => ("norm", EXACT, |x| {
            let inputs = [x.tensor([ROWS, WIDTH], 1), x.tensor([1, WIDTH], 2)];
            x.with_gradients(inputs, |[x, w]| rms_norm(x, w, 1e-6, 0.0))
        }),
        Operation::Gate => ("glu", EXACT, |x| {
            let inputs = [1, 2].map(|salt| x.tensor([ROWS, WIDTH], salt));
            x.with_gradients(inputs, |[gate, up]| glu(gate.clone(), up.clone(), Activation::Silu))
        }),
        Operation::Rotary => ("rotary", EXACT, rotated),
        Operation::Scores => ("scores", EXACT, scored),
        Operation::Draw => ("sampling", EXACT, sampled),
        Operation::Quantised => ("int8 linear", ROUNDED, quantized),
        Operation::DecodeAttention => ("paged attention", EXACT, decoded),
        Operation::Attention => ("attention", EXACT, |x| attended(x, ROWS)),
        Operation::LongAttention => ("long attention", EXACT, |x| attended(x, 20 * ROWS)),
        Operation::AdamW => ("adamw", EXACT, updated),
        Operation::Block8 => ("8-bit moments", ROUNDED, block_wise),
        Operation::Embedding => ("embedding gradient", EXACT, scattered),
        Operation::DeltaNet => ("delta rule", EXACT, delta_net),
    }
}

fn rotated(x: &Inputs<'_>) -> Vec<Tensor<2>> {
    let [heads, _, dim] = HEADS;
    let angles = super::numbers(ROWS * dim / 2, 2);
    let turn = |f: fn(f64) -> f64| {
        let tensor = x.of(angles.iter().map(|&angle| f(angle)).collect(), [ROWS, 1, dim / 2], DType::F32);
        if x.reference { tensor.autodiff() } else { tensor }
    };
    let [cos, sin] = [turn(f64::cos), turn(f64::sin)];
    x.with_gradients([x.tensor([ROWS, heads * dim], 1)], |[x]| {
        rotary(x.clone().reshape([ROWS, heads, dim]), &cos, &sin).reshape([ROWS, heads * dim])
    })
}

fn scored(x: &Inputs<'_>) -> Vec<Tensor<2>> {
    let logits = x.tensor([ROWS, WIDTH], 1) * 8.0;
    let targets = int_tensor((0..ROWS).map(|row| (row * 31 % WIDTH) as i32).collect(), x.device);
    let [d_logp, d_entropy] = [2, 3].map(|salt| x.wide([ROWS], salt));
    let scaling = Scaling { temperature: 0.7, softcap: None };
    let scores = score_rows(&logits, &targets, scaling);
    let upstream = ScoreGradients { d_logp: &d_logp, d_entropy: Some(&d_entropy) };
    let gradient = score_gradient(logits, &targets, &scores, upstream, scaling);
    vec![scores.logp.reshape([ROWS, 1]), scores.entropy.reshape([ROWS, 1]), gradient]
}

/// Tokens, and their log-probs.
fn sampled(x: &Inputs<'_>) -> Vec<Tensor<2>> {
    let logits = x.tensor([ROWS, WIDTH], 1) * 8.0;
    let uniforms: Vec<f32> = (0..ROWS).map(|row| (row as f32 + 0.37) / ROWS as f32).collect();
    let (temperature, uniforms) = (0.9, Some(uniforms.as_slice()));
    if samples_on_device(&logits) {
        let options = SampleOptions { temperature, truncation: Truncation::default(), uniforms };
        let drawn = sample_rows_on_device(&logits, options);
        return vec![drawn.clone().narrow(1, 0, 1), drawn.narrow(1, 2, 1)];
    }
    let drawn = sample_rows(&logits, temperature, uniforms);
    let column = |values| Tensor::from_data(TensorData::new(values, [ROWS, 1]), (x.device, DType::F32));
    vec![
        column(drawn.iter().map(|sampled| sampled.token as f32).collect()),
        column(drawn.iter().map(|sampled| sampled.logp).collect::<Vec<f32>>()),
    ]
}

fn quantized(x: &Inputs<'_>) -> Vec<Tensor<2>> {
    let (rows, w) = (x.tensor([ROWS, WIDTH], 1), x.tensor([2 * WIDTH, WIDTH], 2));
    if x.reference {
        let step = w.clone().abs().max_dim(1) / 127.0;
        let rounded = (w / step.clone()).round() * step;
        return vec![rows.matmul(rounded.transpose())];
    }
    // of the CPU's matrices only those in f32
    let packed = PackedWeights::quantize(&w).expect("devices without this kernel are not checked for it");
    vec![packed.linear(&rows)]
}

/// Causal softmax attention of the last rows of one sequence, from its definition.
fn attention_formula(qkv: [Tensor<3>; 3], scale: f64) -> Tensor<2> {
    let ([queries, heads, dim], [keys, ..]) = (qkv[0].dims(), qkv[1].dims());
    let [q, k, v] = qkv.map(|t| {
        let [rows, kv_heads, _] = t.dims();
        let by_head = t.swap_dims(0, 1).reshape([kv_heads, 1, rows * dim]);
        by_head.repeat_dim(1, heads / kv_heads).reshape([heads, rows, dim])
    });
    let hidden = |query: usize, key: usize| if key > query + keys - queries { -1e9 } else { 0.0 };
    let mask = (0..queries * keys).map(|i| hidden(i / keys, i % keys)).collect::<Vec<f64>>();
    let mask = Tensor::<3>::from_data(TensorData::new(mask, [1, queries, keys]), (&q.device(), DType::F64));
    let scores = q.matmul(k.swap_dims(1, 2)) * scale + mask;
    softmax(scores, 2).matmul(v).swap_dims(0, 1).reshape([queries, heads * dim])
}

fn attended(x: &Inputs<'_>, rows: usize) -> Vec<Tensor<2>> {
    let [heads, kv_heads, dim] = HEADS;
    let scale = (dim as f64).powf(-0.5);
    let groups = PrefixGroups::new(vec![PrefixTree::single(0..rows)], x.device);
    let shape = AttentionShape { groups, window: None, scale, softcap: None };
    let inputs = [(heads, 1), (kv_heads, 2), (kv_heads, 3)].map(|(heads, salt)| x.tensor([rows, heads * dim], salt));
    x.with_gradients(inputs, |inputs| {
        let qkv = inputs.each_ref().map(|t| t.clone().reshape([rows, t.dims()[1] / dim, dim]));
        if x.reference {
            return attention_formula(qkv, scale);
        }
        attention(qkv.each_ref(), None, &shape).reshape([rows, heads * dim])
    })
}

/// The last token of a sequence, over the blocks of those before it.
fn decoded(x: &Inputs<'_>) -> Vec<Tensor<2>> {
    let [heads, kv_heads, dim] = HEADS;
    let (tokens, scale) = (ROWS, (dim as f64).powf(-0.5));
    let q = x.tensor([1, heads * dim], 1);
    let kv = [2, 3].map(|salt| x.tensor([tokens, kv_heads, dim], salt));
    if x.reference {
        let [k, v] = kv;
        return vec![attention_formula([q.reshape([1, heads, dim]), k, v], scale)];
    }
    let blocks = tokens.div_ceil(BLOCK_SIZE);
    let before = kv.each_ref().map(|t| t.clone().narrow(0, 0, tokens - 1));
    let slots = SlotMapping::new((0..tokens as u32 - 1).collect(), x.device);
    let pool = KvPool::float(kv_heads, blocks, dim, x.stored, x.device);
    let pool = write_kv(pool, before.each_ref(), &slots);
    let member = SequenceBlocks { row: 0, blocks: (0..blocks as u32).collect(), tokens };
    let shared = vec![SharedBlocks { first: 0, blocks: Vec::new(), members: vec![member] }];
    // an angle of 0: keys are in the pool as they are
    let angle = |value| x.of(vec![value; dim / 2], [1, 1, dim / 2], DType::F32);
    let (tables, angles) = (BlockTables::new(shared, 1, x.device), RotaryAngles::new(&angle(1.0), &angle(0.0)));
    let [k, v] = kv.map(|t| t.narrow(0, tokens - 1, 1).reshape([1, kv_heads * dim]));
    let shape =
        PagedAttentionShape { tables: &tables, angles: &angles, window: None, scale, softcap: None, sinks: None };
    vec![paged_attention([q, k, v], pool, &shape).0]
}

/// The first update of a parameter in f32.
fn updated(x: &Inputs<'_>) -> Vec<Tensor<2>> {
    let step = AdamWStep { clip: 0.5, betas: [0.9, 0.95], eps: 1e-8, second_root: 0.3, rate: 0.01, keep: 0.99 };
    let (value, gradient) = (x.wide([ROWS, WIDTH], 1), x.wide([ROWS, WIDTH], 2));
    if x.reference {
        let g = gradient * step.clip;
        let [m, v] = [g.clone() * (1.0 - step.betas[0]), g.clone() * g * (1.0 - step.betas[1])];
        let change = m.clone() * step.rate / (v.clone().sqrt() / step.second_root + step.eps);
        return vec![value * step.keep - change, m, v];
    }
    let mut batch = AdamWBatch::default();
    let all = AdamWSlice { rows: 0..ROWS, moments: None };
    let mut output = adamw(value, vec![all], &gradient, None, &step, &mut batch);
    batch.launch();
    let [m, v] = output.moments.remove(0);
    vec![output.value, m, v]
}

/// Moments in 8 bits and back, on evenly spaced entries.
fn block_wise(x: &Inputs<'_>) -> Vec<Tensor<2>> {
    let entry = |i: usize| (2.0 * i as f64 - 255.0) / 255.0;
    let column = |values: Vec<f64>| Tensor::<1>::from_data(TensorData::new(values, [256]), (x.device, DType::F32));
    let entries = column((0..256).map(entry).collect());
    let midpoints = column((0..255).map(|i| f64::midpoint(entry(i), entry(i + 1))).chain([f64::INFINITY]).collect());
    let map = QuantizationMap { midpoints: &midpoints, middle: 0.0, smallest: 1e-31 };
    let blocks = quantize_blockwise(&x.tensor([ROWS, WIDTH], 1), &map);
    vec![dequantize_blockwise(&blocks, &entries, [ROWS, WIDTH], DType::F32)]
}

fn scattered(x: &Inputs<'_>) -> Vec<Tensor<2>> {
    let ids: Vec<i32> = (0..ROWS as i32).map(|row| row * row % 17).collect();
    let rows = RowsByToken::new(&ids, x.device);
    vec![scatter_add_rows(x.tensor([17, WIDTH], 1), &rows, &x.tensor([ROWS, WIDTH], 2))]
}

/// Convolution, rule and norm of gated `DeltaNet`, of two sequences.
fn delta_net(x: &Inputs<'_>) -> Vec<Tensor<2>> {
    let heads = DeltaHeads { keys: 1, values: 2, key_dim: 16, value_dim: 16 };
    let (rows, columns) = (4 * ROWS, heads.values * heads.value_dim);
    let sequences = SequenceRows::whole([(0..70, None), (70..rows, None)], x.device);
    let decay = |salt, low: f64, high: f64| {
        let numbers = super::numbers(rows * heads.values, salt);
        let between = |x: f64| low + (high - low) * f64::midpoint(x, 1.0);
        x.of(numbers.into_iter().map(between).collect(), [rows, heads.values], DType::F32)
    };
    let taps = [x.tensor([rows, heads.channels()], 1), x.tensor([heads.channels(), 4], 2)];
    let mut results = x.with_gradients(taps, |[x, w]| causal_convolution(x, w, &sequences));
    let inputs = [x.tensor([rows, heads.channels()], 3), decay(4, -0.3, 0.0), decay(5, 0.1, 0.9)];
    results.extend(x.with_gradients(inputs, |[qkv, g, beta]| gated_delta_rule([qkv, g, beta], heads, &sequences)));
    let inputs = [x.tensor([rows, columns], 6), x.tensor([rows, columns], 7), x.tensor([1, columns], 8)];
    results.extend(x.with_gradients(inputs, |[x, z, w]| gated_rms_norm(x, z, w, 1e-6)));
    results
}
