//! Against transformers, TRL and torch, number by number: everything that stands in the fixtures.

mod adapters;
mod exact;
mod expert_adapters;
mod export;
mod functions;
mod heads;
mod kept_states;
pub(crate) mod linear_attention;
pub(crate) mod long_rows;
mod meshes;
pub(crate) mod models;
mod mxfp4;
mod nested;
mod optim;
mod published;
mod quantized_checkpoint;
mod rewards;
mod routers;
mod schedules;
mod sft;
mod tokenizers;
mod tool_turns;
mod train;
mod training_turns;
mod zero;
