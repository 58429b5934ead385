//! State that all layers of a forward pass share: positions, masks, sequence lengths, dropout.

use crate::adapter::Dropout;
use crate::arch::Arch;
use crate::attention::SequenceLayout;
use crate::ranges::consecutive;
use crate::rope::RotaryEmbeddings;
use crate::routing::{RouterLoss, Routing};
use burn::tensor::Device;
use firebrick_backends::kernels::SequenceRows;

/// Sequences of the rows of a forward pass, and the keys that each row sees (vLLM's `ForwardContext`). Built once, used
/// by every layer.
#[derive(Clone, Debug)]
pub struct ForwardContext {
    rotary: RotaryEmbeddings,
    /// Layout of a forward pass over whole sequences, without a cache.
    sequences: Option<SequenceLayout>,
    /// The sequences for linear attention, in architectures that have it.
    delta: Option<SequenceRows>,
    dropout: Option<Dropout>,
    routing: Routing,
    router_loss: Option<RouterLoss>,
}

impl ForwardContext {
    /// A forward pass of rows over a cache, which knows the keys that each row sees.
    pub(crate) fn cached(rotary: &RotaryEmbeddings) -> Self {
        Self {
            rotary: rotary.clone(),
            sequences: None,
            delta: None,
            dropout: None,
            routing: Routing::default(),
            router_loss: None,
        }
    }

    /// Prepares a forward pass over whole sequences, without a cache. Attention over sequences of more than `chunk`
    /// tokens computes the scores of `chunk` queries at a time (0: of all at once).
    pub fn whole(arch: &Arch, sequences: SequenceLayout, chunk: usize, device: &Device) -> Self {
        let positions = sequences.positions();
        Self::for_rows(arch, sequences, &positions, chunk, device)
    }

    /// [`Self::whole`] for some of the rows, at these positions in their sequences: attention alone runs over all rows.
    pub fn for_rows(arch: &Arch, sequences: SequenceLayout, positions: &[u32], chunk: usize, device: &Device) -> Self {
        let runs = || consecutive(sequences.lengths().iter().copied()).zip(sequences.parents().iter().copied());
        Self {
            delta: arch.delta_net.map(|_| SequenceRows::whole(runs(), device)),
            sequences: Some(sequences.prepared(&arch.windows, chunk, device)),
            ..Self::cached(&RotaryEmbeddings::new(arch, positions, device))
        }
    }

    /// The sequences of a forward pass without a cache.
    pub fn sequences(&self) -> Option<&SequenceLayout> {
        self.sequences.as_ref()
    }

    /// The sequences of a forward pass that has no cache.
    pub(crate) fn layout(&self) -> &SequenceLayout {
        self.sequences().unwrap_or_else(|| unreachable!("a cache attends"))
    }

    /// The sequences as linear attention takes them; asked in architectures that have it.
    pub(crate) fn delta(&self) -> &SequenceRows {
        self.delta.as_ref().unwrap_or_else(|| unreachable!("laid out if there are such layers"))
    }

    /// True if the backward pass recomputes attention scores outside of the autodiff graph.
    pub fn recomputes_attention(&self) -> bool {
        self.sequences.as_ref().is_some_and(SequenceLayout::recomputes)
    }

    /// Sets dropout of adapter inputs, for training.
    #[must_use]
    pub fn with_dropout(mut self, dropout: Option<Dropout>) -> Self {
        self.dropout = dropout;
        self
    }

    /// Sets the routes that are replayed or recorded.
    #[must_use]
    pub fn with_routing(mut self, routing: Routing) -> Self {
        self.routing = routing;
        self
    }

    /// Routes that are replayed or recorded.
    pub fn routing(&self) -> &Routing {
        &self.routing
    }

    /// Sets the auxiliary loss of routers, where a graph is traced.
    #[must_use]
    pub fn with_router_loss(mut self, loss: Option<RouterLoss>) -> Self {
        self.router_loss = loss;
        self
    }

    /// The auxiliary loss of routers.
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
}
