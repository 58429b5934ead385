//! Tokens that are sampled from rows of logits.

use super::{by_device, no_kernel, operations};
use crate::shapes::{SampleOptions, SampledToken, Truncation};
use burn::tensor::{Tensor, TensorData};

operations! {
    /// Samples a token from every row of `logits`, `[rows, vocab]`: the first at which the cumulative sum of
    /// `softmax(logits / temperature)` reaches the row's uniform number, or the likeliest where there are no numbers.
    ///
    /// # Panics
    /// If the device lost the logits.
    pub fn sample_rows(logits: &Tensor<2>, temperature: f64, uniforms: Option<&[f32]>) -> Vec<SampledToken> {
        cpu: sample if alike(&[logits]) && is_full_precision(logits);
        else { inverse_cdf(logits.clone() / temperature, uniforms) }
    }

    /// Samples a token from every row of `logits`, `[rows, vocab]`, on the device. Gives `[rows, 3]` in f32: its id,
    /// its log-prob under the truncated distribution, and its log-prob under the whole one, in nats.
    ///
    /// # Panics
    /// If [`samples_on_device`] is false.
    pub fn sample_rows_on_device(logits: &Tensor<2>, choice: SampleOptions<'_>) -> Tensor<2> {
        cube: sample if cube::sample::takes(logits);
        else { no_kernel("sample_rows_on_device") }
    }

    /// [`sample_rows_on_device`] with the uniform numbers, `[rows]`, on the device already.
    ///
    /// # Panics
    /// If [`samples_on_device`] is false.
    pub fn draw_rows(
        logits: &Tensor<2>,
        temperature: f64,
        truncation: Truncation,
        uniforms: Option<&Tensor<1>>,
    ) -> Tensor<2> {
        cube: sample if cube::sample::takes(logits);
        else { no_kernel("draw_rows") }
    }
}

/// Returns true if tokens are sampled from these logits on their device: GPUs have a kernel, also for truncated
/// distributions.
pub fn samples_on_device(logits: &Tensor<2>) -> bool {
    by_device!(&logits.device(), cpu => false, cube => crate::cube::sample::takes(logits))
}

/// Argmax, or inversion of the cumulative distribution at uniform numbers.
fn inverse_cdf(z: Tensor<2>, uniforms: Option<&[f32]>) -> Vec<SampledToken> {
    let [rows, vocab] = z.dims();
    let max = z.clone().max_dim(1);
    let exp = (z.clone() - max.clone()).exp();
    let total = exp.clone().sum_dim(1);
    let tokens = match uniforms {
        None => z.clone().argmax(1),
        Some(uniforms) => {
            let cumulative = exp.cumsum(1);
            // the sum's own rounding may differ from the running sum's: scale by the latter's end
            let end = cumulative.clone().narrow(1, vocab - 1, 1);
            let uniforms = TensorData::new(uniforms.to_vec(), [rows, 1]).convert_dtype(z.dtype());
            let threshold = end * Tensor::<2>::from_data(uniforms, (&z.device(), z.dtype()));
            // the first token at or above the threshold: as many as stand below it
            cumulative.lower(threshold).int().sum_dim(1)
        }
    };
    let logp = z.gather(1, tokens.clone()) - max - total.log();
    let ids = tokens.into_data();
    let logp = logp.into_data();
    ids.iter::<i64>().zip(logp.iter::<f32>()).map(|(id, logp)| SampledToken { token: id as u32, logp }).collect()
}
