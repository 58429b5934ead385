//! What `CubeCL` backends have kernels for.

use super::graph::CubeRecorder;
use super::packed::QuantizedMatrix;
use super::{
    adamw, attention, bias, block8, convolution, decays, delta_rule, embedding, fused_norm, gated_norm, glu, launch,
    norm, paged, product, quantized_linear, rotary, sample, scores, step,
};
use crate::backend::{Kernels, PackedMatrix, Recorder};
use crate::choice::{Operation, TILE};
use crate::clamped_swiglu::clamped_swiglu;
use crate::delta::{DeltaHeads, SequenceRows};
use crate::expert_bias;
use crate::experts::{self, ExpertInput, ExpertRows};
use crate::paged::{KvPool, PagedAttentionShape, SlotMapping};
use crate::quantized_experts;
use crate::quantized_linear::{self as widened, Matrices};
use crate::root;
use crate::shapes::{
    AdamWOutput, AdamWStep, AttentionShape, Gate, JoinedHeads, QuantizationMap, QuantizedBlocks, RowScores,
    RowsByToken, RunningScores, SampleOptions, Scaling, ScoreGradients, Truncation,
};
use burn::backend::Cube;
use burn::tensor::{DType, Device, Int, Tensor};
use firebrick_device::device::is_cpu;
use firebrick_spec::QuantizedLayout;
use std::ops::Range;
use std::sync::Arc;

/// The kernels of `CubeCL` backends: in f32 inside; f32, f16 or bf16 outside.
#[derive(Debug)]
pub(crate) struct CubeKernels;

/// Matrices in few bits that kernels widen.
fn matrices(words: &Tensor<2>, layout: QuantizedLayout) -> Matrices {
    Matrices {
        words: words.clone(),
        layout,
        widen: quantized_linear::dequantize,
        fused: quantized_linear::fused,
        products: product::PRODUCTS,
    }
}

impl Kernels for CubeKernels {
    fn runs_on(&self, device: &Device) -> bool {
        !is_cpu(device)
    }

    fn available(&self, operation: Operation, device: &Device) -> bool {
        launch::available(operation, device)
    }

    fn expert_linear(&self, x: &Tensor<2>, w: &Tensor<2>, rows: &ExpertRows, reads: ExpertInput) -> Tensor<2> {
        experts::linear::<Cube>(x, w, rows, reads, product::PRODUCTS)
    }

    fn expert_bias(&self, y: &Tensor<2>, bias: &Tensor<2>, rows: &ExpertRows) -> Tensor<2> {
        expert_bias::add::<Cube>(y, bias, rows)
    }

    fn clamped_swiglu(&self, x: &Tensor<2>, limit: f64) -> Tensor<2> {
        clamped_swiglu::<Cube>(x, limit)
    }

    fn combine_experts(&self, y: &Tensor<2>, weights: &Tensor<2>, rows: &ExpertRows) -> Tensor<2> {
        experts::combine::<Cube>(y, weights, rows)
    }

    fn attach_gradient(&self, y: &Tensor<2>, x: &Tensor<2>, gradient: Tensor<2>) -> Tensor<2> {
        experts::attach::<Cube>(y, x, gradient)
    }

    fn backward_root(&self, output: Tensor<2>, gradient: Tensor<2>) -> Tensor<1> {
        root::root::<Cube>(output, gradient)
    }

    fn vocabulary_tile(&self, device: &Device) -> Option<usize> {
        launch::available(Operation::Scores, device).then_some(TILE)
    }

    fn rms_norm(&self, x: &Tensor<2>, w: &Tensor<2>, eps: f64, offset: f64) -> Option<Tensor<2>> {
        norm::rms_norm(x, w, eps, offset)
    }

    fn rms_norm_add(
        &self,
        base: Tensor<2>,
        x: &Tensor<2>,
        w: &Tensor<2>,
        eps: f64,
        offset: f64,
    ) -> Result<Tensor<2>, Tensor<2>> {
        norm::rms_norm_add(base, x, w, eps, offset)
    }

    fn add_rms_norm(
        &self,
        base: Tensor<2>,
        x: &Tensor<2>,
        w: &Tensor<2>,
        eps: f64,
        offset: f64,
    ) -> Result<[Tensor<2>; 2], Tensor<2>> {
        fused_norm::add_rms_norm(base, x, w, eps, offset)
    }

    fn norm_heads(
        &self,
        qkv: Tensor<2>,
        weights: [&Tensor<2>; 2],
        heads: JoinedHeads,
        eps: f64,
        offset: f64,
    ) -> Result<Tensor<2>, Tensor<2>> {
        fused_norm::norm_heads(qkv, weights, heads, eps, offset)
    }

    fn glu_joined(&self, activation: Gate, x: &Tensor<2>) -> Option<Tensor<2>> {
        glu::glu_joined(activation, x)
    }

    fn linear(&self, x: &Tensor<2>, w: &Tensor<2>) -> Option<Tensor<2>> {
        product::linear(x, w)
    }

    fn add_bias(&self, y: Tensor<2>, bias: &Tensor<2>) -> Result<Tensor<2>, Tensor<2>> {
        bias::add_bias(y, bias)
    }

    fn product(&self, x: &Tensor<2>, w: &Tensor<2>) -> Option<Tensor<2>> {
        product::product(x, w)
    }

    fn matmul(&self, a: &Tensor<2>, b: &Tensor<2>) -> Option<Tensor<2>> {
        product::matmul(a, b)
    }

    fn matmul_tn(&self, a: &Tensor<2>, b: &Tensor<2>) -> Option<Tensor<2>> {
        product::matmul_tn(a, b)
    }

    fn glu(&self, activation: Gate, gate: &Tensor<2>, up: &Tensor<2>) -> Option<Tensor<2>> {
        glu::glu(activation, gate, up)
    }

    fn rotary(&self, x: Tensor<3>, cos: &Tensor<3>, sin: &Tensor<3>) -> Result<Tensor<3>, Tensor<3>> {
        rotary::rotary(x, cos, sin)
    }

    fn quantized_linear(&self, x: &Tensor<2>, words: &Tensor<2>, layout: QuantizedLayout) -> Tensor<2> {
        widened::linear::<Cube>(x, matrices(words, layout))
    }

    fn quantized_expert_linear(
        &self,
        x: &Tensor<2>,
        words: &Tensor<2>,
        layout: QuantizedLayout,
        rows: &ExpertRows,
        reads: ExpertInput,
    ) -> Tensor<2> {
        quantized_experts::linear::<Cube>(x, matrices(words, layout), rows, reads)
    }

    fn dequantize(&self, words: &Tensor<2>, layout: QuantizedLayout, dtype: DType) -> Tensor<2> {
        quantized_linear::dequantize(words, layout, dtype)
    }

    fn quantize(&self, matrix: &Tensor<2>) -> Option<Arc<dyn PackedMatrix>> {
        Some(Arc::new(QuantizedMatrix::quantize(matrix)?))
    }

    fn attention(
        &self,
        q: &Tensor<3>,
        k: &Tensor<3>,
        v: &Tensor<3>,
        sinks: Option<&Tensor<2>>,
        shape: &AttentionShape,
    ) -> Option<Tensor<3>> {
        attention::attention(q, k, v, sinks, shape)
    }

    fn causal_convolution(&self, x: &Tensor<2>, w: &Tensor<2>, sequences: &SequenceRows) -> Option<Tensor<2>> {
        convolution::causal_convolution(x, w, sequences)
    }

    fn continue_convolution(
        &self,
        x: &Tensor<2>,
        w: &Tensor<2>,
        pool: Tensor<2>,
        sequences: &SequenceRows,
    ) -> Result<(Tensor<2>, Tensor<2>), Tensor<2>> {
        convolution::continue_convolution(x, w, pool, sequences)
    }

    fn gated_delta_rule(
        &self,
        qkv: &Tensor<2>,
        g: &Tensor<2>,
        beta: &Tensor<2>,
        heads: DeltaHeads,
        sequences: &SequenceRows,
    ) -> Option<Tensor<2>> {
        delta_rule::gated_delta_rule(qkv, g, beta, heads, sequences)
    }

    fn continue_delta_rule(
        &self,
        inputs: [&Tensor<2>; 3],
        pool: Tensor<2>,
        heads: DeltaHeads,
        sequences: &SequenceRows,
    ) -> Result<(Tensor<2>, Tensor<2>), Tensor<2>> {
        delta_rule::continue_delta_rule(inputs, pool, heads, sequences)
    }

    fn log_decays(&self, a: &Tensor<2>, decay_log: &Tensor<2>, time_bias: &Tensor<2>) -> Option<Tensor<2>> {
        decays::log_decays(a, decay_log, time_bias)
    }

    fn gated_rms_norm(&self, x: &Tensor<2>, z: &Tensor<2>, w: &Tensor<2>, eps: f64) -> Option<Tensor<2>> {
        gated_norm::gated_rms_norm(x, z, w, eps)
    }

    fn paged_attention(
        &self,
        qkv: [Tensor<2>; 3],
        pool: KvPool,
        shape: &PagedAttentionShape<'_>,
    ) -> Result<(Tensor<2>, KvPool), KvPool> {
        paged::paged_attention(qkv, pool, shape)
    }

    fn paged_attention_joined(
        &self,
        qkv: &Tensor<2>,
        bias: Option<&Tensor<2>>,
        heads: JoinedHeads,
        pool: KvPool,
        shape: &PagedAttentionShape<'_>,
    ) -> Result<(Tensor<2>, KvPool), KvPool> {
        paged::paged_attention_joined(qkv, bias, heads, pool, shape)
    }

    fn write_kv(&self, pool: KvPool, kv: [&Tensor<3>; 2], slots: &SlotMapping) -> KvPool {
        paged::write_kv(pool, kv, slots)
    }

    fn copy_blocks(&self, pool: KvPool, pairs: &[(u32, u32)]) -> KvPool {
        paged::copy_blocks(pool, pairs)
    }

    fn gather_kv(&self, pool: &KvPool, slots: &SlotMapping, dtype: DType) -> [Tensor<3>; 2] {
        paged::gather_kv(pool, slots, dtype)
    }

    fn sample_rows_on_device(&self, logits: &Tensor<2>, choice: SampleOptions<'_>) -> Option<Tensor<2>> {
        sample::sample_rows_on_device(logits, choice)
    }

    fn draw_rows(
        &self,
        logits: &Tensor<2>,
        temperature: f64,
        truncation: Truncation,
        uniforms: Option<&Tensor<1>>,
    ) -> Option<Tensor<2>> {
        sample::draw_rows(logits, temperature, truncation, uniforms)
    }

    fn load_step(&self, target: &Tensor<1, Int>, words: Tensor<1, Int>, tokens: Option<&Tensor<2>>, rows: usize) {
        step::load_step(target, &words, tokens, rows);
    }

    fn words_of(&self, whole: &Tensor<1, Int>, place: Range<usize>) -> Option<Tensor<1, Int>> {
        Some(step::words_of(whole, &place))
    }

    fn floats_of(&self, whole: &Tensor<1, Int>, place: Range<usize>) -> Option<Tensor<1>> {
        Some(step::floats_of(whole, &place))
    }

    fn duplicate(&self, tensor: &Tensor<2>) -> Option<Tensor<2>> {
        Some(step::duplicate(tensor))
    }

    fn recorder(&self, device: &Device) -> Option<Box<dyn Recorder>> {
        Some(Box::new(CubeRecorder::of(device)))
    }

    fn score_rows(&self, logits: &Tensor<2>, targets: &Tensor<1, Int>, scaling: Scaling) -> Option<RowScores> {
        scores::score_tile(logits, 0, targets, None, scaling).map(scores::finish)
    }

    fn score_gradient(
        &self,
        logits: Tensor<2>,
        targets: &Tensor<1, Int>,
        scores: &RowScores,
        upstream: ScoreGradients<'_>,
        scaling: Scaling,
    ) -> Option<Tensor<2>> {
        scores::tile_gradient(logits, 0, targets, scores, upstream, scaling)
    }

    fn score_tile(
        &self,
        logits: &Tensor<2>,
        first: usize,
        targets: &Tensor<1, Int>,
        running: Option<RunningScores>,
        scaling: Scaling,
    ) -> Option<RunningScores> {
        scores::score_tile(logits, first, targets, running, scaling)
    }

    fn finish_scores(&self, running: RunningScores) -> Option<RowScores> {
        Some(scores::finish(running))
    }

    fn tile_gradient(
        &self,
        logits: Tensor<2>,
        first: usize,
        targets: &Tensor<1, Int>,
        scores: &RowScores,
        upstream: ScoreGradients<'_>,
        scaling: Scaling,
    ) -> Option<Tensor<2>> {
        scores::tile_gradient(logits, first, targets, scores, upstream, scaling)
    }

    fn has_adamw(&self, value: &Tensor<2>) -> bool {
        adamw::has_kernel(value)
    }

    fn adamw(
        &self,
        value: Tensor<2>,
        rows: Range<usize>,
        gradient: &Tensor<2>,
        moments: Option<[Tensor<2>; 2]>,
        stored: Option<Tensor<2>>,
        step: &AdamWStep,
    ) -> Option<AdamWOutput> {
        adamw::has_kernel(&value).then(|| adamw::adamw(value, rows, gradient, moments, stored, step))
    }

    fn quantize_blockwise(&self, values: &Tensor<2>, map: &QuantizationMap<'_>) -> Option<QuantizedBlocks> {
        block8::quantize(values, map)
    }

    fn dequantize_blockwise(
        &self,
        blocks: &QuantizedBlocks,
        entries: &Tensor<1>,
        shape: [usize; 2],
        dtype: DType,
    ) -> Option<Tensor<2>> {
        block8::dequantize(blocks, entries, shape, dtype)
    }

    fn scatter_add_rows(&self, sum: Tensor<2>, groups: &RowsByToken, rows: &Tensor<2>) -> Result<Tensor<2>, Tensor<2>> {
        embedding::scatter_add_rows(sum, groups, rows)
    }
}
