//! The error that memory ran out.

use std::fmt;

/// Whose memory ran out, or which bound an allocation exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryErrorKind {
    /// `CubeCL`'s pool of device memory could not reserve a buffer: the driver gave it no page, or it keeps track of no
    /// more.
    Pool,
    /// The driver of a device refused device memory outside the pool, or without saying for what.
    Driver,
    /// The driver of a device got no host memory: pinned pages, or what it needs for itself.
    Host,
    /// The system or its allocator refused host memory.
    System,
    /// One buffer is larger than the device allows: it would not fit an empty device either.
    Buffer,
    /// The run used more than its `memory.limit`.
    Limit {
        /// The limit, in bytes.
        allowed: u64,
    },
}

/// Memory ran out: what was refused, and what its source says of it. Work that needs less memory may succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Whose memory it was.
    pub kind: MemoryErrorKind,
    /// Bytes asked for, where the source says so; with [`MemoryErrorKind::Limit`], the bytes in use.
    pub bytes: Option<u64>,
    /// The crate and the error, or the system's call, that reported it.
    pub origin: &'static str,
    /// Message of the source, on one line and without backtraces. Empty for [`MemoryErrorKind::Limit`].
    pub message: String,
    /// The device was lost with it: nothing else runs on it in this process.
    pub device_lost: bool,
}

impl OutOfMemory {
    /// More bytes were in use than `memory.limit` allows.
    pub fn over_limit(in_use: u64, allowed: u64) -> Self {
        Self {
            kind: MemoryErrorKind::Limit { allowed },
            bytes: Some(in_use),
            origin: "memory.limit",
            message: String::new(),
            device_lost: false,
        }
    }

    /// The system refused host memory of so many bytes, where they are known.
    pub fn system(bytes: Option<u64>, origin: &'static str, error: &(dyn std::error::Error + 'static)) -> Self {
        Self { kind: MemoryErrorKind::System, bytes, origin, message: one_line(&error.to_string()), device_lost: false }
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.bytes.map(|bytes| format!("{bytes} bytes"));
        let some = bytes.as_deref();
        match self.kind {
            MemoryErrorKind::Pool => {
                let some = some.unwrap_or("more memory");
                write!(f, "the device's memory pool could not reserve {some}")
            }
            MemoryErrorKind::Driver => {
                let some = some.unwrap_or("memory");
                write!(f, "the device's driver refused {some}")
            }
            MemoryErrorKind::Host => {
                let some = some.unwrap_or("memory");
                write!(f, "the device's driver could not get {some} of the host")
            }
            MemoryErrorKind::System => {
                let some = some.unwrap_or("memory");
                write!(f, "the system refused {some}")
            }
            MemoryErrorKind::Buffer => match some {
                Some(some) => write!(f, "a buffer of {some} is larger than the device allows"),
                None => f.write_str("a buffer is larger than the device allows"),
            },
            MemoryErrorKind::Limit { allowed } => {
                let some = some.unwrap_or("more");
                write!(f, "{some} were in use, and memory.limit is {allowed} bytes")
            }
        }?;
        if self.device_lost {
            f.write_str(", and the device was lost with it")?;
        }
        if !self.message.is_empty() {
            write!(f, ": {}", self.message)?;
        }
        Ok(())
    }
}

impl std::error::Error for OutOfMemory {}

/// A message on one line, without the backtraces that `CubeCL` and Burn add: names of functions there are no report.
pub fn one_line(message: &str) -> String {
    let lines = message.lines().map(str::trim);
    lines.filter(|line| !line.is_empty() && !is_backtrace(line)).collect::<Vec<&str>>().join(" ")
}

/// Returns true if a line is a backtrace's heading, one of its frames (`12: name`), or the place of one (`at
/// file.rs:3:5`).
fn is_backtrace(line: &str) -> bool {
    let heading = ["Backtrace", "Backtrace:", "Asked at:", "No backtrace available"];
    let frame = line
        .split_once(": ")
        .is_some_and(|(number, _)| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()));
    heading.contains(&line) || frame || line.starts_with("at ") && line.contains(".rs:")
}
