//! Devices by name: parsing, listing without panics, opening.

mod hardware;

pub use crate::panics::panic_message;
pub use firebrick_spec::Backend;
#[cfg(feature = "cuda")]
pub use hardware::cube_probe;
pub use hardware::{is_accelerator, is_cpu, is_integrated, largest_buffer};

use crate::out_of_memory::OutOfMemory;
use crate::{Error, Result};
use burn::tensor::{Device, DeviceType, FloatDType};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

/// Returns true if this build contains a backend.
pub fn is_built(backend: Backend) -> bool {
    match backend {
        Backend::Cpu => true,
        Backend::Cuda => cfg!(feature = "cuda"),
        Backend::Wgpu => cfg!(feature = "wgpu"),
        Backend::Vulkan => cfg!(feature = "vulkan"),
        Backend::Metal => cfg!(feature = "metal"),
    }
}

fn hint(backend: Backend) -> &'static str {
    match backend {
        Backend::Cpu => "it is always there",
        Backend::Cuda => "it needs an NVIDIA driver and a CUDA toolkit (NVRTC and headers)",
        Backend::Wgpu => "it needs a graphics driver: Vulkan, Metal or DX12",
        Backend::Vulkan => "it needs a Vulkan driver",
        Backend::Metal => "it needs macOS",
    }
}

fn device_type(backend: Backend) -> Option<DeviceType> {
    match backend {
        Backend::Cpu => Some(DeviceType::Flex),
        #[cfg(feature = "cuda")]
        Backend::Cuda => Some(DeviceType::Cuda),
        #[cfg(feature = "wgpu")]
        Backend::Wgpu => Some(DeviceType::Wgpu),
        #[cfg(feature = "vulkan")]
        Backend::Vulkan => Some(DeviceType::Vulkan),
        #[cfg(feature = "metal")]
        Backend::Metal => Some(DeviceType::Metal),
        #[allow(unreachable_patterns, reason = "reachable in builds that leave a backend out")]
        _ => None,
    }
}

/// A backend's devices, unopened; empty where a driver is missing or fails.
pub(crate) fn list(backend: Backend) -> Vec<Device> {
    let Some(kind) = device_type(backend) else {
        return Vec::new();
    };
    quietly(|| Device::enumerate(kind).into_vec()).unwrap_or_default()
}
/// A device as users spell it: `cpu`, `cuda:0`, `wgpu`, `vulkan:1`, `metal`, `auto`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceSpec {
    /// The best hardware there is, never a software adapter; the CPU where there is none.
    #[default]
    Auto,
    /// The `index`-th device of a backend.
    Named {
        /// The backend.
        backend: Backend,
        /// Counted from 0 within the backend.
        index: usize,
    },
}

impl DeviceSpec {
    /// The plain CPU.
    pub const CPU: Self = Self::Named { backend: Backend::Cpu, index: 0 };

    /// The backend; the CPU for `auto`, which names none.
    pub fn backend(self) -> Backend {
        match self {
            Self::Named { backend, .. } => backend,
            Self::Auto => Backend::Cpu,
        }
    }

    /// The device of one of several processes on a machine: a card each, counted from the one that is named. Everything
    /// else is shared.
    #[must_use]
    pub fn for_local_rank(self, rank: usize) -> Self {
        match self {
            Self::Named { backend: backend @ Backend::Cuda, index } => Self::Named { backend, index: index + rank },
            shared => shared,
        }
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Named { backend: Backend::Cpu, .. } => f.write_str("cpu"),
            Self::Named { backend, index } => write!(f, "{}:{index}", backend.name()),
        }
    }
}

impl From<DeviceSpec> for String {
    fn from(spec: DeviceSpec) -> Self {
        spec.to_string()
    }
}

impl TryFrom<String> for DeviceSpec {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl FromStr for DeviceSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let unknown = || Error::UnknownDevice { name: text.to_owned() };
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let (name, index) = match text.split_once(':') {
            Some((name, index)) => (name, index.parse().map_err(|_| unknown())?),
            None => (text, 0),
        };
        let backend = Backend::ALL.into_iter().find(|b| b.name() == name).ok_or_else(unknown)?;
        if backend == Backend::Cpu && text != "cpu" {
            return Err(unknown());
        }
        Ok(Self::Named { backend, index })
    }
}

/// Properties of a device that could be opened.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceInfo {
    /// Its name in `device`.
    pub device: DeviceSpec,
    /// The name that it reports.
    pub name: String,
    /// A software adapter: works, slowly; `auto` never picks it.
    pub software: bool,
    /// A GPU whose memory is the host's: moving tensors to the host frees nothing.
    pub integrated: bool,
    /// Bytes it can hold, where its driver says.
    pub memory_bytes: Option<u64>,
    /// Bytes of the largest tensor that it holds in one piece, where there is a limit: WebGPU binds buffers of some
    /// size only.
    pub largest_buffer: Option<u64>,
    /// Float types it computes in.
    pub dtypes: Vec<&'static str>,
}

/// A backend and what it finds here.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BackendReport {
    /// The backend.
    pub backend: Backend,
    /// True if this build contains it.
    pub built: bool,
    /// Its devices that could be opened.
    pub devices: Vec<DeviceInfo>,
    /// Why there are none, or why one could not be opened.
    pub note: Option<String>,
}

/// Opens every device of every backend in this build and says what it is. Never panics.
pub fn probe() -> Vec<BackendReport> {
    Backend::ALL.into_iter().map(probe_backend).collect()
}

fn probe_backend(backend: Backend) -> BackendReport {
    let mut report = BackendReport { backend, built: is_built(backend), devices: Vec::new(), note: None };
    if !report.built {
        report.note = Some(Error::NotBuilt { backend: backend.name(), feature: backend.name() }.to_string());
        return report;
    }
    let devices = list(backend);
    if devices.is_empty() {
        report.note = Some(format!("no device: {}", hint(backend)));
    }
    for (index, device) in devices.into_iter().enumerate() {
        match describe(backend, index, &device) {
            Ok(info) => report.devices.push(info),
            Err(e) => report.note = Some(e.to_string()),
        }
    }
    report
}

fn describe(backend: Backend, index: usize, device: &Device) -> Result<DeviceInfo> {
    let spec = DeviceSpec::Named { backend, index };
    #[cfg(feature = "cuda")]
    if let (Backend::Cuda, Some(detail)) = (backend, crate::toolkit::missing_here()) {
        return Err(Error::Open { device: spec.to_string(), detail });
    }
    let opened = quietly(|| {
        let (name, software) = identity(backend, device);
        let dtypes =
            [(FloatDType::F32, "f32"), (FloatDType::BF16, "bf16"), (FloatDType::F16, "f16"), (FloatDType::F64, "f64")]
                .into_iter()
                .filter(|(dtype, _)| device.supports_dtype(*dtype))
                .map(|(_, name)| name)
                .collect();
        DeviceInfo {
            device: spec,
            name,
            software,
            integrated: is_integrated(device),
            memory_bytes: device.memory_capacity(),
            largest_buffer: largest_buffer(device),
            dtypes,
        }
    });
    opened.map_err(|panicked| match panicked.refused {
        Some(what) => Error::NoRoom { device: spec.to_string(), what },
        None => Error::Open { device: spec.to_string(), detail: panicked.message },
    })
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn identity(backend: Backend, device: &Device) -> (String, bool) {
    match device.identity() {
        // a software rasteriser is no card
        Some(identity) => (identity.name, backend != Backend::Cuda && identity.physical.is_none()),
        None => (backend.name().to_owned(), false),
    }
}

#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
fn identity(backend: Backend, _device: &Device) -> (String, bool) {
    (backend.name().to_owned(), false)
}

/// Returns true if f32 matrix products may be rounded to TF32 on devices that have it. The first call of a process
/// decides, and [`open`] decides for no: f32 means f32. It also keeps a stray `cubek.toml` from changing results.
pub fn allow_tf32(allow: bool) {
    static DECIDED: std::sync::Once = std::sync::Once::new();
    DECIDED.call_once(|| {
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        {
            use cubek_std::config::{CubekConfig, MatmulConfig, RuntimeConfig};
            let config = CubekConfig { matmul: MatmulConfig { allow_tf32: allow } };
            if !CubekConfig::try_set(config) {
                tracing::warn!("this program has used a GPU before: TF32 rounding of f32 matmuls was set then");
            }
        }
        tracing::debug!("TF32 allowed: {allow}");
    });
}

/// Opens a device by name and says what it is.
///
/// # Errors
/// `Error::NotBuilt` for a backend that this build lacks, `Error::NoDevice` where it finds none, `Error::NoSuchIndex`,
/// `Error::Open` where the driver fails, and `Error::CrashesHere` for SPIR-V on llvmpipe. `auto` passes over devices
/// that fail and takes the CPU in the end.
pub fn open(spec: DeviceSpec) -> Result<(Device, DeviceInfo)> {
    // Otherwise a tensor that was read to the host is still on the device, and is copied when its bytes are first
    // looked at: it frees nothing until then, and shows what the buffer holds by that time.
    burn_std::set_runtime_kind(burn_std::RuntimeKind::Async);
    allow_tf32(false);
    match spec {
        DeviceSpec::Auto => open_auto(),
        DeviceSpec::Named { backend, index } => open_named(backend, index),
    }
}

fn open_auto() -> Result<(Device, DeviceInfo)> {
    for backend in Backend::ALL.into_iter().filter(|b| is_built(*b) && *b != Backend::Cpu) {
        for index in 0..list(backend).len() {
            match open_named(backend, index) {
                Ok((device, info)) if !info.software => return Ok((device, info)),
                Ok(_) => {}
                Err(e) => tracing::warn!("passing over {}:{index}: {e}", backend.name()),
            }
        }
    }
    open_named(Backend::Cpu, 0)
}

fn open_named(backend: Backend, index: usize) -> Result<(Device, DeviceInfo)> {
    if !is_built(backend) {
        return Err(Error::NotBuilt { backend: backend.name(), feature: backend.name() });
    }
    let devices = list(backend);
    let count = devices.len();
    if count == 0 {
        return Err(Error::NoDevice { backend: backend.name(), hint: hint(backend) });
    }
    let Some(device) = devices.into_iter().nth(index) else {
        let wanted = DeviceSpec::Named { backend, index }.to_string();
        return Err(Error::NoSuchIndex { wanted, backend: backend.name(), count });
    };
    let info = describe(backend, index, &device)?;
    // Features unify: with `vulkan` built in, wgpu compiles to SPIR-V too, and Mesa's llvmpipe dies on its first
    // matmul.
    let spirv = cfg!(feature = "vulkan") && matches!(backend, Backend::Vulkan | Backend::Wgpu);
    if spirv && info.name.to_lowercase().contains("llvmpipe") {
        return Err(Error::CrashesHere { device: info.device.to_string(), adapter: info.name });
    }
    Ok((device, info))
}

/// A panic of what ran quietly.
struct Panicked {
    message: String,
    /// Memory that ran out, where a panic said so: that of a backend's thread reaches the caller as a channel that is
    /// closed.
    refused: Option<OutOfMemory>,
}

/// Runs something that may panic, without the panic's noise on stderr. One thread at a time: the hook is the process's,
/// and two that exchange it at the same time could leave the silent one.
fn quietly<T>(f: impl FnOnce() -> T) -> Result<T, Panicked> {
    static HOOK: Mutex<()> = Mutex::new(());
    let _alone = HOOK.lock().unwrap_or_else(PoisonError::into_inner);
    let hook = std::panic::take_hook();
    let refused = Arc::new(Mutex::new(None));
    let seen = Arc::clone(&refused);
    std::panic::set_hook(Box::new(move |panic| {
        if let Some(what) = OutOfMemory::in_panic(panic.payload()) {
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            seen.get_or_insert(what);
        }
    }));
    let result = catch_unwind(AssertUnwindSafe(f));
    std::panic::set_hook(hook);
    result.map_err(|payload| Panicked {
        message: panic_message(payload.as_ref()),
        refused: refused.lock().unwrap_or_else(PoisonError::into_inner).take(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_a_thread_of_the_backend_had_none_of_is_told_as_such() {
        let failed = |message: &'static str| {
            quietly(|| {
                let thread = std::thread::spawn(move || panic!("{message}"));
                let _ = thread.join();
                panic!("RecvError")
            })
            .map_err(|panicked: Panicked| (panicked.message, panicked.refused.is_some()))
        };
        let refused = failed("DriverError(CUDA_ERROR_OUT_OF_MEMORY)");
        let other = failed("DriverError(CUDA_ERROR_INVALID_VALUE)");
        assert_eq!(refused, Err::<(), _>(("RecvError".to_owned(), true)));
        assert_eq!(other, Err(("RecvError".to_owned(), false)));
    }

    #[test]
    fn every_spelling_parses_and_prints_back() {
        for (text, printed) in [("cpu", "cpu"), ("cuda", "cuda:0"), ("vulkan:1", "vulkan:1"), ("auto", "auto")] {
            assert_eq!(text.parse::<DeviceSpec>().unwrap().to_string(), printed);
        }
        for text in ["gpu", "cuda:", "cuda:x", "cpu:1", "wgpu:-1", ""] {
            let message = text.parse::<DeviceSpec>().unwrap_err().to_string();
            assert!(message.contains(text) && message.contains("wgpu[:n]"), "{message}");
        }
    }

    #[test]
    fn probing_lists_the_cpu_and_never_panics() {
        let reports = probe();
        let cpu = reports.iter().find(|r| r.backend == Backend::Cpu).unwrap();
        assert_eq!(cpu.devices[0].device, DeviceSpec::CPU);
        assert!(cpu.devices[0].dtypes.contains(&"f32"));
        for report in &reports {
            assert!(!report.devices.is_empty() || report.note.is_some(), "{report:?}");
        }
    }

    #[test]
    fn a_backend_that_is_not_built_names_the_feature_that_adds_it() {
        for backend in Backend::ALL.into_iter().filter(|b| !is_built(*b)) {
            let message = open(DeviceSpec::Named { backend, index: 0 }).unwrap_err().to_string();
            assert!(message.contains(&format!("--features {}", backend.name())), "{message}");
        }
    }

    #[test]
    fn an_index_that_does_not_exist_is_refused_with_the_count() {
        let spec = DeviceSpec::Named { backend: Backend::Cpu, index: 3 };
        assert!(open(spec).unwrap_err().to_string().contains("has 1 device"));
    }
}
