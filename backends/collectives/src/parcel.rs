//! Bytes on their way between ranks: some of their own, or a part of values that several messages share without a copy.

use super::Flat;
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Content of a message.
#[derive(Clone)]
pub(super) enum Parcel {
    /// Bytes of its own.
    Own(Vec<u8>),
    /// These bytes of values, which nobody changes while a message has them.
    Part(Arc<Flat>, Range<usize>),
}

impl Deref for Parcel {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Part(values, bytes) => &values.as_bytes()[bytes.clone()],
        }
    }
}

impl From<Vec<u8>> for Parcel {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Own(bytes)
    }
}

impl PartialEq for Parcel {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Parcel {}

impl fmt::Debug for Parcel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}
