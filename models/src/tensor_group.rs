//! Ranks that share every matrix of a model while it samples (Shoeybi et al., 2019, arXiv:1909.08053): each has some heads, some rows of
//! the MLP and some rows of the vocabulary, and the same residual stream.
//!
//! | | rows | a message |
//! |---|---|---|
//! | embedding | a rank's own tokens, zeros for others | a sum of `[tokens, hidden]` |
//! | each half of a layer | partial products | the same |
//! | norm over all queries (`OLMo` 3) | squares of its own | a sum of `[tokens, 2]` |
//! | logits | of its own tokens of the vocabulary | an all-gather of `[rows, vocabulary]` |
//!
//! Sums are made in the order of the ranks, so that all have the same bits and sample the same tokens; with the logits goes a fingerprint
//! of the tokens so far, so that ranks that differ end with an error. A forward pass does not stop at an error: it is kept, no further
//! message is sent, and [`TensorGroup::check`] gives it.

use crate::arch::Arch;
use crate::functional::norm_offset;
use crate::{Error, Result};
use burn::tensor::{Bool, Int, Tensor};
use firebrick_backends::collective::{CollectiveError, Flat};
use firebrick_backends::precision::{stored_as, widened};
use firebrick_backends::transfer::HostTensor;
use firebrick_spec::TensorShare;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of a fingerprint.
const FINGERPRINT: usize = size_of::<u64>();

/// The messages of ranks that share matrices. All call the same ones in the same order.
pub trait TensorRanks: Debug + Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// How many share.
    fn size(&self) -> usize;

    /// The sum of values over the ranks, in their order.
    ///
    /// # Errors
    /// Where a rank is gone, late, or in another operation.
    fn all_reduce(&self, own: Flat) -> Result<Flat, CollectiveError>;

    /// Every rank's values one behind the other. All give as many.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    fn all_gather(&self, own: Flat) -> Result<Flat, CollectiveError>;
}

/// The group of a model's shares. Clones are the same group.
#[derive(Clone, Debug)]
pub struct TensorGroup {
    ranks: Arc<dyn TensorRanks>,
    failed: Arc<Mutex<Option<Error>>>,
}

impl TensorGroup {
    /// A group of at least one rank.
    #[must_use]
    pub fn new(ranks: Arc<dyn TensorRanks>) -> Self {
        Self {
            ranks,
            failed: Arc::default(),
        }
    }

    /// This rank's share of a model.
    #[must_use]
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

    /// What `work` gives, unless a message before or in it has failed.
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
    pub(crate) fn sum(&self, own: Tensor<2>) -> Tensor<2> {
        let (shape, device, stored) = (own.dims(), own.device(), own.dtype());
        let sum = self.attempt(|| {
            let own = HostTensor::download(own.clone())?;
            let all = self.ranks.all_reduce(own.into_flat_as_stored())?;
            let sum = HostTensor::from_flat(all, shape).into_device(&device);
            Ok(stored_as(sum, stored))
        });
        sum.unwrap_or(own)
    }

    /// Rows of the embedding for token ids `[tokens]`: `[tokens, hidden]`. `table` has this rank's rows.
    pub(crate) fn embed(&self, arch: &Arch, table: Tensor<2>, ids: Tensor<1, Int>) -> Tensor<2> {
        let own = self.share().vocabulary(arch);
        self.sum(masked_rows(own, table, ids))
    }

    /// Queries and keys normed over all heads, of which each rank has some: [`QkNorm::Projection`](crate::arch::QkNorm::Projection).
    /// `weights` are those of its own heads.
    pub(crate) fn norm_projections(
        &self,
        arch: &Arch,
        own: [Tensor<2>; 2],
        weights: [Tensor<2>; 2],
    ) -> [Tensor<2>; 2] {
        let share = self.share();
        // heads of this rank's architecture
        let all = [
            arch.num_heads * share.ranks(),
            arch.num_kv_heads * share.ranks(),
        ];
        let squares = own.each_ref().map(|y| {
            let y = widened(y.clone());
            (y.clone() * y).sum_dim(1)
        });
        let [queries, keys] = squares;
        let sums = self.sum(Tensor::cat(vec![queries, keys], 1));
        let [q, k] = own;
        let [q_weight, k_weight] = weights;
        let normed = |y: Tensor<2>, weight: Tensor<2>, place: usize| {
            let stored = y.dtype();
            // key heads that several ranks have are in the sum, and in the count, as often
            let mean = sums.clone().narrow(1, place, 1) / (all[place] * arch.head_dim) as f64;
            let weight = widened(weight) + norm_offset(arch);
            stored_as(
                widened(y) * (mean + arch.norm_eps).sqrt().recip() * weight,
                stored,
            )
        };
        [normed(q, q_weight, 0), normed(k, k_weight, 1)]
    }

    /// Logits `[rows, vocabulary]` from those of each rank's part of it, which may have columns of no token at its end. Compares
    /// fingerprints of the tokens so far.
    pub(crate) fn gather_logits(
        &self,
        own: &Tensor<2>,
        vocabulary: usize,
        fingerprint: u64,
    ) -> Tensor<2> {
        let ([rows, part], device, dtype) = (own.dims(), own.device(), own.dtype());
        let gathered = self.attempt(|| {
            let own = HostTensor::download(own.clone())?;
            let width = own.bytes() / (rows * part).max(1);
            let all = self.gather(own.as_bytes(), fingerprint)?;
            let row = part * width;
            let parts: Vec<&[u8]> = all.chunks_exact(rows * row + FINGERPRINT).collect();
            let mut bytes = Vec::with_capacity(rows * vocabulary * width);
            for at in 0..rows {
                let mut left = vocabulary * width;
                for part in &parts {
                    let some = row.min(left);
                    bytes.extend_from_slice(&part[at * row..][..some]);
                    left -= some;
                }
            }
            let whole = HostTensor::from_bytes(bytes, [rows, vocabulary], dtype);
            Ok(whole.into_device(&device))
        });
        gathered.unwrap_or_else(|| Tensor::zeros([rows, vocabulary], (&device, dtype)))
    }

    /// Every rank's bytes and fingerprint; refuses other fingerprints than the first.
    fn gather(&self, own: &[u8], fingerprint: u64) -> Result<Vec<u8>> {
        let own = [own, &fingerprint.to_le_bytes()].concat();
        let length = own.len();
        let all = self.ranks.all_gather(Flat::Bytes(own))?;
        let said = |part: &[u8]| part[length - FINGERPRINT..].to_vec();
        let mut parts = all.as_bytes().chunks_exact(length);
        let first = parts.next().map(said);
        match parts.position(|part| Some(said(part)) != first) {
            Some(after) => Err(Error::Diverged { rank: after + 1 }),
            None => Ok(all.as_bytes().to_vec()),
        }
    }

    /// Ends a run: refuses ranks with other tokens than the first.
    pub(crate) fn same_tokens(&self, fingerprint: u64) -> Result<()> {
        self.attempt(|| self.gather(&[], fingerprint).map(|_| ()));
        self.check()
    }
}

/// Rows of a table that has those of some tokens, for token ids `[tokens]`: `[tokens, columns]`, zeros for other tokens.
pub(crate) fn masked_rows(own: Range<usize>, table: Tensor<2>, ids: Tensor<1, Int>) -> Tensor<2> {
    let [tokens] = ids.dims();
    let (local, others) = local_ids(own, ids);
    let rows = table.select(0, local);
    let [_, hidden] = rows.dims();
    let others = others.reshape([tokens, 1]).expand([tokens, hidden]);
    rows.mask_fill(others, 0.0)
}

/// Token ids `[tokens]` counted from the first of some tokens, 0 for others; and which are others.
#[must_use]
pub fn local_ids(own: Range<usize>, ids: Tensor<1, Int>) -> (Tensor<1, Int>, Tensor<1, Bool>) {
    let (first, last) = (own.start as i64, own.end as i64 - 1);
    let before = ids.clone().lower_elem(first);
    let others = before.bool_or(ids.clone().greater_elem(last));
    ((ids - first).mask_fill(others.clone(), 0), others)
}

/// A matrix with zeros below it, for tokens that there are not.
pub(crate) fn padded(matrix: Tensor<2>, rows: usize) -> Tensor<2> {
    let [own, columns] = matrix.dims();
    if own == rows {
        return matrix;
    }
    let like = (&matrix.device(), matrix.dtype());
    let zeros = Tensor::zeros([rows - own, columns], like);
    Tensor::cat(vec![matrix, zeros], 0)
}
