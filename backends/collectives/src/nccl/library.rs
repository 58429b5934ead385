//! libnccl, opened at run time: the functions that are used, as `nccl.h` declares them. What cudarc declares of it
//! looks for `libnccl.so`, which only NVIDIA's package for developers has, and not for `libnccl.so.2`.

#![allow(unsafe_code, reason = "NCCL is a library of C")]

use libloading::Library as Opened;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

/// The names of the library's file.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The first version whose communicators can be told not to block, 2.14.
const OLDEST: c_int = 21_400;

/// `ncclSuccess`.
pub(super) const SUCCESS: c_int = 0;
/// `ncclInProgress`.
pub(super) const IN_PROGRESS: c_int = 7;
/// `ncclUint8`.
pub(super) const BYTE: c_int = 1;

/// Bytes of a unique id.
pub(super) const ID: usize = 128;

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub [u8; ID]);

/// `ncclComm_t`.
pub(super) type Comm = *mut c_void;
/// `cudaStream_t`.
pub(super) type Stream = *mut c_void;

/// `ncclConfig_t` as of 2.14. Later versions have more fields; they read as many bytes as `size` says, and take what
/// the version lacks for unset.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

impl Config {
    /// Calls return before they are through.
    pub fn not_blocking() -> Self {
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: OLDEST as c_uint, blocking: 0 }
    }
}

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident = $name:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions of a library that stays open.
        pub(super) struct Library {
            /// As `ncclGetVersion` counts.
            pub version: c_int,
            $($(#[$doc])* pub $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Library {
            /// Looks all functions up.
            fn of(opened: &'static Opened, version: c_int) -> Result<Self, String> {
                $(
                    // SAFETY: the type is that of `nccl.h`, which has not changed since `OLDEST`; the library is never
                    // closed.
                    let $field = unsafe {
                        opened.get::<unsafe extern "C" fn($($argument),*) -> $result>($name.as_bytes())
                    };
                    let $field = *$field.map_err(|_| {
                        format!("{} {} has no {}; {}", NAMES[0], written(version), $name, INSTALL)
                    })?;
                )*
                Ok(Self { version, $($field,)* })
            }
        }
    };
}

functions! {
    get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> c_int;
    comm_init_rank_config = "ncclCommInitRankConfig": fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> c_int;
    comm_finalize = "ncclCommFinalize": fn(Comm) -> c_int;
    comm_destroy = "ncclCommDestroy": fn(Comm) -> c_int;
    comm_abort = "ncclCommAbort": fn(Comm) -> c_int;
    comm_get_async_error = "ncclCommGetAsyncError": fn(Comm, *mut c_int) -> c_int;
    get_error_string = "ncclGetErrorString": fn(c_int) -> *const c_char;
    get_last_error = "ncclGetLastError": fn(Comm) -> *const c_char;
    all_gather = "ncclAllGather": fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> c_int;
    send = "ncclSend": fn(*const c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
    recv = "ncclRecv": fn(*mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
    group_start = "ncclGroupStart": fn() -> c_int;
    group_end = "ncclGroupEnd": fn() -> c_int;
}

/// Advice on how to get a library.
const INSTALL: &str = "install NCCL 2.14 or newer (from NVIDIA's repository: apt-get install libnccl2), or add its folder to LD_LIBRARY_PATH \
                       (of the Python package nvidia-nccl-cu12: site-packages/nvidia/nccl/lib)";

/// The library of this process.
pub(super) fn open() -> Result<&'static Library, String> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    LIBRARY
        .get_or_init(|| {
            let opened = NAMES.map(|name| {
                // SAFETY: its initialisers only initialise it.
                unsafe { Opened::new(name) }
            });
            let mut errors = Vec::new();
            for (name, opened) in NAMES.iter().zip(opened) {
                match opened {
                    Ok(opened) => return checked(Box::leak(Box::new(opened))),
                    Err(error) => errors.push(format!("{name}: {error}")),
                }
            }
            let why = &errors[0];
            Err(format!("NCCL's library cannot be opened ({why}); {INSTALL}"))
        })
        .as_ref()
        .map_err(Clone::clone)
}

/// The functions of a library that is new enough.
fn checked(opened: &'static Opened) -> Result<Library, String> {
    let mut version: c_int = 0;
    // SAFETY: `nccl.h` declares it so since NCCL 2.0; it writes one number.
    let code = unsafe {
        opened.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion").map(|ask| ask(&raw mut version))
    };
    match code {
        Ok(SUCCESS) if version >= OLDEST => Library::of(opened, version),
        Ok(SUCCESS) => Err(format!(
            "NCCL {} is too old: its communicators block, and a rank would wait for ever for one that is gone; {INSTALL}",
            written(version)
        )),
        Ok(code) => Err(format!("ncclGetVersion gives {code}; {INSTALL}")),
        Err(error) => Err(format!("{}: {error}; {INSTALL}", NAMES[0])),
    }
}

/// A version as people write it. Up to 2.8 `nccl.h` counts 1000, 100, 1, and later 10000, 100, 1.
pub(super) fn written(version: c_int) -> String {
    let major = if version < 10_000 { 1_000 } else { 10_000 };
    let minor = version % major / 100;
    format!("{}.{minor}.{}", version / major, version % 100)
}

/// The file that this process has in its memory, where the system tells.
pub(super) fn path() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let mut files = maps.lines().filter_map(|line| {
        let file = PathBuf::from(&line[line.find('/')?..]);
        let name = file.file_name()?.to_str()?;
        name.starts_with("libnccl.so").then_some(file)
    });
    files.next()
}

impl Library {
    /// NCCL's text of a code, and of its last error.
    pub fn text(&self, code: c_int, comm: Option<Comm>) -> String {
        // SAFETY: both give texts that end with a zero and live as long as the library, or nothing.
        let text = |text: *const c_char| unsafe {
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        // SAFETY: the communicator, where there is one, has not been given back.
        let (error, last) = unsafe {
            (text((self.get_error_string)(code)), text((self.get_last_error)(comm.unwrap_or(std::ptr::null_mut()))))
        };
        let error = error.unwrap_or_else(|| format!("code {code}"));
        match last.map(|last| last.trim().to_owned()) {
            Some(last) if !last.is_empty() => format!("{error}: {last}"),
            _ => error,
        }
    }

    /// A new id for a group of ranks.
    pub fn unique_id(&self) -> Result<UniqueId, String> {
        let mut id = UniqueId([0; ID]);
        // SAFETY: it writes an id.
        match unsafe { (self.get_unique_id)(&raw mut id) } {
            SUCCESS => Ok(id),
            code => Err(self.text(code, None)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_written_as_nvidia_writes_them() {
        for (version, text) in
            [(2_804, "2.8.4"), (21_003, "2.10.3"), (21_400, "2.14.0"), (22_105, "2.21.5"), (22_902, "2.29.2")]
        {
            assert_eq!(written(version), text);
        }
    }

    #[test]
    fn the_configuration_is_laid_out_as_nccl_reads_it() {
        let config = Config::not_blocking();
        assert_eq!((size_of::<Config>(), config.size), (24, 24));
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
        assert_eq!(size_of::<UniqueId>(), 128);
    }
}
