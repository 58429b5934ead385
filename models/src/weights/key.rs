//! Key of a tensor of a unit.

use crate::unit::Slot;
use firebrick_spec::QuantizedLayout;

/// Key of a tensor of a unit: its role, and its layout if it is the buffer of a frozen quantized matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightKey {
    /// Its role in the unit.
    pub slot: Slot,
    /// Layout of codes and scales; `None` for a tensor of numbers.
    pub layout: Option<QuantizedLayout>,
}

impl From<Slot> for WeightKey {
    fn from(slot: Slot) -> Self {
        Self { slot, layout: None }
    }
}
