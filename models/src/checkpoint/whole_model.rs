//! Source of the weights of a checkpoint that is written.

use crate::decoder::Param;
use crate::{Decoder, Result};
use std::ops::Range;

/// A whole model, whose numbers are asked for some rows at a time, as they are written: a decoder's own, or those that
/// several ranks have parts of.
pub trait WholeModel {
    /// The decoder, or this rank's part of it.
    fn decoder(&self) -> &Decoder;

    /// Rows of the whole parameter at a flat index.
    ///
    /// # Errors
    /// If the device, or a rank that has some of them, fails.
    fn rows(&self, index: usize, rows: Range<usize>) -> Result<Param>;
}

impl WholeModel for Decoder {
    fn decoder(&self) -> &Decoder {
        self
    }

    fn rows(&self, index: usize, rows: Range<usize>) -> Result<Param> {
        Ok(self.param_rows(index, rows))
    }
}
