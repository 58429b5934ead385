//! Reinforcement-learning post-training of language models, in one program without Python.
//!
//! This crate is the front door: [`spec`] describes models and devices as plain data, [`backends`] says what can compute, [`models`] holds decoders, and [`engine`] trains them.
//! The program of the same name is a thin layer above. `examples/own_task.rs` trains on a task of one's own in a few lines.

pub use firebrick_backends as backends;
pub use firebrick_engine as engine;
pub use firebrick_models as models;
pub use firebrick_spec as spec;
