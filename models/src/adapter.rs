//! Low-rank adapters (Hu et al., 2021, arXiv:2106.09685): trained bypasses beside frozen matrices.
//!
//! A bypass is two more entries of its unit's parameter table. With it a unit computes `x Wᵀ + s · (drop(x) Aᵀ) Bᵀ`; the
//! dense `W + s · B A` exists only where a merged model is asked for.

mod dropout;

pub use dropout::{Dropout, DropoutKey};

use crate::layer::Context;
use crate::unit::{ParamSpec, Slot, product};
use burn::tensor::Tensor;

/// What PEFT puts before the name of an adapted module.
const PREFIX: &str = "base_model.model.";

/// A projection that can have a bypass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(
    missing_docs,
    reason = "the variants are the field's own names for these matrices"
)]
pub enum Target {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
}

/// Targets, the module names they go by, and the matrices they stand beside.
const TARGETS: [(Target, &str, Slot); 7] = [
    (Target::Q, "q_proj", Slot::Q),
    (Target::K, "k_proj", Slot::K),
    (Target::V, "v_proj", Slot::V),
    (Target::O, "o_proj", Slot::O),
    (Target::Gate, "gate_proj", Slot::Gate),
    (Target::Up, "up_proj", Slot::Up),
    (Target::Down, "down_proj", Slot::Down),
];

impl Target {
    /// Every projection of a layer: PEFT's `all-linear`.
    #[must_use]
    pub fn all() -> Vec<Self> {
        TARGETS.iter().map(|t| t.0).collect()
    }

    /// The module's name: `q_proj`, …
    #[must_use]
    pub fn module(self) -> &'static str {
        TARGETS[self as usize].1
    }

    /// Modules by name, in the order of the layer, each once.
    pub fn parse(names: &[impl AsRef<str>]) -> Result<Vec<Self>, String> {
        let mut targets = names
            .iter()
            .map(|name| {
                let name = name.as_ref();
                let found = TARGETS.iter().find(|t| t.1 == name);
                found.map(|t| t.0).ok_or_else(|| {
                    let known = TARGETS.map(|t| t.1).join(", ");
                    format!(
                        "unknown module {name:?}; known: {known}, or all-linear for all of them"
                    )
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        targets.sort_unstable();
        targets.dedup();
        Ok(targets)
    }

    /// The target beside whose matrix a bypass runs.
    pub(crate) fn of(slot: Slot) -> Option<Self> {
        TARGETS.iter().find(|t| t.2 == slot).map(|t| t.0)
    }

    /// A number that no other target of any layer has.
    fn place(self, layer: usize) -> usize {
        layer * TARGETS.len() + self as usize
    }
}

/// What a model's bypasses look like: everything but their numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rows of A and columns of B (PEFT's `r`).
    pub rank: usize,
    /// Numerator of the scale (PEFT's `lora_alpha`).
    pub alpha: f64,
    /// Divide by the root of the rank instead of the rank (Kalajdzievski, 2023).
    pub use_rslora: bool,
    /// Share of a bypass's inputs that training drops.
    pub dropout: f64,
    /// Projections with a bypass, in every layer.
    pub target_modules: Vec<Target>,
}

impl Default for LoraConfig {
    /// TRL's rank and alpha, without dropout, beside every projection.
    fn default() -> Self {
        Self {
            rank: 16,
            alpha: 32.0,
            use_rslora: false,
            dropout: 0.0,
            target_modules: Target::all(),
        }
    }
}

impl LoraConfig {
    /// Refuses settings that cannot work, by PEFT's name without its prefix.
    pub fn check(&self) -> Result<(), String> {
        if self.rank == 0 {
            return Err("rank should be at least 1".into());
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            return Err(format!("alpha should be above 0, found {}", self.alpha));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(format!(
                "dropout should be at least 0 and below 1, found {}",
                self.dropout
            ));
        }
        if self.target_modules.is_empty() {
            return Err("target_modules names no module".into());
        }
        Ok(())
    }

    /// What a bypass is multiplied by: alpha / rank, or alpha / √rank.
    #[must_use]
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }

    /// The parameters that these bypasses add to a unit, under PEFT's names.
    #[must_use]
    pub fn specs(&self, base: &[ParamSpec]) -> Vec<ParamSpec> {
        let adapted = base.iter().filter_map(|spec| {
            let target = Target::of(spec.slot)?;
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

/// Number of the random stream that starts a bypass's A, apart from those of other purposes.
pub(crate) fn init_stream(layer: usize, target: Target) -> u64 {
    const ADAPTER_STREAM: u64 = 3 << 32;
    ADAPTER_STREAM + target.place(layer) as u64
}

/// How the bypasses of a layer run in one forward: what their matrices do not say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bypass<'a> {
    scale: f64,
    dropout: Option<&'a Dropout>,
    layer: usize,
}

impl<'a> Bypass<'a> {
    pub(crate) fn new(lora: &LoraConfig, ctx: &'a Context, layer: usize) -> Self {
        Self {
            scale: lora.scale(),
            dropout: ctx.dropout(),
            layer,
        }
    }

    /// `s · (drop(x) Aᵀ) Bᵀ`. The scale, and what dropout makes up for, go where the tensor is narrowest.
    pub(crate) fn run(
        &self,
        x: Tensor<2>,
        target: Target,
        a: &Tensor<2>,
        b: &Tensor<2>,
    ) -> Tensor<2> {
        let (x, scale) = match self.dropout {
            Some(dropout) => (
                dropout.apply(x, target.place(self.layer)),
                self.scale / dropout.keep(),
            ),
            None => (x, self.scale),
        };
        product(&(product(&x, a) * scale), b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_go_by_their_place_in_the_table() {
        for (i, (target, module, slot)) in TARGETS.into_iter().enumerate() {
            assert_eq!(target as usize, i);
            assert_eq!(target.module(), module);
            assert_eq!(Target::of(slot), Some(target));
        }
    }

    #[test]
    fn modules_are_named_once_each_and_unknown_ones_are_refused_with_the_known() {
        let names = ["v_proj", "q_proj", "v_proj"];
        assert_eq!(Target::parse(&names), Ok(vec![Target::Q, Target::V]));
        let message = Target::parse(&["lm_head"]).unwrap_err();
        assert!(
            message.contains("\"lm_head\"") && message.contains("q_proj, k_proj"),
            "{message}"
        );
    }

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
