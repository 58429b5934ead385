//! Errors of naming, opening and using a device.

use crate::collective_error::CollectiveError;
use crate::out_of_memory::OutOfMemory;
use crate::panics::panic_message;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Unknown device name.
    #[error("unknown device {name:?}; known: cpu, cuda[:n], wgpu[:n], vulkan[:n], metal[:n], auto")]
    UnknownDevice {
        /// The given text.
        name: String,
    },
    /// The backend is not part of this build.
    #[error(
        "this build has no {backend} backend; rebuild with `cargo build --release --features {feature}`, or use `--device cpu`"
    )]
    NotBuilt {
        /// The backend.
        backend: &'static str,
        /// The cargo feature that adds it.
        feature: &'static str,
    },
    /// The backend is built in but finds no device.
    #[error("no {backend} device found ({hint}); use `--device cpu`, or run `firebrick devices` for a list of devices")]
    NoDevice {
        /// The backend.
        backend: &'static str,
        /// The usual cause.
        hint: &'static str,
    },
    /// The device index is out of range.
    #[error(
        "device {wanted} does not exist: {backend} has {count} device(s), numbered from 0; run `firebrick devices` for a list"
    )]
    NoSuchIndex {
        /// The device as named.
        wanted: String,
        /// The backend.
        backend: &'static str,
        /// Devices it has.
        count: usize,
    },
    /// The device exists but cannot be opened.
    #[error("cannot open {device}: {detail}; try another device (see `firebrick devices`)")]
    Open {
        /// The device as named.
        device: String,
        /// The driver's message.
        detail: String,
    },
    /// The device has no memory left for a program that has put nothing on it yet.
    #[error(
        "out of memory: {what}. This happened while opening {device}, before the run allocated anything on it: other \
         programs use its memory (`nvidia-smi` lists them on an NVIDIA GPU); end them, or choose another `device` \
         (`firebrick devices` lists them)"
    )]
    NoRoom {
        /// The device as named.
        device: String,
        /// Whose memory ran out.
        what: OutOfMemory,
    },
    /// A float type that the device cannot compute in.
    #[error(
        "this device does not support {precision}, only {known}; set `precision` to one of these, or choose another `device` \
         (`firebrick devices` lists the types of each)"
    )]
    Precision {
        /// The requested type.
        precision: &'static str,
        /// The supported types.
        known: String,
    },
    /// A driver that is known to crash the process.
    #[error(
        "{device} is {adapter}, a software driver that crashes on SPIR-V kernels; \
         build without the `vulkan` feature (WGSL works there) or use `--device cpu`"
    )]
    CrashesHere {
        /// The device as named.
        device: String,
        /// The adapter.
        adapter: String,
    },
    /// A device profile could not be saved.
    #[error("cannot save the device profile to {}: {detail}", path.display())]
    Profile {
        /// The file or folder.
        path: std::path::PathBuf,
        /// Why, and what to do.
        detail: String,
    },
    /// Kernels could not be recorded as a graph, or a graph not be replayed.
    #[error("a graph of kernels: {reason}")]
    Graph {
        /// Message of the device.
        reason: String,
    },
    /// A copy between host and device failed.
    #[error("copy between host and device failed: {0}")]
    Transfer(String),
    /// Memory ran out on the device or the host.
    #[error("out of memory: {0}")]
    OutOfMemory(OutOfMemory),
    /// Another rank of the run failed or is gone, or the ranks disagree.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}

impl Error {
    /// Error of a device when something is copied or read: memory ran out, or another failure.
    pub fn device(error: &(dyn std::error::Error + 'static)) -> Self {
        match OutOfMemory::in_error(error) {
            Some(what) => Self::OutOfMemory(what),
            None => Self::Transfer(error.to_string()),
        }
    }

    /// Error of a device that panicked.
    pub fn panicked(payload: &(dyn std::any::Any + Send)) -> Self {
        match OutOfMemory::in_panic(payload) {
            Some(what) => Self::OutOfMemory(what),
            None => Self::Transfer(panic_message(payload)),
        }
    }

    /// Returns true if the user can mend it by changing what they asked for, as opposed to a device that failed.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Collective(error) => error.is_user_error(),
            other => !matches!(other, Self::Transfer(_) | Self::NoRoom { .. } | Self::OutOfMemory(_)),
        }
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
