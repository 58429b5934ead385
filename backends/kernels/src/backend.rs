//! The fused operations that a backend may have a kernel for.

use super::choice::Operation;
use super::delta::{DeltaHeads, SequenceRows};
use super::experts::{ExpertInput, ExpertRows};
use super::paged::{KvPool, PagedAttentionShape, SlotMapping};
use super::quantized_linear::through_the_host;
use super::shapes::{
    AdamWOutput, AdamWStep, AttentionShape, Gate, JoinedHeads, QuantizationMap, QuantizedBlocks, RowScores,
    RowsByToken, RunningScores, SampleOptions, SampledToken, Scaling, ScoreGradients, Truncation,
};
use burn::tensor::{DType, Device, Int, Tensor};
use firebrick_spec::QuantizedLayout;
use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// The kernels of a backend. A method that a backend leaves out has no kernel there: it returns `None`, or gives back
/// the tensor that it would have written to. The functions of [`crate::kernels`] document shapes and formulas.
#[allow(unused_variables, reason = "a default reads no argument")]
pub(super) trait Kernels: Sync {
    /// Whether a device is this backend's.
    fn runs_on(&self, device: &Device) -> bool;

    /// Whether models on a device of this backend run an operation through its kernel.
    fn available(&self, operation: Operation, device: &Device) -> bool;

    /// Columns of the vocabulary whose logits are scored at a time; `None` where whole rows are.
    fn vocabulary_tile(&self, device: &Device) -> Option<usize> {
        None
    }

    fn rms_norm(&self, x: &Tensor<2>, w: &Tensor<2>, eps: f64, offset: f64) -> Option<Tensor<2>> {
        None
    }

    fn rms_norm_add(
        &self,
        base: Tensor<2>,
        x: &Tensor<2>,
        w: &Tensor<2>,
        eps: f64,
        offset: f64,
    ) -> Result<Tensor<2>, Tensor<2>> {
        Err(base)
    }

    fn add_rms_norm(
        &self,
        base: Tensor<2>,
        x: &Tensor<2>,
        w: &Tensor<2>,
        eps: f64,
        offset: f64,
    ) -> Result<[Tensor<2>; 2], Tensor<2>> {
        Err(base)
    }

    fn norm_heads(
        &self,
        qkv: Tensor<2>,
        weights: [&Tensor<2>; 2],
        heads: JoinedHeads,
        eps: f64,
        offset: f64,
    ) -> Result<Tensor<2>, Tensor<2>> {
        Err(qkv)
    }

    fn glu_joined(&self, activation: Gate, x: &Tensor<2>) -> Option<Tensor<2>> {
        None
    }

    fn product(&self, x: &Tensor<2>, w: &Tensor<2>) -> Option<Tensor<2>> {
        None
    }

    fn glu(&self, activation: Gate, gate: &Tensor<2>, up: &Tensor<2>) -> Option<Tensor<2>> {
        None
    }

    fn rotary(&self, x: Tensor<3>, cos: &Tensor<3>, sin: &Tensor<3>) -> Result<Tensor<3>, Tensor<3>> {
        Err(x)
    }

    fn linear(&self, x: &Tensor<2>, w: &Tensor<2>) -> Option<Tensor<2>> {
        None
    }

    fn add_bias(&self, y: Tensor<2>, bias: &Tensor<2>) -> Result<Tensor<2>, Tensor<2>> {
        Err(y)
    }

    fn linear_each(&self, x: &Tensor<2>, w: &[&Tensor<2>]) -> Option<Vec<Tensor<2>>> {
        None
    }

    fn linear_add(&self, base: &Tensor<2>, x: &Tensor<2>, w: &Tensor<2>) -> Option<Tensor<2>> {
        None
    }

    fn linear_swiglu(&self, x: &Tensor<2>, gate: &Tensor<2>, up: &Tensor<2>) -> Option<Tensor<2>> {
        None
    }

    /// Every backend has this one and the next four, in tensor operations where it has no kernel.
    fn expert_linear(&self, x: &Tensor<2>, w: &Tensor<2>, rows: &ExpertRows, reads: ExpertInput) -> Tensor<2>;

    fn expert_bias(&self, y: &Tensor<2>, bias: &Tensor<2>, rows: &ExpertRows) -> Tensor<2>;

    fn clamped_swiglu(&self, x: &Tensor<2>, limit: f64) -> Tensor<2>;

    fn combine_experts(&self, y: &Tensor<2>, weights: &Tensor<2>, rows: &ExpertRows) -> Tensor<2>;

    fn attach_gradient(&self, y: &Tensor<2>, x: &Tensor<2>, gradient: Tensor<2>) -> Tensor<2>;

    fn backward_root(&self, output: Tensor<2>, gradient: Tensor<2>) -> Tensor<1>;

    /// Every backend has this one and the next two, in tensor operations where it has no kernel. What is widened is one
    /// matrix.
    fn quantized_linear(&self, x: &Tensor<2>, words: &Tensor<2>, layout: QuantizedLayout) -> Tensor<2>;

    fn quantized_expert_linear(
        &self,
        x: &Tensor<2>,
        words: &Tensor<2>,
        layout: QuantizedLayout,
        rows: &ExpertRows,
        reads: ExpertInput,
    ) -> Tensor<2>;

    fn dequantize(&self, words: &Tensor<2>, layout: QuantizedLayout, dtype: DType) -> Tensor<2> {
        through_the_host(words, layout, dtype)
    }

    fn matmul(&self, a: &Tensor<2>, b: &Tensor<2>) -> Option<Tensor<2>> {
        None
    }

    fn matmul_nt(&self, a: &Tensor<2>, b: &Tensor<2>) -> Option<Tensor<2>> {
        None
    }

    fn matmul_tn(&self, a: &Tensor<2>, b: &Tensor<2>) -> Option<Tensor<2>> {
        None
    }

    /// Copies a matrix `[outputs, inputs]` for products with few rows, with its own numbers.
    fn pack(&self, matrix: &Tensor<2>) -> Option<Arc<dyn PackedMatrix>> {
        None
    }

    /// Copies a matrix `[outputs, inputs]` for products with few rows, rounded to 8 bits.
    fn quantize(&self, matrix: &Tensor<2>) -> Option<Arc<dyn PackedMatrix>> {
        None
    }

    fn attention(
        &self,
        q: &Tensor<3>,
        k: &Tensor<3>,
        v: &Tensor<3>,
        sinks: Option<&Tensor<2>>,
        shape: &AttentionShape,
    ) -> Option<Tensor<3>> {
        None
    }

    fn causal_convolution(&self, x: &Tensor<2>, w: &Tensor<2>, sequences: &SequenceRows) -> Option<Tensor<2>> {
        None
    }

    fn continue_convolution(
        &self,
        x: &Tensor<2>,
        w: &Tensor<2>,
        pool: Tensor<2>,
        sequences: &SequenceRows,
    ) -> Result<(Tensor<2>, Tensor<2>), Tensor<2>> {
        Err(pool)
    }

    fn gated_delta_rule(
        &self,
        qkv: &Tensor<2>,
        g: &Tensor<2>,
        beta: &Tensor<2>,
        heads: DeltaHeads,
        sequences: &SequenceRows,
    ) -> Option<Tensor<2>> {
        None
    }

    fn continue_delta_rule(
        &self,
        inputs: [&Tensor<2>; 3],
        pool: Tensor<2>,
        heads: DeltaHeads,
        sequences: &SequenceRows,
    ) -> Result<(Tensor<2>, Tensor<2>), Tensor<2>> {
        Err(pool)
    }

    fn log_decays(&self, a: &Tensor<2>, decay_log: &Tensor<2>, time_bias: &Tensor<2>) -> Option<Tensor<2>> {
        None
    }

    fn gated_rms_norm(&self, x: &Tensor<2>, z: &Tensor<2>, w: &Tensor<2>, eps: f64) -> Option<Tensor<2>> {
        None
    }

    fn paged_attention(
        &self,
        qkv: [Tensor<2>; 3],
        pool: KvPool,
        shape: &PagedAttentionShape<'_>,
    ) -> Result<(Tensor<2>, KvPool), KvPool> {
        Err(pool)
    }

    fn paged_attention_joined(
        &self,
        qkv: &Tensor<2>,
        bias: Option<&Tensor<2>>,
        heads: JoinedHeads,
        pool: KvPool,
        shape: &PagedAttentionShape<'_>,
    ) -> Result<(Tensor<2>, KvPool), KvPool> {
        Err(pool)
    }

    /// Every backend has this one and the next two, whether models use its kernels or not: they copy and compute
    /// nothing.
    fn write_kv(&self, pool: KvPool, kv: [&Tensor<3>; 2], slots: &SlotMapping) -> KvPool;

    fn copy_blocks(&self, pool: KvPool, pairs: &[(u32, u32)]) -> KvPool;

    fn gather_kv(&self, pool: &KvPool, slots: &SlotMapping, dtype: DType) -> [Tensor<3>; 2];

    fn sample_rows(&self, logits: &Tensor<2>, temperature: f64, uniforms: Option<&[f32]>) -> Option<Vec<SampledToken>> {
        None
    }

    fn sample_rows_on_device(&self, logits: &Tensor<2>, choice: SampleOptions<'_>) -> Option<Tensor<2>> {
        None
    }

    fn draw_rows(
        &self,
        logits: &Tensor<2>,
        temperature: f64,
        truncation: Truncation,
        uniforms: Option<&Tensor<1>>,
    ) -> Option<Tensor<2>> {
        None
    }

    /// Overwrites the words of `target`, whoever else holds it: with `words`, and the first ones with the first number
    /// of each row of `tokens`. Where there are no kernels it does nothing, and there are no such buffers.
    fn load_step(&self, target: &Tensor<1, Int>, words: Tensor<1, Int>, tokens: Option<&Tensor<2>>, rows: usize) {}

    /// A part of a buffer of words, which shares its memory.
    fn words_of(&self, whole: &Tensor<1, Int>, place: Range<usize>) -> Option<Tensor<1, Int>> {
        None
    }

    /// The same as floats with these bits.
    fn floats_of(&self, whole: &Tensor<1, Int>, place: Range<usize>) -> Option<Tensor<1>> {
        None
    }

    /// A copy of a tensor in a buffer of its own, in rows without padding.
    fn duplicate(&self, tensor: &Tensor<2>) -> Option<Tensor<2>> {
        None
    }

    /// What records graphs on a device.
    fn recorder(&self, device: &Device) -> Option<Box<dyn Recorder>> {
        None
    }

    fn score_rows(&self, logits: &Tensor<2>, targets: &Tensor<1, Int>, scaling: Scaling) -> Option<RowScores> {
        None
    }

    fn score_gradient(
        &self,
        logits: Tensor<2>,
        targets: &Tensor<1, Int>,
        scores: &RowScores,
        upstream: ScoreGradients<'_>,
        scaling: Scaling,
    ) -> Option<Tensor<2>> {
        None
    }

    fn score_tile(
        &self,
        logits: &Tensor<2>,
        first: usize,
        targets: &Tensor<1, Int>,
        running: Option<RunningScores>,
        scaling: Scaling,
    ) -> Option<RunningScores> {
        None
    }

    /// Scores after the last tile; `None` where there is no `score_tile`.
    fn finish_scores(&self, running: RunningScores) -> Option<RowScores> {
        None
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
        None
    }

    /// Whether `adamw` updates parameters like this one.
    fn has_adamw(&self, value: &Tensor<2>) -> bool {
        false
    }

    /// `None` where `has_adamw` says no.
    fn adamw(
        &self,
        value: Tensor<2>,
        rows: Range<usize>,
        gradient: &Tensor<2>,
        moments: Option<[Tensor<2>; 2]>,
        stored: Option<Tensor<2>>,
        step: &AdamWStep,
    ) -> Option<AdamWOutput> {
        None
    }

    fn quantize_blockwise(&self, values: &Tensor<2>, map: &QuantizationMap<'_>) -> Option<QuantizedBlocks> {
        None
    }

    fn dequantize_blockwise(
        &self,
        blocks: &QuantizedBlocks,
        entries: &Tensor<1>,
        shape: [usize; 2],
        dtype: DType,
    ) -> Option<Tensor<2>> {
        None
    }

    fn scatter_add_rows(&self, sum: Tensor<2>, groups: &RowsByToken, rows: &Tensor<2>) -> Result<Tensor<2>, Tensor<2>> {
        Err(sum)
    }
}

/// A copy of a matrix `[outputs, inputs]` in the layout of a backend's kernels for products with few rows.
pub(super) trait PackedMatrix: Any + Debug + Send + Sync {
    /// Bytes of the copy.
    fn bytes(&self) -> usize;

    /// Whether the copy has the matrix's own numbers.
    fn is_exact(&self) -> bool;

    /// `x · Wᵀ`. `None` where the kernel does not take `x`.
    fn linear(&self, x: &Tensor<2>) -> Option<Tensor<2>>;

    /// The same of this matrix and others of its kind, in this order.
    fn linear_each(&self, others: &[&dyn PackedMatrix], x: &Tensor<2>) -> Option<Vec<Tensor<2>>> {
        let own = self.linear(x)?;
        let others = others.iter().map(|w| w.linear(x));
        std::iter::once(Some(own)).chain(others).collect()
    }

    /// `base + x · Wᵀ`. Gives the base back where the kernel does not take the tensors.
    fn linear_add(&self, base: Tensor<2>, x: &Tensor<2>) -> Result<Tensor<2>, Tensor<2>>;

    /// `silu(x · Wᵀ) ∘ (x · upᵀ)`, with `up` of the same kind and shape. `None` where the kernel does not take the
    /// tensors.
    fn linear_swiglu(&self, up: &dyn PackedMatrix, x: &Tensor<2>) -> Option<Tensor<2>>;
}

/// A backend's recorded kernels.
pub(super) trait RecordedGraph: Debug {
    /// Launches them again.
    fn replay(&self) -> Result<(), String>;
}

/// Opening and closing a recording.
pub(super) trait Recorder {
    /// Announces a recording: from now on nothing that it will use is moved.
    fn prepare(&self) -> Result<(), String>;
    /// From now on kernels are recorded and not run.
    fn start(&self) -> Result<(), String>;
    /// Ends the recording.
    fn finish(&self) -> Result<Box<dyn RecordedGraph>, String>;
    /// Waits until the device has done what it was asked for.
    fn wait(&self) -> Result<(), String>;
}
