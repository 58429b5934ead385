//! Words of a buffer as bytes.

/// The bytes of words.
pub(super) fn bytes(words: &[f32]) -> &[u8] {
    bytemuck::cast_slice(words)
}

/// [`bytes`] to write.
pub(super) fn bytes_mut(words: &mut [f32]) -> &mut [u8] {
    bytemuck::cast_slice_mut(words)
}
