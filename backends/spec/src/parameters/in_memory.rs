//! What a parameter takes in memory.

use super::ParamSpec;
use crate::arch::Arch;
use crate::quantized::QuantizedLayout;

impl ParamSpec {
    /// The layout of a matrix that an architecture has in few bits: those of a layer's mixer and of its dense MLP.
    #[must_use]
    pub fn layout(&self, arch: &Arch) -> Option<QuantizedLayout> {
        let base = arch.base.filter(|_| self.slot.is_linear())?;
        Some(QuantizedLayout::new(base, self.rows_cols()))
    }

    /// Bytes of its values.
    #[must_use]
    pub fn bytes(&self, arch: &Arch) -> usize {
        match self.layout(arch) {
            Some(layout) => layout.bytes(),
            None => self.numel() * arch.precision.width() as usize,
        }
    }
}
