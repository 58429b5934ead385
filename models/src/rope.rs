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
        let half = arch.head_dim / 2;
        let table = |f: fn(f64) -> f64| {
            let values = for_each(
                positions,
                half,
                |position, frequencies| frequencies.iter().map(|&w| f(position * w)).collect(),
                &frequencies_of(arch, positions),
            );
            Tensor::<3>::from_data(TensorData::new(values, [positions.len(), 1, half]), device)
        };
        Self {
            cos: table(f64::cos),
            sin: table(f64::sin),
        }
    }

    /// Cosines and then sines for each of these positions, on the host: `[tokens, head_dim]`, as the tables have them in f32.
    pub(crate) fn on_host(arch: &Arch, positions: &[u32]) -> Vec<f32> {
        let frequencies = frequencies_of(arch, positions);
        for_each(
            positions,
            2 * frequencies.len(),
            |position, frequencies| {
                let angles = frequencies.iter().map(|&w| (position * w).sin_cos());
                let (sines, cosines): (Vec<f64>, Vec<f64>) = angles.unzip();
                cosines.into_iter().chain(sines).map(|x| x as f32).collect()
            },
            &frequencies,
        )
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

/// The frequencies of a forward pass at these positions.
fn frequencies_of(arch: &Arch, positions: &[u32]) -> Vec<f64> {
    let longest = positions.iter().max().map_or(0, |&p| p as usize + 1);
    frequencies(arch, longest)
}

/// What `row` gives for every position, `width` numbers each. Many sequences have the same positions: each is computed once.
fn for_each<T: Copy>(
    positions: &[u32],
    width: usize,
    row: impl Fn(f64, &[f64]) -> Vec<T>,
    frequencies: &[f64],
) -> Vec<T> {
    let mut distinct = positions.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    let known = distinct
        .iter()
        .flat_map(|&p| row(f64::from(p), frequencies));
    let known: Vec<T> = known.collect();
    let mut values = Vec::with_capacity(positions.len() * width);
    for position in positions {
        let at = distinct.binary_search(position).unwrap_or_default() * width;
        values.extend_from_slice(&known[at..at + width]);
    }
    values
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
