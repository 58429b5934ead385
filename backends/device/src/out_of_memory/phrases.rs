//! Memory that ran out, told by words: the one place where text is read. It is for what arrives as a panic's message or
//! as a string, which is everything that Burn hands on: `burn_cubecl` turns `CubeCL`'s errors into text.

use super::kind::{MemoryErrorKind, OutOfMemory, one_line};
use crate::device_lost::is_lost;

/// Place of the requested bytes in a message. Words that need a number beside them are no sign without it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bytes {
    /// Directly before the words.
    Before,
    /// Directly after the words.
    After,
    /// Nowhere.
    Unsaid,
}

/// Words that say that memory ran out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Phrase {
    /// The words, in lower case.
    pub words: &'static str,
    /// Whose memory.
    pub kind: MemoryErrorKind,
    /// Place of the bytes.
    pub bytes: Bytes,
    /// The crate and the error that has these words.
    pub origin: &'static str,
}

const fn phrase(words: &'static str, kind: MemoryErrorKind, bytes: Bytes, origin: &'static str) -> Phrase {
    Phrase { words, kind, bytes, origin }
}

/// Every phrase with where it comes from. The first that a message contains decides, so the general ones stand last.
#[rustfmt::skip]
pub(super) const TABLE: [Phrase; 21] = [
    // CubeCL's memory management, which Burn hands on as the text of an `ExecutionError` when a tensor is read
    phrase("can't allocate buffer of size: ", MemoryErrorKind::Buffer, Bytes::After, "cubecl-runtime, IoError::BufferTooBig"),
    phrase("out of device memory allocating ", MemoryErrorKind::Pool, Bytes::After, "cubecl-runtime, IoError::OutOfMemory"),
    phrase(" bytes: every page size the memory tracks", MemoryErrorKind::Pool, Bytes::Before, "cubecl-runtime, IoError::PageSizesExhausted"),
    phrase("out-of-memory error happened during launch", MemoryErrorKind::Driver, Bytes::Unsaid, "cubecl-runtime, LaunchError::OutOfMemory"),
    // what is left of an allocation that failed in a panic of the device's thread
    phrase("was never allocated: the reservation behind it failed", MemoryErrorKind::Pool, Bytes::Unsaid, "cubecl-server, ErrorGraph::unallocated"),
    // CUDA: `CUresult`, which cubecl-cuda and cudarc print by name
    phrase("cumemallochost_v2 failed with error code: cuda_error_out_of_memory", MemoryErrorKind::Host, Bytes::Unsaid, "cubecl-cuda, pinned memory"),
    phrase("cuda_error_out_of_memory", MemoryErrorKind::Driver, Bytes::Unsaid, "cudarc, DriverError"),
    // wgpu: a panic of the handler of uncaptured errors that cubecl-wgpu registers
    phrase(" is greater than the maximum buffer size", MemoryErrorKind::Buffer, Bytes::Before, "wgpu-core, CreateBufferError::MaxBufferSize"),
    phrase("wgpu error: out of memory", MemoryErrorKind::Driver, Bytes::Unsaid, "wgpu, Error::OutOfMemory"),
    phrase("not enough memory left", MemoryErrorKind::Driver, Bytes::Unsaid, "wgpu-core, DeviceError::OutOfMemory"),
    // Vulkan: `vk::Result`, by its `Debug` and by its `Display`
    phrase("error_out_of_device_memory", MemoryErrorKind::Driver, Bytes::Unsaid, "ash, ERROR_OUT_OF_DEVICE_MEMORY"),
    phrase("a device memory allocation has failed", MemoryErrorKind::Driver, Bytes::Unsaid, "ash, ERROR_OUT_OF_DEVICE_MEMORY"),
    phrase("error_out_of_host_memory", MemoryErrorKind::Host, Bytes::Unsaid, "ash, ERROR_OUT_OF_HOST_MEMORY"),
    phrase("a host memory allocation has failed", MemoryErrorKind::Host, Bytes::Unsaid, "ash, ERROR_OUT_OF_HOST_MEMORY"),
    // the host: Rust's allocation errors, and those of the operating system
    phrase("memory allocation of ", MemoryErrorKind::System, Bytes::After, "std, handle_alloc_error"),
    phrase("memory allocation failed", MemoryErrorKind::System, Bytes::Unsaid, "std, TryReserveError; dyn-stack, AllocError"),
    phrase("cannot allocate memory", MemoryErrorKind::System, Bytes::Unsaid, "the system, ENOMEM"),
    phrase("not enough memory", MemoryErrorKind::System, Bytes::Unsaid, "the system, ERROR_NOT_ENOUGH_MEMORY"),
    phrase("out of host memory", MemoryErrorKind::Host, Bytes::Unsaid, "a driver"),
    // wgpu-hal (`DeviceError::OutOfMemory`), gpu-allocator, Metal, and drivers that are not known
    phrase("out of memory", MemoryErrorKind::Driver, Bytes::Unsaid, "wgpu-hal, DeviceError::OutOfMemory, or a driver"),
    // the name of a variant, as `unwrap` prints it
    phrase("outofmemory", MemoryErrorKind::Driver, Bytes::Unsaid, "the name of an error"),
];

/// Memory that ran out according to a message.
pub(super) fn find(message: &str) -> Option<OutOfMemory> {
    let message = one_line(message);
    let lower = message.to_ascii_lowercase();
    let (phrase, bytes) = TABLE.iter().find_map(|phrase| {
        let at = lower.find(phrase.words)?;
        let bytes = match phrase.bytes {
            Bytes::Before => Some(number_at_end(&lower[..at])?),
            Bytes::After => Some(number_at_start(&lower[at + phrase.words.len()..])?),
            Bytes::Unsaid => None,
        };
        Some((phrase, bytes))
    })?;
    Some(OutOfMemory { kind: phrase.kind, bytes, origin: phrase.origin, device_lost: is_lost(&message), message })
}

fn number_at_start(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit());
    text[..end.unwrap_or(text.len())].parse().ok()
}

fn number_at_end(text: &str) -> Option<u64> {
    let start = text.rfind(|c: char| !c.is_ascii_digit());
    text[start.map_or(0, |at| at + 1)..].parse().ok()
}
