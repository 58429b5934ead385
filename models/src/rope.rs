//! Rotary position embedding in rotate-half form (Su et al., 2021, arXiv:2104.09864; the layout of transformers), with
//! a position for every row.

use crate::arch::{Arch, Rope};
use burn::tensor::{Device, Tensor, TensorData};
use firebrick_backends::kernels::{RotaryAngles, StepRotary, rotary, rotary_each};

/// The rotary embeddings of the layers of one forward pass, and the growth of their queries.
#[derive(Clone, Debug)]
pub struct RotaryEmbeddings {
    /// The distinct embeddings.
    kinds: Vec<RotaryEmbedding>,
    /// Index of each layer's embedding.
    of_layers: Vec<usize>,
    query_scale: Option<Tensor<2>>,
}

impl RotaryEmbeddings {
    /// The embeddings of an architecture at these positions, one for each token.
    pub fn new(arch: &Arch, positions: &[u32], device: &Device) -> Self {
        let (kinds, of_layers) = arch.rope_kinds();
        let embedding = |rope: Option<&Rope>| RotaryEmbedding::new(rope, arch, positions, device);
        let scale = query_scales(arch, positions);
        Self {
            kinds: kinds.into_iter().map(embedding).collect(),
            of_layers,
            query_scale: scale.map(|scale| {
                let shape = [scale.len(), 1];
                Tensor::from_data(TensorData::new(scale, shape), device)
            }),
        }
    }

    /// [`Self::new`] on the host, for a decoding step on a GPU.
    pub(crate) fn on_host(arch: &Arch, positions: &[u32]) -> StepRotary {
        let (kinds, _) = arch.rope_kinds();
        let angles = kinds.into_iter().map(|rope| angles_on_host(rope, arch.rotary_dim, positions));
        let scale = query_scales(arch, positions);
        StepRotary {
            angles: angles.collect(),
            query_scale: scale.map(|scales| scales.into_iter().map(|x| x as f32).collect()),
        }
    }

    /// The embedding of a layer.
    pub(crate) fn layer(&self, layer: usize) -> &RotaryEmbedding {
        &self.kinds[self.of_layers[layer]]
    }

    /// Factors of the rows' queries, `[tokens, 1]`, where not all are one.
    pub(crate) fn query_scale(&self) -> Option<&Tensor<2>> {
        self.query_scale.as_ref()
    }

    /// Cosines and sines of the layers as a kernel takes them that rotates on its own.
    pub(crate) fn angles(&self) -> LayerAngles {
        LayerAngles {
            kinds: self.kinds.iter().map(RotaryEmbedding::angles).collect(),
            of_layers: self.of_layers.clone(),
        }
    }
}

/// The angles of the layers' rotary embeddings for a kernel that rotates on its own.
#[derive(Clone, Debug)]
pub(crate) struct LayerAngles {
    kinds: Vec<RotaryAngles>,
    of_layers: Vec<usize>,
}

impl LayerAngles {
    /// The angles of an architecture, from those of each of its [kinds](Arch::rope_kinds).
    pub fn new(arch: &Arch, kinds: Vec<RotaryAngles>) -> Self {
        let (_, of_layers) = arch.rope_kinds();
        Self { kinds, of_layers }
    }

    /// The angles of a layer.
    pub fn layer(&self, layer: usize) -> &RotaryAngles {
        &self.kinds[self.of_layers[layer]]
    }
}

/// Cosines and sines of the rotation angles of one forward pass: `[tokens, 1, head_dim / 2]` each.
#[derive(Clone, Debug)]
pub(crate) struct RotaryEmbedding {
    cos: Tensor<3>,
    sin: Tensor<3>,
    /// True if nothing is rotated. The angles are then zero, for kernels that rotate themselves.
    identity: bool,
    /// Angles of zero, for kernels that rotate whole heads on their own, where a part of each head is rotated before.
    identity_angles: Option<RotaryAngles>,
}

impl RotaryEmbedding {
    /// The tables for these positions, one for each token.
    fn new(rope: Option<&Rope>, arch: &Arch, positions: &[u32], device: &Device) -> Self {
        let half = arch.rotary_dim / 2;
        let (frequencies, factor) = frequencies_of(rope, arch.rotary_dim, positions);
        let table = |f: fn(f64) -> f64| {
            let row = |position: f64| frequencies.iter().map(|&w| factor * f(position * w)).collect();
            let values = for_each(positions, half, row);
            Tensor::<3>::from_data(TensorData::new(values, [positions.len(), 1, half]), device)
        };
        Self {
            cos: table(f64::cos),
            sin: table(f64::sin),
            identity: rope.is_none(),
            identity_angles: (arch.rotary_dim < arch.head_dim).then(|| {
                let shape = [positions.len(), 1, arch.head_dim / 2];
                let (cos, sin) = (Tensor::ones(shape, device), Tensor::zeros(shape, device));
                RotaryAngles::new(&cos, &sin)
            }),
        }
    }

    /// Cosines and sines as a kernel takes them that rotates on its own.
    fn angles(&self) -> RotaryAngles {
        let angles = || RotaryAngles::new(&self.cos, &self.sin);
        self.identity_angles.clone().unwrap_or_else(angles)
    }

    /// Rotates `x` of shape `[tokens, heads, head_dim]`, or its leading dimensions, in f32 or wider.
    pub fn rotate(&self, x: Tensor<3>) -> Tensor<3> {
        if self.identity {
            return x;
        }
        let ([.., dim], [.., half]) = (x.dims(), self.cos.dims());
        if 2 * half == dim {
            return rotary(x, &self.cos, &self.sin);
        }
        let rest = x.clone().narrow(2, 2 * half, dim - 2 * half);
        let turned = rotary(x.narrow(2, 0, 2 * half), &self.cos, &self.sin);
        Tensor::cat(vec![turned, rest], 2)
    }

    /// [`Self::rotate`] of queries and keys.
    pub fn rotate_each(&self, x: [Tensor<3>; 2]) -> [Tensor<3>; 2] {
        let ([.., dim], [.., half]) = (x[0].dims(), self.cos.dims());
        if self.identity || 2 * half != dim {
            return x.map(|x| self.rotate(x));
        }
        rotary_each(x, &self.cos, &self.sin)
    }

    /// Rotates what kernels that rotate whole heads on their own do not: nothing, where they rotate it all.
    pub fn rotate_part(&self, x: Tensor<3>) -> Tensor<3> {
        match self.identity_angles {
            Some(_) => self.rotate(x),
            None => x,
        }
    }
}

/// Cosines and then sines for each of these positions, on the host: `[tokens, head_dim]`, as the tables have them in
/// f32.
fn angles_on_host(rope: Option<&Rope>, head_dim: usize, positions: &[u32]) -> Vec<f32> {
    let (frequencies, factor) = frequencies_of(rope, head_dim, positions);
    for_each(positions, head_dim, |position| {
        let (sines, cosines): (Vec<f64>, Vec<f64>) = frequencies.iter().map(|&w| (position * w).sin_cos()).unzip();
        cosines.into_iter().chain(sines).map(|x| (factor * x) as f32).collect()
    })
}

/// The frequencies of a forward pass at these positions, and the factor of cosines and sines.
fn frequencies_of(rope: Option<&Rope>, head_dim: usize, positions: &[u32]) -> (Vec<f64>, f64) {
    let longest = positions.iter().max().map_or(0, |&p| p as usize + 1);
    match rope {
        Some(rope) => (rope.frequencies(head_dim, longest), rope.attention_factor()),
        None => (vec![0.0; head_dim / 2], 1.0),
    }
}

/// Factors of queries at these positions, where not all are one: the tokens of the trained context stay as they are.
fn query_scales(arch: &Arch, positions: &[u32]) -> Option<Vec<f64>> {
    let scaling = arch.query_scaling?;
    let grown = positions.iter().any(|&p| p as usize >= scaling.original);
    grown.then(|| positions.iter().map(|&p| scaling.factor(p)).collect())
}

/// `row` of every position, `width` values each. Many sequences have the same positions: each is computed once.
fn for_each<T: Copy>(positions: &[u32], width: usize, row: impl Fn(f64) -> Vec<T>) -> Vec<T> {
    let mut distinct = positions.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    let known: Vec<T> = distinct.iter().flat_map(|&p| row(f64::from(p))).collect();
    let mut values = Vec::with_capacity(positions.len() * width);
    for position in positions {
        let at = distinct.binary_search(position).unwrap_or_default() * width;
        values.extend_from_slice(&known[at..at + width]);
    }
    values
}
