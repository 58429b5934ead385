//! Every source of the table, with its own errors where they can be made outside its crate.

use super::phrases::{TABLE, find};
use super::{MemoryErrorKind, OutOfMemory};
use crate::allocator::map_pages;
use burn_std::ExecutionError;
use std::error::Error;
use std::io;

/// Summary of an error: whose memory, and how much of it.
type Summary = (MemoryErrorKind, Option<u64>);

fn summary(what: Option<OutOfMemory>) -> Option<Summary> {
    what.map(|what| (what.kind, what.bytes))
}

/// Burn's form of an error of a backend: its text.
fn in_burn(message: &(impl ToString + ?Sized)) -> ExecutionError {
    ExecutionError::with_context(message.to_string())
}

/// More than an address space holds.
const TOO_MUCH: usize = 1 << 62;

#[test]
fn memory_that_the_system_refuses_is_recognised_by_type_and_by_text() {
    let mut values: Vec<u8> = Vec::new();
    let refused = values.try_reserve_exact(TOO_MUCH).expect_err("too much");
    let mapped = memmap2::MmapMut::map_anon(TOO_MUCH).expect_err("too much");
    let errors: [&(dyn Error + 'static); 3] = [&refused, &mapped, &io::Error::from(io::ErrorKind::OutOfMemory)];
    for error in errors {
        let expected = Some((MemoryErrorKind::System, None));
        assert_eq!(summary(OutOfMemory::in_error(error)), expected, "{error}");
        // a message that lost its type, as of a panic; of the last there is no more than the kind's own name
        if error.to_string() != "out of memory" {
            assert_eq!(summary(find(&error.to_string())), expected, "{error}");
        }
    }
    let pages = map_pages(TOO_MUCH).expect_err("too much");
    let expected = (MemoryErrorKind::System, Some(TOO_MUCH as u64));
    assert_eq!(summary(OutOfMemory::in_error(&pages)), Some(expected));
    assert!(pages.to_string().contains(&format!("{TOO_MUCH} bytes")));
}

#[test]
fn an_error_is_found_below_those_that_wrap_it() {
    let refused = Vec::<u8>::new().try_reserve_exact(TOO_MUCH).unwrap_err();
    let wrapped = io::Error::other(io::Error::other(refused));
    assert_eq!(summary(OutOfMemory::in_error(&wrapped)), Some((MemoryErrorKind::System, None)));
    let limit = io::Error::other(OutOfMemory::over_limit(3, 2));
    let memory = OutOfMemory::in_error(&limit);
    assert_eq!(memory, Some(OutOfMemory::over_limit(3, 2)));
}

#[test]
fn a_panic_is_recognised_by_its_text_whatever_string_it_holds() {
    for payload in [
        std::panic::catch_unwind(|| panic!("wgpu error: {}", "Out of Memory")),
        std::panic::catch_unwind(|| panic!("wgpu error: Out of Memory")),
    ] {
        let payload = payload.expect_err("a panic");
        let memory = OutOfMemory::in_panic(payload.as_ref()).expect("memory that ran out");
        assert_eq!(memory.kind, MemoryErrorKind::Driver);
        assert_eq!(memory.message, "wgpu error: Out of Memory");
    }
    assert_eq!(OutOfMemory::in_panic(&7), None);
}

/// Messages of sources whose errors cannot be made here, as their crates write them.
#[test]
fn messages_of_drivers_are_recognised() {
    let messages = [
        (
            "couldn't find resource for that handle: memory ManagedMemoryId { value: 7 } was never allocated: the reservation \
             behind it failed\nNo backtrace available",
            MemoryErrorKind::Pool,
        ),
        (
            "Unknown error happened during execution: cuMemAllocHost_v2 failed with error code: CUDA_ERROR_OUT_OF_MEMORY",
            MemoryErrorKind::Host,
        ),
        // its `Display` asks the driver for the second part
        ("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")", MemoryErrorKind::Driver),
        ("ERROR_OUT_OF_DEVICE_MEMORY", MemoryErrorKind::Driver),
        ("A device memory allocation has failed", MemoryErrorKind::Driver),
        ("ERROR_OUT_OF_HOST_MEMORY", MemoryErrorKind::Host),
        ("A host memory allocation has failed", MemoryErrorKind::Host),
        ("out of host memory", MemoryErrorKind::Host),
        ("memory allocation failed", MemoryErrorKind::System),
        ("Not enough memory resources are available to process this command. (os error 8)", MemoryErrorKind::System),
        ("called `unwrap()` on an `Err` value: OutOfMemory", MemoryErrorKind::Driver),
    ];
    for (message, kind) in messages {
        let burn = in_burn(message);
        assert_eq!(summary(OutOfMemory::in_error(&burn)), Some((kind, None)), "{message}");
    }
    let aborted = find("memory allocation of 4096 bytes failed");
    assert_eq!(summary(aborted), Some((MemoryErrorKind::System, Some(4096))));
}

#[test]
fn other_failures_are_not_taken_for_it() {
    for message in [
        "The device is poisoned: an illegal memory access was encountered",
        "couldn't find resource for that handle: memory 7 is not in any pool\nNo backtrace available",
        "the provided strides are not supported for this operation",
        "Parent device is lost",
        "index out of bounds: the len is 3 but the index is 7",
        "memory allocation of the cache belongs to block 3",
        "Too much shared memory requested.\nRequested 65536 bytes, maximum 49152 bytes available.",
        "the loss is NaN at step 3",
        "memory.train_tokens is 7, but a sequence has 9 tokens",
        "No space left on device (os error 28)",
        // names of functions in a backtrace
        "A validation error happened\nBacktrace:\n   0: firebrick::OutOfMemory::in_error\n             at src/out of memory.rs:3:5",
    ] {
        assert_eq!(OutOfMemory::in_error(&in_burn(message)), None, "{message}");
        assert_eq!(OutOfMemory::in_panic(&message.to_owned()), None, "{message}");
    }
    let missing = std::fs::read("out_of_memory").expect_err("there is none");
    assert_eq!(OutOfMemory::in_error(&missing), None);
}

#[test]
fn a_lost_device_is_told_with_the_memory_that_ran_out_before() {
    let reason = "Unknown: Out of memory";
    let lost = OutOfMemory::in_error(&ExecutionError::device_poisoned(reason)).unwrap();
    assert!(lost.device_lost);
    assert_eq!(lost.kind, MemoryErrorKind::Driver);
    assert!(lost.to_string().contains("the device was lost with it"));
    // as a panic it is text alone
    let text = ExecutionError::device_poisoned(reason).to_string();
    assert!(OutOfMemory::in_panic(&text).unwrap().device_lost);
    assert!(!OutOfMemory::in_error(&in_burn(reason)).unwrap().device_lost);
    let other = ExecutionError::device_poisoned("Unknown: Device is lost");
    assert_eq!(OutOfMemory::in_error(&other), None);
}

#[test]
fn messages_are_told_on_one_line_without_backtraces() {
    let message = "An IO error happened\nCaused by:\n  out of device memory allocating 12 bytes\n   0: a::frame\n             \
                   at src/a.rs:1:2\nAsked at:\nNo backtrace available";
    let memory = OutOfMemory::in_error(&in_burn(message)).unwrap();
    let expected = "An IO error happened Caused by: out of device memory allocating 12 bytes";
    assert_eq!(memory.message, expected);
    assert_eq!(memory.to_string(), format!("the device's memory pool could not reserve 12 bytes: {expected}"));
}

#[test]
fn every_phrase_can_be_found_and_names_its_origin() {
    for (i, phrase) in TABLE.iter().enumerate() {
        assert_eq!(phrase.words, phrase.words.to_lowercase());
        assert!(!phrase.origin.is_empty(), "{phrase:?}");
        // one that contains an earlier one would never decide
        let earlier = TABLE[..i].iter().find(|p| phrase.words.contains(p.words));
        assert!(earlier.is_none(), "{phrase:?} is behind {earlier:?}");
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod of_cubecl {
    use super::{MemoryErrorKind, OutOfMemory, Summary, find, in_burn, summary};
    use cubecl::server::{IoError, LaunchError, ServerError};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// `BackTrace`, which `CubeCL` does not export.
    fn empty<T: Default>() -> T {
        T::default()
    }

    const SIZE: u64 = 1 << 40;

    fn full() -> IoError {
        IoError::OutOfMemory { size: SIZE, backtrace: empty() }
    }

    fn unknown(description: &str) -> IoError {
        IoError::Unknown { description: description.to_owned(), backtrace: empty() }
    }

    fn io_errors() -> Vec<(IoError, Summary)> {
        let mapping = IoError::StorageMappingFailed { size: SIZE, source: Box::new(full()), backtrace: empty() };
        let big = IoError::BufferTooBig { size: SIZE, backtrace: empty() };
        let pages = IoError::PageSizesExhausted { size: SIZE, backtrace: empty() };
        let never = IoError::NotFound {
            backtrace: empty(),
            reason: "memory 7 was never allocated: the reservation behind it failed".into(),
        };
        let pinned = "cuMemAllocHost_v2 failed with error code: CUDA_ERROR_OUT_OF_MEMORY";
        vec![
            (full(), (MemoryErrorKind::Pool, Some(SIZE))),
            (mapping, (MemoryErrorKind::Pool, Some(SIZE))),
            (pages, (MemoryErrorKind::Pool, Some(SIZE))),
            (big, (MemoryErrorKind::Buffer, Some(SIZE))),
            (never, (MemoryErrorKind::Pool, None)),
            (unknown(pinned), (MemoryErrorKind::Host, None)),
        ]
    }

    fn launch() -> LaunchError {
        LaunchError::OutOfMemory { reason: "a kernel".into(), backtrace: empty() }
    }

    /// Error of reading a buffer that was never written.
    fn unwritten(root: ServerError) -> ServerError {
        let read = ServerError::Unwritten {
            failure: 3,
            claimed: 1,
            chain: vec!["skipped `fill`: it needed memory 7, which carried the failure".into()],
            root: Box::new(root),
            backtrace: empty(),
        };
        ServerError::Several { errors: vec![ServerError::TornDown, read], backtrace: empty() }
    }

    #[test]
    fn errors_say_the_same_by_type_as_text_of_burn_and_as_a_panic() {
        let io = io_errors().into_iter();
        let io = io.map(|(error, summary)| (ServerError::Io(error), summary));
        let launch = (ServerError::Launch(launch()), (MemoryErrorKind::Driver, None));
        for (error, expected) in io.chain([launch]) {
            let expected = Some(expected);
            for error in [error.clone(), unwritten(error)] {
                assert_eq!(summary(OutOfMemory::in_error(&error)), expected, "{error}");
                let burn = in_burn(&error);
                assert_eq!(summary(OutOfMemory::in_error(&burn)), expected, "{burn}");
                // as `Result::unwrap` does
                let panic = catch_unwind(AssertUnwindSafe(|| panic!("{error:?}")));
                let panic = panic.expect_err("an error");
                assert_eq!(summary(OutOfMemory::in_panic(panic.as_ref())), expected);
            }
        }
    }

    #[test]
    fn errors_below_a_servers_say_it_too() {
        for (error, expected) in io_errors() {
            assert_eq!(summary(OutOfMemory::in_error(&error)), Some(expected));
        }
        let memory = OutOfMemory::in_error(&launch()).map(|what| what.kind);
        assert_eq!(memory, Some(MemoryErrorKind::Driver));
    }

    #[test]
    fn other_errors_of_cubecl_are_not_taken_for_it() {
        let strides = IoError::UnsupportedStrides { backtrace: empty() };
        let forbidden = IoError::PageUpdateForbidden { size: SIZE, backtrace: empty() };
        let compiled = LaunchError::Unknown { reason: "no kernel".into(), backtrace: empty() };
        let errors = [
            ServerError::Io(strides),
            // a recorded graph: nothing was asked of the device
            ServerError::Io(forbidden),
            ServerError::Io(unknown("CUDA allocation error: CUDA_ERROR_INVALID_VALUE")),
            ServerError::Launch(compiled),
            ServerError::TornDown,
            ServerError::Skipped,
        ];
        for error in errors {
            assert_eq!(OutOfMemory::in_error(&error), None, "{error}");
            assert_eq!(find(&error.to_string()), None, "{error}");
        }
    }
}

#[cfg(feature = "wgpu")]
mod of_wgpu {
    use super::{MemoryErrorKind, OutOfMemory, find, in_burn, summary};
    use burn_std::ExecutionError;
    use cubecl::wgpu::wgpu::wgc::device::DeviceError;
    use cubecl::wgpu::wgpu::wgc::resource::CreateBufferError;
    use cubecl::wgpu::wgpu::{DeviceLostReason, Error, hal};

    #[test]
    fn errors_say_the_same_by_type_and_in_the_panic_that_cubecl_makes_of_them() {
        let source = Box::new(CreateBufferError::Device(DeviceError::OutOfMemory));
        let full = Error::OutOfMemory { source };
        let expected = Some((MemoryErrorKind::Driver, None));
        assert_eq!(summary(OutOfMemory::in_error(&full)), expected);
        assert_eq!(summary(OutOfMemory::in_panic(&format!("wgpu error: {full}"))), expected);
        let core = DeviceError::OutOfMemory;
        assert_eq!(summary(OutOfMemory::in_error(&core)), expected);
        assert_eq!(summary(find(&core.to_string())), expected);

        let big = CreateBufferError::MaxBufferSize { requested: 1 << 32, maximum: 1 << 31 };
        let (text, expected) = (big.to_string(), Some((MemoryErrorKind::Buffer, Some(1 << 32))));
        let refused = Error::Validation {
            description: format!("Validation Error\n\nCaused by:\n  {text}\n"),
            source: Box::new(big),
        };
        assert_eq!(summary(OutOfMemory::in_error(&refused)), expected);
        assert_eq!(summary(OutOfMemory::in_panic(&format!("wgpu error: {refused}"))), expected);
    }

    /// As `CubeCL`'s callback puts it: the reason and the message, which wgpu-core takes from wgpu-hal.
    #[test]
    fn a_device_that_is_lost_for_memory_is_told_from_one_that_is_lost_otherwise() {
        let lost = |error: hal::DeviceError| {
            let reason = format!("{:?}: {error}", DeviceLostReason::Unknown);
            OutOfMemory::in_error(&ExecutionError::device_poisoned(reason))
        };
        let memory = lost(hal::DeviceError::OutOfMemory).expect("memory that ran out");
        assert!(memory.device_lost && memory.kind == MemoryErrorKind::Driver);
        assert_eq!(lost(hal::DeviceError::Lost), None);
        assert_eq!(lost(hal::DeviceError::Unexpected), None);
        let error =
            Error::Internal { source: Box::new(DeviceError::Lost), description: "Parent device is lost".into() };
        assert_eq!(OutOfMemory::in_error(&error), None);
        assert_eq!(OutOfMemory::in_error(&in_burn(&error)), None);
    }
}
