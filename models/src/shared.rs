//! Serde's form of a field that is shared, for `#[serde(with = …)]`: that of what it holds.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::sync::Arc;

/// Writes the value behind the `Arc`.
///
/// # Errors
/// Those of the value.
pub fn serialize<T: Serialize, S: Serializer>(value: &Option<Arc<T>>, to: S) -> Result<S::Ok, S::Error> {
    value.as_deref().serialize(to)
}

/// Reads one, shared with nothing yet.
///
/// # Errors
/// Those of the value.
pub fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<Arc<T>>, D::Error> {
    Ok(Option::deserialize(from)?.map(Arc::new))
}
