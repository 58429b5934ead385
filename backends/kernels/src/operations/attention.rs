//! Attention of whole sequences, and of new tokens over a paged cache of keys and values.

use super::{no_kernel, operations};
use crate::paged::{KvPool, PagedAttentionShape, SlotMapping};
use crate::shapes::{AttentionShape, JoinedHeads};
use burn::tensor::{DType, Tensor};

operations! {
    /// Causal softmax attention of queries, `[rows, heads, dim]`, over keys and values, `[rows, kv_heads, dim]`, of
    /// packed sequences: `[rows, heads, dim]`, zeros in rows of no sequence. `sinks`, `[1, heads]`, are one more score of
    /// every row of a head, whose probability is left out of the sum.
    ///
    /// # Panics
    /// If [`available`](crate::available) has no kernel for attention.
    pub fn attention(qkv: [&Tensor<3>; 3], sinks: Option<&Tensor<2>>, shape: &AttentionShape) -> Tensor<3> {
        cpu: attention if alike(&qkv) && sinks.is_none_or(|t| alike(&[t]) && t.dtype() == qkv[0].dtype());
        cube: attention if cube::attention::takes(qkv, shape);
        else { no_kernel("attention") }
    }

    /// Writes keys and values, `[tokens, kv_heads, dim]` each, to a pool, in place where nobody else holds it: token i
    /// to the slot `slots[i]` (vLLM's `reshape_and_cache`). Not differentiable.
    ///
    /// # Panics
    /// If a slot is outside the pool.
    pub fn write_kv(pool: KvPool, kv: [&Tensor<3>; 2], slots: &SlotMapping) -> KvPool {
        cpu: paged;
        cube: paged;
        else { no_kernel("write_kv") }
    }

    /// Copies blocks of a pool to others, in place where nobody else holds it: `pairs` are source and target blocks; no
    /// block is a target twice, or a source and a target.
    ///
    /// # Panics
    /// If a block is outside the pool.
    pub fn copy_blocks(pool: KvPool, pairs: &[(u32, u32)]) -> KvPool {
        cpu: paged;
        cube: paged;
        else { no_kernel("copy_blocks") }
    }

    /// The keys and the values in some slots of a pool, `[kv_heads, slots, dim]` each, in a float type.
    ///
    /// # Panics
    /// If a slot is outside the pool.
    pub fn gather_kv(pool: &KvPool, slots: &SlotMapping, dtype: DType) -> [Tensor<3>; 2] {
        cpu: paged;
        cube: paged;
        else { no_kernel("gather_kv") }
    }

    /// Attention of one new token per sequence over a paged cache (`PagedAttention`, arXiv:2309.06180): `q`, `[rows,
    /// heads · dim]`. Queries and keys are rotated by their rotary angles first, and `k` and `v`, `[rows, kv_heads ·
    /// dim]`, are written to the last token of each sequence's blocks. Gives `[rows, heads · dim]`, zeros for a row in
    /// no sequence, and the pool. Not differentiable.
    ///
    /// The new token's key and value are read as they are stored: in a pool of 8 bits, with its rounding.
    ///
    /// # Panics
    /// If [`available`](crate::available) has no kernel for attention over a cache.
    pub fn paged_attention(
        qkv: [Tensor<2>; 3],
        pool: KvPool,
        shape: &PagedAttentionShape<'_>,
    ) -> (Tensor<2>, KvPool) {
        cpu: paged if cpu::paged::takes(&qkv, &pool, shape);
        cube: paged if cube::paged::takes(&qkv, &pool, shape);
        else { no_kernel("paged_attention") }
    }

    /// [`paged_attention`] of queries, keys and values in one tensor, `[rows, (heads + 2 · kv_heads) · dim]`, to which
    /// `bias`, of shape `[1, (heads + 2 · kv_heads) · dim]`, is added first, rounded as a sum of tensors is.
    ///
    /// # Panics
    /// As [`paged_attention`], and on the CPU, which has no such kernel.
    pub fn paged_attention_joined(
        qkv: &Tensor<2>,
        bias: Option<&Tensor<2>>,
        heads: JoinedHeads,
        pool: KvPool,
        shape: &PagedAttentionShape<'_>,
    ) -> (Tensor<2>, KvPool) {
        cube: paged if cube::paged::takes_joined(qkv, bias, heads, &pool, shape);
        else { no_kernel("paged_attention_joined") }
    }
}
