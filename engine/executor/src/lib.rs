//! Executes a plan on a model: weights in their place, forward and backward segment by segment, gradients added up.
//!
//! Everything the plan decides happens between two segments; units know nothing of it. [`learner`] is a trained model:
//! decoder, plan and optimizer.

#![forbid(unsafe_code)]

mod activation_offload;
mod all_reduce;
pub mod batch;
mod boundary_log;
mod fetch;
mod gathered_model;
mod gradient;
mod gradient_shards;
mod gradients;
mod head;
pub mod learner;
mod leaves;
mod non_finite;
pub mod optim;
mod pipeline_parallel;
mod pipeline_schedule;
mod pool_peak;
mod reduce_scatter;
mod resident_model;
mod runtime;
mod segment;
mod segment_executor;
mod sequence_parallel;
mod shards;
mod stage_weights;
mod tensor_parallel;
mod training_pass;
mod uneven_inputs;
mod weight_shards;

pub use boundary_log::{Boundary, BoundaryKind, BoundaryLog, BoundaryRow, BoundaryRows, KEPT_ROWS, Moment, RING_ROWS};
pub use gradient::Gradient;
pub use gradients::{GradientHook, Gradients};
pub use head::HeadLoss;
pub use non_finite::NonFinite;
pub use pipeline_parallel::check_stages;
pub use pool_peak::PoolPeak;
pub use resident_model::{Residency, ResidentModel, kept_values};
pub use runtime::Runtime;
pub use segment_executor::{Executor, score_all};
pub use sequence_parallel::check_shared_sequences;
pub(crate) use shards::{Shards, from_device_to_device, local_part};
pub use tensor_parallel::check_shared_matrices;
pub use uneven_inputs::rounds;
