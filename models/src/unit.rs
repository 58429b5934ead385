//! The units of a decoder and their parameters, as plain data.

pub use firebrick_spec::parameters::{ParamSpec, Slot, TargetModule, UnitKind, chain, unit_specs};
