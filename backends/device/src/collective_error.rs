//! Errors between ranks.

use crate::out_of_memory::{MemoryErrorKind, OutOfMemory};

/// Begin of the last words of a rank that hung.
pub const HUNG: &str = "it hung";

/// Result of a collective.
pub type Result<T, E = CollectiveError> = std::result::Result<T, E>;

/// Why a rank failed, as the others are told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failure {
    /// The rank in the whole world; set on the way.
    pub rank: usize,
    /// Its error.
    pub message: String,
    /// True if memory ran out.
    pub out_of_memory: bool,
    /// Bytes in use and allowed, where a limit was exceeded.
    pub limit: Option<(u64, u64)>,
    /// True if its device is lost.
    pub device_lost: bool,
    /// True if the user can mend it.
    pub users: bool,
}

impl Failure {
    /// An error that says this.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), ..Self::default() }
    }

    /// Memory that ran out.
    pub fn from_oom(what: &OutOfMemory) -> Self {
        let limit = match what.kind {
            MemoryErrorKind::Limit { allowed } => Some((what.bytes.unwrap_or(allowed), allowed)),
            _ => None,
        };
        Self { limit, out_of_memory: true, device_lost: what.device_lost, ..Self::new(what.to_string()) }
    }

    /// The memory that ran out on that rank, as an error of this one.
    pub fn memory(&self) -> Option<OutOfMemory> {
        let kind = match self.limit {
            Some((used, allowed)) => OutOfMemory::over_limit(used, allowed),
            None => OutOfMemory {
                kind: MemoryErrorKind::Driver,
                bytes: None,
                origin: "another rank",
                message: format!("rank {}: {}", self.rank, self.message),
                device_lost: false,
            },
        };
        self.out_of_memory.then_some(OutOfMemory { device_lost: self.device_lost, ..kind })
    }
}

/// Errors between ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// Two ranks are in different operations, or in one with different lengths or types.
    #[error(
        "the ranks disagree: rank {rank} is in {ours}, rank {other} in {theirs}; start every rank with the same program, configuration \
         and data"
    )]
    Mismatch {
        /// The lower of the two ranks.
        rank: usize,
        /// Its operation.
        ours: String,
        /// The other rank.
        other: usize,
        /// The other rank's operation.
        theirs: String,
    },
    /// Ranks failed, and all know it: the group can continue.
    #[error("{}", failures(.0))]
    Failed(Vec<Failure>),
    /// A rank is gone or has given up.
    #[error("rank {rank} is gone: {message}")]
    Lost {
        /// The rank, in the whole world.
        rank: usize,
        /// Its last words.
        message: String,
    },
    /// A rank did not come.
    #[error(
        "rank {rank} has waited {seconds} s for rank {other} in {operation}; see what that rank does, and whether the network between \
         them works"
    )]
    Deadline {
        /// The rank that waited.
        rank: usize,
        /// The rank that did not come.
        other: usize,
        /// Seconds of the deadline.
        seconds: u64,
        /// The operation.
        operation: String,
    },
    /// NCCL, or the GPU that it works on, failed on a rank.
    #[error("rank {rank}: {operation} over NCCL: {message}")]
    Nccl {
        /// The rank, in the whole world.
        rank: usize,
        /// The operation.
        operation: String,
        /// Message of NCCL or the device, and what to do.
        message: String,
    },
    /// Values that an operation cannot take.
    #[error("{0}")]
    Values(String),
    /// The transport failed.
    #[error("MPI: {0}")]
    Transport(String),
}

impl CollectiveError {
    /// Returns true if the user can mend it by changing what they asked for: all ranks that failed say so.
    pub fn is_user_error(&self) -> bool {
        matches!(self, Self::Failed(failures) if failures.iter().all(|failure| failure.users))
    }

    /// Returns true if a rank hung: it did not come in time, or its watchdog says so.
    pub fn is_hang(&self) -> bool {
        match self {
            Self::Deadline { .. } => true,
            Self::Lost { message, .. } => message.starts_with(HUNG),
            Self::Failed(failures) => failures.iter().any(|failure| failure.message.contains(HUNG)),
            _ => false,
        }
    }

    /// The failure to act on where ranks have failed: the largest shortage of memory, or else the lowest rank's error.
    /// Equal on every rank.
    pub fn failure(&self) -> Option<&Failure> {
        let Self::Failed(failures) = self else {
            return None;
        };
        // an error that is no shortage cannot be answered by a cheaper plan
        let other = failures.iter().find(|failure| !failure.out_of_memory);
        let key = |failure: &&Failure| (failure.device_lost, failure.limit, usize::MAX - failure.rank);
        other.or_else(|| failures.iter().max_by_key(key))
    }
}

fn failures(failures: &[Failure]) -> String {
    let each = failures.iter().map(|failure| format!("rank {} failed: {}", failure.rank, failure.message));
    each.collect::<Vec<_>>().join("; ")
}
