//! Fuzz targets of Firebrick's parsers.

mod targets;

pub use targets::*;

/// As the program's: limits of allocations count by it.
#[global_allocator]
static ALLOCATOR: firebrick_backends::allocator::CountingAllocator = firebrick_backends::allocator::CountingAllocator;

/// Replaces libFuzzer's hook, which aborts at every panic: the program catches those of the readers of binary files. A
/// panic that is not caught still ends the target.
pub fn allow_caught_panics() {
    std::panic::set_hook(Box::new(|_| {}));
}
