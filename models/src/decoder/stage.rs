//! A decoder of which a rank trains a stage: consecutive layers, with the embedding on the first stage and the head on
//! the last. Its units are those of the whole model. A rank holds no weights of other stages between passes.

use super::{Decoder, Unit};
use crate::{Error, Result};
use firebrick_arch::PipelineStage;
use std::ops::Range;

impl Decoder {
    /// The same decoder, of which a stage is trained here.
    ///
    /// # Errors
    /// [`Error::Shared`] for a model that cannot be cut into so many stages.
    pub fn in_stage(mut self, stage: PipelineStage) -> Result<Self> {
        PipelineStage::check(&self.arch, stage.stages()).map_err(Error::Stages)?;
        self.stage = Some(stage);
        Ok(self)
    }

    /// Which stage is trained here, where it is one of several.
    #[must_use]
    pub fn stage(&self) -> Option<PipelineStage> {
        self.stage
    }

    /// Whether a unit is on another stage than this one alone.
    #[must_use]
    pub fn is_elsewhere(&self, unit: usize) -> bool {
        let has = |stage: PipelineStage| stage.has(&self.arch, self.units[unit].kind);
        !self.stage.is_none_or(has)
    }

    /// Whether the embedding runs here.
    #[must_use]
    pub fn embeds(&self) -> bool {
        self.stage.is_none_or(|stage| stage.is_first())
    }

    /// Whether the head runs here.
    #[must_use]
    pub fn has_head(&self) -> bool {
        self.stage.is_none_or(|stage| stage.is_last())
    }

    /// Indices of the units between embedding and head that run here.
    #[must_use]
    pub fn own_body(&self) -> Range<usize> {
        let own: Vec<usize> = self.body().filter(|&unit| !self.is_elsewhere(unit)).collect();
        let first = own.first().copied().unwrap_or(1);
        first..first + own.len()
    }

    /// The unit of the parameter at a flat index.
    fn unit_of(&self, index: usize) -> &Unit {
        &self.units[self.units.partition_point(|u| u.range.end <= index)]
    }

    /// Whether an earlier rank has what is here of the parameter at a flat index: the same share of it, or the stage of
    /// a tied matrix.
    #[must_use]
    pub fn is_copy(&self, index: usize) -> bool {
        let kind = self.unit_of(index).kind;
        let staged = self.stage.is_some_and(|stage| stage.is_copy(&self.arch, kind));
        staged || self.block(index).is_some_and(|own| own.is_copy)
    }

    /// Whether several ranks have parts of the model, each its own.
    #[must_use]
    pub fn is_part(&self) -> bool {
        self.share.is_some() || self.stage.is_some()
    }
}
