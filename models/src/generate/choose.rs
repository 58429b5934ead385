//! One token for every row of a batch of logits.

use super::Sampling;
use super::truncate::draw_truncated;
use crate::random::DrawKey;
use crate::{Error, Result};
use burn::tensor::{Int, Tensor, TensorData};

/// A chosen token and its log-probs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chosen {
    pub token: u32,
    /// Under the distribution it was drawn from.
    pub logp: f32,
    /// Under the full one.
    pub full_logp: f32,
}

/// Chooses by argmax, by a draw from the whole distribution (both on the device: one number a row comes back),
/// or by a draw from a truncated one (on the host: truncation sorts, and no backend sorts on the device).
pub(super) fn choose(
    logits: Tensor<2>,
    sampling: &Sampling,
    keys: &[DrawKey],
    position: u32,
) -> Result<Vec<Chosen>> {
    if sampling.is_greedy() {
        return on_device(logits, None);
    }
    let z = if (sampling.temperature - 1.0).abs() < f64::EPSILON {
        logits
    } else {
        logits / sampling.temperature
    };
    let uniforms: Vec<f32> = keys.iter().map(|k| k.uniform(position)).collect();
    if !sampling.is_truncated() {
        return on_device(z, Some(uniforms));
    }
    let vocab = z.dims()[1];
    let z: Vec<f32> = read(z)?;
    Ok(z.chunks(vocab)
        .zip(uniforms)
        .map(|(row, u)| draw_truncated(row, sampling, u))
        .collect())
}

/// Argmax, or inversion of the cumulative distribution at the given uniform numbers.
fn on_device(z: Tensor<2>, uniforms: Option<Vec<f32>>) -> Result<Vec<Chosen>> {
    let [rows, _] = z.dims();
    let device = z.device();
    let max = z.clone().max_dim(1);
    let exp = (z.clone() - max.clone()).exp();
    let total = exp.clone().sum_dim(1);
    let tokens = match uniforms {
        None => z.clone().argmax(1),
        Some(u) => {
            let cumulative = exp.cumsum(1);
            // the sum's own rounding may differ from the running sum's: scale by the latter's end
            let end = cumulative.clone().narrow(1, cumulative.dims()[1] - 1, 1);
            let threshold = end * Tensor::<2>::from_data(TensorData::new(u, [rows, 1]), &device);
            // the first token at or above the threshold: as many as stand below it
            cumulative.lower(threshold).int().sum_dim(1)
        }
    };
    let logp = z.gather(1, tokens.clone()) - max - total.log();
    let tokens: Vec<i32> = read_int(tokens)?;
    let logps: Vec<f32> = read(logp)?;
    Ok(tokens
        .into_iter()
        .zip(logps)
        .map(|(token, logp)| Chosen {
            token: token as u32,
            logp,
            full_logp: logp,
        })
        .collect())
}

const DOING: &str = "sampling tokens";

fn read(t: Tensor<2>) -> Result<Vec<f32>> {
    t.try_into_vec_as().map_err(|e| Error::Device {
        doing: DOING,
        detail: e.to_string(),
    })
}

fn read_int(t: Tensor<2, Int>) -> Result<Vec<i32>> {
    t.try_into_vec_as().map_err(|e| Error::Device {
        doing: DOING,
        detail: e.to_string(),
    })
}
