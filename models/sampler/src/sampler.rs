//! Sampling one token for every row of logits, on the device where it can.

use super::sampling_params::SamplingParams;
use super::sequence::SampledToken;
use super::top_k_top_p::sample_truncated;
use burn::tensor::{Device, Int, Tensor, TensorData};
use firebrick_backends::kernels::{self, SampleOptions, Truncation};
use firebrick_models::random::DrawKey;
use firebrick_models::{Error, Result};
use rayon::prelude::*;

/// A sampled token for every row, on the host or on the device.
#[derive(Debug)]
pub(super) enum SampledTokens {
    Host(Vec<SampledToken>),
    /// `[rows, 3]`: id, log-probability, and log-probability before truncation; or `[rows, 2]` where these are the
    /// same. One tensor, since every read waits for the device. Ids are exact in f32 up to 2²⁴.
    Device(Tensor<2>),
}

impl SampledTokens {
    /// The token ids as inputs of a forward pass, `[rows]`, without waiting for the device.
    pub fn ids(&self, device: &Device) -> Tensor<1, Int> {
        match self {
            Self::Host(chosen) => {
                let ids: Vec<i32> = chosen.iter().map(|c| c.token as i32).collect();
                Tensor::from_data(TensorData::new(ids, [chosen.len()]), device)
            }
            Self::Device(rows) => rows.clone().narrow(1, 0, 1).squeeze_dim::<1>(1).int(),
        }
    }

    /// Waits for the tokens and their log-probabilities.
    pub fn read(self) -> Result<Vec<SampledToken>> {
        let rows = match self {
            Self::Host(chosen) => return Ok(chosen),
            Self::Device(rows) => rows,
        };
        let [_, width] = rows.dims();
        let rows: Vec<f32> = read(rows)?;
        let chosen = |row: &[f32]| SampledToken { token: row[0] as u32, logp: row[1], full_logp: row[width - 1] };
        Ok(rows.chunks_exact(width).map(chosen).collect())
    }
}

/// The random number of a row: by key and position, or none for a row without a sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct RandomDraw {
    pub key: Option<DrawKey>,
    /// Index of the token in its completion.
    pub position: u32,
}

impl RandomDraw {
    /// The draw of a sequence's next token, after so many.
    pub fn next(key: DrawKey, tokens: usize) -> Self {
        Self { key: Some(key), position: tokens as u32 }
    }
}

impl RandomDraw {
    /// For a row without a sequence.
    pub const NONE: Self = Self { key: None, position: 0 };

    pub fn uniform(&self) -> f32 {
        self.key.map_or(0.5, |key| key.uniform(self.position))
    }
}

/// Samples a token for every row of logits `[rows, vocab]`: by argmax, from the whole distribution, or from a truncated
/// one.
///
/// The GPU kernel does all three on the device; the CPU kernel does the first two. Without a kernel, tensor operations
/// do the first two on the device, and truncated rows are read back and sampled on the host: no backend sorts on the
/// device, and bisection in tensor operations takes some eighty passes over the logits, which is no faster than one
/// read and a partial sort.
pub(super) fn sample(logits: Tensor<2>, sampling: &SamplingParams, draws: &[RandomDraw]) -> Result<SampledTokens> {
    let uniforms: Vec<f32> = draws.iter().map(RandomDraw::uniform).collect();
    if !sampling.is_truncated() || sampling.is_greedy() {
        let uniforms = (!sampling.is_greedy()).then_some(&uniforms[..]);
        let temperature = sampling.scoring_temperature();
        if let Some(drawn) = kernels::sample_rows(&logits, temperature, uniforms) {
            let chosen = |drawn: kernels::SampledToken| SampledToken {
                token: drawn.token,
                logp: drawn.logp,
                full_logp: drawn.logp,
            };
            return Ok(SampledTokens::Host(drawn.into_iter().map(chosen).collect()));
        }
    }
    let choice = SampleOptions {
        temperature: sampling.scoring_temperature(),
        truncation: Truncation { top_k: sampling.top_k, top_p: sampling.top_p, min_p: sampling.min_p },
        uniforms: (!sampling.is_greedy()).then_some(&uniforms),
    };
    if let Some(rows) = kernels::sample_rows_on_device(&logits, choice) {
        return Ok(SampledTokens::Device(rows));
    }
    if sampling.is_greedy() {
        return Ok(SampledTokens::Device(on_device(logits, None)));
    }
    let z = if (sampling.temperature - 1.0).abs() < f64::EPSILON { logits } else { logits / sampling.temperature };
    if !sampling.is_truncated() {
        return Ok(SampledTokens::Device(on_device(z, Some(uniforms))));
    }
    let vocab = z.dims()[1];
    let z: Vec<f32> = read(z)?;
    let rows = z.par_chunks(vocab).zip(uniforms);
    let chosen = rows.map(|(row, u)| sample_truncated(row, sampling, u));
    Ok(SampledTokens::Host(chosen.collect()))
}

/// Argmax, or inversion of the cumulative distribution at uniform numbers: `[rows, 2]` of ids and log-probabilities.
fn on_device(z: Tensor<2>, uniforms: Option<Vec<f32>>) -> Tensor<2> {
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
    Tensor::cat(vec![tokens.float(), logp], 1)
}

fn read(t: Tensor<2>) -> Result<Vec<f32>> {
    t.try_into_vec_as().map_err(|e| Error::device("sampling tokens", &e))
}
