//! The run folder and its checkpoints: where a policy or critic comes from, where a run stands, what is written.

mod critic_source;
mod inputs;
mod policy_source;
mod run_dir;
mod run_lock;
mod saved_tensors;
mod sharded;
pub mod trainer_state;

pub use critic_source::{CriticSource, critic_architecture};
pub use inputs::Inputs;
pub use policy_source::{PolicySource, architecture, check_arch, check_ends, tokenizer_of};
pub use run_dir::RunDir;
pub use trainer_state::TrainerState;
