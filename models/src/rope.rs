//! Rotary position embedding in rotate-half form (Su et al., 2021, arXiv:2104.09864; the layout of transformers), with a position
//! for every row.

use crate::arch::{Arch, RopeScaling};
use burn::tensor::{Device, Tensor, TensorData};
use firebrick_backends::kernels::{self, RotaryAngles};
use firebrick_backends::precision::{stored_as, widened};

/// Cosines and sines of the rotation angles of one forward pass: `[tokens, 1, head_dim / 2]` each.
#[derive(Clone, Debug)]
pub struct RotaryEmbedding {
    cos: Tensor<3>,
    sin: Tensor<3>,
}

impl RotaryEmbedding {
    /// The tables for these positions, one for each token.
    #[must_use]
    pub fn new(arch: &Arch, positions: &[u32], device: &Device) -> Self {
        let longest = positions.iter().max().map_or(0, |&p| p as usize + 1);
        let frequencies = frequencies(arch, longest);
        let half = frequencies.len();
        // many sequences have the same positions: each is computed once
        let mut distinct = positions.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let table = |f: fn(f64) -> f64| {
            let known: Vec<f64> = distinct
                .iter()
                .flat_map(|&p| frequencies.iter().map(move |&w| f(f64::from(p) * w)))
                .collect();
            let mut values = Vec::with_capacity(positions.len() * half);
            for position in positions {
                let at = distinct.binary_search(position).unwrap_or_default() * half;
                values.extend_from_slice(&known[at..at + half]);
            }
            Tensor::<3>::from_data(TensorData::new(values, [positions.len(), 1, half]), device)
        };
        Self {
            cos: table(f64::cos),
            sin: table(f64::sin),
        }
    }

    /// Cosines and sines as a kernel takes them that rotates on its own.
    pub(crate) fn angles(&self) -> RotaryAngles {
        RotaryAngles::new(&self.cos, &self.sin)
    }

    /// Rotates `x` of shape `[tokens, heads, head_dim]`, in f32 or wider.
    #[must_use]
    pub fn rotate(&self, x: Tensor<3>) -> Tensor<3> {
        let x = match kernels::rotary(x, &self.cos, &self.sin) {
            Ok(rotated) => return rotated,
            Err(x) => x,
        };
        let stored = x.dtype();
        let x = widened(x);
        let half = x.dims()[2] / 2;
        let a = x.clone().narrow(2, 0, half);
        let b = x.narrow(2, half, half);
        let (cos, sin) = (self.cos.clone(), self.sin.clone());
        let first = a.clone() * cos.clone() - b.clone() * sin.clone();
        let second = b * cos + a * sin;
        stored_as(Tensor::cat(vec![first, second], 2), stored)
    }
}

/// Rotation angle per position of each pair of dimensions. `longest` is the number of positions of the forward pass, which only
/// dynamic scaling uses (as transformers does).
fn frequencies(arch: &Arch, longest: usize) -> Vec<f64> {
    let dim = arch.head_dim as f64;
    let base = |theta: f64| -> Vec<f64> {
        (0..arch.head_dim / 2)
            .map(|i| theta.powf(-2.0 * i as f64 / dim))
            .collect()
    };
    let plain = base(arch.rope.theta);
    match arch.rope.scaling {
        RopeScaling::Default => plain,
        RopeScaling::Linear { factor } => plain.into_iter().map(|w| w / factor).collect(),
        RopeScaling::Dynamic { factor, original } => {
            if longest <= original {
                return plain;
            }
            let growth = factor * longest as f64 / original as f64 - (factor - 1.0);
            base(arch.rope.theta * growth.powf(dim / (dim - 2.0)))
        }
        RopeScaling::Llama3 {
            factor,
            low,
            high,
            original,
        } => plain
            .into_iter()
            .map(|w| {
                let wavelength = std::f64::consts::TAU / w;
                let turns = original as f64 / wavelength;
                if turns < low {
                    w / factor
                } else if turns > high {
                    w
                } else {
                    let blend = (turns - low) / (high - low);
                    (1.0 - blend) * w / factor + blend * w
                }
            })
            .collect(),
    }
}
