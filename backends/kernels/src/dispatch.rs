//! What models call: each function goes to the kernels of the backend that its first tensor is on.

use super::backend::Kernels;
use super::choice::Operation;
use super::cpu::CpuKernels;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::cube::CubeKernels;
use super::experts::{ExpertInput, ExpertRows};
use super::paged::{KvPool, PagedAttentionShape, SlotMapping};
use super::shapes::{
    AttentionShape, Gate, JoinedHeads, RowScores, RowsByToken, RunningScores, SampleOptions, SampledToken, Scaling,
    ScoreGradients, Truncation,
};
use burn::tensor::{DType, Device, Int, Tensor};
use firebrick_spec::QuantizedLayout;

/// The backends of this build that have kernels.
const BACKENDS: &[&dyn Kernels] = &[
    &CpuKernels,
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    &CubeKernels,
];

/// The kernels for tensors on a device.
pub(super) fn kernels(device: &Device) -> &'static dyn Kernels {
    let mut backends = BACKENDS.iter();
    let found = backends.find(|backend| backend.runs_on(device));
    *found.unwrap_or_else(|| unreachable!("{device:?} is of no backend of this build"))
}

/// Whether models on this device run an operation through its kernel.
#[must_use]
pub fn available(operation: Operation, device: &Device) -> bool {
    kernels(device).available(operation, device)
}

/// `x / √(mean(x²) + eps) · (w + offset)` for `x` of shape `[rows, n]` and `w` of shape `[1, n]`.
///
/// `None` where no kernel is used for the tensors.
#[must_use]
pub fn rms_norm(x: &Tensor<2>, w: &Tensor<2>, eps: f64, offset: f64) -> Option<Tensor<2>> {
    kernels(&x.device()).rms_norm(x, w, eps, offset)
}

/// [`rms_norm`] added to `base`, `[rows, n]`, in one pass; in place where `base` is not shared.
///
/// # Errors
/// `base` itself, where no kernel is used for the tensors.
pub fn rms_norm_add(
    base: Tensor<2>,
    x: &Tensor<2>,
    w: &Tensor<2>,
    eps: f64,
    offset: f64,
) -> Result<Tensor<2>, Tensor<2>> {
    kernels(&x.device()).rms_norm_add(base, x, w, eps, offset)
}

/// `base + x`, `[rows, n]`, rounded as it is stored, and its [`rms_norm`], in one pass; the sum is in place where
/// `base` is not shared.
///
/// Not differentiable.
///
/// # Errors
/// `base` itself, where no kernel is used for the tensors: the CPU has none.
pub fn add_rms_norm(
    base: Tensor<2>,
    x: &Tensor<2>,
    w: &Tensor<2>,
    eps: f64,
    offset: f64,
) -> Result<[Tensor<2>; 2], Tensor<2>> {
    kernels(&x.device()).add_rms_norm(base, x, w, eps, offset)
}

/// [`rms_norm`] of every query head and key head of rows `[queries | keys | values]`, by the weights of queries and
/// keys, `[1, dim]` each; in place where `qkv` is not shared.
///
/// Not differentiable.
///
/// # Errors
/// `qkv` itself, where no kernel is used for the tensors: the CPU has none.
pub fn norm_heads(
    qkv: Tensor<2>,
    weights: [&Tensor<2>; 2],
    heads: JoinedHeads,
    eps: f64,
    offset: f64,
) -> Result<Tensor<2>, Tensor<2>> {
    kernels(&qkv.device()).norm_heads(qkv, weights, heads, eps, offset)
}

/// [`glu`] of rows `[gate | up]`: `[rows, n]` for `x` of shape `[rows, 2 n]`.
///
/// `None` where no kernel is used for the activation or the tensor: the CPU has none. Not differentiable.
#[must_use]
pub fn glu_joined(activation: Gate, x: &Tensor<2>) -> Option<Tensor<2>> {
    kernels(&x.device()).glu_joined(activation, x)
}

/// `x · Wᵀ` on a GPU for `x` of shape `[rows, inputs]` and `w` of shape `[outputs, inputs]`, in rows without padding:
/// kernels read them as they are, where they would copy Burn's own on CUDA first.
///
/// `None` on the CPU, for tensors with autodiff or of different types, and where kernels are off.
#[must_use]
pub fn product(x: &Tensor<2>, w: &Tensor<2>) -> Option<Tensor<2>> {
    kernels(&x.device()).product(x, w)
}

/// `activation(gate) · up`, element by element.
///
/// `None` where no kernel is used for the activation or the tensors. `gate` and `up` are of one shape, `[rows, width]`,
/// as the result is.
#[must_use]
pub fn glu(activation: Gate, gate: &Tensor<2>, up: &Tensor<2>) -> Option<Tensor<2>> {
    kernels(&gate.device()).glu(activation, gate, up)
}

/// Rotates each pair `(x[i], x[i + dim/2])` of `x`, `[tokens, heads, dim]`, by the token's angle i, whose cosines and
/// sines are `cos` and `sin`, `[tokens, 1, dim/2]` each. On a GPU in place where `x` is not shared.
///
/// # Errors
/// `x` itself, where no kernel is used for the tensors.
pub fn rotary(x: Tensor<3>, cos: &Tensor<3>, sin: &Tensor<3>) -> Result<Tensor<3>, Tensor<3>> {
    kernels(&x.device()).rotary(x, cos, sin)
}

/// `x · Wᵀ` for `x` of shape `[rows, inputs]` and `w` of shape `[outputs, inputs]`.
///
/// `w` must be a leaf of the autodiff graph or a constant. With a constant `w` nothing of `x` is saved, since no
/// gradient needs it.
///
/// `None` where no kernel is used for the tensors.
#[must_use]
pub fn linear(x: &Tensor<2>, w: &Tensor<2>) -> Option<Tensor<2>> {
    kernels(&x.device()).linear(x, w)
}

/// `y + bias` for `y` of shape `[rows, n]` and a bias `[1, n]`, in place where `y` is not shared.
///
/// # Errors
/// `y` itself, where no kernel is used for the tensors.
pub fn add_bias(y: Tensor<2>, bias: &Tensor<2>) -> Result<Tensor<2>, Tensor<2>> {
    kernels(&y.device()).add_bias(y, bias)
}

/// [`linear`] of each of several matrices `[outputs, inputs]` and one `x`, in one call.
///
/// `None` where no kernel is used for the tensors: there are many rows, a graph, or tensors other than the CPU
/// backend's f32 or f64.
#[must_use]
pub fn linear_each<const N: usize>(x: &Tensor<2>, w: [&Tensor<2>; N]) -> Option<[Tensor<2>; N]> {
    let products = kernels(&x.device()).linear_each(x, &w)?;
    products.try_into().ok()
}

/// `base + x · Wᵀ`, with `base` of the result's shape.
///
/// `None` as in [`linear_each`]. `x` is `[rows, inputs]`, `w` `[outputs, inputs]`.
#[must_use]
pub fn linear_add(base: &Tensor<2>, x: &Tensor<2>, w: &Tensor<2>) -> Option<Tensor<2>> {
    kernels(&x.device()).linear_add(base, x, w)
}

/// `silu(x · gateᵀ) ∘ (x · upᵀ)`, the gated half of an MLP.
///
/// `None` as in [`linear_each`]. `x` is `[rows, inputs]`, both matrices are `[outputs, inputs]`, the result is `[rows,
/// outputs]`.
#[must_use]
pub fn linear_swiglu(x: &Tensor<2>, gate: &Tensor<2>, up: &Tensor<2>) -> Option<Tensor<2>> {
    kernels(&x.device()).linear_swiglu(x, gate, up)
}

/// `x · Wᵀ` with the matrix of each row's expert: sorted rows, `[choices, outputs]`, for `w` of shape `[experts ·
/// outputs, inputs]`, and `x` of shape `[tokens, inputs]` or, sorted, `[choices, inputs]`.
///
/// `w` must be a leaf of the autodiff graph or a constant. With a constant `w` nothing of `x` is saved, since no
/// gradient needs it.
#[must_use]
pub fn expert_linear(x: &Tensor<2>, w: &Tensor<2>, rows: &ExpertRows, reads: ExpertInput) -> Tensor<2> {
    kernels(&x.device()).expert_linear(x, w, rows, reads)
}

/// Sorted rows `y`, `[choices, outputs]`, plus the bias of each row's expert, of `[experts, outputs]`.
#[must_use]
pub fn expert_bias(y: &Tensor<2>, bias: &Tensor<2>, rows: &ExpertRows) -> Tensor<2> {
    kernels(&y.device()).expert_bias(y, bias, rows)
}

/// `(up + 1) · gate · σ(1.702 gate)` of rows `[gate | up]`, where `gate ≤ limit` and `|up| ≤ limit` (gpt-oss): `[rows,
/// n]` for `x` of shape `[rows, 2 n]`. Nothing but `x` is kept for the backward pass.
#[must_use]
pub fn clamped_swiglu(x: &Tensor<2>, limit: f64) -> Tensor<2> {
    kernels(&x.device()).clamped_swiglu(x, limit)
}

/// The sum of each token's rows of `y`, sorted, `[choices, n]`, by its `weights`, `[tokens, choices of a token]`:
/// `[tokens, n]`.
#[must_use]
pub fn combine_experts(y: &Tensor<2>, weights: &Tensor<2>, rows: &ExpertRows) -> Tensor<2> {
    kernels(&y.device()).combine_experts(y, weights, rows)
}

/// `y`, whose backward pass adds `gradient`, a constant of the shape of `x`, to the gradient of `x`: a loss of its own
/// that is added to whatever is made of `y`.
#[must_use]
pub fn attach_gradient(y: &Tensor<2>, x: &Tensor<2>, gradient: Tensor<2>) -> Tensor<2> {
    kernels(&y.device()).attach_gradient(y, x, gradient)
}

/// A number whose gradient by `output` is `gradient`, which has its shape: the root of a backward pass from a gradient
/// that is known, as `output.backward(gradient)` in `PyTorch`. `(output * gradient).sum()` has the same gradients and
/// computes a number; this one means nothing.
#[must_use]
pub fn backward_root<const D: usize>(output: Tensor<D>, gradient: Tensor<D>) -> Tensor<1> {
    let dims = output.dims();
    let size = [dims[0], dims[1..].iter().product()];
    let (output, gradient) = (output.reshape(size), gradient.reshape(size));
    kernels(&output.device()).backward_root(output, gradient)
}

/// `x · Wᵀ` for `x` of shape `[rows, inputs]` and a frozen matrix `[outputs, inputs]` in few bits
/// ([`firebrick_device::quantized`]), which is widened to the type of `x` as it is multiplied: the product with the
/// [`dequantize`]d matrix. Differentiable in `x`; nothing wide is kept for the backward pass, which widens again.
///
/// On the CPU at most [`firebrick_spec::quantized::CPU_TILE`] numbers are wide at a time; elsewhere the whole matrix,
/// for as long as the product takes.
#[must_use]
pub fn quantized_linear(x: &Tensor<2>, words: &Tensor<2>, layout: QuantizedLayout) -> Tensor<2> {
    kernels(&x.device()).quantized_linear(x, words, layout)
}

/// [`expert_linear`] with frozen matrices in few bits, each expert's with a buffer of its own: `words` is `[experts,
/// words]`. Otherwise as [`quantized_linear`]; the matrix of one expert at a time is wide, or on the CPU a tile of it.
#[must_use]
pub fn quantized_expert_linear(
    x: &Tensor<2>,
    words: &Tensor<2>,
    layout: QuantizedLayout,
    rows: &ExpertRows,
    reads: ExpertInput,
) -> Tensor<2> {
    kernels(&x.device()).quantized_expert_linear(x, words, layout, rows, reads)
}

/// The matrix `[outputs, inputs]` that a buffer in few bits stands for ([`firebrick_device::quantized`]), in a float type; those
/// of several buffers one below the other. Not differentiable.
#[must_use]
pub fn dequantize(words: &Tensor<2>, layout: QuantizedLayout, dtype: DType) -> Tensor<2> {
    let kernels = kernels(&words.device());
    if layout.matrices == 1 {
        return kernels.dequantize(words, layout, dtype);
    }
    let one = |matrix| kernels.dequantize(&words.clone().narrow(0, matrix, 1), layout.one(), dtype);
    Tensor::cat((0..layout.matrices).map(one).collect(), 0)
}

/// `a · b` for `[m, k]` and `[k, n]`; of half precision an f32 result on the CPU, and one in half
/// precision on NVIDIA's tensor cores. Other GPUs have no kernel.
///
/// `None` where no kernel is used for the tensors. Not differentiable.
#[must_use]
pub fn matmul(a: &Tensor<2>, b: &Tensor<2>) -> Option<Tensor<2>> {
    kernels(&a.device()).matmul(a, b)
}

/// `a · bᵀ` for `[m, k]` and `[n, k]`; an f32 result for half precision. The CPU has one.
///
/// `None` where no kernel is used for the tensors. Not differentiable.
#[must_use]
pub fn matmul_nt(a: &Tensor<2>, b: &Tensor<2>) -> Option<Tensor<2>> {
    kernels(&a.device()).matmul_nt(a, b)
}

/// `aᵀ · b` for `[k, m]` and `[k, n]`; the result's type as of [`matmul`].
///
/// `None` where no kernel is used for the tensors. Not differentiable.
#[must_use]
pub fn matmul_tn(a: &Tensor<2>, b: &Tensor<2>) -> Option<Tensor<2>> {
    kernels(&a.device()).matmul_tn(a, b)
}

/// Causal attention of packed sequences: `q`, `[rows, heads, dim]`, over `k` and `v`, `[rows, kv_heads, dim]`, gives
/// `[rows, heads, dim]`; rows in no sequence get zeros. Of each head's `sinks`, `[1, heads]`, the exponential is added
/// to the sum that a row's softmax is divided by.
///
/// `None` where no kernel is used for the tensors: on the CPU as [`Operation::Attention`], on a GPU as
/// [`Operation::LongAttention`].
#[must_use]
pub fn attention(
    q: &Tensor<3>,
    k: &Tensor<3>,
    v: &Tensor<3>,
    sinks: Option<&Tensor<2>>,
    shape: &AttentionShape,
) -> Option<Tensor<3>> {
    kernels(&q.device()).attention(q, k, v, sinks, shape)
}

/// Attention of one new token per sequence over a paged cache (`PagedAttention`, arXiv:2309.06180): `q`, `[rows, heads
/// · dim]`. Queries and keys are rotated by their rotary angles first, and `k` and `v`, `[rows, kv_heads · dim]`, are
/// written to the last token of each sequence's blocks. Gives `[rows, heads · dim]`, zeros for a row in no sequence,
/// and the pool.
///
/// The new token's key and value are read as they are stored: in a pool of 8 bits, with its rounding.
///
/// # Errors
/// Gives the pool back where no kernel is used for the tensors. Not differentiable.
pub fn paged_attention(
    qkv: [Tensor<2>; 3],
    pool: KvPool,
    shape: &PagedAttentionShape<'_>,
) -> Result<(Tensor<2>, KvPool), KvPool> {
    kernels(&qkv[0].device()).paged_attention(qkv, pool, shape)
}

/// [`paged_attention`] of queries, keys and values in one tensor, `[rows, (heads + 2 · kv_heads) · dim]`, to which
/// `bias`, of shape `[1, (heads + 2 · kv_heads) · dim]`, is added first, rounded as a sum of tensors is.
///
/// # Errors
/// Gives the pool back where no kernel is used for the tensors: the CPU has none. Not differentiable.
pub fn paged_attention_joined(
    qkv: &Tensor<2>,
    bias: Option<&Tensor<2>>,
    heads: JoinedHeads,
    pool: KvPool,
    shape: &PagedAttentionShape<'_>,
) -> Result<(Tensor<2>, KvPool), KvPool> {
    kernels(&qkv.device()).paged_attention_joined(qkv, bias, heads, pool, shape)
}

/// Writes keys and values, `[tokens, kv_heads, dim]` each, to a pool, in place where nobody else holds it: token i to
/// the slot `slots[i]` (vLLM's `reshape_and_cache`). Not differentiable.
///
/// # Panics
/// Where a slot is outside the pool.
#[must_use]
pub fn write_kv(pool: KvPool, kv: [&Tensor<3>; 2], slots: &SlotMapping) -> KvPool {
    kernels(&kv[0].device()).write_kv(pool, kv, slots)
}

/// Copies blocks of a pool to others, in place where nobody else holds it: `pairs` are source and target blocks; no
/// block is a target twice, or a source and a target.
///
/// # Panics
/// Where a block is outside the pool.
#[must_use]
pub fn copy_blocks(pool: KvPool, pairs: &[(u32, u32)]) -> KvPool {
    kernels(&pool.device()).copy_blocks(pool, pairs)
}

/// The keys and the values in some slots of a pool, `[kv_heads, slots, dim]` each, in a float type.
///
/// # Panics
/// Where a slot is outside the pool.
#[must_use]
pub fn gather_kv(pool: &KvPool, slots: &SlotMapping, dtype: DType) -> [Tensor<3>; 2] {
    kernels(&pool.device()).gather_kv(pool, slots, dtype)
}

/// Samples a token from every row of `logits`, `[rows, vocab]`: the first at which the cumulative sum of
/// `softmax(logits / temperature)` reaches the row's uniform number, or the likeliest where there are no numbers.
///
/// `None` where no kernel is used for the tensor.
#[must_use]
pub fn sample_rows(logits: &Tensor<2>, temperature: f64, uniforms: Option<&[f32]>) -> Option<Vec<SampledToken>> {
    kernels(&logits.device()).sample_rows(logits, temperature, uniforms)
}

/// Samples a token from every row of `logits`, `[rows, vocab]`, on the device. Gives `[rows, 3]` in f32: its id, its
/// log-prob under the truncated distribution, and its log-prob under the whole one, in nats.
///
/// `None` where no kernel is used for the tensor: the CPU has [`sample_rows`].
#[must_use]
pub fn sample_rows_on_device(logits: &Tensor<2>, choice: SampleOptions<'_>) -> Option<Tensor<2>> {
    kernels(&logits.device()).sample_rows_on_device(logits, choice)
}

/// [`sample_rows_on_device`] with the uniform numbers, `[rows]`, on the device already.
///
/// `None` where no kernel is used for the tensor.
#[must_use]
pub fn draw_rows(
    logits: &Tensor<2>,
    temperature: f64,
    truncation: Truncation,
    uniforms: Option<&Tensor<1>>,
) -> Option<Tensor<2>> {
    kernels(&logits.device()).draw_rows(logits, temperature, truncation, uniforms)
}

/// A copy of a tensor in a buffer of its own; on the CPU, where nothing overwrites what somebody else holds, the same.
/// The tensor is `[rows, columns]`, of any type.
#[must_use]
pub fn duplicate(tensor: &Tensor<2>) -> Tensor<2> {
    let copy = kernels(&tensor.device()).duplicate(tensor);
    copy.unwrap_or_else(|| tensor.clone())
}

/// Log-probs of targets, `[rows]`, and entropies, given raw logits, `[rows, vocab]`. With z the logits after `scaling`
/// and p = softmax(z): the log-prob of token t is `z_t − logsumexp(z)`, and the entropy is `logsumexp(z) − Σ p z`.
///
/// `None` where no kernel is used for the tensors. Not differentiable: [`score_gradient`] is its gradient.
#[must_use]
pub fn score_rows(logits: &Tensor<2>, targets: &Tensor<1, Int>, scaling: Scaling) -> Option<RowScores> {
    kernels(&logits.device()).score_rows(logits, targets, scaling)
}

/// The gradient with respect to raw logits, given the gradients with respect to log-probs and, where the loss depends
/// on them, entropies. Overwrites the logits where they are not shared.
///
/// `None` where no kernel is used for the tensors. Logits and gradient are `[rows, vocab]`, targets `[rows]`.
#[must_use]
pub fn score_gradient(
    logits: Tensor<2>,
    targets: &Tensor<1, Int>,
    scores: &RowScores,
    upstream: ScoreGradients<'_>,
    scaling: Scaling,
) -> Option<Tensor<2>> {
    kernels(&logits.device()).score_gradient(logits, targets, scores, upstream, scaling)
}

/// The columns of a tile where kernels score the vocabulary in tiles, so that never all logits exist at once. `None`
/// where they score whole rows, or not at all.
#[must_use]
pub fn vocabulary_tile(device: &Device) -> Option<usize> {
    kernels(device).vocabulary_tile(device)
}

/// Updates the statistics of rows, `running`, by one more tile of their raw logits, `[rows, width]`, which begins at
/// column `first` of the vocabulary. [`finish_scores`] ends them after the last tile.
///
/// `None` where no kernel is used for the tensors.
#[must_use]
pub fn score_tile(
    logits: &Tensor<2>,
    first: usize,
    targets: &Tensor<1, Int>,
    running: Option<RunningScores>,
    scaling: Scaling,
) -> Option<RunningScores> {
    kernels(&logits.device()).score_tile(logits, first, targets, running, scaling)
}

/// Log-probs and entropies after the last tile of the vocabulary.
#[must_use]
pub fn finish_scores(running: RunningScores) -> RowScores {
    let kernels = kernels(&running.0.device());
    kernels.finish_scores(running).expect("made by `score_tile`")
}

/// [`score_gradient`] of one tile of the logits, which begins at column `first` of the vocabulary.
///
/// `None` where no kernel is used for the tensors. Logits and gradient are `[rows, tile]`, targets `[rows]`.
#[must_use]
pub fn tile_gradient(
    logits: Tensor<2>,
    first: usize,
    targets: &Tensor<1, Int>,
    scores: &RowScores,
    upstream: ScoreGradients<'_>,
    scaling: Scaling,
) -> Option<Tensor<2>> {
    kernels(&logits.device()).tile_gradient(logits, first, targets, scores, upstream, scaling)
}

/// Adds each of `rows`, `[tokens, n]`, to the row of `sum`, `[vocab, n]`, of its token (`torch.index_add_`), in a fixed
/// order without atomics; in place where `sum` is not shared.
///
/// # Errors
/// `sum` itself, where no kernel is used for the tensors.
pub fn scatter_add_rows(sum: Tensor<2>, groups: &RowsByToken, rows: &Tensor<2>) -> Result<Tensor<2>, Tensor<2>> {
    kernels(&sum.device()).scatter_add_rows(sum, groups, rows)
}
