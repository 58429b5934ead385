//! Target modules by name, by slot and by architecture.

use super::slot::{Slot, TARGET_MODULES, TargetModule};
use super::{chain, unit_specs};
use crate::arch::Arch;

impl TargetModule {
    /// Every projection that a layer may have: PEFT's `all-linear`, of which an architecture has [some](Self::in_arch).
    #[must_use]
    pub fn all() -> Vec<Self> {
        TARGET_MODULES.iter().map(|t| t.0).collect()
    }

    /// The modules that layers of this architecture have.
    #[must_use]
    pub fn in_arch(arch: &Arch) -> Vec<Self> {
        let slots: Vec<Slot> = chain(arch)
            .into_iter()
            .flat_map(|unit| unit_specs(arch, unit))
            .map(|spec| spec.slot)
            .collect();
        let has = |target: &Self| slots.contains(&target.slot());
        Self::all().into_iter().filter(has).collect()
    }

    /// The module's name in a checkpoint: `q_proj`, …
    #[must_use]
    pub fn module(self) -> &'static str {
        TARGET_MODULES[self as usize].1
    }

    /// Modules by name, in the order of the layer, without duplicates. The error lists the known names.
    ///
    /// # Errors
    /// A message with the first unknown name.
    pub fn parse(names: &[impl AsRef<str>]) -> Result<Vec<Self>, String> {
        let mut targets = names
            .iter()
            .map(|name| {
                let name = name.as_ref();
                let found = TARGET_MODULES.iter().find(|t| t.1 == name);
                found.map(|t| t.0).ok_or_else(|| {
                    let known = TARGET_MODULES.map(|t| t.1).join(", ");
                    format!(
                        "unknown module {name:?}; supported: {known}, or all-linear for all of them"
                    )
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        targets.sort_unstable();
        targets.dedup();
        Ok(targets)
    }

    /// The target module whose matrix is in `slot`, if there is one.
    #[must_use]
    pub fn of(slot: Slot) -> Option<Self> {
        TARGET_MODULES.iter().find(|t| t.2 == slot).map(|t| t.0)
    }

    /// The slot of its matrix.
    #[must_use]
    pub fn slot(self) -> Slot {
        TARGET_MODULES[self as usize].2
    }

    /// Index among the target modules of all layers, for random streams.
    #[must_use]
    pub fn index(self, layer: usize) -> usize {
        // those of attention and MLP keep the streams that they had before there were others
        const FIRST: usize = TargetModule::Down as usize + 1;
        const OTHERS: usize = 1 << 24;
        let place = self as usize;
        if place < FIRST {
            layer * FIRST + place
        } else {
            OTHERS + layer * (TARGET_MODULES.len() - FIRST) + (place - FIRST)
        }
    }
}
