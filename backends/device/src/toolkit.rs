//! Requirements of CUDA at run time besides the driver: the compiler (NVRTC) and the headers that kernels include.
//! Without them a kernel fails at its first launch, on a thread of the backend, so a device is opened only if they are
//! found.

use std::path::{Path, PathBuf};

/// Headers of kernels: half precision, tensor cores, and what the latter include.
const HEADERS: [&str; 3] = ["cuda_fp16.h", "mma.h", "crt/mma.h"];

/// A toolkit, and what it lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolkit {
    /// Its folder.
    pub folder: Option<PathBuf>,
    /// Missing parts, with what to do; nothing where kernels can be compiled.
    pub missing: Option<String>,
}

/// The toolkit of a machine whose files `exists` knows: the one in `named` (`CUDA_PATH`), or else in one of the usual
/// folders. `nvrtc` says whether the compiler's library is found, given the toolkit's folder.
pub fn inspect(
    named: Option<PathBuf>,
    exists: impl Fn(&Path) -> bool + Copy,
    nvrtc: impl FnOnce(&Path) -> bool,
) -> Toolkit {
    let folder = folder(named, exists);
    let nvrtc = folder.as_deref().is_some_and(nvrtc);
    let missing = missing(folder.as_deref(), nvrtc, exists);
    Toolkit { folder, missing }
}

/// The toolkit that the backend uses: `CUDA_PATH`, or else the first of the usual folders that exists.
fn folder(named: Option<PathBuf>, exists: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    if named.is_some() {
        return named;
    }
    let usual = ["/usr/local/cuda", "/opt/cuda"];
    let installed = usual.iter().map(Path::new).find(|path| exists(path));
    let packaged = || exists(Path::new("/usr/bin/nvcc")).then(|| Path::new("/usr"));
    installed.or_else(packaged).map(Path::to_path_buf)
}

/// The missing part of a toolkit, and how to install it.
fn missing(folder: Option<&Path>, nvrtc: bool, exists: impl Fn(&Path) -> bool) -> Option<String> {
    let Some(folder) = folder else {
        return Some("no CUDA toolkit found in /usr/local/cuda or /opt/cuda; install one, or set CUDA_PATH".into());
    };
    let include = folder.join("include");
    if let Some(header) = HEADERS.iter().find(|header| !exists(&include.join(header))) {
        return Some(format!(
            "{} not found, which the kernels include; install the headers of the CUDA toolkit, or set CUDA_PATH to a toolkit that has them",
            include.join(header).display()
        ));
    }
    (!nvrtc).then(|| {
        format!(
            "libnvrtc.so not found, which compiles the kernels; add its folder (for example {}) to LD_LIBRARY_PATH",
            folder.join("lib64").display()
        )
    })
}

/// The missing part of this machine's toolkit, and how to install it.
#[cfg(feature = "cuda")]
pub(crate) fn missing_here() -> Option<String> {
    // on Windows the toolkit is found by itself and has another layout
    if cfg!(windows) {
        return None;
    }
    let there = |path: &Path| path.exists();
    // SAFETY: it opens and closes a library of NVIDIA's, whose initialisers only initialise it.
    #[allow(unsafe_code, reason = "opening a library runs its initialisers")]
    let nvrtc = unsafe { cudarc::nvrtc::sys::is_culib_present() };
    inspect(std::env::var_os("CUDA_PATH").map(PathBuf::from), there, |_| nvrtc).missing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_toolkit_is_the_one_that_is_named_or_the_first_that_is_there() {
        let only = |there: &'static str| move |path: &Path| path == Path::new(there);
        let named = Some(PathBuf::from("/elsewhere"));
        assert_eq!(folder(named.clone(), only("/opt/cuda")), named);
        for (there, expected) in [("/opt/cuda", "/opt/cuda"), ("/usr/bin/nvcc", "/usr")] {
            assert_eq!(folder(None, only(there)), Some(PathBuf::from(expected)));
        }
        assert_eq!(folder(None, |_| false), None);
    }

    #[test]
    fn what_is_missing_is_named_with_what_to_do() {
        let toolkit = Some(Path::new("/opt/cuda"));
        assert_eq!(missing(toolkit, true, |_| true), None);
        let none = missing(None, true, |_| true).expect("no toolkit");
        assert!(none.contains("CUDA_PATH"), "{none}");
        let without = |path: &Path| !path.ends_with("crt/mma.h");
        let header = missing(toolkit, true, without).expect("a header short");
        assert!(header.contains("/opt/cuda/include/crt/mma.h not found"), "{header}");
        let library = missing(toolkit, false, |_| true).expect("no compiler");
        assert!(library.contains("libnvrtc.so") && library.contains("/opt/cuda/lib64"), "{library}");
    }
}
