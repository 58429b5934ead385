//! Collectives between NVIDIA GPUs over NCCL.
//!
//! libnccl is opened at run time (`library`); the ranks agree to use it, and its id travels over the collective that
//! they have already ([`Nccl::join`]). That one carries everything but values from then on: headers, statuses, bytes
//! that ranks exchange.
//!
//! **Sums.** NCCL's own reductions add in the order of its rings and trees, which changes with their number, the size
//! of a message and NCCL's version. Here a sum has the same bits whatever carries it, so NCCL only moves bytes: every
//! rank gets all ranks' parts of its shard (an all-to-all of sends and receives in one group), adds them up on its GPU
//! in the order of the ranks, and the shards are gathered (`ncclAllGather`). That is a ring's number of bytes, in two
//! operations.
//!
//! **Order and memory.** A rank asks its device for the buffers of an operation and waits until what is in them was
//! computed, before it says to the others that it takes part. NCCL works on a stream of its own, and the rank waits for
//! it: nothing is read before it is written, no memory of an operation is given to others before its end, and a
//! shortage is told as any other failure, in the header.
//!
//! **Waits.** Communicators do not block (`blocking = 0`). The rank looks at its event, at NCCL's asynchronous error
//! and at the ranks that gave up, until the deadline; then it aborts the communicator and gives the error, and all
//! ranks end.

#[cfg(feature = "cuda")]
mod card;
#[cfg(feature = "cuda")]
mod communicator;
#[cfg(feature = "cuda")]
mod library;
#[cfg(feature = "cuda")]
mod ranks;
#[cfg(feature = "cuda")]
mod roll_call;
#[cfg(feature = "cuda")]
mod watched;

use super::{Collective, Result};
use burn::tensor::Device;
use std::path::PathBuf;
use std::sync::Arc;

/// Ranks that are processes or threads with an NVIDIA GPU each.
#[derive(Clone, Copy, Debug)]
pub struct Nccl;

/// The library of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclInstallation {
    /// Its file, where the system says which it is.
    pub path: Option<PathBuf>,
    /// Its version: `2.21.5`.
    pub version: String,
}

impl Nccl {
    /// These ranks with values that go from GPU to GPU over NCCL, or why not: the same answer on every rank. All ranks
    /// call it together, each with the device that it computes on.
    ///
    /// # Errors
    /// Those of [`exchange`](Collective::exchange); [`CollectiveError::Nccl`](super::CollectiveError::Nccl) where all
    /// could, and NCCL fails.
    #[cfg(feature = "cuda")]
    pub fn join(
        ranks: &Arc<dyn Collective>,
        device: &Device,
    ) -> Result<std::result::Result<Arc<dyn Collective>, String>> {
        roll_call::join(ranks, device)
    }

    /// Why ranks of this build have no NCCL.
    ///
    /// # Errors
    /// None.
    #[cfg(not(feature = "cuda"))]
    pub fn join(
        _ranks: &Arc<dyn Collective>,
        _device: &Device,
    ) -> Result<std::result::Result<Arc<dyn Collective>, String>> {
        Ok(Err(not_built()))
    }

    /// The library that runs would use.
    ///
    /// # Errors
    /// Why there is none, or none that serves, and what to do.
    #[cfg(feature = "cuda")]
    pub fn installation() -> std::result::Result<NcclInstallation, String> {
        let library = library::open()?;
        Ok(NcclInstallation { path: library::path(), version: library::written(library.version) })
    }

    /// The library that runs would use.
    ///
    /// # Errors
    /// Always: this build uses none.
    #[cfg(not(feature = "cuda"))]
    pub fn installation() -> std::result::Result<NcclInstallation, String> {
        Err(not_built())
    }
}

#[cfg(not(feature = "cuda"))]
fn not_built() -> String {
    "this build has no CUDA; build it with `cargo build --release --features cuda,mpi`".into()
}
