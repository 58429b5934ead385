//! Low-rank adapters (`LoRA`: Hu et al., 2021, arXiv:2106.09685): their settings, and the parameters that they add to a unit.

use crate::arch::Arch;
use crate::parameters::{ParamSpec, Slot, TargetModule};

/// What PEFT puts before the name of an adapted module.
const PREFIX: &str = "base_model.model.";

/// The `LoRA` settings of a model, by PEFT's names.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rows of A and columns of B (PEFT's `r`); at least 1.
    pub rank: usize,
    /// Numerator of the scale (PEFT's `lora_alpha`).
    pub alpha: f64,
    /// Whether the scale is alpha / √rank instead of alpha / rank (rsLoRA: Kalajdzievski, 2023, arXiv:2312.03732).
    pub use_rslora: bool,
    /// Dropout rate of an adapter's inputs in training, in [0, 1).
    pub dropout: f64,
    /// Modules with an adapter, in every layer.
    pub target_modules: Vec<TargetModule>,
}

impl Default for LoraConfig {
    /// TRL's rank and alpha, no dropout, all modules.
    fn default() -> Self {
        Self {
            rank: 16,
            alpha: 32.0,
            use_rslora: false,
            dropout: 0.0,
            target_modules: TargetModule::all(),
        }
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
            return Err(format!(
                "dropout must be at least 0 and below 1, found {}",
                self.dropout
            ));
        }
        if self.target_modules.is_empty() {
            return Err("target_modules is empty".into());
        }
        Ok(())
    }

    /// Refuses modules that are experts in a layer of an architecture: there are no adapters of experts. Where the experts of a layer are
    /// one tensor, the modules are those of the shared one, as PEFT takes them too.
    ///
    /// # Errors
    /// A message that names the first such module, the layer and how many experts it has.
    pub fn check_for(&self, arch: &Arch) -> Result<(), String> {
        let in_mlp = |target: &&TargetModule| {
            matches!(
                target,
                TargetModule::Gate | TargetModule::Up | TargetModule::Down
            )
        };
        let expert = self.target_modules.iter().find(in_mlp);
        match (expert, arch.expert_layers().next()) {
            (Some(target), Some((layer, own))) if own.shared.is_none() => Err(format!(
                "target_modules has {}, but layer {layer} has {} experts, and adapters of experts are not built; list modules of attention: [q_proj, k_proj, v_proj, o_proj]",
                target.module(),
                own.count
            )),
            _ => Ok(()),
        }
    }

    /// The same with the target modules that an architecture has.
    #[must_use]
    pub fn in_arch(mut self, arch: &Arch) -> Self {
        let known = TargetModule::in_arch(arch);
        self.target_modules.retain(|target| known.contains(target));
        self
    }

    /// Refuses target modules that no layer of an architecture has, where they were asked for by name.
    ///
    /// # Errors
    /// A message with the first such module, and those that the model has.
    pub fn check_names(targets: &[TargetModule], arch: &Arch) -> Result<(), String> {
        let known = TargetModule::in_arch(arch);
        match targets.iter().find(|target| !known.contains(target)) {
            None => Ok(()),
            Some(target) => {
                let known: Vec<&str> = known.iter().map(|own| own.module()).collect();
                Err(format!(
                    "no layer of this model ({}) has {}; it has {}",
                    arch.family.model_type(),
                    target.module(),
                    known.join(", ")
                ))
            }
        }
    }

    /// The factor of an adapter's output: alpha / rank, or alpha / √rank.
    #[must_use]
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }

    /// The parameters that adapters add to a unit with the parameters `base`, by PEFT's names: A `[rank, in]` and B `[out, rank]` of each
    /// target module.
    #[must_use]
    pub fn specs(&self, base: &[ParamSpec]) -> Vec<ParamSpec> {
        let adapted = base.iter().filter_map(|spec| {
            let target = TargetModule::of(spec.slot)?;
            let wanted = self.target_modules.contains(&target);
            wanted.then_some((target, spec))
        });
        adapted
            .flat_map(|(target, spec)| {
                let [out, input] = spec.rows_cols();
                let module = spec.name.strip_suffix(".weight").unwrap_or(&spec.name);
                let adapter = |slot, matrix: &str, shape: &[usize]| {
                    ParamSpec::new(slot, format!("{PREFIX}{module}.{matrix}.weight"), shape)
                };
                [
                    adapter(Slot::LoraA(target), "lora_A", &[self.rank, input]),
                    adapter(Slot::LoraB(target), "lora_B", &[out, self.rank]),
                ]
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_is_alpha_over_the_rank_or_over_its_root() {
        let plain = LoraConfig {
            rank: 4,
            alpha: 8.0,
            ..LoraConfig::default()
        };
        let stabilised = LoraConfig {
            use_rslora: true,
            ..plain.clone()
        };
        assert!((plain.scale() - 2.0).abs() < 1e-12);
        assert!((stabilised.scale() - 4.0).abs() < 1e-12);
    }
}
