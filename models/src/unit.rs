//! The units of a decoder and their parameters, as plain data.

pub use firebrick_arch::parameters::{ParamSpec, Slot, TargetModule, UnitKind, chain, unit_specs};
