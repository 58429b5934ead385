//! What tests ask of the stand-in for a CUDA card (`tests/cuda`). It reads its settings when a process first uses CUDA,
//! so each such test runs itself again in a process of its own.

use crate::support::report;
use firebrick_backends::device::open;

/// A file for a line of each call.
pub const RECORD: &str = "STAND_IN_RECORD";
/// What runs as soon as it is asked for.
pub const EARLY: &str = "STAND_IN_EARLY";
/// Memory is refused while this file is there, which gets a line for each refusal. One that begins with `at most N`
/// goes after N.
pub const REFUSE_WHILE: &str = "STAND_IN_REFUSE_WHILE";

/// Whether the card is the stand-in; a real one keeps no record and takes no orders.
pub fn is_stand_in() -> bool {
    let (_, info) = open("cuda".parse().expect("a device's name")).expect("opened before");
    let is = info.name.contains("stand-in");
    if !is {
        report("not run: the card is no stand-in");
    }
    is
}
