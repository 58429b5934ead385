//! `CubeCL`'s own errors. They reach whoever uses a `CubeCL` client; Burn hands on their text.

use super::kind::{MemoryErrorKind, OutOfMemory, one_line};
use super::phrases;
use cubecl::server::{IoError, LaunchError, ServerError};
use std::error::Error;

/// Memory that ran out according to an error of `CubeCL`.
pub(super) fn find(error: &(dyn Error + 'static)) -> Option<OutOfMemory> {
    if let Some(error) = error.downcast_ref::<ServerError>() {
        server(error)
    } else if let Some(error) = error.downcast_ref::<IoError>() {
        io(error)
    } else {
        error.downcast_ref::<LaunchError>().and_then(launch)
    }
}

fn server(error: &ServerError) -> Option<OutOfMemory> {
    let memory = match error {
        ServerError::Io(error) => io(error),
        ServerError::Launch(error) => launch(error),
        // what was read was never written: the root says why
        ServerError::Unwritten { root, .. } => server(root),
        ServerError::Several { errors, .. } => errors.iter().find_map(server),
        ServerError::DevicePoisoned(poison) => lost(&poison.reason),
        ServerError::Generic { reason, .. } => phrases::find(reason),
        _ => None,
    };
    memory.map(|what| OutOfMemory { message: one_line(&error.to_string()), ..what })
}

/// A device that was lost: the words of its driver or of wgpu say why.
fn lost(reason: &str) -> Option<OutOfMemory> {
    phrases::find(reason).map(|what| OutOfMemory { device_lost: true, ..what })
}

fn io(error: &IoError) -> Option<OutOfMemory> {
    let (kind, bytes, origin) = match error {
        IoError::OutOfMemory { size, .. } => (MemoryErrorKind::Pool, *size, "cubecl-runtime, IoError::OutOfMemory"),
        IoError::PageSizesExhausted { size, .. } => {
            (MemoryErrorKind::Pool, *size, "cubecl-runtime, IoError::PageSizesExhausted")
        }
        IoError::BufferTooBig { size, .. } => (MemoryErrorKind::Buffer, *size, "cubecl-runtime, IoError::BufferTooBig"),
        IoError::StorageMappingFailed { size, source, .. } => {
            let origin = "cubecl-runtime, IoError::StorageMappingFailed";
            (io(source)?.kind, *size, origin)
        }
        // a driver's own words
        IoError::Unknown { description, .. } => return phrases::find(description),
        IoError::NotFound { reason, .. } => return phrases::find(&reason.to_string()),
        IoError::DevicePoisoned(poison) => return lost(&poison.reason),
        _ => return None,
    };
    Some(OutOfMemory { kind, bytes: Some(bytes), origin, message: one_line(&error.to_string()), device_lost: false })
}

fn launch(error: &LaunchError) -> Option<OutOfMemory> {
    match error {
        LaunchError::OutOfMemory { .. } => Some(OutOfMemory {
            kind: MemoryErrorKind::Driver,
            bytes: None,
            origin: "cubecl-runtime, LaunchError::OutOfMemory",
            message: one_line(&error.to_string()),
            device_lost: false,
        }),
        LaunchError::DevicePoisoned(poison) => lost(&poison.reason),
        LaunchError::Unknown { reason, .. } => phrases::find(reason),
        _ => None,
    }
}
