//! Low-rank adapters (`LoRA`: Hu et al., 2021, arXiv:2106.09685): trained matrices A and B beside a frozen matrix W.
//!
//! A and B are two more parameters of the unit of W. With them a unit computes `x Wᵀ + s · (dropout(x) Aᵀ) Bᵀ`; the
//! dense `W + s · B A` is only made for a merged model.

mod dropout;
mod forward;

pub use dropout::{Dropout, DropoutKey};
pub use firebrick_arch::lora::LoraConfig;
pub(crate) use forward::{LoraForward, init_stream};
