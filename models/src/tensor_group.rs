//! Ranks that share every matrix of a model while it samples (Shoeybi et al., 2019, arXiv:1909.08053): each has some
//! heads, some rows of the MLP and some rows of the vocabulary, and the same residual stream.
//!
//! | | rows | a message |
//! |---|---|---|
//! | embedding | a rank's own tokens, zeros for others | a sum of `[tokens, hidden]` |
//! | each half of a layer | partial products | the same |
//! | norm over all queries (`OLMo` 3) | squares of its own | a sum of `[tokens, 2]` |
//! | logits | of its own tokens of the vocabulary | an all-gather of `[rows, vocabulary]` |
//!
//! Sums are made in the order of the ranks, so that all have the same bits and sample the same tokens; with the logits
//! goes a fingerprint of the tokens so far, so that ranks that differ end with an error. A forward pass does not stop
//! at an error: it is kept, no further message is sent, and [`TensorGroup::check`] gives it.

use crate::arch::Arch;
use crate::{Error, Result};
use burn::tensor::{Bool, Int, Tensor};
use firebrick_arch::TensorShare;
use firebrick_backends::collective::CollectiveError;
use firebrick_backends::precision::{stored_as, widened};
use firebrick_backends::transfer::HostTensor;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of a fingerprint, each of them a value of the message of logits.
const FINGERPRINT: usize = size_of::<u64>();

/// The messages of ranks that share matrices. All call the same ones in the same order.
pub trait TensorRanks: Debug + Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// The sum of a tensor's values over the ranks, in their order.
    ///
    /// # Errors
    /// If a rank is gone, late, or in another operation, or if a copy fails.
    fn all_reduce(&self, values: Tensor<1>) -> Result<Tensor<1>, firebrick_backends::Error>;

    /// The values of every rank's tensor one behind the other. All have as many.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    fn all_gather(&self, values: Tensor<1>) -> Result<Tensor<1>, firebrick_backends::Error>;

    /// Every rank's bytes, by rank. All give as many.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>, CollectiveError>;
}

/// The group of a model's shares. Clones are the same group.
#[derive(Clone, Debug)]
pub struct TensorGroup {
    ranks: Arc<dyn TensorRanks>,
    failed: Arc<Mutex<Option<Error>>>,
}

impl TensorGroup {
    /// A group of at least one rank.
    pub fn new(ranks: Arc<dyn TensorRanks>) -> Self {
        Self { ranks, failed: Arc::default() }
    }

    /// This rank's share of a model.
    pub fn share(&self) -> TensorShare {
        TensorShare::new(self.ranks.rank(), self.ranks.size())
    }

    fn failed(&self) -> MutexGuard<'_, Option<Error>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error of a message since the last call.
    ///
    /// # Errors
    /// [`Error::Ranks`], or that of a copy.
    pub fn check(&self) -> Result<()> {
        self.failed().take().map_or(Ok(()), Err)
    }

    /// Result of `work`, unless a message before or in it has failed.
    fn attempt<T>(&self, work: impl FnOnce() -> Result<T>) -> Option<T> {
        if self.failed().is_some() {
            return None;
        }
        match work() {
            Ok(done) => Some(done),
            Err(error) => {
                *self.failed() = Some(error);
                None
            }
        }
    }

    /// The sum of tensors of one shape over the ranks, in their order and at least in f32.
    pub(crate) fn sum(&self, part: Tensor<2>) -> Tensor<2> {
        let [rows, columns] = part.dims();
        let sum = self.attempt(|| {
            let values = part.clone().reshape([rows * columns]);
            Ok(self.ranks.all_reduce(values)?.reshape([rows, columns]))
        });
        sum.unwrap_or(part)
    }

    /// Rows of the embedding for token ids `[tokens]`: `[tokens, hidden]`. `table` has this rank's rows.
    pub(crate) fn embed(&self, arch: &Arch, table: Tensor<2>, ids: Tensor<1, Int>) -> Tensor<2> {
        let tokens = self.share().vocabulary(arch);
        self.sum(masked_rows(tokens, table, ids))
    }

    /// Queries and keys normed over all heads, of which each rank has some:
    /// [`QkNorm::Projection`](crate::arch::QkNorm::Projection). `weights` are those of its own heads.
    pub(crate) fn norm_projections(
        &self,
        arch: &Arch,
        projections: [Tensor<2>; 2],
        weights: [Tensor<2>; 2],
    ) -> [Tensor<2>; 2] {
        let share = self.share();
        // heads of this rank's architecture
        let heads = [arch.num_heads * share.ranks(), arch.num_kv_heads * share.ranks()];
        let squares = projections.each_ref().map(|y| {
            let y = widened(y.clone());
            (y.clone() * y).sum_dim(1)
        });
        let [queries, keys] = squares;
        let sums = self.sum(Tensor::cat(vec![queries, keys], 1));
        let [q, k] = projections;
        let [q_weight, k_weight] = weights;
        let normed = |y: Tensor<2>, weight: Tensor<2>, place: usize| {
            let stored = y.dtype();
            // key heads that several ranks have are in the sum, and in the count, as often
            let mean = sums.clone().narrow(1, place, 1) / (heads[place] * arch.head_dim) as f64;
            let weight = widened(weight) + arch.norm_offset;
            stored_as(widened(y) * (mean + arch.norm_eps).sqrt().recip() * weight, stored)
        };
        [normed(q, q_weight, 0), normed(k, k_weight, 1)]
    }

    /// Logits `[rows, vocabulary]` from those of each rank's part of it, which may have columns of no token at its end.
    /// Compares fingerprints of the tokens so far.
    pub(crate) fn gather_logits(&self, logits: &Tensor<2>, vocabulary: usize, fingerprint: u64) -> Tensor<2> {
        let ([rows, part], device, dtype) = (logits.dims(), logits.device(), logits.dtype());
        let ranks = self.share().ranks();
        let gathered = self.attempt(|| {
            // bytes are whole numbers in every float type
            let sent = fingerprint.to_le_bytes().map(f32::from);
            let sent = Tensor::<1>::from_data(sent, (&device, dtype));
            let values = logits.clone().reshape([rows * part]);
            let ranks_values = self.ranks.all_gather(Tensor::cat(vec![values, sent], 0))?;
            let ranks_values = ranks_values.reshape([ranks, rows * part + FINGERPRINT]);
            let prints = ranks_values.clone().narrow(1, rows * part, FINGERPRINT);
            same(HostTensor::download(prints)?.as_bytes(), ranks)?;
            let parts = ranks_values.narrow(1, 0, rows * part).reshape([ranks, rows, part]);
            Ok(parts.swap_dims(0, 1).reshape([rows, ranks * part]).narrow(1, 0, vocabulary))
        });
        gathered.unwrap_or_else(|| Tensor::zeros([rows, vocabulary], (&device, dtype)))
    }

    /// Ends a run: refuses ranks with other tokens than the first.
    pub(crate) fn same_tokens(&self, fingerprint: u64) -> Result<()> {
        self.attempt(|| {
            let print = fingerprint.to_le_bytes().to_vec();
            let prints = self.ranks.all_gather_bytes(print)?;
            same(&prints, self.share().ranks())
        });
        self.check()
    }
}

/// Refuses ranks whose fingerprints are not the first one's.
fn same(prints: &[u8], ranks: usize) -> Result<()> {
    let mut each = prints.chunks_exact(prints.len() / ranks);
    let first = each.next();
    match each.position(|print| Some(print) != first) {
        Some(after) => Err(Error::Diverged { rank: after + 1 }),
        None => Ok(()),
    }
}

/// Rows of a table that has those of some tokens, for token ids `[tokens]`: `[tokens, columns]`, zeros for other
/// tokens.
pub(crate) fn masked_rows(vocabulary: Range<usize>, table: Tensor<2>, ids: Tensor<1, Int>) -> Tensor<2> {
    let [tokens] = ids.dims();
    let (local, others) = local_ids(vocabulary, ids);
    let rows = table.select(0, local);
    let [_, hidden] = rows.dims();
    let others = others.reshape([tokens, 1]).expand([tokens, hidden]);
    rows.mask_fill(others, 0.0)
}

/// Token ids `[tokens]` counted from the first of some tokens, 0 for others; and which are others.
pub fn local_ids(tokens: Range<usize>, ids: Tensor<1, Int>) -> (Tensor<1, Int>, Tensor<1, Bool>) {
    let (first, last) = (tokens.start as i64, tokens.end as i64 - 1);
    let others = ids.clone().lower_elem(first).bool_or(ids.clone().greater_elem(last));
    ((ids - first).mask_fill(others.clone(), 0), others)
}

/// A matrix with zeros below it, for tokens that there are not.
pub(crate) fn padded(matrix: Tensor<2>, rows: usize) -> Tensor<2> {
    let [kept, columns] = matrix.dims();
    if kept == rows {
        return matrix;
    }
    let like = (&matrix.device(), matrix.dtype());
    let zeros = Tensor::zeros([rows - kept, columns], like);
    Tensor::cat(vec![matrix, zeros], 0)
}
