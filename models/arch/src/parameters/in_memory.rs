//! Size and layout of a parameter in memory.

use super::ParamSpec;
use crate::arch::Arch;
use firebrick_spec::quantized::QuantizedLayout;

impl ParamSpec {
    /// The layout of a matrix that an architecture quantizes: those of a layer's mixer, of its dense MLP and of its
    /// experts, each of which is quantised by itself.
    pub fn layout(&self, arch: &Arch) -> Option<QuantizedLayout> {
        let base = arch.base?;
        let [rows, cols] = self.rows_cols();
        if self.slot.is_linear() {
            return Some(QuantizedLayout::new(base, [rows, cols]));
        }
        let experts = self.experts().filter(|_| self.slot.is_expert())?;
        Some(QuantizedLayout::stacked(base, experts, [rows / experts, cols]))
    }

    /// Bytes of its values.
    pub fn bytes(&self, arch: &Arch) -> usize {
        match self.layout(arch) {
            Some(layout) => layout.bytes(),
            None => self.numel() * arch.precision.width() as usize,
        }
    }
}
