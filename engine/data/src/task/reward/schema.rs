//! JSON that must match a schema.

use super::Rule;
use crate::task::{Reading, Score, TaskError};
use jsonschema::PatternOptions;
use math_answer::concluded;
use serde_json::Value;

/// Longest JSON text, in bytes; a longer one is invalid.
const MAX_BYTES: usize = 1 << 20;

/// The JSON of a completion matches a schema. Nothing is fetched, and patterns match in linear time: those with
/// look-around or back-references are rejected.
pub(super) fn rule(schema: &Value, setting: &str) -> Result<Rule, TaskError> {
    let options = jsonschema::options().offline().with_pattern_options(PatternOptions::regex());
    let validator = options.build(schema).map_err(|error| {
        TaskError::config(format!("{setting}.schema"), format!("it is not a valid JSON schema: {error}"))
    })?;
    let score = move |json: &str| {
        let value = Some(json).filter(|json| json.len() <= MAX_BYTES).map(serde_json::from_str::<Value>);
        let fits = matches!(value, Some(Ok(value)) if validator.is_valid(&value));
        let reading = Reading { parsed: Some(Reading::short(json)), ..Reading::default() };
        Score { reading: Some(reading), ..Score::paid(fits) }
    };
    Ok(Rule::of_completion(move |case| Ok(score(find(case.text)))).after_thought())
}

/// The JSON of a completion: its last fenced block, or all text after its reasoning.
fn find(text: &str) -> &str {
    let text = concluded(text).trim();
    let Some((text_before, _)) = text.rsplit_once("```") else { return text };
    let Some((_, inside)) = text_before.rsplit_once("```") else { return text };
    inside.strip_prefix("json").unwrap_or(inside).trim()
}
