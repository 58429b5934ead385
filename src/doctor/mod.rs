//! Checks of `firebrick doctor`, each with its finding and the command that fixes it.

mod check;
mod devices;
mod kernels;
mod machine;
mod nvidia;
mod programs;
mod storage;
mod system;
mod vulkan;

#[cfg(test)]
mod tests;

pub use check::{Check, Status};
pub use kernels::checks as kernel_checks;
pub use machine::Machine;
pub use storage::free_disk;

use firebrick::backends::collective::Nccl;
use firebrick::backends::device::{Backend, BackendReport, is_built};
use firebrick::backends::kernel_cache;
use std::path::Path;

/// All checks of a machine whose backends have been probed, for runs in folders like `output`.
pub fn checks(machine: &Machine, reports: &[BackendReport], output: &Path) -> Vec<Check> {
    let mut checks = devices::checks(reports);
    if cfg!(target_os = "linux") {
        let opened = is_built(Backend::Cuda).then(Nccl::installation);
        checks.extend([nvidia::driver(machine), nvidia::toolkit(machine), nvidia::nccl(machine, opened)]);
        checks.extend([vulkan::loader(machine), system::open_files(machine), system::locked_memory(machine)]);
        checks.push(system::memory(machine));
    }
    checks.extend([storage::run_folder(output), storage::cache(machine)]);
    if is_built(Backend::Cuda) || is_built(Backend::Vulkan) {
        checks.push(storage::kernel_cache(kernel_cache::folder().as_deref()));
    }
    checks.extend([programs::python(machine), programs::mpi(machine)]);
    checks
}
