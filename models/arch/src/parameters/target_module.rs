//! Target modules by name, by slot and by architecture.

use super::slot::{Slot, TARGET_MODULES, TargetModule};
use super::{chain, unit_specs};
use crate::arch::Arch;

/// The parameters of all experts of a layer that can have adapters, by the names that a model has them under (PEFT's
/// `target_parameters`).
const PARAMETERS: [(TargetModule, &str); 2] =
    [(TargetModule::ExpertGateUp, "mlp.experts.gate_up_proj"), (TargetModule::ExpertDown, "mlp.experts.down_proj")];

impl TargetModule {
    /// Every projection that a layer may have: PEFT's `all-linear`, of which an architecture has [some](Self::in_arch).
    /// Experts that are modules of their own have the names of a dense MLP's.
    pub fn all() -> Vec<Self> {
        TARGET_MODULES.iter().map(|t| t.0).filter(|target| !target.is_expert()).collect()
    }

    /// The modules that layers of this architecture have, and the matrices of their experts.
    pub fn in_arch(arch: &Arch) -> Vec<Self> {
        let slots: Vec<Slot> =
            chain(arch).into_iter().flat_map(|unit| unit_specs(arch, unit)).map(|spec| spec.slot).collect();
        TARGET_MODULES.iter().map(|t| t.0).filter(|target| slots.contains(&target.slot())).collect()
    }

    /// The module's name in a checkpoint: `q_proj`, …
    pub fn module(self) -> &'static str {
        TARGET_MODULES[self as usize].1
    }

    /// The name of the parameter that has the matrices of all experts of a layer, where they are one.
    pub fn parameter(self) -> Option<&'static str> {
        let parameter = PARAMETERS.iter().find(|(target, _)| *target == self);
        parameter.map(|(_, name)| *name)
    }

    /// True if it stands for the matrices of all experts of a layer.
    pub fn is_expert(self) -> bool {
        matches!(self, Self::ExpertGate | Self::ExpertUp | Self::ExpertGateUp | Self::ExpertDown)
    }

    /// The matrices of experts that have the same name as a dense MLP's, where experts are modules of their own.
    pub fn of_experts(self) -> Option<Self> {
        match self {
            Self::Gate => Some(Self::ExpertGate),
            Self::Up => Some(Self::ExpertUp),
            Self::Down => Some(Self::ExpertDown),
            _ => None,
        }
    }

    /// Modules by name, in the order of the layer, without duplicates. The error lists the known names.
    ///
    /// # Errors
    /// A message with the first unknown name.
    pub fn parse(names: &[impl AsRef<str>]) -> Result<Vec<Self>, String> {
        let known = || TARGET_MODULES.iter().filter(|t| !t.0.is_expert());
        let find = |name: &str| {
            let target = known().find(|t| t.1 == name);
            target.map(|t| t.0).ok_or_else(|| {
                let known: Vec<&str> = known().map(|t| t.1).collect();
                let known = known.join(", ");
                format!("unknown module {name:?}; supported: {known}, or all-linear for all of them")
            })
        };
        sorted(names.iter().map(|name| find(name.as_ref())))
    }

    /// Parameters of experts by name, as PEFT finds them: by the last parts of a name. The error lists the known ones.
    ///
    /// # Errors
    /// A message with the first unknown name.
    pub fn parse_parameters(names: &[impl AsRef<str>]) -> Result<Vec<Self>, String> {
        let find = |name: &str| {
            let parameter = PARAMETERS.iter().find(|(_, known)| Self::ends_with(known, name));
            parameter.map(|(target, _)| *target).ok_or_else(|| {
                let known = PARAMETERS.map(|(_, name)| name).join(", ");
                format!("unknown parameter {name:?}; supported: {known}")
            })
        };
        sorted(names.iter().map(|name| find(name.as_ref())))
    }

    /// True if the last parts of a path are `name`, which is how PEFT finds modules and parameters.
    pub fn ends_with(path: &str, name: &str) -> bool {
        path.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    }

    /// The target module whose matrix is in `slot`, if there is one.
    pub fn from_slot(slot: Slot) -> Option<Self> {
        TARGET_MODULES.iter().find(|t| t.2 == slot).map(|t| t.0)
    }

    /// The slot of its matrix.
    pub fn slot(self) -> Slot {
        TARGET_MODULES[self as usize].2
    }

    /// Index among the target modules of all layers, for random streams.
    pub fn index(self, layer: usize) -> usize {
        // those that came later have ranges of their own, so that the others keep their streams
        const RANGE: usize = 1 << 24;
        let place = self as usize;
        let ranges = [Self::Q, Self::DeltaQkv, Self::ExpertGate].map(|first| first as usize);
        let range = ranges.partition_point(|&first| first <= place) - 1;
        let ends = [ranges[1], ranges[2], TARGET_MODULES.len()];
        let count = ends[range] - ranges[range];
        range * RANGE + layer * count + (place - ranges[range])
    }
}

/// Targets in their order, each once; the first error where there is one.
fn sorted(targets: impl Iterator<Item = Result<TargetModule, String>>) -> Result<Vec<TargetModule>, String> {
    let mut targets = targets.collect::<Result<Vec<_>, _>>()?;
    targets.sort_unstable();
    targets.dedup();
    Ok(targets)
}
