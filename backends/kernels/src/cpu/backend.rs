//! What the CPU backend has kernels for.

use super::packed::PanelMatrix;
use super::{
    attention, autodiff, convolution, delta_rule, experts, gated_norm, glu, linear, norm, paged, quantized_experts,
    quantized_linear, rotary, sample, scores, skinny_gemm,
};
use crate::backend::{Kernels, PackedMatrix};
use crate::choice::Operation;
use crate::clamped_swiglu::clamped_swiglu;
use crate::delta::{DeltaHeads, SequenceRows};
use crate::expert_bias;
use crate::experts::{self as operations, ExpertInput, ExpertRows};
use crate::paged::{KvPool, PagedAttentionShape, SlotMapping};
use crate::products::Products;
use crate::quantized_experts as coded;
use crate::quantized_linear::{self as widened, Matrices, through_the_host};
use crate::root;
use crate::shapes::{AttentionShape, Gate, RowScores, SampledToken, Scaling, ScoreGradients};
use burn::backend::Flex;
use burn::tensor::{DType, Device, Int, Tensor};
use firebrick_device::device::is_cpu;
use firebrick_spec::QuantizedLayout;
use std::sync::Arc;

/// The kernels of the CPU backend, in f32 and f64.
#[derive(Debug)]
pub(crate) struct CpuKernels;

/// Matrices in few bits that the host widens.
fn matrices(words: &Tensor<2>, layout: QuantizedLayout) -> Matrices {
    Matrices {
        words: words.clone(),
        layout,
        widen: through_the_host,
        // in f64 alone: the CPU's kernel for f32 widens tiles as it multiplies
        fused: |_, _, _| None,
        products: Products::OPERATIONS,
    }
}

impl Kernels for CpuKernels {
    fn runs_on(&self, device: &Device) -> bool {
        is_cpu(device)
    }

    fn available(&self, operation: Operation, device: &Device) -> bool {
        autodiff::available(operation, device)
    }

    fn rms_norm(&self, x: &Tensor<2>, w: &Tensor<2>, eps: f64, offset: f64) -> Option<Tensor<2>> {
        norm::rms_norm(x, w, eps, offset)
    }

    fn glu(&self, activation: Gate, gate: &Tensor<2>, up: &Tensor<2>) -> Option<Tensor<2>> {
        glu::glu(activation, gate, up)
    }

    fn rotary(&self, x: Tensor<3>, cos: &Tensor<3>, sin: &Tensor<3>) -> Result<Tensor<3>, Tensor<3>> {
        rotary::rotary(x, cos, sin)
    }

    fn linear(&self, x: &Tensor<2>, w: &Tensor<2>) -> Option<Tensor<2>> {
        linear::linear(x, w)
    }

    fn linear_each(&self, x: &Tensor<2>, w: &[&Tensor<2>]) -> Option<Vec<Tensor<2>>> {
        skinny_gemm::linear_each(x, w)
    }

    fn linear_add(&self, base: &Tensor<2>, x: &Tensor<2>, w: &Tensor<2>) -> Option<Tensor<2>> {
        skinny_gemm::linear_add(base, x, w)
    }

    fn linear_swiglu(&self, x: &Tensor<2>, gate: &Tensor<2>, up: &Tensor<2>) -> Option<Tensor<2>> {
        skinny_gemm::linear_swiglu(x, gate, up)
    }

    fn expert_linear(&self, x: &Tensor<2>, w: &Tensor<2>, rows: &ExpertRows, reads: ExpertInput) -> Tensor<2> {
        experts::linear(x, w, rows, reads)
            .unwrap_or_else(|| operations::linear::<Flex>(x, w, rows, reads, Products::OPERATIONS))
    }

    fn expert_bias(&self, y: &Tensor<2>, bias: &Tensor<2>, rows: &ExpertRows) -> Tensor<2> {
        expert_bias::add::<Flex>(y, bias, rows)
    }

    fn clamped_swiglu(&self, x: &Tensor<2>, limit: f64) -> Tensor<2> {
        glu::clamped(x, limit).unwrap_or_else(|| clamped_swiglu::<Flex>(x, limit))
    }

    fn combine_experts(&self, y: &Tensor<2>, weights: &Tensor<2>, rows: &ExpertRows) -> Tensor<2> {
        experts::combine(y, weights, rows).unwrap_or_else(|| operations::combine::<Flex>(y, weights, rows))
    }

    fn attach_gradient(&self, y: &Tensor<2>, x: &Tensor<2>, gradient: Tensor<2>) -> Tensor<2> {
        operations::attach::<Flex>(y, x, gradient)
    }

    fn backward_root(&self, output: Tensor<2>, gradient: Tensor<2>) -> Tensor<1> {
        root::root::<Flex>(output, gradient)
    }

    fn quantized_linear(&self, x: &Tensor<2>, words: &Tensor<2>, layout: QuantizedLayout) -> Tensor<2> {
        quantized_linear::linear(x, words, layout)
            .unwrap_or_else(|| widened::linear::<Flex>(x, matrices(words, layout)))
    }

    fn quantized_expert_linear(
        &self,
        x: &Tensor<2>,
        words: &Tensor<2>,
        layout: QuantizedLayout,
        rows: &ExpertRows,
        reads: ExpertInput,
    ) -> Tensor<2> {
        quantized_experts::linear(x, words, layout, rows, reads)
            .unwrap_or_else(|| coded::linear::<Flex>(x, matrices(words, layout), rows, reads))
    }

    fn matmul(&self, a: &Tensor<2>, b: &Tensor<2>) -> Option<Tensor<2>> {
        linear::matmul(a, b)
    }

    fn matmul_nt(&self, a: &Tensor<2>, b: &Tensor<2>) -> Option<Tensor<2>> {
        linear::matmul_nt(a, b)
    }

    fn matmul_tn(&self, a: &Tensor<2>, b: &Tensor<2>) -> Option<Tensor<2>> {
        linear::matmul_tn(a, b)
    }

    fn pack(&self, matrix: &Tensor<2>) -> Option<Arc<dyn PackedMatrix>> {
        Some(Arc::new(PanelMatrix::pack(matrix)?))
    }

    fn quantize(&self, matrix: &Tensor<2>) -> Option<Arc<dyn PackedMatrix>> {
        Some(Arc::new(PanelMatrix::quantize(matrix)?))
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

    fn gated_rms_norm(&self, x: &Tensor<2>, z: &Tensor<2>, w: &Tensor<2>, eps: f64) -> Option<Tensor<2>> {
        gated_norm::gated_rms_norm(x, z, w, eps)
    }

    fn paged_attention(
        &self,
        qkv: [Tensor<2>; 3],
        pool: KvPool,
        shape: &PagedAttentionShape<'_>,
    ) -> Result<(Tensor<2>, KvPool), KvPool> {
        paged::paged_attention(&qkv, pool, shape)
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

    fn sample_rows(&self, logits: &Tensor<2>, temperature: f64, uniforms: Option<&[f32]>) -> Option<Vec<SampledToken>> {
        sample::sample_rows(logits, temperature, uniforms)
    }

    fn score_rows(&self, logits: &Tensor<2>, targets: &Tensor<1, Int>, scaling: Scaling) -> Option<RowScores> {
        scores::score_rows(logits, targets, scaling)
    }

    fn score_gradient(
        &self,
        logits: Tensor<2>,
        targets: &Tensor<1, Int>,
        scores: &RowScores,
        upstream: ScoreGradients<'_>,
        scaling: Scaling,
    ) -> Option<Tensor<2>> {
        scores::score_gradient(logits, targets, scores, upstream, scaling)
    }
}
