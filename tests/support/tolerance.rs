//! How far two ways to a number may be apart, stated once: absolute up to one and relative above for scores and losses,
//! relative L2 for gradient tensors.

use firebrick_backends::Precision;

/// f64, other orders of summation.
pub const F64: f64 = 1e-10;

/// f32 on one device, other orders of summation.
pub const F32: f64 = 5e-5;

/// f32 against another device or another program.
pub const F32_ELSEWHERE: f64 = 1e-4;

/// The same of a model with linear attention, whose recurrence carries rounding along: as its fixture says.
pub const LINEAR_ATTENTION: f64 = 3e-4;

/// Weights after f32 updates on another device or in another place: a direction is divided by its own size.
pub const F32_UPDATE: f64 = 1e-3;

/// What moments in fewer bits change of an update.
pub const COARSE_MOMENTS: f64 = 0.05;

/// About how far apart neighbouring numbers of a precision are, relative to their size.
pub fn spacing(precision: Precision) -> f64 {
    match precision {
        Precision::F32 => 1.2e-7,
        Precision::F16 => 1e-3,
        Precision::Bf16 => 8e-3,
    }
}
