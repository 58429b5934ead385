//! Which optimizer settings go with a plan.

use crate::optim::OptimConfig;
use crate::{Error, Result};
use firebrick_plan::ModelPlan;
use firebrick_spec::Precision;

/// Refuses optimizer settings that a plan cannot serve; `section` is where a configuration has them.
///
/// # Errors
/// `Error::Config` for a loss scale or clipping beside `memory.step_in_backward`.
pub fn check_optimizer(plan: &ModelPlan, optim: &OptimConfig, precision: Precision, section: &str) -> Result<()> {
    if plan.optimizer.in_backward && optim.scaler(precision).is_some() {
        return Err(Error::Config(format!(
            "memory.step_in_backward updates segments before all gradients are known to be finite, which a loss scale \
             needs (f16 has one by itself): use precision: bf16, set {section}.loss_scale to nothing in other precisions, \
             or leave step_in_backward off"
        )));
    }
    if plan.optimizer.in_backward && optim.clip_grad.is_some() {
        return Err(Error::Config(format!(
            "memory.step_in_backward updates segments before the gradient's global norm is known, so it cannot be \
             clipped: set {section}.clip_grad: null, or leave step_in_backward off"
        )));
    }
    Ok(())
}
