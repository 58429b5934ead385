//! Headers that ranks exchange before the data of an operation.

use super::{CollectiveError, Element, Failure, Result};
use std::fmt;

/// Says that a message is a header of this version: ranks of different builds are told apart.
const MAGIC: u32 = 0x4642_0001;

/// Bytes of a header without its message.
const FIXED: usize = 48;

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationKind {
    /// [`all_gather`](super::Collective::all_gather)
    AllGather,
    /// [`reduce_scatter`](super::Collective::reduce_scatter)
    ReduceScatter,
    /// [`all_reduce`](super::Collective::all_reduce)
    AllReduce,
    /// [`all_to_all`](super::Collective::all_to_all)
    AllToAll,
    /// [`send`](super::Collective::send) and [`receive`](super::Collective::receive)
    Send,
    /// [`exchange`](super::Collective::exchange)
    Exchange,
    /// [`split`](super::Collective::split)
    Split,
    /// [`agree`](super::Collective::agree)
    Agree,
}

impl OperationKind {
    /// Number of kinds.
    pub const COUNT: usize = 8;

    /// All of them.
    pub const ALL: [Self; Self::COUNT] = [
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllReduce,
        Self::AllToAll,
        Self::Send,
        Self::Exchange,
        Self::Split,
        Self::Agree,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
            Self::AllToAll => "all_to_all",
            Self::Send => "send",
            Self::Exchange => "exchange",
            Self::Split => "split",
            Self::Agree => "agree",
        }
    }

    /// Returns true if every rank gives the same number of values.
    fn has_one_length(self) -> bool {
        !matches!(self, Self::Exchange | Self::Agree)
    }
}

/// Next operation of a rank, or its failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: OperationKind,
    pub element: Element,
    /// Operations of the group before this one.
    pub sequence: u64,
    /// Bytes that the rank gives.
    pub bytes: u64,
    pub failure: Option<Failure>,
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, element, sequence, bytes, .. } = self;
        let values = bytes / element.bytes() as u64;
        match kind {
            OperationKind::Send => write!(f, "a send of {values} {}", element.name()),
            OperationKind::Split | OperationKind::Agree => {
                write!(f, "{} (operation {sequence})", kind.name())
            }
            _ => write!(f, "{} of {values} {} (operation {sequence})", kind.name(), element.name()),
        }
    }
}

impl Header {
    /// Returns true if another rank's header belongs to the same operation.
    pub fn agrees(&self, other: &Self) -> bool {
        self.kind == other.kind
            && self.element == other.element
            && self.sequence == other.sequence
            && (!self.kind.has_one_length() || self.bytes == other.bytes)
    }

    pub fn encode(&self) -> Vec<u8> {
        let failure = self.failure.as_ref();
        let (used, allowed) = failure.and_then(|f| f.limit).unwrap_or_default();
        let flags = failure.map_or(0, |f| {
            let flags = [true, f.out_of_memory, f.limit.is_some(), f.device_lost, f.users];
            flags.iter().enumerate().fold(0, |mask, (bit, set)| mask | u8::from(*set) << bit)
        });
        let mut bytes = Vec::with_capacity(FIXED);
        bytes.extend(MAGIC.to_le_bytes());
        bytes.extend([self.kind as u8, self.element as u8, flags, 0]);
        for number in [self.sequence, self.bytes, used, allowed, 0] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(failure.map_or(&[][..], |f| f.message.as_bytes()));
        bytes
    }

    /// The header that a rank sent.
    pub fn decode(bytes: &[u8], from: usize) -> Result<Self> {
        let foreign = || {
            CollectiveError::Transport(format!(
                "rank {from} sent {} bytes that are not a header of this version: build the same program on every \
                 machine",
                bytes.len()
            ))
        };
        let magic = bytes.get(..4).is_some_and(|magic| magic == MAGIC.to_le_bytes());
        if !magic || bytes.len() < FIXED {
            return Err(foreign());
        }
        let number = |at: usize| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(eight)
        };
        let kind = OperationKind::ALL.get(usize::from(bytes[4])).copied().ok_or_else(foreign)?;
        let element = Element::of_code(bytes[5]).ok_or_else(foreign)?;
        let flag = |bit: u8| bytes[6] & (1 << bit) != 0;
        let failure = flag(0).then(|| Failure {
            rank: from,
            message: String::from_utf8_lossy(&bytes[FIXED..]).into_owned(),
            out_of_memory: flag(1),
            limit: flag(2).then(|| (number(24), number(32))),
            device_lost: flag(3),
            users: flag(4),
        });
        Ok(Self { kind, element, sequence: number(8), bytes: number(16), failure })
    }
}
