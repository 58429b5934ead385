//! A tool call, independent of its format.

use serde::Serialize;
use serde_json::{Map, Value};

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ToolCall {
    /// The tool.
    pub name: String,
    /// Its arguments by name; numbers beyond 64 bits are [marks](firebrick_spec::json).
    pub arguments: Map<String, Value>,
}

/// The calls of a turn in order; malformed ones as the reason.
pub type ToolCalls = Vec<Result<ToolCall, String>>;
