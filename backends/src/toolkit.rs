//! What CUDA needs at run time beside a driver: the compiler (NVRTC) and the headers that kernels include. Without them a kernel
//! fails when it is first launched, on a thread of the backend's own; so a device is opened only where they are.

use std::path::{Path, PathBuf};

/// Headers of kernels: half precision, tensor cores, and what the latter include.
const HEADERS: [&str; 3] = ["cuda_fp16.h", "mma.h", "crt/mma.h"];

/// Where the backend looks for a toolkit: `CUDA_PATH`, or else the first of the usual places that is there.
fn folder(named: Option<PathBuf>, exists: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    if named.is_some() {
        return named;
    }
    let usual = ["/usr/local/cuda", "/opt/cuda"];
    let installed = usual.iter().map(Path::new).find(|path| exists(path));
    let packaged = || exists(Path::new("/usr/bin/nvcc")).then(|| Path::new("/usr"));
    installed.or_else(packaged).map(Path::to_path_buf)
}

/// What is missing of a toolkit, and what to do about it.
fn missing(folder: Option<&Path>, nvrtc: bool, exists: impl Fn(&Path) -> bool) -> Option<String> {
    let Some(folder) = folder else {
        return Some(
            "there is no CUDA toolkit in /usr/local/cuda or /opt/cuda; install one, or set CUDA_PATH to where it is".into(),
        );
    };
    let include = folder.join("include");
    if let Some(header) = HEADERS.iter().find(|header| !exists(&include.join(header))) {
        return Some(format!(
            "{} is missing, which kernels include; install the headers of a CUDA toolkit, or set CUDA_PATH to one that has them",
            include.join(header).display()
        ));
    }
    (!nvrtc).then(|| {
        format!(
            "libnvrtc.so is not found, which compiles kernels; add its folder ({}, say) to LD_LIBRARY_PATH",
            folder.join("lib64").display()
        )
    })
}

/// What is missing here, and what to do about it.
#[cfg(feature = "cuda")]
pub(crate) fn missing_here() -> Option<String> {
    // Windows finds its toolkit by itself, and lays it out otherwise
    if cfg!(windows) {
        return None;
    }
    let there = |path: &Path| path.exists();
    let folder = folder(std::env::var_os("CUDA_PATH").map(PathBuf::from), there);
    // SAFETY: it opens and closes a library of NVIDIA's, whose initialisers do nothing but that.
    #[allow(unsafe_code, reason = "opening a library runs code of it")]
    let nvrtc = unsafe { cudarc::nvrtc::sys::is_culib_present() };
    missing(folder.as_deref(), nvrtc, there)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_toolkit_is_the_one_that_is_named_or_the_first_that_is_there() {
        let only = |there: &'static str| move |path: &Path| path == Path::new(there);
        let named = Some(PathBuf::from("/elsewhere"));
        assert_eq!(folder(named.clone(), only("/opt/cuda")), named);
        for (there, found) in [("/opt/cuda", "/opt/cuda"), ("/usr/bin/nvcc", "/usr")] {
            assert_eq!(folder(None, only(there)), Some(PathBuf::from(found)));
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
        assert!(
            header.contains("/opt/cuda/include/crt/mma.h is missing"),
            "{header}"
        );
        let library = missing(toolkit, false, |_| true).expect("no compiler");
        assert!(
            library.contains("libnvrtc.so") && library.contains("/opt/cuda/lib64"),
            "{library}"
        );
    }
}
