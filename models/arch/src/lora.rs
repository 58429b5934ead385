//! Low-rank adapters (`LoRA`: Hu et al., 2021, arXiv:2106.09685): their settings, and the parameters that they add to a
//! unit.

use crate::arch::Arch;
use crate::parameters::{ParamSpec, Slot, Stored, TargetModule};

/// PEFT's prefix of the names of adapted modules.
const PREFIX: &str = "base_model.model.";

/// The `LoRA` settings of a model, by PEFT's names.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rows of A and columns of B (PEFT's `r`); at least 1.
    pub rank: usize,
    /// Numerator of the scale (PEFT's `lora_alpha`).
    pub alpha: f64,
    /// True if the scale is alpha / √rank instead of alpha / rank (rsLoRA: Kalajdzievski, 2023, arXiv:2312.03732).
    pub use_rslora: bool,
    /// Dropout rate of an adapter's inputs in training, in [0, 1).
    pub dropout: f64,
    /// Modules with an adapter, and parameters of all experts with one for each (PEFT's `target_parameters`), in every
    /// layer.
    pub target_modules: Vec<TargetModule>,
}

impl Default for LoraConfig {
    /// TRL's rank and alpha, no dropout, all modules.
    fn default() -> Self {
        Self { rank: 16, alpha: 32.0, use_rslora: false, dropout: 0.0, target_modules: TargetModule::all() }
    }
}

impl LoraConfig {
    /// Refuses values out of range; the error names the setting.
    ///
    /// # Errors
    /// A message with the first setting that is out of range, and the range.
    pub fn check(&self) -> Result<(), String> {
        if self.rank == 0 {
            return Err("rank must be at least 1".into());
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            return Err(format!("alpha must be above 0, found {}", self.alpha));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(format!("dropout must be at least 0 and below 1, found {}", self.dropout));
        }
        if self.target_modules.is_empty() {
            return Err("target_modules is empty".into());
        }
        Ok(())
    }

    /// Keeps the targets that an architecture has. Where experts are modules, `gate_proj`, `up_proj` and `down_proj`
    /// are theirs too; where the experts of a layer are one parameter, they are those of the dense MLP or the shared
    /// expert, as in PEFT.
    #[must_use]
    pub fn in_arch(mut self, arch: &Arch) -> Self {
        self.target_modules = Self::targets_in(&self.target_modules, arch);
        self
    }

    fn targets_in(targets: &[TargetModule], arch: &Arch) -> Vec<TargetModule> {
        let known = TargetModule::in_arch(arch);
        let apart = !arch.stacks_experts();
        let expanded = targets.iter().flat_map(|&target| {
            let of_experts = target.of_experts().filter(|_| apart);
            std::iter::once(target).chain(of_experts)
        });
        let mut kept: Vec<TargetModule> = expanded.filter(|target| known.contains(target)).collect();
        kept.sort_unstable();
        kept.dedup();
        kept
    }

    /// The names of the modules with an adapter, as PEFT's `target_modules` has them.
    pub fn modules(&self, arch: &Arch) -> Vec<&'static str> {
        modules(&self.target_modules, arch)
    }

    /// The names of the parameters of experts with adapters, as PEFT's `target_parameters` has them.
    pub fn parameters(&self, arch: &Arch) -> Vec<&'static str> {
        parameters(&self.target_modules, arch)
    }

    /// True if any expert has an adapter.
    pub fn has_experts(&self) -> bool {
        self.target_modules.iter().any(|target| target.is_expert())
    }

    /// Refuses target modules that no layer of an architecture has, where they were asked for by name.
    ///
    /// # Errors
    /// A message with the first such module, and those that the model has.
    pub fn check_names(targets: &[TargetModule], arch: &Arch) -> Result<(), String> {
        let lacks = |target: &&TargetModule| Self::targets_in(&[**target], arch).is_empty();
        let Some(target) = targets.iter().find(lacks) else {
            return Ok(());
        };
        let known = TargetModule::in_arch(arch);
        let has = modules(&known, arch).join(", ");
        let stacked = parameters(&known, arch).join(", ");
        let beside = if stacked.is_empty() {
            String::new()
        } else {
            format!(", and of its experts the parameters {stacked} (target_parameters)")
        };
        Err(format!(
            "no layer of this model ({}) has {}; it has {has}{beside}",
            arch.family.model_type(),
            target.module(),
        ))
    }

    /// Refuses parameters of experts where an architecture has none, or has them as modules of their own.
    ///
    /// # Errors
    /// A message with the first such parameter, and what to write instead.
    pub fn check_parameters(targets: &[TargetModule], arch: &Arch) -> Result<(), String> {
        let Some(name) = targets.iter().find_map(|target| target.parameter()) else {
            return Ok(());
        };
        let model = arch.family.model_type();
        match arch.expert_layers().next() {
            None => Err(format!("this model ({model}) has no experts, so no {name}")),
            Some(_) if !arch.stacks_experts() => Err(format!(
                "experts of this model ({model}) are separate modules, not the parameter {name}: list gate_proj, \
                 up_proj, down_proj in target_modules"
            )),
            Some(_) => Ok(()),
        }
    }

    /// The factor of an adapter's output: alpha / rank, or alpha / √rank.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }

    /// The parameters that adapters add to a unit with the parameters `base`, by PEFT's names: A `[rank, in]` and B
    /// `[out, rank]` of each target module.
    pub fn specs(&self, base: &[ParamSpec]) -> Vec<ParamSpec> {
        let mut specs = Vec::new();
        for spec in base {
            match TargetModule::from_slot(spec.slot).filter(|target| self.target_modules.contains(target)) {
                Some(target) if target.is_expert() => specs.extend(self.expert_specs(target, spec)),
                Some(target) => specs.extend(self.module_specs(target, spec)),
                None => {}
            }
        }
        specs
    }

    fn module_specs(&self, target: TargetModule, spec: &ParamSpec) -> [ParamSpec; 2] {
        let [out, input] = spec.rows_cols();
        let adapter =
            |slot, matrix: &str, shape: &[usize]| ParamSpec::new(slot, adapter_name(&spec.name, matrix), shape);
        [
            adapter(Slot::LoraA(target), "lora_A", &[self.rank, input]),
            adapter(Slot::LoraB(target), "lora_B", &[out, self.rank]),
        ]
    }

    /// A and B of every expert of a layer, one below the other: `[experts · rank, in]` and `[experts · out, rank]` in
    /// memory.
    fn expert_specs(&self, target: TargetModule, spec: &ParamSpec) -> [ParamSpec; 2] {
        let (rank, [rows, input]) = (self.rank, spec.rows_cols());
        let [a, b] = [Slot::LoraA(target), Slot::LoraB(target)];
        if let Stored::ByExpert(experts) = spec.stored {
            let name = |matrix| adapter_name(&spec.name, matrix);
            return [
                ParamSpec::of_experts(a, name("lora_A"), experts, [rank, input]),
                ParamSpec::of_experts(b, name("lora_B"), experts, [rows / experts, rank]),
            ];
        }
        // PEFT wraps the module of the parameters once for each of them, the last one outermost
        let inner = target == TargetModule::ExpertGateUp && self.target_modules.contains(&TargetModule::ExpertDown);
        let module = spec.name.rsplit_once('.').map_or("", |(module, _)| module);
        let layer = if inner { ".base_layer" } else { "" };
        let name = |matrix: &str| adapter_name(&format!("{module}{layer}"), matrix);
        let experts = spec.shape[0];
        let interleaved = matches!(spec.stored, Stored::Ordered(order) if order.interleaved);
        let shape = [experts, rows / experts, rank];
        [
            ParamSpec::new(a, name("lora_A"), &[rank * experts, input]),
            ParamSpec::adapter_outputs(b, name("lora_B"), shape, interleaved),
        ]
    }
}

/// PEFT's name of a matrix beside a weight or a module.
fn adapter_name(weight: &str, matrix: &str) -> String {
    let module = weight.strip_suffix(".weight").unwrap_or(weight);
    format!("{PREFIX}{module}.{matrix}.weight")
}

fn modules(targets: &[TargetModule], arch: &Arch) -> Vec<&'static str> {
    let stacked = arch.stacks_experts();
    let modules = targets.iter().filter(|target| !(stacked && target.is_expert()));
    let mut names = Vec::new();
    for name in modules.map(|target| target.module()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

fn parameters(targets: &[TargetModule], arch: &Arch) -> Vec<&'static str> {
    targets.iter().filter_map(|target| target.parameter()).filter(|_| arch.stacks_experts()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_is_alpha_over_the_rank_or_over_its_root() {
        let plain = LoraConfig { rank: 4, alpha: 8.0, ..LoraConfig::default() };
        let stabilised = LoraConfig { use_rslora: true, ..plain.clone() };
        assert!((plain.scale() - 2.0).abs() < 1e-12);
        assert!((stabilised.scale() - 4.0).abs() < 1e-12);
    }
}
