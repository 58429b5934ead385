//! Compiled kernels on disk, for later processes of the same program: of CUDA and of SPIR-V, in builds with the feature
//! `kernel-cache`. Other kernels are compiled by drivers, which have caches themselves.

use crate::environment::cache_folder;
use std::path::PathBuf;

/// The folder of compiled kernels. `None` in builds without the feature, and without a cache folder of the user.
pub fn folder() -> Option<PathBuf> {
    if cfg!(feature = "kernel-cache") { Some(cache_folder()?.join("kernels")) } else { None }
}

/// Reads and writes compiled kernels in [`folder`] from now on. A program calls this before it uses a GPU. A folder that
/// cannot be written only means that kernels are compiled again.
pub fn enable() {
    #[cfg(all(feature = "kernel-cache", any(feature = "wgpu", feature = "cuda")))]
    if let (Some(folder), Some(name)) = (folder(), database::name()) {
        database::remove_old(&folder);
        database::open(folder, name);
    }
}

#[cfg(all(feature = "kernel-cache", any(feature = "wgpu", feature = "cuda")))]
mod database {
    use cubecl::config::cache::CacheConfig;
    use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
    use std::path::{Path, PathBuf};
    use std::time::{Duration, SystemTime};

    /// Age at which the database of another build is removed.
    const OLD: Duration = Duration::from_secs(60 * 60 * 24 * 30);

    /// Name of this build's database. `CubeCL`'s keys identify the code of a kernel only if the linker writes a build id,
    /// so each build has a separate database.
    pub fn name() -> Option<String> {
        let file = std::env::current_exe().ok()?.metadata().ok()?;
        let built = file.modified().ok()?.duration_since(SystemTime::UNIX_EPOCH).ok()?;
        Some(format!("firebrick-{}-{:x}-{:x}", env!("CARGO_PKG_VERSION"), file.len(), built.as_nanos()))
    }

    /// Removes databases that no build has written for a while.
    pub fn remove_old(folder: &Path) {
        let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let ours = files.filter(|file| file.file_name().to_string_lossy().starts_with("firebrick-"));
        for file in ours {
            let written = file.metadata().and_then(|metadata| metadata.modified());
            if written.is_ok_and(|written| written.elapsed().is_ok_and(|age| age > OLD)) {
                // another process may have removed it
                let _ = std::fs::remove_file(file.path());
            }
        }
    }

    pub fn open(folder: PathBuf, name: String) {
        let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
        config.compilation.cache = true;
        config.environment.name = name;
        config.environment.path = CacheConfig::Directory(folder);
        config.environment.records.keep_sessions = Some(1);
        if !CubeClRuntimeConfig::try_set(config) {
            tracing::warn!("this program has used a GPU before: compiled kernels are not kept");
        }
    }
}
