//! Collectives: what the ranks of a run say to each other, under the names that MPI and NCCL use.
//!
//! | implementation | ranks |
//! |---|---|
//! | [`Solo`] | one |
//! | [`Threads`] | threads of one process, for tests and for programs of one's own |
//! | `Mpi` (feature `mpi`) | processes that `mpirun` or `srun` started |
//! | [`Nccl`] (feature `cuda`) | those of `Threads` or `Mpi` that have an NVIDIA GPU each: NCCL moves values from GPU to GPU, the other two carry all else |
//!
//! Without NCCL values pass through host memory as bytes: a transport delivers messages and knows nothing of what is in them
//! (`transport`). All operations are built on that once (`staged`), so that every transport computes the same, to the bit: sums are made
//! in the order of the ranks, whoever makes them. With NCCL too: it moves bytes, and each GPU adds up its shard in that order (`nccl`).
//!
//! Before its data every operation exchanges a header with all ranks. A rank that is in another operation, or in the same one with
//! another length or type, is thereby an error on every rank, and so is a rank that failed. Every wait has a deadline.
//!
//! A gather can be started and waited for later: it runs on a thread of its group beside the rank's computation ([`Background`]).

mod background;
mod error;
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
mod settings;
mod solo;
mod staged;
mod threads;
mod traffic;
mod traits;
mod transport;

pub use background::Background;
pub use error::{CollectiveError, Failure, Result};
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
pub use traits::Collective;
