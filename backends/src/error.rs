//! What can go wrong when a device is named, opened or used.

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The name is none of ours.
    #[error(
        "unknown device {found:?}; known: cpu, cuda[:n], wgpu[:n], vulkan[:n], metal[:n], auto"
    )]
    UnknownDevice {
        /// What was given.
        found: String,
    },
    /// The backend was left out of this build.
    #[error(
        "this build has no {backend} backend; build it with `cargo build --release --features {feature}`, or use `--device cpu`"
    )]
    NotBuilt {
        /// The backend.
        backend: &'static str,
        /// The cargo feature that adds it.
        feature: &'static str,
    },
    /// The backend is built in and finds nothing to run on.
    #[error(
        "no {backend} device on this machine ({hint}); `--device cpu` always works, `firebrick devices` lists what there is"
    )]
    NoDevice {
        /// The backend.
        backend: &'static str,
        /// What is usually missing.
        hint: &'static str,
    },
    /// There are devices, but not that many.
    #[error(
        "device {wanted} does not exist: {backend} has {count} here, counted from 0; `firebrick devices` lists them"
    )]
    NoSuchIndex {
        /// The device as named.
        wanted: String,
        /// The backend.
        backend: &'static str,
        /// Devices it has.
        count: usize,
    },
    /// The device is there and cannot be opened.
    #[error("{device} could not be opened: {detail}; try another device (`firebrick devices`)")]
    Open {
        /// The device as named.
        device: String,
        /// What the driver said.
        detail: String,
    },
    /// A float type that the device cannot compute in.
    #[error(
        "this device does not compute in {asked}; it does in {known}: set `precision` to one of these, or another `device` \
         (`firebrick devices` lists the types of each)"
    )]
    Precision {
        /// The type that was asked for.
        asked: &'static str,
        /// The types that it computes in.
        known: String,
    },
    /// A driver that is known to end the process.
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
    /// A device's profile could not be kept.
    #[error("cannot keep the device's profile at {}: {detail}", path.display())]
    Profile {
        /// The file or folder.
        path: std::path::PathBuf,
        /// Why, and what to do.
        detail: String,
    },
    /// A copy between host and device failed.
    #[error("copying between host and device: {0}")]
    Transfer(String),
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
