//! JSON that has to fit a schema.

use crate::task::TaskError;
use jsonschema::{PatternOptions, Validator};
use math_answer::concluded;
use serde_json::Value;
use std::fmt;
use std::sync::Arc;

/// Bytes of a JSON text that is read; a longer one does not fit.
const LONGEST: usize = 1 << 20;

/// A schema, compiled.
#[derive(Clone)]
pub(crate) struct Schema {
    validator: Arc<Validator>,
}

impl fmt::Debug for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Schema").finish_non_exhaustive()
    }
}

impl Schema {
    /// Compiles a schema, `setting` being the reward's name in messages. Nothing is fetched, and patterns are matched
    /// in linear time: those with look-around or back-references are refused.
    pub fn new(schema: &Value, setting: &str) -> Result<Self, TaskError> {
        let options = jsonschema::options().offline().with_pattern_options(PatternOptions::regex());
        let validator = options.build(schema).map_err(|error| {
            TaskError::config(format!("{setting}.schema"), format!("it is not a valid JSON schema: {error}"))
        })?;
        Ok(Self { validator: Arc::new(validator) })
    }

    /// The JSON of a completion: its last fenced block, or all that follows its reasoning.
    pub fn find(text: &str) -> &str {
        let text = concluded(text).trim();
        let Some(end) = text.rfind("```") else {
            return text;
        };
        let Some(start) = text[..end].rfind("```") else {
            return text;
        };
        let inside = &text[start + 3..end];
        let json = inside.strip_prefix("json").unwrap_or(inside);
        json.trim()
    }

    /// Whether a text is JSON that fits.
    pub fn fits(&self, json: &str) -> bool {
        if json.len() > LONGEST {
            return false;
        }
        serde_json::from_str(json).is_ok_and(|value: Value| self.validator.is_valid(&value))
    }
}
