//! A pool of blocks of keys and values, and the sequences that read it through block tables (`PagedAttention`,
//! arXiv:2309.06180).
//!
//! A block has [`BLOCK_SIZE`] tokens. Slot s of a pool is token `s % BLOCK_SIZE` of block `s / BLOCK_SIZE`; the slots
//! of one head are contiguous, so that neighbouring blocks are one range of memory.

use crate::sequence_blocks::SharedBlocks;
use crate::shapes::int_tensor;
use crate::slot_runs::SlotRuns;
use burn::tensor::{DType, Device, Int, Tensor};
use firebrick_device::device::is_cpu;
use firebrick_device::zeros::{int_zeros, zeros};
use firebrick_spec::BLOCK_SIZE;

/// Tokens from which a GPU divides the attention of a sequence among several cubes.
pub const MIN_SPLIT_TOKENS: usize = 1024;

/// Keys and values of one layer.
#[derive(Clone, Debug)]
pub enum KvPool {
    /// In a float type: keys and values, `[kv_heads, slots, dim]` each.
    Float {
        /// Keys, with their rotary embedding. On the CPU the keys of a block are stored transposed, `[dim,
        /// BLOCK_SIZE]`, in the memory of its slots, in 8 bits too; `gather_kv` of `firebrick-kernels` gives the
        /// rows back.
        keys: Tensor<3>,
        /// Values.
        values: Tensor<3>,
    },
    /// In 8 bits: number x of a key or value is stored as `round(x / s)`, in ±127, where s is a scale of that token and
    /// head: the largest magnitude over 127, rounded up to bf16. All are i32 tensors.
    Int8 {
        /// `[kv_heads, slots, dim / 4]`: four codes each, in two's complement, the first in the lowest bits.
        keys: Tensor<3, Int>,
        /// As the keys.
        values: Tensor<3, Int>,
        /// `[kv_heads, slots]`: the bits of the key's scale in the low half, those of the value's in the high half.
        scales: Tensor<2, Int>,
    },
}

impl KvPool {
    /// A pool of zeros in a float type.
    pub fn float(kv_heads: usize, blocks: usize, dim: usize, dtype: DType, device: &Device) -> Self {
        // in one dimension, since a GPU's backend may pad the rows of others, which kernels would have to copy
        let shape = [kv_heads, blocks * BLOCK_SIZE, dim];
        let flat = [shape.iter().product()];
        let zeros = || zeros(flat, dtype, device).reshape(shape);
        Self::Float { keys: zeros(), values: zeros() }
    }

    /// A pool of zeros in 8 bits.
    ///
    /// # Panics
    /// If `dim` is no multiple of 4.
    pub fn int8(kv_heads: usize, blocks: usize, dim: usize, device: &Device) -> Self {
        assert!(dim.is_multiple_of(4), "four codes share a word");
        let slots = blocks * BLOCK_SIZE;
        // in one dimension, as in `float`
        let words = || {
            let words = int_zeros([kv_heads * slots * dim / 4], device);
            words.reshape([kv_heads, slots, dim / 4])
        };
        Self::Int8 {
            keys: words(),
            values: words(),
            scales: int_zeros([kv_heads * slots], device).reshape([kv_heads, slots]),
        }
    }

    /// This pool's blocks in a larger pool.
    ///
    /// # Panics
    /// If `blocks` are fewer than there are.
    #[must_use]
    pub fn grown(self, blocks: usize) -> Self {
        let device = self.device();
        match self {
            Self::Float { keys, values } => {
                let [heads, slots, dim] = keys.dims();
                let larger = Self::float(heads, blocks, dim, keys.dtype(), &device);
                let Self::Float { keys: k, values: v } = larger else { unreachable!("made of floats") };
                let place = [0..heads, 0..slots, 0..dim];
                Self::Float { keys: k.slice_assign(place.clone(), keys), values: v.slice_assign(place, values) }
            }
            Self::Int8 { keys, values, scales } => {
                let [heads, slots, words] = keys.dims();
                let larger = Self::int8(heads, blocks, words * 4, &device);
                let Self::Int8 { keys: k, values: v, scales: s } = larger else { unreachable!("made of codes") };
                let place = [0..heads, 0..slots, 0..words];
                Self::Int8 {
                    keys: k.slice_assign(place.clone(), keys),
                    values: v.slice_assign(place, values),
                    scales: s.slice_assign([0..heads, 0..slots], scales),
                }
            }
        }
    }

    /// Its device.
    pub fn device(&self) -> Device {
        match self {
            Self::Float { keys, .. } => keys.device(),
            Self::Int8 { keys, .. } => keys.device(),
        }
    }

    /// Slots: blocks times [`BLOCK_SIZE`].
    pub fn slots(&self) -> usize {
        match self {
            Self::Float { keys, .. } => keys.dims()[1],
            Self::Int8 { keys, .. } => keys.dims()[1],
        }
    }
}

/// Slots of a pool, one for each row of a tensor.
#[derive(Clone, Debug)]
pub struct SlotMapping {
    slots: Vec<u32>,
    on_device: Option<Tensor<1, Int>>,
}

impl SlotMapping {
    /// Prepares slots for a device.
    pub fn new(slots: Vec<u32>, device: &Device) -> Self {
        let on_device = (!is_cpu(device)).then(|| int_tensor(slots.iter().map(|&slot| slot as i32).collect(), device));
        Self { slots, on_device }
    }

    /// The slots.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// The slots for GPU kernels, `[slots]` in i32; none on the CPU.
    pub fn on_device(&self) -> Option<&Tensor<1, Int>> {
        self.on_device.as_ref()
    }

    /// Number of slots.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns true if there is no slot.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }
}

/// The sequences of one step of decoding. Made once per step for all layers that see as much.
#[derive(Clone, Debug)]
pub struct BlockTables {
    /// For GPU kernels.
    pub on_device: Option<DeviceTables>,
    /// For the CPU's kernel.
    pub on_cpu: Option<SlotRuns>,
}

/// Block tables for GPU kernels.
#[derive(Clone, Debug)]
pub struct DeviceTables {
    /// [`TableWords::words`], i32.
    pub table: Tensor<1, Int>,
    /// Blocks of a row in the table.
    pub stride: usize,
    /// See [`TableWords::longest`].
    pub longest: usize,
    /// See [`TableWords::most`].
    pub most: usize,
}

/// Blocks of the largest tile of keys whose sums kernels of training and decoding add in the same order.
pub const TILE_BLOCKS: usize = 64 / BLOCK_SIZE;

/// A block table as GPU kernels read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableWords {
    /// `[rows]`: the tokens of each row's sequence, without those of whole tiles of [`TILE_BLOCKS`] that no token sees
    /// any more; 0 for a row in none. `[rows]`: the rows, those in a sequence first.
    /// `[rows]`: each row's index among those. `[rows, stride]`: each row's blocks, padded with zeros.
    pub words: Vec<i32>,
    /// Blocks of a row.
    pub stride: usize,
    /// Tokens of the longest sequence, rounded down to a power of two, so that the division of long rows seldom
    /// changes; 0 where it is shorter than [`MIN_SPLIT_TOKENS`].
    pub longest: usize,
    /// No sequence is longer than this.
    pub most: usize,
}

impl TableWords {
    /// For a step of `rows` rows, with at least `stride` blocks of a row.
    pub fn new(shared: &[SharedBlocks], rows: usize, stride: usize) -> Self {
        let members = || {
            shared.iter().flat_map(|group| {
                // zeros stand for blocks that no token sees, so that tiles begin where they do in training
                let prefix = || std::iter::repeat_n(&0, group.first % TILE_BLOCKS).chain(&group.blocks);
                group.members.iter().map(move |member| (prefix(), member))
            })
        };
        let blocks = members().map(|(prefix, member)| prefix.count() + member.blocks.len());
        // a power of two, so that few shapes of the table occur
        let stride = blocks.max().unwrap_or(1).max(stride).next_power_of_two();
        let mut words = vec![0; rows * (3 + stride)];
        let mut order = Vec::with_capacity(rows);
        let mut longest = 0;
        for (prefix, member) in members() {
            let tokens = prefix.clone().count() * BLOCK_SIZE + member.tokens;
            words[member.row] = tokens as i32;
            order.push(member.row);
            let first = rows * 3 + member.row * stride;
            let row_blocks = prefix.chain(&member.blocks);
            for (to, &block) in words[first..].iter_mut().zip(row_blocks) {
                *to = block as i32;
            }
            longest = longest.max(tokens);
        }
        order.extend((0..rows).filter(|&row| words[row] == 0));
        for (index, row) in order.into_iter().enumerate() {
            words[rows + index] = row as i32;
            words[2 * rows + row] = index as i32;
        }
        Self {
            words,
            stride,
            longest: if longest < MIN_SPLIT_TOKENS { 0 } else { 1 << longest.ilog2() },
            most: stride * BLOCK_SIZE,
        }
    }
}

impl DeviceTables {
    fn new(shared: &[SharedBlocks], rows: usize, device: &Device) -> Self {
        let table = TableWords::new(shared, rows, 1);
        Self { table: int_tensor(table.words, device), stride: table.stride, longest: table.longest, most: table.most }
    }
}

impl BlockTables {
    /// For a step of `rows` rows. A row is in `shared` at most once; one that is not gets zeros as its output.
    ///
    /// # Panics
    /// On the CPU, where a row is in two sequences or outside the step, a sequence has no token or too few blocks, or
    /// another one reads the block that it writes its new token to.
    #[allow(clippy::needless_pass_by_value, reason = "tables of one step, which nobody needs afterwards")]
    pub fn new(shared: Vec<SharedBlocks>, rows: usize, device: &Device) -> Self {
        let (on_device, on_cpu) = if is_cpu(device) {
            (None, Some(SlotRuns::new(&shared, rows)))
        } else {
            (Some(DeviceTables::new(&shared, rows, device)), None)
        };
        Self { on_device, on_cpu }
    }
}

/// Cosines and sines of rotary angles. Made once per step for all layers.
#[derive(Clone, Debug)]
pub struct RotaryAngles {
    /// For the CPU's kernel: `[rows, 1, dim / 2]` each.
    pub on_cpu: Option<[Tensor<3>; 2]>,
    /// For GPU kernels, which bind at most eight buffers: both in one, `[rows, 1, dim]` in f32, cosines first.
    pub on_device: Option<Tensor<3>>,
}

impl RotaryAngles {
    /// Prepares cosines and sines, `[rows, 1, dim / 2]` each, for the device that they are on.
    pub fn new(cos: &Tensor<3>, sin: &Tensor<3>) -> Self {
        let angles = || [cos.clone(), sin.clone()];
        if is_cpu(&cos.device()) {
            return Self { on_cpu: Some(angles()), on_device: None };
        }
        let joined = Tensor::cat(angles().to_vec(), 2).cast(DType::F32);
        Self { on_cpu: None, on_device: Some(joined) }
    }
}

/// The sequences of paged attention, and how scores are computed.
#[derive(Clone, Debug)]
pub struct PagedAttentionShape<'a> {
    /// The sequences.
    pub tables: &'a BlockTables,
    /// Of the rows' positions.
    pub angles: &'a RotaryAngles,
    /// Sliding window: a query sees its own token and the `window − 1` before it; all of its sequence where `None`.
    pub window: Option<usize>,
    /// The factor of products of queries and keys, usually 1 / √dim.
    pub scale: f64,
    /// Soft-cap: scores s become `cap · tanh(s / cap)`.
    pub softcap: Option<f64>,
    /// Of each query head's number, `[1, heads]`, the exponential is added to the sum that its softmax is divided by.
    pub sinks: Option<&'a Tensor<2>>,
}
