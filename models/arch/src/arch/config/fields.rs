//! Typed fields of a JSON object.

use firebrick_spec::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;

/// Bound of sizes, so that products of two fit 64 bits.
const MAX_SIZE: u64 = 1 << 31;

/// Reads typed fields of a JSON object, remembering where it came from for messages.
pub(super) struct Fields<'a> {
    pub path: &'a Path,
    pub map: &'a Map<String, Value>,
}

impl Fields<'_> {
    pub fn error(&self, detail: String) -> Error {
        Error::Config { path: self.path.to_owned(), detail }
    }

    pub fn present(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub fn typed<T>(&self, key: &str, kind: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        self.present(key)
            .map(|v| read(v).ok_or_else(|| self.error(format!("`{key}` must be {kind}, found {v}"))))
            .transpose()
    }

    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        let kind = "a positive whole number below 2^31";
        self.typed(key, kind, |v| v.as_u64().filter(|n| (1..MAX_SIZE).contains(n)).map(|n| n as usize))
    }

    pub fn required(&self, key: &str) -> Result<usize> {
        self.size(key)?.ok_or_else(|| self.error(format!("`{key}` is missing; expected a positive integer")))
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a finite number", Value::as_f64)
    }

    /// A list with one entry for each layer.
    pub fn by_layer(&self, key: &str, layers: usize) -> Result<Option<Vec<Value>>> {
        let list = self.typed(key, "a list", |v| v.as_array().cloned())?;
        match list {
            Some(list) if list.len() < layers => {
                Err(self.error(format!("`{key}` has {} entries for {layers} layers", list.len())))
            }
            list => Ok(list),
        }
    }

    pub fn object(&self, key: &str) -> Result<Option<Map<String, Value>>> {
        self.typed(key, "an object", |v| v.as_object().cloned())
    }

    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }
}
