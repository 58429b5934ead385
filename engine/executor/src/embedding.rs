//! The embedding of a pass, and its gradient. Ranks that share its rows sum what each has of a micro-batch.

use super::fetch::Fetched;
use super::gradients::{Gradients, TokenRows};
use super::runtime::Runtime;
use super::tensor_parallel::sum;
use crate::batch::MicroBatch;
use burn::tensor::Tensor;
use firebrick_backends::kernels::RowsByToken;
use firebrick_core::{Error, Result};
use firebrick_models::Decoder;
use firebrick_models::tensor_group::local_ids;

/// Rows of micro-batches, `[tokens, hidden]` each.
pub(super) fn embed(
    decoder: &Decoder,
    fetched: &Fetched,
    micros: &[MicroBatch],
    runtime: &Runtime,
) -> Result<Vec<Tensor<2>>> {
    let weights = &fetched.weights[0];
    let of = |micro: &MicroBatch| {
        let ids = micro.ids.clone();
        if decoder.share().is_none() {
            return Ok(decoder.embed_with(weights, ids));
        }
        let part = decoder.embed_part(weights, ids);
        Ok(decoder.embedded(sum(part, runtime)?))
    };
    micros.iter().map(of).collect()
}

/// Adds the gradient of a micro-batch's rows, `[tokens, hidden]`, to that of the embedding.
pub(super) fn add_embedding(
    decoder: &Decoder,
    micro: &MicroBatch,
    d: Tensor<2>,
    gradients: &mut Gradients,
    runtime: &Runtime,
) -> Result<()> {
    let d = match decoder.arch().embedding_scale {
        Some(scale) => d * scale,
        None => d,
    };
    let Some(own) = decoder.own_tokens() else {
        let at = TokenRows { ids: &micro.ids, sorted: micro.segments.as_ref() };
        return gradients.add_rows(0, decoder.arch().vocab_size, at, d, runtime);
    };
    // rows of other ranks' tokens add zeros to the first own one
    let [tokens, hidden] = d.dims();
    let [rows, _] = decoder.units()[0].specs[0].rows_cols();
    let (ids, others) = local_ids(own, micro.ids.clone());
    let others = others.reshape([tokens, 1]).expand([tokens, hidden]);
    let sorted = micro.segments.as_ref().map(|_| {
        let own = runtime.copier.download_indices(ids.clone()).finish()?;
        let own: Vec<i32> = own.iter::<i32>().collect();
        Ok::<_, Error>(RowsByToken::new(&own, decoder.device()))
    });
    let segments = sorted.transpose()?;
    let at = TokenRows { ids: &ids, sorted: segments.as_ref() };
    gradients.add_rows(0, rows, at, d.mask_fill(others, 0.0), runtime)
}
