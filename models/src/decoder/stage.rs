//! A decoder of which a rank trains a stage: consecutive layers, with the embedding on the first stage and the head on
//! the last. Its units are those of the whole model. A rank holds no weights of other stages between passes.

use super::Decoder;
use crate::{Error, Result};
use firebrick_arch::PipelineStage;
use std::ops::Range;

impl Decoder {
    /// Sets the pipeline stage that is trained here.
    ///
    /// # Errors
    /// [`Error::Shared`] for a model that cannot be split into these stages.
    pub fn with_stage(mut self, stage: PipelineStage) -> Result<Self> {
        PipelineStage::check(&self.arch, stage.stages()).map_err(Error::Stages)?;
        self.stage = Some(stage);
        Ok(self)
    }

    /// The pipeline stage that is trained here, where there are several.
    pub fn stage(&self) -> Option<PipelineStage> {
        self.stage
    }

    /// True if a unit is on other stages only.
    pub fn is_on_other_stage(&self, unit: usize) -> bool {
        let has = |stage: PipelineStage| stage.has(&self.arch, self.units[unit].kind);
        !self.stage.is_none_or(has)
    }

    /// True if the embedding runs here.
    pub fn embeds(&self) -> bool {
        self.stage.is_none_or(|stage| stage.is_first())
    }

    /// True if the head runs here.
    pub fn has_head(&self) -> bool {
        self.stage.is_none_or(|stage| stage.is_last())
    }

    /// Indices of the units between embedding and head that run here.
    pub fn stage_body(&self) -> Range<usize> {
        let units: Vec<usize> = self.body().filter(|&unit| !self.is_on_other_stage(unit)).collect();
        let first = units.first().copied().unwrap_or(1);
        first..first + units.len()
    }

    /// True if an earlier rank has this part of the parameter at a flat index: the same shard of it, or the stage of a
    /// tied matrix.
    pub fn is_copy(&self, index: usize) -> bool {
        let kind = self.place(index).0.kind;
        let staged = self.stage.is_some_and(|stage| stage.is_copy(&self.arch, kind));
        staged || self.shard_slice(index).is_some_and(|slice| slice.is_copy)
    }

    /// True if several ranks each have a part of the model.
    pub fn is_part(&self) -> bool {
        self.share.is_some() || self.stage.is_some()
    }
}
