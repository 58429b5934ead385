//! Operations of the ranks of a group.

use super::tensors::{TensorResult, through_host};
use super::{Element, Failure, Flat, Gathering, Result, Traffic};
use burn::tensor::Tensor;
use firebrick_spec::Home;
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

/// A callback that reads memory.
pub type Look = Arc<dyn Fn() + Send + Sync>;

/// The ranks of a group, and their operations. Every rank of the group calls the same operations in the same
/// order, from one thread; `send` and `receive` concern two of them.
///
/// After [`CollectiveError::Failed`](super::CollectiveError::Failed) the group can continue, since every rank got it at
/// the same operation. After any other error it cannot: all further operations give the same error.
pub trait Collective: Any + Debug + Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Ranks of the group.
    fn size(&self) -> usize;

    /// True if all ranks are threads of this process, and not processes.
    fn shares_process(&self) -> bool {
        false
    }

    /// The ranks that give the same `color` as a group of their own, ordered by `key` and then by their rank here.
    ///
    /// Errors of that group name ranks of the whole world. A rank of it that fails says so here, with
    /// [`agree`](Self::agree): the others' operations in the new group end with that failure, and so do all later ones.
    /// This group continues; where the new one is needed again, all split anew.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Collective>>;

    /// Every rank's values one behind the other, in the order of the ranks. All give as many.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange); `CollectiveError::Mismatch` too where ranks give different lengths or types.
    fn all_gather(&self, values: Flat) -> Result<Flat>;

    /// [`all_gather`](Self::all_gather) without waiting: it may still be under way when this returns, while the rank
    /// computes. It keeps its place among the group's operations: all ranks start it at the same place of their order,
    /// and one of the other operations, which are waited for, begins when all that were started have ended. A failure
    /// of a rank ends those that were started behind it too.
    ///
    /// A group without a thread of its own gathers before this returns.
    fn start_all_gather(&self, values: Flat) -> Gathering {
        Gathering::ended(self.all_gather(values))
    }

    /// This rank's [`shard`](super::shard) of the sum over all ranks, summed in their order and at least in f32.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather); `CollectiveError::Values` for values that cannot be summed.
    fn reduce_scatter(&self, values: Flat) -> Result<Flat>;

    /// The sum over all ranks, summed in their order and at least in f32.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter).
    fn all_reduce(&self, values: Flat) -> Result<Flat>;

    /// Values in as many equal blocks as there are ranks, block `r` for rank `r`: what every rank has for this one, in
    /// the order of the ranks.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather); `CollectiveError::Values` for a length that the ranks do not divide.
    fn all_to_all(&self, blocks: Flat) -> Result<Flat>;

    /// Placement of the buffers of operations on tensors: on the device where its values are exchanged from there, else
    /// on the host.
    fn buffers_home(&self) -> Home {
        Home::Host
    }

    /// From now on `look` is called whenever an operation has all its buffers on the device, where it has any there:
    /// what is in use then is the most of the operation. Groups that are split from this one look too.
    fn watch_buffers(&self, _look: Look) {}

    /// [`all_gather`](Self::all_gather) of the values of a tensor: a row of all ranks' values on its device.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather), and those of copies and of the device.
    fn all_gather_tensor(&self, tensor: Tensor<1>) -> TensorResult {
        through_host(tensor, |tensor| self.all_gather(tensor))
    }

    /// [`reduce_scatter`](Self::reduce_scatter) of the values of a tensor: this rank's shard of the sum on its device.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter), and those of copies and of the device.
    fn reduce_scatter_tensor(&self, tensor: Tensor<1>) -> TensorResult {
        through_host(tensor, |tensor| self.reduce_scatter(tensor))
    }

    /// [`all_reduce`](Self::all_reduce) of the values of a tensor: the sum on its device.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and those of copies and of the device.
    fn all_reduce_tensor(&self, tensor: Tensor<1>) -> TensorResult {
        through_host(tensor, |tensor| self.all_reduce(tensor))
    }

    /// [`all_to_all`](Self::all_to_all) of the values of a tensor: what every rank has for this one on its device.
    ///
    /// # Errors
    /// As [`all_to_all`](Self::all_to_all), and those of copies and of the device.
    fn all_to_all_tensor(&self, blocks: Tensor<1>) -> TensorResult {
        through_host(blocks, |blocks| self.all_to_all(blocks))
    }

    /// Sends values to another rank, which has to [`receive`](Self::receive) them.
    ///
    /// # Errors
    /// `CollectiveError::Values` for a rank that is this one or does not exist; `CollectiveError::Lost` and
    /// `CollectiveError::Transport` where the message cannot be handed over.
    fn send(&self, to: usize, values: Flat) -> Result<()>;

    /// Values that another rank sends.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange); `CollectiveError::Values` for a rank that is this one or does not exist,
    /// `CollectiveError::Mismatch` for another length or type than was sent.
    fn receive(&self, from: usize, len: usize, element: Element) -> Result<Flat>;

    /// Every rank's bytes, by rank; as many as each likes.
    ///
    /// # Errors
    /// `CollectiveError::Mismatch` where ranks are in different operations, `Failed` where one has failed, `Lost` where
    /// one is gone, `Deadline` where one does not come in time, `Transport` where MPI fails.
    fn exchange(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>>;

    /// Ends a phase: tells all ranks whether this one has failed, and gives an error where one has. A rank that failed
    /// while others are in another operation ends that operation with the same error.
    ///
    /// # Errors
    /// `CollectiveError::Failed` with the failures of all ranks that have one; the others as in
    /// [`exchange`](Self::exchange).
    fn agree(&self, failure: Option<Failure>) -> Result<()>;

    /// Tells all ranks that this one gives up: their waits end with
    /// [`CollectiveError::Lost`](super::CollectiveError::Lost) and this message. Nothing works afterwards.
    fn abort(&self, message: &str);

    /// Messages and bytes sent so far.
    fn traffic(&self) -> Traffic;
}
