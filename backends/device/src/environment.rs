//! Environment variables that drivers read, and the user's cache folder.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Keeps Mesa from writing errors about a missing display server to stderr. A program calls this first, while it has
/// one thread.
///
/// Whenever Vulkan devices are listed, Mesa's device-selection layer asks libwayland which GPU the compositor uses.
/// Without `XDG_RUNTIME_DIR` (containers, services) libwayland finds no compositor and writes `error: XDG_RUNTIME_DIR
/// is invalid or not set in the environment.`, several times. An absolute path in `WAYLAND_DISPLAY` needs no
/// `XDG_RUNTIME_DIR`: this sets one that no compositor listens at, if neither variable names a compositor.
///
/// Does nothing in builds without wgpu, on systems other than Linux, and in a process that already has several threads,
/// where changing the environment is unsound.
pub fn without_display_server() {
    let concerned = cfg!(all(target_os = "linux", feature = "wgpu"));
    if concerned && !names_compositor(|name| std::env::var_os(name)) && has_one_thread() {
        // SAFETY: no other thread exists that could read the environment now.
        #[allow(unsafe_code, reason = "the process has one thread")]
        unsafe {
            std::env::set_var("WAYLAND_DISPLAY", "/dev/null");
        }
    }
}

/// Returns true if libwayland has an absolute path of a socket, or the socket itself.
fn names_compositor<S: AsRef<OsStr>>(variable: impl Fn(&str) -> Option<S>) -> bool {
    let absolute = |name| variable(name).is_some_and(|path| Path::new(&path).is_absolute());
    absolute("XDG_RUNTIME_DIR") || absolute("WAYLAND_DISPLAY") || variable("WAYLAND_SOCKET").is_some()
}

/// Returns true if this is the process's only thread, as far as Linux says.
fn has_one_thread() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

/// The folder for measurements and compiled kernels, by the platform's custom. `None` if no variable names one.
pub fn cache_folder() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME")
        .or_else(|| {
            let mac = cfg!(target_os = "macos");
            set("HOME").map(|home| home.join(if mac { "Library/Caches" } else { ".cache" }))
        })
        .or_else(|| set("LOCALAPPDATA"))?;
    Some(base.join("firebrick"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(variables: &[(&str, &'static str)]) -> bool {
        let find = |name: &str| variables.iter().find(|(key, _)| *key == name);
        names_compositor(|name| find(name).map(|(_, value)| *value))
    }

    #[test]
    fn a_compositor_is_named_by_an_absolute_path_or_a_socket() {
        assert!(!named(&[]));
        assert!(!named(&[("WAYLAND_DISPLAY", "wayland-0")]));
        assert!(!named(&[("XDG_RUNTIME_DIR", "run")]));
        assert!(named(&[("XDG_RUNTIME_DIR", "/run/user/1000")]));
        assert!(named(&[("WAYLAND_DISPLAY", "/run/wayland-0")]));
        assert!(named(&[("WAYLAND_SOCKET", "7")]));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_second_thread_is_seen() {
        std::thread::spawn(|| assert!(!has_one_thread())).join().expect("a thread that ends well");
    }
}
