//! The definition of a memory technique.

use crate::estimate::{MemoryUsage, Moment, TrainingPass, Transfers, Update};
use crate::request::{Candidate, Request};
use crate::{Error, MemoryConfig, ModelPlan, Result};
use firebrick_arch::Arch;
use std::fmt::Display;

/// A memory technique: its keys, the settings that it refuses, its part of a plan with bytes and seconds, the planner's
/// choices, and its row in reports. [`TECHNIQUES`](crate::TECHNIQUES) lists all of them; settings, plans, estimates,
/// search, reports and documents follow from the list.
pub trait Technique: Sync {
    /// Its keys, and who decides about it.
    fn about(&self) -> About;

    /// Keys of a configuration, by their paths.
    fn keys(&self) -> &'static [&'static str] {
        self.about().keys
    }

    /// Rejects settings that cannot work with any model.
    ///
    /// # Errors
    /// `Error::Config` with the key.
    fn check(&self, _memory: &MemoryConfig) -> Result<()> {
        Ok(())
    }

    /// Rejects settings that a model does not support.
    ///
    /// # Errors
    /// `Error::Config` with the key.
    fn check_model(&self, _memory: &MemoryConfig, _arch: &Arch) -> Result<()> {
        Ok(())
    }

    /// Writes the settings into a plan.
    fn apply(&self, _memory: &MemoryConfig, _arch: &Arch, _plan: &mut ModelPlan) {}

    /// Rejects a plan that no schedule can execute.
    ///
    /// # Errors
    /// `Error::Plan` with the first mistake.
    fn check_plan(&self, _plan: &ModelPlan, _arch: &Arch) -> Result<()> {
        Ok(())
    }

    /// Gives its keys their defaults.
    fn turn_off(&self, memory: &mut MemoryConfig) {
        memory.reset(self.keys(), &MemoryConfig::default());
    }

    /// Settings that the planner tries in place of `memory`, which may be one of them: of locations and of updates.
    fn placements(&self, memory: &MemoryConfig, _request: &Request) -> Vec<MemoryConfig> {
        vec![memory.clone()]
    }

    /// Settings that the planner tries in place of `memory`, whose placements are chosen: of what segments keep.
    fn kept(&self, memory: &MemoryConfig, _request: &Request) -> Vec<MemoryConfig> {
        vec![memory.clone()]
    }

    /// Adds bytes that are there because of it, at a moment of a pass over a model's segments.
    fn hold(&self, _at: &Moment<'_>, _held: &mut MemoryUsage) {}

    /// Seconds that it adds to each micro-batch of a training step.
    fn pass_seconds(&self, _pass: &TrainingPass<'_>) -> Transfers {
        Transfers::default()
    }

    /// Seconds that it adds to an update.
    fn update_seconds(&self, _update: &Update<'_>) -> f64 {
        0.0
    }

    /// Its effect, for the report of a plan that uses it.
    fn explain(&self, _used: &Candidate, _request: &Request) -> Option<&'static str> {
        None
    }

    /// The keys that turn it on in a plan that uses it.
    fn used_keys(&self, _used: &Candidate) -> Vec<&'static str> {
        self.keys()[..1].to_vec()
    }

    /// Removes it from settings that use it, or what the planner changed of it: the plan that the report compares with.
    fn undo(&self, used: &mut Candidate, request: &Request) {
        if self.about().kind == TechniqueKind::Chosen {
            self.turn_off(&mut used.memory);
        } else {
            used.memory.reset(self.keys(), &request.memory);
        }
    }
}

/// The keys of a technique, and who decides about it.
#[derive(Clone, Copy, Debug)]
pub struct About {
    /// Keys of a configuration, by their paths.
    pub keys: &'static [&'static str],
    /// Who decides.
    pub kind: TechniqueKind,
    /// Settings that show it by itself, over gradient checkpointing: `firebrick plan --techniques` compares them.
    pub examples: &'static [&'static str],
}

/// Who decides about a technique.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TechniqueKind {
    /// The settings, which are limits where the planner tries sizes.
    Set,
    /// The planner, independently of the settings.
    Chosen,
    /// The settings or a search of degrees: it divides the work among ranks.
    Parallelism,
}

/// Names that the file of a technique uses.
pub(crate) mod prelude {
    pub(crate) use super::{About, Technique, TechniqueKind, and, at_least_one_in_plan, require, require_of_plan};
    pub(crate) use crate::request::{Candidate, Request};
    pub(crate) use crate::{MemoryConfig, ModelPlan, Result};
    pub(crate) use firebrick_arch::Arch;
    pub(crate) use firebrick_spec::Home;
}

/// `memory`, and a change of it.
pub(crate) fn and(memory: &MemoryConfig, change: impl FnOnce(&mut MemoryConfig)) -> Vec<MemoryConfig> {
    let mut changed = memory.clone();
    change(&mut changed);
    vec![memory.clone(), changed]
}

/// Refuses settings of which a condition does not hold. `otherwise` begins with a key of `memory`.
pub(crate) fn require(holds: bool, otherwise: impl Display) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::Config(format!("memory.{otherwise}"))) }
}

/// Refuses a plan of which a condition does not hold.
pub(crate) fn require_of_plan(holds: bool, otherwise: impl Display) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::Plan(otherwise.to_string())) }
}

/// Refuses a plan with a size of 0.
pub(crate) fn at_least_one_in_plan(key: &str, size: usize) -> Result<()> {
    require_of_plan(size > 0, format_args!("{key} should be at least 1"))
}
