//! NVIDIA's driver and the CUDA toolkit.

use super::check::Check;
use super::machine::{Machine, Packages};
use firebrick::backends::collective::NcclInstallation;
use firebrick::backends::toolkit::inspect;

const DRIVER: Packages = Packages { apt: "nvidia-driver", dnf: "akmod-nvidia", pacman: "nvidia", brew: None };

const TOOLKIT: Packages = Packages { apt: "nvidia-cuda-toolkit", dnf: "cuda-toolkit", pacman: "cuda", brew: None };

const NCCL: Packages = Packages { apt: "libnccl2", dnf: "libnccl", pacman: "nccl", brew: None };

/// Returns true if an NVIDIA GPU is on the PCI bus.
pub fn has_gpu(machine: &Machine) -> bool {
    machine.entries("/sys/bus/pci/devices").iter().any(|device| {
        let starts = |file: &str, with: &str| {
            let text = std::fs::read_to_string(device.join(file));
            text.is_ok_and(|text| text.trim().starts_with(with))
        };
        starts("vendor", "0x10de") && starts("class", "0x03")
    })
}

/// The driver; the kernel module has its version. WSL and containers have only its library.
pub fn driver(machine: &Machine) -> Check {
    const NAME: &str = "NVIDIA driver";
    let module = machine.read("/proc/driver/nvidia/version");
    let library = machine.library("libcuda.so.1");
    match (module, library) {
        (Some(text), Some(_)) => {
            let line = text.lines().next().unwrap_or_default();
            // "… Kernel Module  570.86.15  …", or "… Open Kernel Module for x86_64  580.159.04  …"
            let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c == '.' || c.is_ascii_digit());
            let version = line.split_whitespace().find(is_version).unwrap_or(line);
            Check::ok(NAME, format!("version {version}"))
        }
        (None, Some(library)) => Check::ok(NAME, library.display().to_string()),
        (Some(_), None) => Check::warning(
            NAME,
            "its kernel module is loaded, but libcuda.so.1 is not found; if this is a container, mount the driver \
             libraries (NVIDIA Container Toolkit)",
        )
        .mended_by("docker run --gpus all IMAGE"),
        (None, None) if has_gpu(machine) => {
            Check::warning(NAME, "there is an NVIDIA GPU, but no driver for it").mended_by(machine.install(&DRIVER))
        }
        (None, None) => Check::ok(NAME, "not needed: there is no NVIDIA GPU"),
    }
}

/// The toolkit, which compiles the CUDA kernels.
pub fn toolkit(machine: &Machine) -> Check {
    const NAME: &str = "CUDA toolkit";
    let exists = |path: &std::path::Path| machine.path(path).exists();
    let toolkit = inspect(machine.folder("CUDA_PATH"), exists, |folder| {
        let beside = ["lib64", "lib", "targets/x86_64-linux/lib"];
        let beside = beside.iter().map(|lib| folder.join(lib).join("libnvrtc.so"));
        machine.library("libnvrtc.so").is_some() || beside.into_iter().any(|library| machine.path(library).exists())
    });
    let wanted = has_gpu(machine) || machine.library("libcuda.so.1").is_some();
    match (toolkit.missing, toolkit.folder) {
        (None, Some(folder)) => Check::ok(NAME, folder.display().to_string()),
        (missing, _) if wanted => {
            let missing = missing.unwrap_or_else(|| "not found".into());
            Check::warning(NAME, missing).mended_by(machine.install(&TOOLKIT))
        }
        _ => Check::ok(NAME, "not needed: there is no NVIDIA GPU"),
    }
}

/// NCCL, over which the GPUs of several ranks exchange values. `opened` is the result of loading it, if the program is
/// built with CUDA.
pub fn nccl(machine: &Machine, opened: Option<Result<NcclInstallation, String>>) -> Check {
    const NAME: &str = "NCCL";
    let file = ["libnccl.so.2", "libnccl.so"].iter().find_map(|name| machine.library(name));
    match (opened, file) {
        (Some(Ok(NcclInstallation { path, version })), file) => {
            let file = path.or(file).map(|file| format!(" ({})", file.display()));
            let finding = format!("version {version}{}", file.unwrap_or_default());
            Check::ok(NAME, finding)
        }
        (Some(Err(why)), Some(_)) => Check::warning(NAME, why).mended_by(machine.install(&NCCL)),
        (None, Some(file)) => {
            let finding = format!("{}; this build has no CUDA, and does not use it", file.display());
            Check::ok(NAME, finding)
        }
        (_, None) if has_gpu(machine) => Check::missing(
            NAME,
            "no libnccl.so.2; not needed for one GPU; several GPUs exchange values through host memory without it",
        )
        .mended_by(machine.install(&NCCL)),
        (_, None) => Check::ok(NAME, "not needed: there is no NVIDIA GPU"),
    }
}
