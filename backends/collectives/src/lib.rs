//! Collectives: what the ranks of a run say to each other, under the names that MPI and NCCL use.
//!
//! | implementation | ranks |
//! |---|---|
//! | [`Solo`] | one |
//! | [`Threads`] | threads of one process, for tests and for programs of one's own |
//! | `Mpi` (feature `mpi`) | processes that `mpirun` or `srun` started |
//! | [`Nccl`] (feature `cuda`) | those of `Threads` or `Mpi` that have an NVIDIA GPU each: NCCL moves values from GPU to GPU, the other two carry all else |
//!
//! Without NCCL values pass through host memory as bytes: a transport delivers messages and knows nothing of what is in
//! them (`transport`). All operations are built on that once (`staged`), so that every transport computes the same, to
//! the bit: sums are made in the order of the ranks, whoever makes them. With NCCL too: it moves bytes, and each GPU
//! adds up its shard in that order (`nccl`).
//!
//! Before its data every operation exchanges a header with all ranks. A rank that is in another operation, or in the
//! same one with another length or type, is thereby an error on every rank, and so is a rank that failed. Every wait
//! has a deadline.
//!
//! Operations on tensors (`all_reduce_tensor` and its like) are the same on the values of a tensor. Over NCCL these
//! stay on the GPU; elsewhere they are copied to the host and back (`tensors`).
//!
//! A gather can be started and waited for later: it runs on a thread of its group beside the rank's computation
//! ([`Background`]).
//!
//! # Who reads, who records, who waits
//!
//! A rank has one mailbox, whatever its groups, and each group has a channel in it.
//!
//! - **Reading.** One thread at a time reads a channel: that of the operation which the group is in
//!   (`operation::during` locks the group). It is the rank's own thread or the group's (`background`), never both: an
//!   operation that the rank waits for begins when all that were started have ended. So a group's operations have one
//!   order, and the headers of an operation one number, on all ranks.
//! - **Order.** A rank sends the header of operation q when it has ended all before q, so all others have begun these:
//!   whoever gets a header of q has q ahead of it or is in it. Only values of `send` may lie between.
//! - **Recording.** A header that tells of a failure is recorded by the mailbox in the step in which it arrives, under
//!   the mailbox's lock; a rank's own failure is recorded before it tells the others. Taking a message changes nothing
//!   of that. The transport says which messages these are, since frames of values may look like anything.
//! - **Waiting.** A wait in a group ends with, in this order: a message of the rank that it waits for; a rank that has
//!   given up; a failure recorded in the group that this one was split from, in an operation after the split; the end
//!   of the rank that it waits for; its deadline. Each of the first four is put into the mailbox and announced to all
//!   waits. A rank that ends hands on the failures that it knows of, since it may have left because of one whose
//!   message is still on its way to others.
//! - **After a failure in operation q** every rank has ended q with it, and goes on with q + 1. A group that was split
//!   from this one and had an operation cut short is of no use any longer, since frames of that may lie about; all
//!   split anew. A gather that was started and comes to q ends with the failure, those that were started behind it end
//!   without an operation, and the rank's next operation is told of it unless the rank was told by waiting.

mod background;
use firebrick_device::collective_error as error;
mod flat;
mod gathering;
mod group;
mod header;
mod launcher;
mod mailbox;
#[cfg(feature = "mpi")]
mod mpi;
mod nccl;
mod operation;
mod parcel;
mod settings;
mod solo;
mod staged;
mod tensors;
mod threads;
mod traffic;
mod traits;
mod transport;

pub use background::Background;
pub use error::{CollectiveError, Failure, HUNG, Result};
pub use flat::{Element, Flat, shard};
pub use gathering::Gathering;
pub use header::OperationKind;
pub use launcher::{Launch, launched_world};
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
pub use nccl::{Nccl, NcclInstallation};
pub use settings::Settings;
pub use solo::Solo;
pub use threads::Threads;
pub use traffic::Traffic;
pub use traits::{Collective, Look};
