//! One token for every row of a batch of logits, on the device until somebody looks.

use super::Sampling;
use super::truncate::draw_truncated;
use crate::random::DrawKey;
use crate::{Error, Result};
use burn::tensor::{Device, Int, Tensor, TensorData};
use firebrick_backends::kernels::{self, Choice, Truncation};
use rayon::prelude::*;

/// A chosen token and its log-probs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chosen {
    pub token: u32,
    /// Under the distribution it was drawn from.
    pub logp: f32,
    /// Under the full one.
    pub full_logp: f32,
}

/// A token for every row: on the host, or where it was drawn.
#[derive(Debug)]
pub(super) enum Drawn {
    Host(Vec<Chosen>),
    /// `[rows, 3]`: its id, its log-prob and that under the full distribution; or `[rows, 2]` where both are the same. In one
    /// tensor, for each reading waits for the device. Ids are exact in f32 up to 2²⁴.
    Device(Tensor<2>),
}

impl Drawn {
    /// The tokens as inputs of a forward, `[rows]`. Nobody waits for them.
    pub fn ids(&self, device: &Device) -> Tensor<1, Int> {
        match self {
            Self::Host(chosen) => {
                let ids: Vec<i32> = chosen.iter().map(|c| c.token as i32).collect();
                Tensor::from_data(TensorData::new(ids, [chosen.len()]), device)
            }
            Self::Device(rows) => rows.clone().narrow(1, 0, 1).squeeze_dim::<1>(1).int(),
        }
    }

    /// The tokens and their log-probs, as soon as the device has them.
    pub fn read(self) -> Result<Vec<Chosen>> {
        let rows = match self {
            Self::Host(chosen) => return Ok(chosen),
            Self::Device(rows) => rows,
        };
        let [_, width] = rows.dims();
        let rows: Vec<f32> = read(rows)?;
        let chosen = |row: &[f32]| Chosen {
            token: row[0] as u32,
            logp: row[1],
            full_logp: row[width - 1],
        };
        Ok(rows.chunks_exact(width).map(chosen).collect())
    }
}

/// What decides a row's token: nothing where nobody looks at it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Draw {
    pub key: Option<DrawKey>,
    /// Of the token in its completion.
    pub position: u32,
}

impl Draw {
    /// Of a row that no sequence is in.
    pub const NONE: Self = Self {
        key: None,
        position: 0,
    };

    fn uniform(&self) -> f32 {
        self.key.map_or(0.5, |key| key.uniform(self.position))
    }
}

/// Chooses by argmax, by a draw from the whole distribution, or from a truncated one.
///
/// A GPU's kernel does all three on the device: a token and its log-probs come back. The CPU's does the first two. Where there is
/// no kernel, tensor operations do them on the device too, but truncate on the host: no backend sorts on the device, and finding
/// boundaries by bisection in tensor operations takes some eighty passes over the logits, which is no faster than reading them
/// back once and sorting the few that matter.
pub(super) fn choose(logits: Tensor<2>, sampling: &Sampling, draws: &[Draw]) -> Result<Drawn> {
    let uniforms: Vec<f32> = draws.iter().map(Draw::uniform).collect();
    if !sampling.is_truncated() || sampling.is_greedy() {
        let uniforms = (!sampling.is_greedy()).then_some(&uniforms[..]);
        let temperature = sampling.scoring_temperature();
        if let Some(drawn) = kernels::draw_rows(&logits, temperature, uniforms) {
            let chosen = |(token, logp)| Chosen {
                token,
                logp,
                full_logp: logp,
            };
            return Ok(Drawn::Host(drawn.into_iter().map(chosen).collect()));
        }
    }
    let choice = Choice {
        temperature: sampling.scoring_temperature(),
        truncation: Truncation {
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
        },
        uniforms: (!sampling.is_greedy()).then_some(&uniforms),
    };
    if let Some(rows) = kernels::choose_rows(&logits, choice) {
        return Ok(Drawn::Device(rows));
    }
    if sampling.is_greedy() {
        return Ok(Drawn::Device(on_device(logits, None)));
    }
    let z = if (sampling.temperature - 1.0).abs() < f64::EPSILON {
        logits
    } else {
        logits / sampling.temperature
    };
    if !sampling.is_truncated() {
        return Ok(Drawn::Device(on_device(z, Some(uniforms))));
    }
    let vocab = z.dims()[1];
    let z: Vec<f32> = read(z)?;
    let rows = z.par_chunks(vocab).zip(uniforms);
    let chosen = rows.map(|(row, u)| draw_truncated(row, sampling, u));
    Ok(Drawn::Host(chosen.collect()))
}

/// Argmax, or inversion of the cumulative distribution at the given uniform numbers: `[rows, 2]` of ids and log-probs.
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
    t.try_into_vec_as().map_err(|e| Error::Device {
        doing: "sampling tokens",
        detail: e.to_string(),
    })
}
