//! Sums in one order: `rollout.exact`.
//!
//! A sum of floats depends on the order of its terms. Kernels choose orders by how many rows there are: inputs are
//! divided among blocks where rows are few, keys among blocks where sequences are. Within [`exact`] they do not, so that
//! a row of a forward pass has the same bits in any batch: as part of a prompt, as a decoding step, and in training.

use crate::operations::by_device;
use crate::scoped::with;
use burn::tensor::{DType, Device};
use std::cell::Cell;

thread_local! {
    static EXACT: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`, a forward pass, on this thread; if `on`, the order of all sums in it depends on shapes of weights and
/// positions in sequences alone. [`crate::is_exact_on`] tells devices on which there are kernels for it; on the CPU in f32
/// the order is always such, except in linear attention.
pub fn exact<R>(on: bool, work: impl FnOnce() -> R) -> R {
    with(&EXACT, on || EXACT.get(), work)
}

/// Returns true if kernels compute exactly on a device, in a type, with heads of `dim` elements in groups of `group` to a
/// key head: on the CPU in f32, and on GPUs in any type, in groups of 64 at most.
pub fn is_exact_on(device: &Device, dtype: DType, [group, dim]: [usize; 2]) -> bool {
    by_device!(
        device,
        cpu => dtype == DType::F32,
        cube => crate::cube::paged::is_exact_on(device, [group, dim]),
    )
}

/// True within [`exact`].
pub(crate) fn is_exact() -> bool {
    EXACT.get()
}

#[cfg(test)]
mod tests {
    use super::{exact, is_exact};

    #[test]
    fn it_ends_with_the_outermost_call_that_turned_it_on() {
        exact(true, || {
            exact(false, || assert!(is_exact()));
            assert!(is_exact());
            let _ = std::panic::catch_unwind(|| exact(true, || panic!("as a failed launch does")));
            assert!(is_exact());
        });
        assert!(!is_exact());
    }
}
