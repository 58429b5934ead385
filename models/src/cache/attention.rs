//! Attention of new tokens over the cache.

use super::layer_cache::LayerCache;
use super::metadata::{
    AttentionMetadata, ContinuedRows, Decode, Gathered, GroupMetadata, JointRows, PrefillMetadata, QUERIES,
};
use crate::attention::{self, AttentionParams, Qkv, attend_rows, scaled_dot_product_attention};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use firebrick_backends::kernels::{self, JoinedHeads, KvPool, PagedAttentionShape, SlotMapping};

impl LayerCache {
    /// The sequences of the forward pass of this layer, `layer`, where [`Self::decode`] attends.
    pub fn decoded<'a>(&self, metadata: &'a AttentionMetadata, layer: usize) -> Option<Decode<'a>> {
        metadata.decoded(self.group, layer)
    }

    /// Attention of one token of each sequence by a kernel, which also rotates queries and keys and writes keys and
    /// values: all `[rows, heads · head_dim]`, and sinks, `[1, heads]`.
    pub fn decode(
        &mut self,
        params: AttentionParams,
        qkv: [Tensor<2>; 3],
        sinks: Option<&Tensor<2>>,
        decode: Decode<'_>,
    ) -> Tensor<2> {
        let shape = shape_of(params, sinks, decode);
        self.update(|pool| kernels::paged_attention(qkv, pool, &shape))
    }

    /// [`Self::decode`] of queries, keys and values in one tensor, to which biases are still to be added.
    pub fn decode_joined(
        &mut self,
        params: AttentionParams,
        (qkv, bias): (&Tensor<2>, Option<&Tensor<2>>),
        heads: JoinedHeads,
        sinks: Option<&Tensor<2>>,
        decode: Decode<'_>,
    ) -> Tensor<2> {
        let shape = shape_of(params, sinks, decode);
        self.update(|pool| kernels::paged_attention_joined(qkv, bias, heads, pool, &shape))
    }

    /// Writes keys and values, and attends with the queries over what each row sees: `[rows, heads · head_dim]`.
    pub fn attend(&mut self, params: AttentionParams, qkv: Qkv, metadata: &AttentionMetadata) -> Tensor<2> {
        match &metadata.groups[self.group] {
            GroupMetadata::Decode(_) => unreachable!("`decode` attends"),
            GroupMetadata::Gathered(gathered) => self.attend_gathered(params, qkv, gathered),
            GroupMetadata::Prefill(prefill) => self.attend_prefill(params, qkv, prefill),
        }
    }

    fn attend_gathered(
        &mut self,
        params: AttentionParams,
        Qkv { q, k, v, sinks }: Qkv,
        gathered: &Gathered,
    ) -> Tensor<2> {
        let [rows, heads, dim] = q.dims();
        let live =
            Tensor::<1, Int>::from_data(TensorData::new(gathered.rows.clone(), [gathered.rows.len()]), &q.device());
        let [k, v] = [k, v].map(|t| if gathered.rows.len() == rows { t } else { t.select(0, live.clone()) });
        let dtype = q.dtype();
        self.update(|pool| ((), kernels::write_kv(pool, [&k, &v], &gathered.new)));
        let [keys, values] = self.gather(&gathered.seen, dtype).map(|t| {
            let [heads, _, dim] = t.dims();
            t.reshape([heads, rows, gathered.longest, dim]).swap_dims(0, 1)
        });
        let q = q.reshape([rows, heads, 1, dim]);
        let hidden = Some(gathered.hidden.clone());
        let (kv, sinks) = ([keys, values], sinks.as_ref());
        scaled_dot_product_attention(q, kv, sinks, params, hidden).reshape([rows, heads * dim])
    }

    fn attend_prefill(
        &mut self,
        params: AttentionParams,
        Qkv { q, k, v, sinks }: Qkv,
        prefill: &PrefillMetadata,
    ) -> Tensor<2> {
        self.update(|pool| ((), kernels::write_kv(pool, [&k, &v], &prefill.slots)));
        // rounded keys and values take part as they are stored, so that results do not depend on how prompts are
        // divided
        let [k, v] = match self.pool() {
            KvPool::Float { .. } => [k, v],
            KvPool::Int8 { .. } => self.gather(&prefill.slots, k.dtype()).map(|t| t.swap_dims(0, 1)),
        };
        let qkv = Qkv { q, k, v, sinks };
        let [tokens, heads, dim] = qkv.q.dims();
        let rows = |first: usize, len: usize| Qkv {
            q: qkv.q.clone().narrow(0, first, len),
            k: qkv.k.clone().narrow(0, first, len),
            v: qkv.v.clone().narrow(0, first, len),
            sinks: qkv.sinks.clone(),
        };
        let joint = match &prefill.joint {
            JointRows::Kernel { context, groups } if context.is_empty() => attend_rows(&qkv, params, groups),
            JointRows::Kernel { context, groups } => {
                let before = self.gather(context, qkv.k.dtype()).map(|t| t.swap_dims(0, 1));
                let with = before_rows(&qkv, before);
                attend_rows(&with, params, groups).narrow(0, context.len(), tokens)
            }
            JointRows::Padded { rows: 0, .. } => Tensor::zeros([0, heads * dim], (&qkv.q.device(), qkv.q.dtype())),
            JointRows::Padded { rows: first, layout } => attention::attend(&rows(0, *first), params, layout),
        };
        if prefill.apart.is_empty() {
            return joint;
        }
        let mut parts = Vec::new();
        let mut next = 0;
        for continued in &prefill.apart {
            let ContinuedRows { rows: own, context } = continued;
            if own.start > next {
                parts.push(joint.clone().narrow(0, next, own.start - next));
            }
            let before = self.gather(context, qkv.k.dtype());
            parts.push(continue_sequence(&rows(own.start, own.len()), before, params));
            next = own.end;
        }
        if next < tokens {
            parts.push(joint.narrow(0, next, tokens - next));
        }
        Tensor::cat(parts, 0)
    }

    /// Keys and values in some slots, `[kv_heads, slots, head_dim]` each.
    fn gather(&self, slots: &SlotMapping, dtype: DType) -> [Tensor<3>; 2] {
        kernels::gather_kv(self.pool(), slots, dtype)
    }
}

fn shape_of<'a>(params: AttentionParams, sinks: Option<&'a Tensor<2>>, decode: Decode<'a>) -> PagedAttentionShape<'a> {
    PagedAttentionShape {
        tables: decode.tables,
        angles: decode.angles,
        window: params.window,
        scale: params.scale,
        softcap: params.softcap,
        sinks,
    }
}

/// Rows of a forward pass after others of which only keys and values are known: their queries are zeros.
fn before_rows(qkv: &Qkv, [keys, values]: [Tensor<3>; 2]) -> Qkv {
    let [context, ..] = keys.dims();
    let [_, heads, dim] = qkv.q.dims();
    let zeros = Tensor::zeros([context, heads, dim], (&qkv.q.device(), qkv.q.dtype()));
    let join = |before: Tensor<3>, rows: &Tensor<3>| Tensor::cat(vec![before, rows.clone()], 0);
    Qkv { q: join(zeros, &qkv.q), k: join(keys, &qkv.k), v: join(values, &qkv.v), sinks: qkv.sinks.clone() }
}

/// Attention of the next tokens of one sequence, given the keys and values before them, `[kv_heads, tokens, head_dim]`,
/// some queries at a time, each chunk up to its own last key.
fn continue_sequence(
    Qkv { q, k, v, sinks }: &Qkv,
    [keys, values]: [Tensor<3>; 2],
    params: AttentionParams,
) -> Tensor<2> {
    let [tokens, heads, dim] = q.dims();
    let context = keys.dims()[1];
    let by_head = |t: &Tensor<3>| t.clone().swap_dims(0, 1);
    let q = by_head(q).unsqueeze::<4>();
    let [k, v] =
        [(keys, k), (values, v)].map(|(before, after)| Tensor::cat(vec![before, by_head(after)], 1).unsqueeze::<4>());
    let chunks = (0..tokens).step_by(QUERIES).map(|first| {
        let len = QUERIES.min(tokens - first);
        let last = context + first + len;
        let hidden =
            |query: usize, key: usize| key > query || params.window.is_some_and(|window| query - key >= window);
        let queries = context + first..last;
        let mask: Vec<bool> = queries.flat_map(|query| (0..last).map(move |key| hidden(query, key))).collect();
        let mask = TensorData::new(mask, [1, 1, len, last]);
        let mask = Tensor::<4, Bool>::from_data(mask, &q.device());
        scaled_dot_product_attention(
            q.clone().narrow(2, first, len),
            [&k, &v].map(|t| t.clone().narrow(2, 0, last)),
            sinks.as_ref(),
            params,
            Some(mask),
        )
    });
    Tensor::cat(chunks.collect(), 2).swap_dims(1, 2).reshape([tokens, heads * dim])
}
