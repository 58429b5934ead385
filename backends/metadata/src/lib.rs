//! Metadata of a batch for kernels (vLLM's attention metadata): sequences and the prefixes that they share, block
//! tables of a paged KV cache, rows of experts, and the arguments and results of operations.
//!
//! It is made on the host, once for all layers of a forward pass, in the layout that the kernels of a device read.

#![forbid(unsafe_code)]

pub mod delta;
pub mod experts;
pub mod paged;
pub mod prefix_groups;
pub mod sequence_blocks;
pub mod shapes;
pub mod slot_runs;
pub mod step;
