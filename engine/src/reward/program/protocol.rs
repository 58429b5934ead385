//! Protocols of programs, and the meaning of their answers.

use super::pending::{Failure, ProgramResult};
use crate::process::Opening;
use crate::task::Score;
use firebrick_spec::json::to_text;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// Protocol of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    /// A function with TRL's signature: a group per call.
    Trl {
        /// Columns of the rows that it takes; `None`: all.
        columns: Option<Vec<String>>,
        /// Required columns.
        needs: Vec<String>,
        /// Its parameter for the objects of environments.
        environments: Option<Parameter>,
    },
    /// A function with verl's signature.
    Verl,
    /// A command: a line per completion, in either direction.
    Lines,
}

/// A parameter of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(super) enum Parameter {
    /// With a default.
    #[serde(rename = "takes")]
    Optional,
    /// Without a default.
    #[serde(rename = "needs")]
    Required,
}

/// Description of a function by its worker.
#[derive(Debug, Deserialize)]
struct Signature {
    style: String,
    needs: Vec<String>,
    columns: Option<Vec<String>>,
    environments: Option<Parameter>,
    #[serde(default)]
    modules: Vec<PathBuf>,
}

/// Answer of a function's worker to a call: results of its completions, or an error of all of them.
#[derive(Debug, Deserialize)]
struct Reply {
    id: u64,
    samples: Option<Vec<Item>>,
    error: Option<String>,
    #[serde(default)]
    modules: Vec<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Item {
    Scored {
        reward: Option<f64>,
        extra: Map<String, Value>,
    },
    Failed {
        error: String,
        #[serde(default)]
        infinite: bool,
    },
}

impl Protocol {
    /// Protocol of a function and the user's modules that it has imported, from the first line of its worker; or the
    /// reason that it cannot be used.
    pub fn of_function(line: &str) -> Result<(Self, Vec<PathBuf>), Failure> {
        match serde_json::from_str(line) {
            Ok(Opening::Refused { refused }) => Err(Failure::Misused(refused)),
            Ok(Opening::Ready(Signature { style, needs, columns, environments, modules })) => {
                let trl = Self::Trl { columns, needs, environments };
                Ok((if style == "trl" { trl } else { Self::Verl }, modules))
            }
            Err(_) => Err(Failure::Failed(format!("its worker wrote {}", shortened(line)))),
        }
    }
}

/// Results of call `id` of a function, of `len` completions, and the user's modules that it has imported meanwhile; or
/// the reason that the line is invalid.
pub(super) fn function_reply(line: &str, id: u64, len: usize) -> Result<(Vec<ProgramResult>, Vec<PathBuf>), String> {
    let reply = serde_json::from_str::<Reply>(line).ok().filter(|reply| reply.id == id);
    let results = reply.map(|reply| match (reply.samples, reply.error) {
        (Some(samples), None) if samples.len() == len => {
            Some((samples.into_iter().map(Item::result).collect(), reply.modules))
        }
        (None, Some(error)) => Some((vec![Err(Failure::Misused(error)); len], reply.modules)),
        _ => None,
    });
    results.flatten().ok_or_else(|| format!("it answered {}, which is not a valid answer", shortened(line)))
}

impl Item {
    fn result(self) -> ProgramResult {
        match self {
            Self::Scored { reward, extra } => Ok(Score { value: reward, extra, ..Score::default() }),
            Self::Failed { error, infinite: true } => Err(Failure::Infinite(error)),
            Self::Failed { error, infinite: false } => Err(Failure::Misused(error)),
        }
    }
}

/// Reads a line as each answer that a program may give, for fuzz targets.
#[doc(hidden)]
pub fn read_answer(line: &str) {
    let _ = (Protocol::of_function(line), function_reply(line, 0, 1), command_reply(line));
}

/// Completion of a command's line, and its result; or the reason that the line is invalid.
pub(super) fn command_reply(line: &str) -> Result<(u64, ProgramResult), String> {
    let invalid = |what: &str| Err(format!("it answered {}, {what}", shortened(line)));
    let Ok(mut answer) = serde_json::from_str::<Map<String, Value>>(line) else {
        return invalid("which is not a JSON object");
    };
    let Some(id) = answer.remove("id").and_then(|id| id.as_u64()) else {
        return invalid("which has no `id`");
    };
    if let Some(error) = answer.remove("error") {
        let text = error.as_str().map_or_else(|| error.to_string(), str::to_owned);
        return Ok((id, Err(Failure::Misused(text))));
    }
    let reward = match answer.remove("reward") {
        Some(Value::Null) => None,
        Some(Value::Number(number)) if number.as_f64().is_some_and(f64::is_finite) => number.as_f64(),
        _ => return invalid("whose `reward` is neither a number nor null"),
    };
    Ok((id, Ok(Score { value: reward, extra: answer, ..Score::default() })))
}

/// A completion as a line for a command.
pub(super) fn command_line(id: u64, sample: &Map<String, Value>) -> String {
    let mut line = Map::new();
    line.insert("id".to_owned(), json!(id));
    line.extend(sample.clone());
    format!("{}\n", to_text(&Value::Object(line)))
}

/// The beginning of a line, quoted.
fn shortened(line: &str) -> String {
    const MAX_CHARS: usize = 200;
    let line = line.trim_end();
    match line.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{:?}…", &line[..end]),
        None => format!("{line:?}"),
    }
}
