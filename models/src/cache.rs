//! The KV cache: allocated once, written in place, read up to the last written column.

use crate::arch::Arch;
use burn::tensor::{Device, Int, Tensor};

/// Keys and values of one layer: `[batch, kv_heads, capacity, head_dim]` each.
#[derive(Debug)]
pub struct LayerCache {
    // Taken out while being written, so that the tensor has one owner and is written in place.
    tensors: Option<(Tensor<4>, Tensor<4>)>,
    used: usize,
}

impl LayerCache {
    /// Writes the keys and values of new columns and returns all columns up to them.
    pub(crate) fn append(&mut self, k: Tensor<4>, v: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        let (keys, values) = self
            .tensors
            .take()
            .unwrap_or_else(|| unreachable!("a cache in use twice"));
        let [batch, heads, len, dim] = k.dims();
        let end = self.used + len;
        let place = [0..batch, 0..heads, self.used..end, 0..dim];
        let keys = keys.slice_assign(place.clone(), k);
        let values = values.slice_assign(place, v);
        self.used = end;
        let view = (
            keys.clone().narrow(2, 0, end),
            values.clone().narrow(2, 0, end),
        );
        self.tensors = Some((keys, values));
        view
    }
}

/// The cache of a batch of sequences, padded on the left so that all share a column.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    starts: Vec<usize>,
    capacity: usize,
}

impl KvCache {
    /// Room for `capacity` columns of `starts.len()` sequences, whose first real columns are `starts`.
    #[must_use]
    pub fn new(arch: &Arch, starts: Vec<usize>, capacity: usize, device: &Device) -> Self {
        let shape = [starts.len(), arch.num_kv_heads, capacity, arch.head_dim];
        let zeros = || Tensor::<4>::zeros(shape, device);
        let layers = (0..arch.num_layers)
            .map(|_| LayerCache {
                tensors: Some((zeros(), zeros())),
                used: 0,
            })
            .collect();
        Self {
            layers,
            starts,
            capacity,
        }
    }

    /// Columns written.
    #[must_use]
    pub fn used(&self) -> usize {
        self.layers.first().map_or(0, |l| l.used)
    }

    /// Columns allocated.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// First real column of each sequence.
    #[must_use]
    pub fn starts(&self) -> &[usize] {
        &self.starts
    }

    pub(crate) fn layer(&mut self, index: usize) -> &mut LayerCache {
        &mut self.layers[index]
    }

    /// A cache of `capacity` columns whose sequences are copies of these: `rows[i]` is the source of sequence `i`.
    /// Shares a prefill among the samples of a group, and drops finished sequences.
    #[must_use]
    pub fn pick(mut self, rows: &[usize], capacity: usize, device: &Device) -> Self {
        let index: Vec<i32> = rows.iter().map(|&r| r as i32).collect();
        let index = Tensor::<1, Int>::from_ints(index.as_slice(), device);
        let pick = |t: Tensor<4>, used: usize| {
            let [_, heads, _, dim] = t.dims();
            let live = t.narrow(2, 0, used).select(0, index.clone());
            let fresh = Tensor::<4>::zeros([rows.len(), heads, capacity, dim], device);
            fresh.slice_assign([0..rows.len(), 0..heads, 0..used, 0..dim], live)
        };
        for layer in &mut self.layers {
            layer.tensors = layer
                .tensors
                .take()
                .map(|(k, v)| (pick(k, layer.used), pick(v, layer.used)));
        }
        self.starts = rows.iter().map(|&r| self.starts[r]).collect();
        self.capacity = capacity;
        self
    }
}
