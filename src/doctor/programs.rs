//! Other programs: Python for rewards, MPI for several machines.

use super::check::Check;
use super::machine::{Machine, Packages};

/// The oldest supported Python, by its minor version.
const MIN_PYTHON: u32 = 9;

const PYTHON: Packages = Packages { apt: "python3", dnf: "python3", pacman: "python", brew: Some("python") };

const MPI: Packages = Packages { apt: "openmpi-bin", dnf: "openmpi", pacman: "openmpi", brew: Some("open-mpi") };

/// `python3`, for rewards in Python; nothing else needs it.
pub fn python(machine: &Machine) -> Check {
    const NAME: &str = "Python";
    let Some(program) = machine.program(&["python3"]) else {
        return Check::missing(NAME, "no python3 in PATH; only rewards written in Python need it")
            .mended_by(machine.install(&PYTHON));
    };
    let finding = |version: &str| format!("{version} ({})", program.display());
    let Some(version) = machine.version(&program) else {
        return Check::warning(NAME, finding("it does not report its version")).mended_by(machine.install(&PYTHON));
    };
    let minor = version.strip_prefix("Python 3.");
    let minor = minor.and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    if minor.is_some_and(|minor| minor >= MIN_PYTHON) {
        return Check::ok(NAME, finding(&version));
    }
    Check::warning(NAME, finding(&format!("{version}: older than 3.{MIN_PYTHON}"))).mended_by(machine.install(&PYTHON))
}

/// The command that builds this program again with one feature more.
pub fn install(feature: &str) -> String {
    let built = [
        ("wgpu", cfg!(feature = "wgpu")),
        ("cuda", cfg!(feature = "cuda")),
        ("vulkan", cfg!(feature = "vulkan")),
        ("metal", cfg!(feature = "metal")),
        ("mpi", cfg!(feature = "mpi")),
        ("kernel-cache", cfg!(feature = "kernel-cache")),
    ];
    let wanted = built.iter().filter(|(name, is)| *is || *name == feature);
    install_with(wanted.map(|(name, _)| *name).collect())
}

/// The command that builds this program with these features.
pub(super) fn install_with(mut features: Vec<&str>) -> String {
    const DEFAULT: [&str; 2] = ["wgpu", "cuda"];
    let mut command = "cargo install --path . --locked".to_owned();
    if DEFAULT.iter().all(|name| features.contains(name)) {
        features.retain(|name| !DEFAULT.contains(name));
    } else {
        command += " --no-default-features";
    }
    if !features.is_empty() {
        command += " --features ";
        command += &features.join(",");
    }
    command
}

/// MPI's launcher, and whether this program is built with MPI. One rank needs neither.
pub fn mpi(machine: &Machine) -> Check {
    const NAME: &str = "MPI";
    let Some(program) = machine.program(&["mpirun", "mpiexec"]) else {
        return Check::missing(NAME, "no mpirun or mpiexec in PATH; one device needs none")
            .mended_by(machine.install(&MPI));
    };
    let Some(version) = machine.version(&program) else {
        let finding = format!("{} does not report its version", program.display());
        return Check::warning(NAME, finding).mended_by(machine.install(&MPI));
    };
    let finding = format!("{version} ({})", program.display());
    if cfg!(feature = "mpi") {
        return Check::ok(NAME, finding);
    }
    Check::missing(
        NAME,
        format!("{finding} is installed, but this program is built for one rank; not needed for one device"),
    )
    .mended_by(install("mpi"))
}
