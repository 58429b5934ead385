//! The allocator of the program: large tensors come and go, and what that costs, page faults included, is the
//! allocator's matter.

use firebrick::backends::allocator::{CountingAllocator, keep_freed_memory};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Sets it as the program does when it starts.
pub fn as_in_the_program() {
    keep_freed_memory();
}
