//! Out-of-memory errors of devices, recognised by their text: Burn hands on what drivers and allocators report as a message.

/// Parts of messages that report memory running out, in lower case, `-` and `_` as spaces.
const SIGNS: [&str; 11] = [
    // CUDA, Vulkan, wgpu, and the standard library's allocation errors
    "out of memory",
    "outofmemory",
    "out of host memory",
    "memory allocation",
    "allocation failed",
    "not enough memory",
    // CubeCL's memory management: `IoError` of cubecl-runtime, and `ErrorGraph::unallocated` of cubecl-server
    "out of device memory",
    "can't allocate buffer of size",
    "every page size the memory tracks still holds",
    "the reservation behind it failed",
    // wgpu-core, which bounds the size of one buffer
    "is greater than the maximum buffer size",
];

/// Whether a message of a device, its driver or an allocator says that memory ran out, or that one allocation is larger than
/// the device allows: work that needs less memory may succeed.
#[must_use]
pub fn is_out_of_memory(message: &str) -> bool {
    let message = message.to_lowercase().replace(['-', '_'], " ");
    SIGNS.iter().any(|sign| message.contains(sign))
}

#[cfg(test)]
mod tests {
    use super::is_out_of_memory;

    /// Messages as they are written, with where they come from.
    const MESSAGES: [(&str, &str); 14] = [
        (
            "cubecl-runtime 0.12, IoError::OutOfMemory",
            "An IO error happened\nCaused by:\n  out of device memory allocating 1099511627776 bytes\nNo backtrace available",
        ),
        (
            "cubecl-runtime 0.12, IoError::BufferTooBig",
            "An IO error happened\nCaused by:\n  can't allocate buffer of size: 1099511627776\nNo backtrace available",
        ),
        (
            "cubecl-runtime 0.12, IoError::PageSizesExhausted",
            "Can't allocate 4096 bytes: every page size the memory tracks still holds live allocations\nNo backtrace available",
        ),
        (
            "cubecl-server 0.12, ErrorGraph::unallocated",
            "couldn't find resource for that handle: memory ManagedMemoryId { value: 7 } was never allocated: the reservation \
             behind it failed\nNo backtrace available",
        ),
        (
            "cubecl-runtime 0.12, IoError::StorageMappingFailed",
            "couldn't map storage for a deferred allocation of 4096 bytes\nCaused by:\n  out of device memory allocating 4096 \
             bytes\nNo backtrace available",
        ),
        (
            "cubecl-runtime 0.12, LaunchError::OutOfMemory",
            "A launch error happened\nCaused by:\n  An out-of-memory error happened during launch\nCaused by:\n  a kernel\n\
             Backtrace\nNo backtrace available",
        ),
        (
            "cubecl-cuda 0.12, the storage of pinned memory",
            "Unknown error happened during execution: cuMemAllocHost_v2 failed with error code: CUDA_ERROR_OUT_OF_MEMORY",
        ),
        (
            "cudarc 0.19, DriverError",
            "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")",
        ),
        ("wgpu 30, Error::OutOfMemory", "Out of Memory"),
        (
            "wgpu-core 30, DeviceError::OutOfMemory",
            "Not enough memory left.",
        ),
        (
            "wgpu-core 30, CreateBufferError::MaxBufferSize",
            "Buffer size 4294967296 is greater than the maximum buffer size (2147483648)",
        ),
        ("ash, Debug of vk::Result", "ERROR_OUT_OF_DEVICE_MEMORY"),
        (
            "ash, Display of vk::Result",
            "A host memory allocation has failed",
        ),
        (
            "std, TryReserveError",
            "memory allocation failed because the memory allocator returned an error",
        ),
    ];

    #[test]
    fn what_drivers_and_allocators_say_when_memory_runs_out_is_recognised() {
        for (origin, message) in MESSAGES {
            assert!(is_out_of_memory(message), "{origin}: {message}");
        }
    }

    #[test]
    fn other_failures_are_not_taken_for_it() {
        for message in [
            "The device is poisoned: an illegal memory access was encountered",
            "couldn't find resource for that handle: memory 7 is not in any pool\nNo backtrace available",
            "the provided strides are not supported for this operation",
            "Parent device is lost",
            "index out of bounds: the len is 3 but the index is 7",
        ] {
            assert!(!is_out_of_memory(message), "{message}");
        }
    }

    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    #[test]
    fn errors_that_cubecl_makes_are_recognised() {
        use cubecl::server::{IoError, LaunchError, ServerError};
        // `BackTrace`, which cubecl does not export
        fn empty<T: Default>() -> T {
            T::default()
        }
        let size = 1 << 40;
        let io = [
            IoError::OutOfMemory {
                size,
                backtrace: empty(),
            },
            IoError::BufferTooBig {
                size,
                backtrace: empty(),
            },
            IoError::PageSizesExhausted {
                size,
                backtrace: empty(),
            },
        ];
        let launch = LaunchError::OutOfMemory {
            reason: "a kernel".into(),
            backtrace: empty(),
        };
        let errors = io.map(ServerError::Io).into_iter();
        for error in errors.chain([ServerError::Launch(launch)]) {
            for message in [error.to_string(), format!("{error:?}")] {
                assert!(is_out_of_memory(&message), "{message}");
            }
        }
    }
}
