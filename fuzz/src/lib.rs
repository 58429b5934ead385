//! Fuzz targets of Firebrick's parsers.

mod targets;

pub use targets::*;

/// As the program's: limits of allocations count by it.
#[global_allocator]
static ALLOCATOR: firebrick_backends::allocator::CountingAllocator = firebrick_backends::allocator::CountingAllocator;
