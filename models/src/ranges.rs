//! Ranges of consecutive parts.

use std::ops::Range;

/// The ranges of parts of these lengths, one behind the other.
pub(crate) fn consecutive(lengths: impl IntoIterator<Item = usize>) -> impl Iterator<Item = Range<usize>> {
    let mut end = 0;
    lengths.into_iter().map(move |length| {
        end += length;
        end - length..end
    })
}
