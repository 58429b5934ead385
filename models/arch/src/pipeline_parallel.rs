//! Stages of a model on devices that each have some of its layers (pipeline parallelism: Huang et al., 2019,
//! arXiv:1811.06965; Narayanan et al., 2019, arXiv:1806.03377).
//!
//! Consecutive layers are a stage, about as many on each; the embedding is on the first stage, the head on the last. A
//! tied matrix, which is both, is on both.

use crate::arch::Arch;
use crate::parameters::UnitKind;
use std::ops::Range;

/// One of the stages of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineStage {
    stage: usize,
    stages: usize,
}

impl PipelineStage {
    /// Stage `stage` of `stages`.
    ///
    /// # Panics
    /// If there is no such stage.
    pub fn new(stage: usize, stages: usize) -> Self {
        assert!(stage < stages, "stage {stage} of {stages}");
        Self { stage, stages }
    }

    /// Refuses a model that cannot be split into `stages` stages.
    ///
    /// # Errors
    /// Why not, and what to do instead.
    pub fn check(arch: &Arch, stages: usize) -> Result<(), String> {
        if stages <= 1 {
            return Ok(());
        }
        let layers = arch.num_layers;
        if stages > layers {
            return Err(format!(
                "it has {layers} layers, and every stage needs at least one; set it to {layers} or less"
            ));
        }
        if let Some((layer, experts)) = arch.expert_layers().next() {
            return Err(format!(
                "layer {layer} has {} experts, whose routes are not sent between stages; set it to 1, and shard \
                 weights with memory.zero_stage: 3",
                experts.count
            ));
        }
        if let Some(base) = arch.base {
            return Err(format!(
                "its base is in {base}, whose codes are not sent between stages; set it to 1, or remove model.lora.base"
            ));
        }
        Ok(())
    }

    /// This stage, from 0.
    pub fn stage(&self) -> usize {
        self.stage
    }

    /// Number of stages.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// True if the embedding is here.
    pub fn is_first(&self) -> bool {
        self.stage == 0
    }

    /// True if the head is here.
    pub fn is_last(&self) -> bool {
        self.stage + 1 == self.stages
    }

    /// Its layers, of `num_layers`.
    pub fn layers(&self, num_layers: usize) -> Range<usize> {
        let first = |stage: usize| stage * num_layers / self.stages;
        first(self.stage)..first(self.stage + 1)
    }

    /// True if a unit is on this stage.
    pub fn has(&self, arch: &Arch, unit: UnitKind) -> bool {
        match unit {
            UnitKind::Embedding => self.is_first() || arch.tied && self.is_last(),
            UnitKind::Head => self.is_last(),
            UnitKind::Attention(layer) | UnitKind::Mlp(layer) => self.layers(arch.num_layers).contains(&layer),
        }
    }

    /// True if an earlier stage has this unit too.
    pub fn is_copy(&self, arch: &Arch, unit: UnitKind) -> bool {
        unit == UnitKind::Embedding && !self.is_first() && self.has(arch, unit)
    }

    /// The first stage that has a unit.
    pub fn owner(&self, arch: &Arch, unit: UnitKind) -> usize {
        let has = |stage: &usize| Self::new(*stage, self.stages).has(arch, unit);
        (0..self.stages).find(has).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_is_on_one_stage_and_none_has_more_than_one_above_another() {
        for stages in 1..9 {
            for layers in stages..20 {
                let parts = (0..stages).map(|stage| PipelineStage::new(stage, stages));
                let parts: Vec<Range<usize>> = parts.map(|stage| stage.layers(layers)).collect();
                let covered: Vec<usize> = parts.iter().cloned().flatten().collect();
                assert_eq!(covered, (0..layers).collect::<Vec<_>>());
                let lengths = parts.iter().map(ExactSizeIterator::len);
                let most = lengths.clone().max().unwrap_or(0);
                assert!(lengths.clone().all(|n| n > 0 && n + 1 >= most));
            }
        }
    }
}
