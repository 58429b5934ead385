//! A paged KV cache: attention of one new token per sequence over it (`PagedAttention`, arXiv:2309.06180), writing and
//! copying.
//!
//! Neighbouring blocks of a sequence are one run of memory. What is computed does not depend on where blocks are:
//! numbers are added up in the order of tokens.

mod attend;
mod int8;
mod pool;
mod products;
mod storage;
mod task;
mod vectors;

pub(crate) use attend::{paged_attention, takes};
pub(crate) use pool::{copy_blocks, gather_kv, write_kv};
