//! The table of operations: what models call.
//!
//! A row of [`operations`] is all that is said of an operation: what it computes, the kernels that there are for it,
//! the tensors that each takes, and the same in tensor operations, which run where no kernel takes the tensors. A
//! kernel is a function of the operation's name and signature in a file of `cpu` or `cube`.

mod attention;
mod decoding;
mod delta_net;
mod experts;
mod norms;
mod optimizer;
pub(crate) mod products;
mod quantized;
pub(crate) mod rows;
mod sampling;
mod scores;

pub use attention::*;
pub use decoding::*;
pub use delta_net::*;
pub use experts::*;
pub use norms::*;
pub use optimizer::*;
pub use products::*;
pub use quantized::*;
pub use rows::*;
pub use sampling::*;
pub use scores::*;

use crate::choice::Operation;
use crate::exact::is_exact;
use crate::paged::KvPool;
use crate::shapes::{QuantizedBlocks, RunningScores};
use burn::tensor::{Device, Tensor};
use std::cell::Cell;

/// Code for devices of this build's backends: `by_device!(device, cpu => …, cube => …)`. A build without GPU backends
/// has no `cube`, nor a device that is not the CPU.
macro_rules! by_device {
    ($device:expr, cpu => $cpu:expr, cube => $cube:expr $(,)?) => {{
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        if firebrick_device::device::is_cpu($device) {
            $cpu
        } else {
            $cube
        }
        #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
        {
            debug_assert!(firebrick_device::device::is_cpu($device), "{:?} is of no backend of this build", $device);
            $cpu
        }
    }};
}
pub(crate) use by_device;

/// A function that is generic over the backend, for the backend of a device.
macro_rules! on_backend {
    ($device:expr, $($function:ident)::+ ( $($argument:expr),* $(,)? )) => {
        crate::operations::by_device!(
            $device,
            cpu => $($function)::+::<burn::backend::Flex>($($argument),*),
            cube => $($function)::+::<burn::backend::Cube>($($argument),*),
        )
    };
}
pub(crate) use on_backend;

/// Rows of the table. A row is a documented function whose body has up to two kernels, `cpu: FILE if TAKES;` and `cube:
/// FILE if TAKES;`, and `else` what computes the same in tensor operations.
///
/// The device of the first argument picks the backend. The condition says of which arguments the kernel is used, of all
/// where there is none; `alike`, `plain` and the names of `cpu` or `cube` are in its scope.
macro_rules! operations {
    ($(
        $(#[$meta:meta])*
        $visibility:vis fn $name:ident $(<const $size:ident>)? (
            $first:ident: $place:ty $(, $argument:ident: $type:ty)* $(,)?
        ) -> $result:ty {
            $(cpu: $cpu:ident $(if $cpu_takes:expr)?;)?
            $(cube: $cube:ident $(if $cube_takes:expr)?;)?
            else $formula:block
        }
    )*) => {$(
        crate::operations::operations! { @row
            [$(#[$meta])* $visibility] $name [$(const $size: usize)?] [$first: $place $(, $argument: $type)*] [$result]
            $first ($first $(, $argument)*)
            [$($cpu [true $(&& $cpu_takes)?])?] [$($cube [true $(&& $cube_takes)?])?] $formula
        }
    )*};
    (@row
        [$(#[$meta:meta])* $visibility:vis] $name:ident [$($sizes:tt)*] [$($arguments:tt)*] [$result:ty]
        $first:ident $call:tt
        [$($cpu:ident [$($cpu_takes:tt)*])?] [$($cube:ident [$($cube_takes:tt)*])?] $formula:block
    ) => {
        $(#[$meta])*
        #[allow(
            unused_imports, unused_variables, clippy::needless_pass_by_value,
            reason = "not every row uses every name, nor every build every kernel"
        )]
        $visibility fn $name<$($sizes)*>($($arguments)*) -> $result {
            use crate::operations::OnDevice;
            let device = $first.place();
            $({
                use crate::cpu::{self, alike, is_full_precision, plain};
                if firebrick_device::device::is_cpu(&device) && $($cpu_takes)* {
                    return cpu::$cpu::$name $call;
                }
            })?
            $(
                #[cfg(any(feature = "wgpu", feature = "cuda"))]
                {
                    use crate::choice::Operation;
                    use crate::cube::{self, alike, plain};
                    if !firebrick_device::device::is_cpu(&device) && $($cube_takes)* {
                        return cube::$cube::$name $call;
                    }
                }
            )?
            crate::operations::count_formula();
            $formula
        }
    };
}
pub(crate) use operations;

/// The argument of an operation that says on which device it runs.
pub(crate) trait OnDevice {
    fn place(&self) -> Device;
}

impl<const D: usize> OnDevice for Tensor<D> {
    fn place(&self) -> Device {
        self.device()
    }
}

impl<T: OnDevice, const N: usize> OnDevice for [T; N] {
    fn place(&self) -> Device {
        self[0].place()
    }
}

impl<T: OnDevice> OnDevice for &T {
    fn place(&self) -> Device {
        (**self).place()
    }
}

impl OnDevice for KvPool {
    fn place(&self) -> Device {
        self.device()
    }
}

impl OnDevice for RunningScores {
    fn place(&self) -> Device {
        self.0.device()
    }
}

impl OnDevice for QuantizedBlocks {
    fn place(&self) -> Device {
        self.scales.device()
    }
}

thread_local! {
    /// Operations of this thread that ran in tensor operations.
    static FORMULAS: Cell<usize> = const { Cell::new(0) };
}

/// Counts an operation that runs in tensor operations.
pub(crate) fn count_formula() {
    FORMULAS.set(FORMULAS.get().wrapping_add(1));
}

/// The result of `work` if all operations in it ran through kernels, for tests and measurements of kernels.
pub fn fused<R>(work: impl FnOnce() -> R) -> Option<R> {
    let before = FORMULAS.get();
    let result = work();
    (FORMULAS.get() == before).then_some(result)
}

/// Ends with the name of an operation that was asked for where it has no kernel, and that is nothing but a kernel.
pub(crate) fn no_kernel(operation: &str) -> ! {
    panic!("{operation} has no kernel for these tensors: `kernels::available` tells devices that have one")
}

/// Returns true if models on this device run an operation through its kernel. Within [`exact`](crate::exact()) the kernel
/// for long sequences attends to all.
pub fn available(operation: Operation, device: &Device) -> bool {
    let operation = match operation {
        Operation::Attention if is_exact() => Operation::LongAttention,
        other => other,
    };
    by_device!(device, cpu => crate::cpu::available(operation, device), cube => crate::cube::available(operation, device))
}
