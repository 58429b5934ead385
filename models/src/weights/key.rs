//! What a tensor of a unit is.

use crate::unit::Slot;
use firebrick_spec::QuantizedLayout;

/// What a tensor of a unit is: its role, and its layout where it is the buffer of a frozen matrix in few bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightKey {
    /// Its role in the unit.
    pub slot: Slot,
    /// Where codes and scales lie; `None` for a tensor of numbers.
    pub layout: Option<QuantizedLayout>,
}

impl From<Slot> for WeightKey {
    fn from(slot: Slot) -> Self {
        Self { slot, layout: None }
    }
}
