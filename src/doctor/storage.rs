//! Folders that runs write to: their space and permissions.

use super::check::Check;
use super::machine::Machine;
use super::programs::install;
use firebrick::engine::plan::size::Bytes;
use std::path::{Path, PathBuf};

/// Free space below which a run cannot write a checkpoint of a small model.
const NO_SPACE: u64 = 64 << 20;

/// Free space below which checkpoints of common models do not fit.
const LITTLE_SPACE: u64 = 10 << 30;

/// The nearest folder above a path that exists.
fn existing(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut above = path.ancestors();
    above.find(|folder| folder.exists()).unwrap_or(Path::new("/")).to_owned()
}

/// Free bytes for this user at the place of a folder; `None` if the system does not report them.
pub fn free_disk(folder: &Path) -> Option<u64> {
    free_bytes(&existing(folder))
}

#[cfg(unix)]
fn free_bytes(folder: &Path) -> Option<u64> {
    let stats = rustix::fs::statvfs(folder).ok()?;
    Some(stats.f_bavail.saturating_mul(stats.f_frsize))
}

#[cfg(not(unix))]
fn free_bytes(_folder: &Path) -> Option<u64> {
    None
}

/// The error of writing to a folder, tried with a temporary file.
fn write_error(folder: &Path) -> Option<std::io::Error> {
    let file = folder.join(format!(".firebrick-doctor-{}", std::process::id()));
    let mut options = std::fs::OpenOptions::new();
    let tried = options.write(true).create_new(true).open(&file);
    match tried {
        Ok(_) => std::fs::remove_file(&file).err(),
        Err(error) => Some(error),
    }
}

/// The folder of runs. Nothing can train without write access.
pub fn run_folder(output: &Path) -> Check {
    run_folder_with(output, free_disk(output))
}

pub fn run_folder_with(output: &Path, free: Option<u64>) -> Check {
    const NAME: &str = "run folder";
    const MEND: &str = "firebrick train CONFIG output=/path/with/space/run";
    let folder = existing(output);
    if let Some(error) = write_error(&folder) {
        let finding = format!("{} cannot be written to: {error}", folder.display());
        return Check::failed(NAME, finding).mended_by(MEND);
    }
    let Some(free) = free else {
        return Check::ok(NAME, folder.display().to_string());
    };
    let finding = format!("{} free in {}", Bytes(free), folder.display());
    match free {
        ..NO_SPACE => Check::failed(NAME, finding).mended_by(MEND),
        NO_SPACE..LITTLE_SPACE => {
            Check::warning(NAME, format!("{finding}: checkpoints of common models take more")).mended_by(MEND)
        }
        _ => Check::ok(NAME, finding),
    }
}

/// The folder of downloads and of measured device profiles.
pub fn cache(machine: &Machine) -> Check {
    const NAME: &str = "cache";
    let home = || machine.folder("HOME").or_else(|| machine.folder("USERPROFILE"));
    let named = ["HF_HOME", "XDG_CACHE_HOME"];
    let named = named.iter().find_map(|name| machine.folder(name));
    let Some(cache) = named.or_else(|| Some(home()?.join(".cache"))) else {
        return Check::warning(NAME, "none of HF_HOME, XDG_CACHE_HOME and HOME is set: nothing can be kept")
            .mended_by("export XDG_CACHE_HOME=/path/with/space");
    };
    let folder = existing(&cache);
    let free = free_bytes(&folder);
    let finding =
        free.map_or_else(|| cache.display().to_string(), |free| format!("{} free in {}", Bytes(free), cache.display()));
    let little = free.is_some_and(|free| free < LITTLE_SPACE);
    match write_error(&folder) {
        Some(error) => Check::warning(NAME, format!("{} cannot be written to: {error}", cache.display()))
            .mended_by("export HF_HOME=/path/with/space XDG_CACHE_HOME=/path/with/space"),
        None if little => Check::warning(NAME, finding).mended_by("export HF_HOME=/path/with/space"),
        None => Check::ok(NAME, finding),
    }
}

/// The folder of compiled kernels, and its size.
pub fn kernel_cache(folder: Option<&Path>) -> Check {
    const NAME: &str = "kernel cache";
    let Some(folder) = folder else {
        return Check::missing(NAME, "this build has none: every process compiles its kernels again")
            .mended_by(install("kernel-cache"));
    };
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = files.filter_map(|file| Some(file.metadata().ok()?.len())).sum();
    match write_error(&existing(folder)) {
        Some(error) => Check::warning(NAME, format!("{} cannot be written to: {error}", folder.display()))
            .mended_by("export XDG_CACHE_HOME=/path/with/space"),
        None => Check::ok(NAME, format!("{} in {}", Bytes(bytes), folder.display())),
    }
}
