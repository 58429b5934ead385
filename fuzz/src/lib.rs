//! Fuzz targets of Firebrick's parsers.

mod targets;

use firebrick_backends::allocation_limit::on_excess;
use firebrick_backends::allocator::CountingAllocator;

pub use targets::*;

/// As the program's: limits of allocations count by it.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Exit code of a target whose input takes more memory than such a file needs, which the program refuses: no failure.
/// `tests/campaigns/fuzz.py` starts the target again.
const REFUSED: i32 = 77;

unsafe extern "C" {
    safe fn _exit(code: i32) -> !;
}

/// Sets the limits of allocations as the program does. Each target begins with it.
pub fn limit_allocations() {
    // libFuzzer reports `exit` as a failure
    on_excess(|_, _| _exit(REFUSED));
}

/// Replaces libFuzzer's hook, which aborts at every panic: the program catches those of the readers of binary files. A
/// panic that is not caught still ends the target.
pub fn allow_caught_panics() {
    std::panic::set_hook(Box::new(|_| {}));
}
