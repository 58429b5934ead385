//! Profiles of devices: measured ones, kept in the user's cache folder, data sheets of well-known GPUs, assumptions for
//! the rest.

mod links;
mod measure;
mod rates;
mod timing;

use crate::{Error, Result, kernels};
use firebrick_device::device::{DeviceInfo, DeviceSpec};
use firebrick_spec::{Backend, DeviceProfile};
use std::path::PathBuf;

pub use links::{machine, measure_links};
pub use measure::measure;

/// The profile of an average device of a backend, with the kernels that models use there.
pub fn assumed(backend: Backend) -> DeviceProfile {
    DeviceProfile::assumed(backend).with_kernels(kernels::table(backend))
}

/// The profile of a device that was described: its cached measurement, a known GPU of its name, or an average one.
pub fn of(info: &DeviceInfo) -> DeviceProfile {
    let mut profile = cached(info)
        .or_else(|| DeviceProfile::known(&info.name))
        .unwrap_or_else(|| DeviceProfile { name: info.name.clone(), ..DeviceProfile::assumed(info.device.backend()) });
    if let DeviceSpec::Named { backend, .. } = info.device {
        profile.backend = backend;
    }
    if info.integrated {
        // a profile that knows the name alone, or an average one, has a link
        profile.host_link = None;
    }
    profile.kernels = kernels::table(profile.backend);
    profile.capacity_bytes = info.memory_bytes.or(profile.capacity_bytes);
    profile.largest_buffer = info.largest_buffer;
    profile
}

/// The profile of a device by its spelling, and what is known of it. A device that is not here, or not in this build,
/// gets the profile of an average one of its kind: a plan can be made for another machine.
pub fn look_up(device: DeviceSpec) -> (DeviceProfile, Option<DeviceInfo>) {
    match firebrick_device::device::open(device) {
        Ok((_, info)) => (of(&info), Some(info)),
        Err(e) => {
            tracing::warn!("{e}; planning for a typical device of its kind");
            (assumed(device.backend()), None)
        }
    }
}

/// Keeps a profile in the user's cache folder; says where.
///
/// # Errors
/// `Error::Profile` where there is no cache folder, or the file cannot be written.
pub fn save(profile: &DeviceProfile, device: DeviceSpec) -> Result<PathBuf> {
    let dir = folder().ok_or_else(|| Error::Profile {
        path: PathBuf::from("(no cache folder)"),
        detail: "none of XDG_CACHE_HOME, HOME and LOCALAPPDATA is set; set one of them".into(),
    })?;
    let path = dir.join(file_name(device, &profile.name));
    let failed =
        |e: std::io::Error| Error::Profile { path: path.clone(), detail: format!("{e}; is the folder writable?") };
    std::fs::create_dir_all(&dir).map_err(failed)?;
    let text = serde_json::to_string_pretty(profile).map_err(|e| failed(e.into()))?;
    std::fs::write(&path, text + "\n").map_err(failed)?;
    Ok(path)
}

/// A measurement that `firebrick devices --measure` left. A file that cannot be read is passed over with a warning.
fn cached(info: &DeviceInfo) -> Option<DeviceProfile> {
    let path = folder()?.join(file_name(info.device, &info.name));
    let text = std::fs::read_to_string(&path).ok()?;
    serde_json::from_str(&text)
        .inspect_err(|e| {
            tracing::warn!("{} is ignored ({e}); `firebrick devices --measure` writes it again", path.display());
        })
        .ok()
}

/// The folder that profiles are kept in.
fn folder() -> Option<PathBuf> {
    Some(firebrick_device::environment::cache_folder()?.join("devices"))
}

fn file_name(device: DeviceSpec, name: &str) -> String {
    let plain: String =
        format!("{device}-{name}").chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    format!("{plain}.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_name_holds_no_separators() {
        let name = file_name(DeviceSpec::CPU, "a/b c:d");
        assert_eq!(name, "cpu-a-b-c-d.json");
    }

    #[test]
    fn an_integrated_gpu_has_one_memory_with_the_host() {
        let of = |integrated| {
            of(&DeviceInfo {
                device: DeviceSpec::Named { backend: Backend::Wgpu, index: 0 },
                name: "a GPU that no table knows".into(),
                software: false,
                integrated,
                memory_bytes: None,
                largest_buffer: None,
                dtypes: Vec::new(),
            })
        };
        assert!(of(true).is_unified());
        assert!(!of(false).is_unified());
    }
}
