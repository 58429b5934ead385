//! Times the kernels that decoders are made of, on the CPU.

use super::timing::seconds;
use crate::kernels::{
    self, Activation, AttentionShape, BlockTables, KvPool, PackedWeights, PagedAttentionShape, PrefixGroups,
    PrefixTree, RotaryAngles, Scaling, ScoreGradients, SequenceBlocks, SharedBlocks, SlotMapping,
};
use crate::{Error, Result};
use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};
use firebrick_spec::BLOCK_SIZE;
use firebrick_spec::{KernelRates, LogitRates, RowsRate};
use std::collections::VecDeque;
use std::time::Instant;

/// Rows of products with few rows.
const ROWS: [usize; 5] = [1, 4, 12, 32, 128];

/// A side of the matrices that are multiplied, and how many there are: a model's weights are larger than what caches
/// hold between two steps.
const SIDE: usize = 1024;
const MATRICES: usize = 32;

/// Rows and columns of logits.
const LOGITS: [usize; 2] = [64, 8192];

/// All rates of a device, given its rate of large products.
pub(super) fn rates(device: &Device, flops: f64) -> Result<KernelRates> {
    Ok(KernelRates {
        product_bandwidth: product_bandwidth(device, flops)?,
        few_rows: few_rows(device, kernels::linear, |w| Some(w.clone()))?,
        panels: few_rows(device, |x, w: &PackedWeights| w.linear(x), PackedWeights::pack)?,
        packing_bandwidth: Some(packing_bandwidth(device)?),
        adapter_flops: adapter(device)?,
        attention_flops: attention(device)?,
        decode_attention_flops: decode_attention(device)?,
        elementwise_bandwidth: elementwise(device)?,
        logits: logits(device)?,
        operation: operation(device)?,
    })
}

/// Normal numbers: ones multiply with less power, and exponentials of equal logits are none of real ones.
fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

fn missing<T>(result: Option<T>) -> Result<T> {
    result.ok_or_else(|| Error::Transfer("a kernel of the CPU does not take f32".into()))
}

/// The result of kernels alone.
fn fused<T>(work: impl FnOnce() -> T) -> Result<T> {
    missing(kernels::fused(work))
}

/// Time of products with a short side beyond their operations, by the bytes of their matrices.
fn product_bandwidth(device: &Device, flops: f64) -> Result<f64> {
    let (mut bytes, mut beyond) = (0.0, 0.0);
    for [rows, inner, outputs] in [[SIDE, 128, SIDE], [SIDE, SIDE, 128], [256, 256, SIDE]] {
        let (x, w) = (random([rows, inner], device), random([outputs, inner], device));
        let time = seconds(|| kernels::linear(&x, &w))?;
        bytes += 4.0 * (rows * inner + inner * outputs + rows * outputs) as f64;
        beyond += time - 2.0 * (rows * inner * outputs) as f64 / flops;
    }
    // where small products are as fast as large ones, bytes cost next to nothing
    Ok(bytes / f64::max(beyond, bytes / 1e12))
}

fn few_rows<W>(
    device: &Device,
    product: impl Fn(&Tensor<2>, &W) -> Tensor<2>,
    prepared: impl Fn(&Tensor<2>) -> Option<W>,
) -> Result<Vec<RowsRate>> {
    let first = random([SIDE, SIDE], device);
    // normal numbers as well, and sooner made than drawn
    let matrices: Option<Vec<W>> =
        (0..MATRICES).map(|index| prepared(&first.clone().mul_scalar(1.0 + index as f32 / 64.0))).collect();
    let matrices = missing(matrices)?;
    let rate = |rows: usize| -> Result<RowsRate> {
        let x = random([rows, SIDE], device);
        let mut next = (0..MATRICES).cycle();
        fused(|| product(&x, &matrices[0]))?;
        // a decoding step has a team of threads
        let time = kernels::with_team(device, || {
            seconds(|| {
                let at = next.next().unwrap_or(0);
                product(&x, &matrices[at])
            })
        })?;
        Ok(RowsRate { rows: rows as u64, flops: 2.0 * (rows * SIDE * SIDE) as f64 / time })
    };
    ROWS.into_iter().map(rate).collect()
}

/// Matrices in panels, all of them kept, as a model's are: part of the time goes to memory that was not used before.
fn packing_bandwidth(device: &Device) -> Result<f64> {
    let matrix = random([SIDE, SIDE], device);
    let started = Instant::now();
    let panels: Option<Vec<_>> = (0..MATRICES).map(|_| PackedWeights::pack(&matrix)).collect();
    let seconds = started.elapsed().as_secs_f64();
    drop(missing(panels)?);
    Ok((MATRICES * SIDE * SIDE * 4) as f64 / seconds)
}

/// An adapter of rank 16, with sixteen rows.
fn adapter(device: &Device) -> Result<f64> {
    const RANK: usize = 16;
    const ROWS: usize = 16;
    let x = random([ROWS, SIDE], device);
    let (a, b) = (random([RANK, SIDE], device), random([SIDE, RANK], device));
    let time = kernels::with_team(device, || seconds(|| kernels::linear(&kernels::linear(&x, &a), &b)))?;
    Ok(4.0 * (ROWS * SIDE * RANK) as f64 / time)
}

/// Four sequences of two blocks, eight heads of 64 dimensions over four key heads.
fn attention(device: &Device) -> Result<[f64; 2]> {
    const SEQUENCES: usize = 4;
    const LENGTH: usize = 128;
    const HEADS: usize = 8;
    const KEY_HEADS: usize = 4;
    const DIM: usize = 64;
    let tree = |index: usize| PrefixTree::single(index * LENGTH..(index + 1) * LENGTH);
    let shape = AttentionShape {
        groups: PrefixGroups::new((0..SEQUENCES).map(tree).collect(), device),
        window: None,
        scale: (DIM as f64).sqrt().recip(),
        softcap: None,
    };
    let rows = SEQUENCES * LENGTH;
    let [q, k, v] = [HEADS, KEY_HEADS, KEY_HEADS].map(|heads| random([rows, heads, DIM], device));
    let attend = |q: &Tensor<3>, k: &Tensor<3>, v: &Tensor<3>| {
        kernels::attention([q, k, v], None, &shape).reshape([rows, HEADS * DIM])
    };
    let forward = seconds(|| attend(&q, &k, &v))?;
    let pass = seconds(|| {
        let leaf = |t: &Tensor<3>| t.clone().autodiff().require_grad();
        let [q, k, v] = [&q, &k, &v].map(leaf);
        let mut tape = attend(&q, &k, &v).sum().backward();
        let d = q.grad_remove(&mut tape);
        d.unwrap_or_else(|| q.inner()).reshape([rows, HEADS * DIM])
    })?;
    // a block of 64 queries against the keys up to its end
    let pairs: usize = (64..=LENGTH).step_by(64).map(|keys| 64 * keys).sum();
    let work = 4.0 * (SEQUENCES * HEADS * DIM * pairs) as f64;
    Ok([work / forward, work / pass])
}

/// Sixteen sequences of 96 tokens, eight heads of 64 dimensions over four key heads, in several layers.
fn decode_attention(device: &Device) -> Result<f64> {
    const ROWS: usize = 16;
    const BLOCKS: usize = 6;
    const LAYERS: usize = 6;
    const HEADS: usize = 8;
    const KEY_HEADS: usize = 4;
    const DIM: usize = 64;
    let sequence = |row: usize| SharedBlocks {
        first: 0,
        blocks: Vec::new(),
        members: vec![SequenceBlocks {
            row,
            blocks: (row * BLOCKS..(row + 1) * BLOCKS).map(|block| block as u32).collect(),
            tokens: BLOCKS * BLOCK_SIZE,
        }],
    };
    let tables = BlockTables::new((0..ROWS).map(sequence).collect(), ROWS, device);
    let slots = ROWS * BLOCKS * BLOCK_SIZE;
    let mapping = SlotMapping::new((0..slots as u32).collect(), device);
    let numbers = || random([slots, KEY_HEADS, DIM], device);
    let pool = || {
        let pool = KvPool::float(KEY_HEADS, ROWS * BLOCKS, DIM, DType::F32, device);
        kernels::write_kv(pool, [&numbers(), &numbers()], &mapping)
    };
    let mut pools: VecDeque<KvPool> = (0..LAYERS).map(|_| pool()).collect();
    let angles = Tensor::<3>::ones([ROWS, 1, DIM / 2], device) * 0.1;
    let shape = PagedAttentionShape {
        tables: &tables,
        angles: &RotaryAngles::new(&angles, &angles),
        window: None,
        scale: (DIM as f64).sqrt().recip(),
        softcap: None,
        sinks: None,
    };
    let qkv = [HEADS, KEY_HEADS, KEY_HEADS].map(|heads| random([ROWS, heads * DIM], device));
    let mut attend = || {
        let pool = pools.pop_front()?;
        let (out, pool) = kernels::paged_attention(qkv.clone(), pool, &shape);
        pools.push_back(pool);
        Some(out)
    };
    let _ = missing(attend())?;
    let time = kernels::with_team(device, || seconds(|| attend().unwrap_or_else(|| qkv[0].clone())))?;
    Ok(4.0 * (HEADS * DIM * slots) as f64 / time)
}

/// The gate of an MLP reads two tensors and writes one.
fn elementwise(device: &Device) -> Result<f64> {
    let [gate, up] = [(); 2].map(|()| random([SIDE, SIDE], device));
    let gated = || kernels::glu(gate.clone(), up.clone(), Activation::Silu);
    fused(gated)?;
    let time = seconds(gated)?;
    Ok((3 * SIDE * SIDE * 4) as f64 / time)
}

fn logits(device: &Device) -> Result<LogitRates> {
    let [rows, vocabulary] = LOGITS;
    let logits = random(LOGITS, device);
    let targets: Vec<i32> = (0..rows as i32).collect();
    let targets = Tensor::<1, Int>::from_data(TensorData::new(targets, [rows]), device);
    let scaling = Scaling { temperature: 1.0, softcap: None };
    let score = || kernels::score_rows(&logits, &targets, scaling);
    let scores = fused(score)?;
    let scored = seconds(|| score().logp.reshape([rows, 1]))?;
    let d_logp = Tensor::<1>::ones([rows], device);
    let differentiated = seconds(|| {
        let upstream = ScoreGradients { d_logp: &d_logp, d_entropy: None };
        // as in training nobody else holds the logits: the copy is what a product would have given
        let unshared = logits.clone() + 0.0;
        kernels::score_gradient(unshared, &targets, &scores, upstream, scaling)
    })?;
    let uniforms = vec![0.5; rows];
    let drawn = seconds(|| {
        let tokens = kernels::sample_rows(&logits, 1.0, Some(&uniforms[..]));
        Tensor::from_data(TensorData::new(vec![tokens[0].logp], [1, 1]), device)
    })?;
    let logits = (rows * vocabulary) as f64;
    Ok(LogitRates { scored: logits / scored, differentiated: logits / differentiated, drawn: logits / drawn })
}

/// Sums of two small tensors that others hold.
fn operation(device: &Device) -> Result<f64> {
    let a = random([8, 64], device);
    let chain = 64;
    let time = seconds(|| {
        let sums: Vec<Tensor<2>> = (0..chain).map(|_| a.clone() + a.clone()).collect();
        sums.into_iter().next().unwrap_or_else(|| a.clone())
    })?;
    Ok(time / f64::from(chain))
}
