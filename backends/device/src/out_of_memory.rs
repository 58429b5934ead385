//! One error for every backend's out-of-memory failure.
//!
//! Sources and their form:
//!
//! | source | arrives as |
//! |---|---|
//! | `CubeCL` (`IoError`, `LaunchError`, `ServerError`) | text: `burn_cubecl` formats the error into Burn's `ExecutionError` when a tensor is read. Typed only where a `CubeCL` client is used directly |
//! | an allocation that failed in a panic of the device's thread | text, "never allocated": the cause was only logged there |
//! | CUDA's driver | text, in an `IoError::Unknown` or a panic; allocations of the pool are `IoError::OutOfMemory` |
//! | wgpu, out of memory or over the largest buffer | text in a panic: `CubeCL` registers a handler of uncaptured errors, which panics. Typed where an error scope is opened |
//! | wgpu, device lost | `ExecutionError::DevicePoisoned`, whose text has wgpu's reason: `CubeCL` registers the callback |
//! | Vulkan's driver under SPIR-V | `IoError::OutOfMemory`, as text |
//! | the operating system | `std::io::Error`, typed |
//! | the allocator, where the caller can handle it | `TryReserveError`, typed |
//! | the allocator elsewhere (the CPU backend) | not at all: the process aborts, after [`on_refusal`](crate::allocator::on_refusal) |
//! | `memory.limit` | [`OutOfMemory::over_limit`] |
//!
//! A device of wgpu has one callback of each kind, and `CubeCL` installs both when it opens the device: a second
//! registration would replace `CubeCL`'s own, which marks the device as lost and wakes who waits for it. So none is
//! registered here, and what they say is taken from where `CubeCL` puts it.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cubecl_errors;
mod kind;
mod phrases;
#[cfg(test)]
mod tests;
mod watch;
#[cfg(feature = "wgpu")]
mod wgpu_errors;

pub use kind::{MemoryErrorKind, OutOfMemory, one_line};
pub use watch::Watch;

use crate::panics::panic_message;
use burn_std::ExecutionError;
use std::any::Any;
use std::collections::TryReserveError;
use std::error::Error;
use std::io;

impl OutOfMemory {
    /// Memory that ran out according to an error or one of its sources: by their types, and by their words where no
    /// type says it.
    pub fn in_error(error: &(dyn Error + 'static)) -> Option<Self> {
        chain(error).find_map(typed).or_else(|| chain(error).find_map(|error| phrases::find(&error.to_string())))
    }

    /// Memory that ran out according to a caught panic.
    pub fn in_panic(payload: &(dyn Any + Send)) -> Option<Self> {
        match payload.downcast_ref::<Self>() {
            Some(what) => Some(what.clone()),
            None => phrases::find(&panic_message(payload)),
        }
    }
}

/// An error and its sources.
fn chain<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn Error + 'static)| (*error).source())
}

/// Memory that ran out according to the type of an error, without its sources.
fn typed(error: &(dyn Error + 'static)) -> Option<OutOfMemory> {
    if let Some(what) = error.downcast_ref::<OutOfMemory>() {
        return Some(what.clone());
    }
    if let Some(error) = error.downcast_ref::<ExecutionError>() {
        return execution(error);
    }
    if let Some(system) = error.downcast_ref::<io::Error>() {
        if system.kind() == io::ErrorKind::OutOfMemory {
            return Some(OutOfMemory::system(None, "std, io::ErrorKind::OutOfMemory", error));
        }
        // it is not among its sources
        return OutOfMemory::in_error(system.get_ref()?);
    }
    if error.is::<TryReserveError>() {
        return Some(OutOfMemory::system(None, "std, TryReserveError", error));
    }
    of_devices(error)
}

/// Burn's error: it holds the text of the backend's.
fn execution(error: &ExecutionError) -> Option<OutOfMemory> {
    let what = phrases::find(error.reason())?;
    Some(OutOfMemory { device_lost: what.device_lost || error.is_device_poisoned(), ..what })
}

#[cfg(feature = "wgpu")]
fn of_devices(error: &(dyn Error + 'static)) -> Option<OutOfMemory> {
    cubecl_errors::find(error).or_else(|| wgpu_errors::find(error))
}

#[cfg(all(feature = "cuda", not(feature = "wgpu")))]
fn of_devices(error: &(dyn Error + 'static)) -> Option<OutOfMemory> {
    cubecl_errors::find(error)
}

#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
fn of_devices(_error: &(dyn Error + 'static)) -> Option<OutOfMemory> {
    None
}
