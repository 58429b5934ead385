//! What all layers of a forward pass share: positions, masks, sequence lengths, dropout.

use crate::adapter::Dropout;
use crate::arch::Arch;
use crate::attention::SequenceLayout;
use crate::rope::RotaryEmbeddings;
use crate::routing::{RouterLoss, Routing};
use burn::tensor::{Bool, Device, Tensor, TensorData};
use firebrick_backends::kernels::SequenceRows;

/// How the rows of a forward pass belong to sequences, and which keys each may see (vLLM's `ForwardContext`). Built
/// once, used by every layer.
#[derive(Clone, Debug)]
pub struct ForwardContext {
    /// Number of sequences.
    pub batch: usize,
    /// Columns of each sequence in this forward pass, padding included.
    pub len: usize,
    rotary: RotaryEmbeddings,
    starts: Vec<usize>,
    first: usize,
    masks: Vec<WindowMask>,
    /// Of a forward pass over whole sequences, without a cache.
    sequences: Option<SequenceLayout>,
    /// The same as linear attention takes them, in architectures that have it.
    delta: Option<SequenceRows>,
    device: Device,
    dropout: Option<Dropout>,
    routing: Routing,
    router_loss: Option<RouterLoss>,
}

/// The mask of layers with one sliding window: true where a key is hidden, `None` where every key is visible.
#[derive(Clone, Debug)]
struct WindowMask {
    window: Option<usize>,
    hidden: Option<Tensor<4, Bool>>,
}

/// The columns of a forward pass over sequences that are padded on the left. Positions count from each sequence's first
/// column.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// First column of each sequence that is not padding.
    pub starts: &'a [usize],
    /// First column of this forward pass.
    pub first: usize,
    /// Columns of each sequence in this forward pass.
    pub len: usize,
}

impl ForwardContext {
    /// Prepares rotary tables and masks for `len` columns of each sequence from column `first` on.
    #[must_use]
    pub fn new(arch: &Arch, columns: Columns<'_>, device: &Device) -> Self {
        let Columns { starts, first, len } = columns;
        let positions: Vec<u32> = starts
            .iter()
            .flat_map(|&start| (first..first + len).map(move |c| c.saturating_sub(start) as u32))
            .collect();
        let rotary = RotaryEmbeddings::new(arch, &positions, device);
        let mut this = Self {
            batch: starts.len(),
            len,
            starts: starts.to_vec(),
            first,
            delta: arch.delta_net.map(|_| {
                assert_eq!(first, 0, "states of earlier columns are in a cache");
                // what comes before a sequence is part of none: it leaves no trace in a state
                let rows = (0..).zip(starts).map(|(i, start)| i * len + start..(i + 1) * len);
                SequenceRows::whole(rows, device)
            }),
            ..Self::cached(&rotary, positions.len(), device)
        };
        for &window in &arch.windows {
            if this.masks.iter().all(|m| m.window != window) {
                let hidden = this.make_mask(window);
                this.masks.push(WindowMask { window, hidden });
            }
        }
        this
    }

    /// A forward pass of rows over a cache, which knows the keys that each row sees.
    pub(crate) fn cached(rotary: &RotaryEmbeddings, rows: usize, device: &Device) -> Self {
        Self {
            batch: rows,
            len: 1,
            rotary: rotary.clone(),
            starts: vec![0; rows],
            first: 0,
            masks: Vec::new(),
            sequences: None,
            delta: None,
            device: device.clone(),
            dropout: None,
            routing: Routing::default(),
            router_loss: None,
        }
    }

    /// Prepares a forward pass over whole sequences, without a cache. Attention over sequences of more than `chunk`
    /// tokens computes the scores of `chunk` queries at a time (0: of all at once).
    #[must_use]
    pub fn whole(arch: &Arch, sequences: SequenceLayout, chunk: usize, device: &Device) -> Self {
        let positions = sequences.positions();
        Self::of_rows(arch, sequences, &positions, chunk, device)
    }

    /// The same for some of the rows, at these positions in their sequences: attention alone is of all rows, and
    /// everything else of these.
    #[must_use]
    pub fn of_rows(arch: &Arch, sequences: SequenceLayout, positions: &[u32], chunk: usize, device: &Device) -> Self {
        Self {
            batch: sequences.lengths().len(),
            len: sequences.longest(),
            rotary: RotaryEmbeddings::new(arch, positions, device),
            starts: vec![0; sequences.lengths().len()],
            first: 0,
            masks: Vec::new(),
            delta: arch.delta_net.map(|_| {
                let mut row = 0;
                let own = sequences.lengths().iter().map(|&n| {
                    row += n;
                    row - n..row
                });
                SequenceRows::whole(own, device)
            }),
            sequences: Some(sequences.prepared(&arch.windows, chunk, device)),
            device: device.clone(),
            dropout: None,
            routing: Routing::default(),
            router_loss: None,
        }
    }

    /// The sequences of a forward pass without a cache.
    #[must_use]
    pub fn sequences(&self) -> Option<&SequenceLayout> {
        self.sequences.as_ref()
    }

    /// The sequences as linear attention takes them; asked in architectures that have it.
    pub(crate) fn delta(&self) -> &SequenceRows {
        let own = self.delta.as_ref();
        own.unwrap_or_else(|| unreachable!("laid out if there are such layers"))
    }

    /// Whether the backward pass recomputes attention scores outside of the autodiff graph.
    #[must_use]
    pub fn recomputes_attention(&self) -> bool {
        self.sequences.as_ref().is_some_and(SequenceLayout::recomputes)
    }

    /// The same forward pass with dropout of adapter inputs: for training.
    #[must_use]
    pub fn with_dropout(mut self, dropout: Option<Dropout>) -> Self {
        self.dropout = dropout;
        self
    }

    /// The same forward pass with routes that are given or recorded.
    #[must_use]
    pub fn with_routing(mut self, routing: Routing) -> Self {
        self.routing = routing;
        self
    }

    /// What it does with routes.
    #[must_use]
    pub fn routing(&self) -> &Routing {
        &self.routing
    }

    /// The same forward pass with the auxiliary loss of routers, where a graph is traced.
    #[must_use]
    pub fn with_router_loss(mut self, loss: Option<RouterLoss>) -> Self {
        self.router_loss = loss;
        self
    }

    /// The auxiliary loss of routers.
    #[must_use]
    pub fn router_loss(&self) -> Option<&RouterLoss> {
        self.router_loss.as_ref()
    }

    pub(crate) fn dropout(&self) -> Option<&Dropout> {
        self.dropout.as_ref()
    }

    /// The rotary tables of the rows, by layer.
    pub(crate) fn rotary(&self) -> &RotaryEmbeddings {
        &self.rotary
    }

    /// The mask of layers with this sliding window, `[batch or 1, 1, queries, keys]`; `None` where every key is
    /// visible.
    pub(crate) fn mask(&self, window: Option<usize>) -> Option<Tensor<4, Bool>> {
        let known = self.masks.iter().find(|m| m.window == window);
        known.and_then(|m| m.hidden.clone())
    }

    /// True where a key is hidden: `[batch or 1, 1, queries, keys]`. `None` where every key is visible.
    fn make_mask(&self, window: Option<usize>) -> Option<Tensor<4, Bool>> {
        let same = self.starts.iter().all(|&s| s == 0);
        let starts: &[usize] = if same { &[0] } else { &self.starts };
        let hidden = |start: usize, query: usize, key: usize| {
            key > query || key < start || window.is_some_and(|w| query - key >= w)
        };
        let keys = self.first + self.len;
        let mut values = Vec::with_capacity(starts.len() * self.len * keys);
        for &start in starts {
            for query in self.first..keys {
                values.extend((0..keys).map(|key| hidden(start, query, key)));
            }
        }
        let shape = [starts.len(), 1, self.len, keys];
        values.contains(&true).then(|| Tensor::<4, Bool>::from_data(TensorData::new(values, shape), &self.device))
    }
}
