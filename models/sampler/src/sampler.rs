//! Sampling one token for every row of logits, on the device where it can.

use super::sampling_params::SamplingParams;
use super::sequence::SampledToken;
use super::top_k_top_p::sample_truncated;
use burn::tensor::{Device, Int, Tensor, TensorData};
use firebrick_backends::kernels::{self, SampleOptions, Scaling, Truncation};
use firebrick_models::random::DrawKey;
use firebrick_models::{Error, Result};
use rayon::prelude::*;

/// A sampled token for every row, on the host or on the device.
#[derive(Debug)]
pub(super) enum SampledTokens {
    Host(Vec<SampledToken>),
    /// `[rows, 3]`: id, log-probability, and log-probability before truncation. One tensor, since every read waits for
    /// the device. Ids are exact in f32 up to 2²⁴.
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
        let rows: Vec<f32> = read(rows)?;
        let (rows, _) = rows.as_chunks();
        let chosen = |&[token, logp, full_logp]: &[f32; 3]| SampledToken { token: token as u32, logp, full_logp };
        Ok(rows.iter().map(chosen).collect())
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
    /// For a row without a sequence.
    pub const NONE: Self = Self { key: None, position: 0 };

    /// The draw of a sequence's next token, after `tokens`.
    pub fn next(key: DrawKey, tokens: usize) -> Self {
        Self { key: Some(key), position: tokens as u32 }
    }

    pub fn uniform(&self) -> f32 {
        self.key.map_or(0.5, |key| key.uniform(self.position))
    }
}

/// Samples a token for every row of logits `[rows, vocab]`: by argmax, from the whole distribution, or from a truncated
/// one.
///
/// If they are to be `exact`, log-probs are those that training computes, to the bit, which sums in another order than a
/// GPU's kernel that samples.
///
/// The GPU kernel does all three on the device; the CPU kernel does the first two. Elsewhere truncated rows are read
/// back and sampled on the host: no backend sorts on the device, and bisection in tensor operations takes some eighty
/// passes over the logits, which is no faster than one read and a partial sort.
pub(super) fn sample(
    logits: &Tensor<2>,
    sampling: &SamplingParams,
    draws: &[RandomDraw],
    exact: bool,
) -> Result<SampledTokens> {
    let uniforms: Vec<f32> = draws.iter().map(RandomDraw::uniform).collect();
    let drawn = (!sampling.is_greedy()).then_some(&uniforms[..]);
    let temperature = sampling.scoring_temperature();
    if kernels::samples_on_device(logits) {
        let truncation = Truncation { top_k: sampling.top_k, top_p: sampling.top_p, min_p: sampling.min_p };
        let options = SampleOptions { temperature, truncation, uniforms: drawn };
        let tokens = kernels::sample_rows_on_device(logits, options);
        return Ok(SampledTokens::Device(if exact { scored(tokens, logits, sampling) } else { tokens }));
    }
    if !sampling.is_truncated() || sampling.is_greedy() {
        let chosen =
            |drawn: kernels::SampledToken| SampledToken { token: drawn.token, logp: drawn.logp, full_logp: drawn.logp };
        let rows = kernels::sample_rows(logits, temperature, drawn);
        return Ok(SampledTokens::Host(rows.into_iter().map(chosen).collect()));
    }
    let z = if (sampling.temperature - 1.0).abs() < f64::EPSILON {
        logits.clone()
    } else {
        logits.clone() / sampling.temperature
    };
    let [rows, vocab] = z.dims();
    let z: Vec<f32> = read(z)?;
    let chosen = z.par_chunks(vocab).zip(uniforms).map(|(row, u)| sample_truncated(row, sampling, u));
    let mut chosen: Vec<SampledToken> = chosen.collect();
    // as training scores them, to the bit
    let tokens: Vec<i32> = chosen.iter().map(|c| c.token as i32).collect();
    let tokens = Tensor::<1, Int>::from_data(TensorData::new(tokens, [rows]), &logits.device());
    let full = kernels::score_rows(logits, &tokens, Scaling { temperature, softcap: None });
    let full: Vec<f32> = full.logp.try_into_vec_as().map_err(|e| Error::device("scoring tokens", &e))?;
    for (chosen, full) in chosen.iter_mut().zip(full) {
        chosen.full_logp = full;
    }
    Ok(SampledTokens::Host(chosen))
}

/// Sampled tokens, `[rows, 3]`, with log-probs by the kernel that scores logits in training. Without truncation both
/// log-probs are the same.
pub(super) fn scored(tokens: Tensor<2>, logits: &Tensor<2>, sampling: &SamplingParams) -> Tensor<2> {
    let [rows, _] = tokens.dims();
    let ids = tokens.clone().narrow(1, 0, 1).squeeze_dim::<1>(1).int();
    let scaling = Scaling { temperature: sampling.scoring_temperature(), softcap: None };
    let full = kernels::score_rows(logits, &ids, scaling).logp.reshape([rows, 1]);
    let truncated = sampling.is_truncated() && !sampling.is_greedy();
    let own = if truncated { tokens.clone().narrow(1, 1, 1) } else { full.clone() };
    Tensor::cat(vec![tokens.narrow(1, 0, 1), own, full], 1)
}

fn read(t: Tensor<2>) -> Result<Vec<f32>> {
    t.try_into_vec_as().map_err(|e| Error::device("sampling tokens", &e))
}
