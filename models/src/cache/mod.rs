//! The KV cache: keys and values of many sequences of different length, written in place.
//!
//! One tensor a layer for keys and one for values, `[rows, kv_heads, capacity, head_dim]`. All sequences share the column
//! that is written next, so that one slice assignment writes the new column of all of them on every backend; a sequence is
//! the window of its row that ends there. A sequence that enters later has a shorter window: its prompt's columns are copied
//! to just before the shared column, over those of whoever had the row before.
//!
//! ```text
//!             0         lo                    used      capacity
//! row 0       ......................pppppccccc.........           p: prompt, c: completion
//! row 1       ..........ppppppppppccccccccccccc.........          the longest window begins at `lo`
//! row 2       ..........................pppppcc.........
//! ```
//!
//! Where columns run out, rows end, or more rows are wanted, [`KvCache::lay_out`] copies what lives to the front of new
//! tensors, a layer at a time, the longest window first. Keys carry their position (rotary embedding), so columns mean nothing
//! to attention, and a window may move.

mod attention;

pub(crate) use attention::Reach;

use crate::arch::Arch;
use crate::attention::AttentionParams;
use crate::rope::RotaryEmbedding;
use burn::tensor::{DType, Device, Int, Tensor};
use firebrick_backends::PrecisionExt;
use firebrick_backends::kernels::{self, DecodeShape, Decoded, Kin, Window};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Keys and values of one layer, `[rows, kv_heads, capacity, head_dim]` each.
#[derive(Debug)]
pub struct LayerCache {
    // Taken out while being written, so that the tensor has one owner and is written in place.
    tensors: Option<(Tensor<4>, Tensor<4>)>,
}

impl LayerCache {
    fn new(shape: [usize; 4], dtype: DType, device: &Device) -> Self {
        let zeros = || kernels::zeros(shape, dtype, device);
        Self {
            tensors: Some((zeros(), zeros())),
        }
    }

    fn change(&mut self, f: impl FnOnce(Tensor<4>, Tensor<4>) -> (Tensor<4>, Tensor<4>)) {
        let (keys, values) = self
            .tensors
            .take()
            .unwrap_or_else(|| unreachable!("a cache in use twice"));
        self.tensors = Some(f(keys, values));
    }

    /// The keys and the values, all rows and columns.
    fn whole(&self) -> (Tensor<4>, Tensor<4>) {
        self.tensors
            .clone()
            .unwrap_or_else(|| unreachable!("a cache in use twice"))
    }

    /// Writes keys and values into rows, from a column on.
    fn write(&mut self, rows: Range<usize>, first: usize, k: Tensor<4>, v: Tensor<4>) {
        let [_, heads, len, dim] = k.dims();
        let place = [rows, 0..heads, first..first + len, 0..dim];
        self.change(|keys, values| {
            (
                keys.slice_assign(place.clone(), k),
                values.slice_assign(place, v),
            )
        });
    }

    /// The same for one new column, by a kernel that turns queries and keys by their angles too: all `[rows, heads · head_dim]`.
    pub(crate) fn decode(
        &mut self,
        params: AttentionParams,
        qkv: [Tensor<2>; 3],
        rotary: &RotaryEmbedding,
        decoded: &Decoded,
    ) -> Tensor<2> {
        let shape = DecodeShape {
            decoded,
            angles: rotary.tables(),
            window: params.window,
            scale: params.scale,
            softcap: params.softcap,
        };
        let mut mixed = None;
        self.change(|keys, values| {
            let (out, [keys, values]) = kernels::decode_attention(qkv, [keys, values], &shape)
                .expect("tensors of the device that the cache is on");
            mixed = Some(out);
            (keys, values)
        });
        mixed.unwrap_or_else(|| unreachable!("the cache was there"))
    }
}

/// Where a sequence came from, and how many of its tokens it had then: those it shares with all others from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Origin {
    id: u64,
    tokens: usize,
}

impl Origin {
    /// One that nothing else has.
    fn own() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            id: NEXT.fetch_add(1, Relaxed),
            tokens: 0,
        }
    }
}

/// The cache of a decoder.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    /// First column of each sequence's window.
    starts: Vec<usize>,
    /// Where each sequence came from.
    origins: Vec<Origin>,
    /// Columns written: the next one is written for all sequences.
    used: usize,
    rows: usize,
    capacity: usize,
    /// Bytes of one row's column, all layers.
    token_bytes: usize,
    dtype: DType,
    device: Device,
}

impl KvCache {
    /// Room for `capacity` columns of `starts.len()` sequences, padded on the left so that all share a column, whose first
    /// real columns are `starts`.
    #[must_use]
    pub fn new(arch: &Arch, starts: Vec<usize>, capacity: usize, device: &Device) -> Self {
        let rows = starts.len();
        Self {
            starts,
            origins: (0..rows).map(|_| Origin::own()).collect(),
            ..Self::empty(arch, rows, capacity, device)
        }
    }

    /// Room for `capacity` columns of `rows` sequences, none there yet.
    #[must_use]
    pub fn empty(arch: &Arch, rows: usize, capacity: usize, device: &Device) -> Self {
        let shape = [rows, arch.num_kv_heads, capacity, arch.head_dim];
        let dtype = arch.precision.dtype(device);
        let layer = |_| LayerCache::new(shape, dtype, device);
        Self {
            layers: (0..arch.num_layers).map(layer).collect(),
            starts: Vec::new(),
            origins: Vec::new(),
            used: 0,
            rows,
            capacity,
            token_bytes: arch.cache_bytes_per_token(),
            dtype,
            device: device.clone(),
        }
    }

    /// Columns written.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used
    }

    /// Columns allocated.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Rows allocated.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Tokens that there is room for: rows times columns.
    #[must_use]
    pub fn cells(&self) -> usize {
        self.rows * self.capacity
    }

    /// Bytes allocated.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.cells() * self.token_bytes
    }

    /// First column of each sequence's window. Sequences take the first rows.
    #[must_use]
    pub fn starts(&self) -> &[usize] {
        &self.starts
    }

    /// Columns of the longest window.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.starts.iter().min().map_or(0, |lo| self.used - lo)
    }

    /// The sequences that have begun, with the column that is written next: those that were copied from one together.
    fn kin(&self) -> Vec<Kin> {
        let mut families: Vec<(u64, Kin)> = Vec::new();
        for (row, (&start, origin)) in self.starts.iter().zip(&self.origins).enumerate() {
            if start > self.used {
                continue;
            }
            let own = (row, start + origin.tokens..self.used + 1);
            match families.iter_mut().find(|(id, _)| *id == origin.id) {
                Some((_, kin)) => kin.members.push(own),
                None => {
                    let prefix = (row, start..own.1.start);
                    let members = vec![own];
                    families.push((origin.id, Kin { prefix, members }));
                }
            }
        }
        let whole = |(_, mut kin): (u64, Kin)| {
            // alone, a sequence shares nothing
            if let [(_, own)] = &mut kin.members[..] {
                own.start = kin.prefix.1.start;
                kin.prefix.1.end = kin.prefix.1.start;
            }
            kin
        };
        families.into_iter().map(whole).collect()
    }

    pub(crate) fn layer(&mut self, index: usize) -> &mut LayerCache {
        &mut self.layers[index]
    }

    /// The columns that a forward has written are there.
    pub(crate) fn advance(&mut self, columns: usize) {
        self.used += columns;
    }

    /// Forgets all sequences, and takes the next column to be `used`.
    pub fn clear(&mut self, used: usize) {
        assert!(used <= self.capacity, "a column outside the cache");
        self.starts.clear();
        self.origins.clear();
        self.used = used;
    }

    /// Copies a sequence of another cache into `rows`, which are taken, or the next ones. Its window must fit before the
    /// shared column.
    pub fn adopt(&mut self, rows: Range<usize>, source: &Self, row: usize) {
        let start = source.starts[row];
        let len = source.used - start;
        assert!(
            len <= self.used && rows.end <= self.rows && rows.start <= self.starts.len(),
            "a sequence that does not fit"
        );
        let first = self.used - len;
        let window = Window {
            row,
            columns: start..start + len,
            rows: rows.clone(),
            first,
        };
        let copied = |target: Tensor<4>, from: &Tensor<4>| {
            kernels::copy_columns(target, from, std::slice::from_ref(&window)).unwrap_or_else(
                |target| {
                    let [_, heads, _, dim] = from.dims();
                    let window = from.clone().narrow(0, row, 1).narrow(2, start, len);
                    let place = [rows.clone(), 0..heads, first..first + len, 0..dim];
                    target.slice_assign(place, window.expand([rows.len(), heads, len, dim]))
                },
            )
        };
        for (layer, from) in self.layers.iter_mut().zip(&source.layers) {
            let (k, v) = from.whole();
            layer.change(|keys, values| (copied(keys, &k), copied(values, &v)));
        }
        let taken = rows.end.max(self.starts.len());
        let origin = Origin {
            tokens: len,
            ..source.origins[row]
        };
        self.starts.resize(taken, first);
        self.origins.resize(taken, origin);
        self.starts[rows.clone()].fill(first);
        self.origins[rows].fill(origin);
    }

    /// The last sequence takes the place of the one in `row`, which has ended.
    pub fn drop_row(&mut self, row: usize) {
        let last = self.starts.len() - 1;
        if row < last {
            let (start, used) = (self.starts[last], self.used);
            let first = Tensor::<1, Int>::from_ints([0], &self.device);
            for layer in &mut self.layers {
                // The row before its columns: `select` copies whatever it is given into contiguous memory, and a range of
                // columns of all rows would be the whole cache. It selects the one row there is, to have a copy: the tensors
                // need one owner again when they are written.
                let pick = |t: Tensor<4>| {
                    let window = t.narrow(0, last, 1).narrow(2, start, used - start);
                    window.select(0, first.clone())
                };
                let (k, v) = layer.whole();
                let (k, v) = (pick(k), pick(v));
                layer.write(row..row + 1, start, k, v);
            }
        }
        self.starts.swap_remove(row);
        self.origins.swap_remove(row);
    }

    /// Moves the sequences `order`, which become the first rows, to new tensors of `rows` rows and `capacity` columns,
    /// such that the next column is `used`. Sequences that are not named are forgotten.
    pub fn lay_out(&mut self, order: &[usize], rows: usize, used: usize, capacity: usize) {
        let starts: Vec<usize> = order.iter().map(|&row| self.starts[row]).collect();
        let lo = starts.iter().copied().min().unwrap_or(self.used);
        let len = self.used - lo;
        assert!(
            len <= used && used <= capacity && order.len() <= rows,
            "a cache that is too small"
        );
        let in_place = order.iter().enumerate().all(|(i, &row)| i == row);
        let index: Vec<i32> = order.iter().map(|&row| row as i32).collect();
        let index = Tensor::<1, Int>::from_ints(index.as_slice(), &self.device);
        let (count, device, dtype) = (order.len(), &self.device, self.dtype);
        let windows: Vec<Window> = order
            .iter()
            .zip(&starts)
            .enumerate()
            .map(|(to, (&row, &start))| Window {
                row,
                columns: start..self.used,
                rows: to..to + 1,
                first: used - (self.used - start),
            })
            .collect();
        let carry = |old: Tensor<4>| {
            let [_, heads, _, dim] = old.dims();
            let fresh = kernels::zeros([rows, heads, capacity, dim], dtype, device);
            kernels::copy_columns(fresh, &old, &windows).unwrap_or_else(|fresh| {
                let live = old.narrow(2, lo, len);
                let live = if in_place {
                    live.narrow(0, 0, count)
                } else {
                    live.select(0, index.clone())
                };
                fresh.slice_assign([0..count, 0..heads, used - len..used, 0..dim], live)
            })
        };
        for layer in &mut self.layers {
            if count == 0 || len == 0 {
                let [_, heads, _, dim] = layer.whole().0.dims();
                layer.tensors = None;
                *layer = LayerCache::new([rows, heads, capacity, dim], dtype, device);
            } else {
                layer.change(|k, v| (carry(k), carry(v)));
            }
        }
        let shift = |start: usize| used - (self.used - start);
        self.starts = starts.into_iter().map(shift).collect();
        self.origins = order.iter().map(|&row| self.origins[row]).collect();
        (self.used, self.rows, self.capacity) = (used, rows, capacity);
    }
}
