//! What of a configuration its schema does not allow, in the words of this program.

use crate::config::schema::{objects, schema};
use jsonschema::error::{TypeKind, ValidationErrorKind as Kind};
use jsonschema::{ValidationError, Validator};
use serde_json::Value;
use std::sync::LazyLock;

/// The schema and what checks by it: made once, for it takes longer than a check.
static SCHEMA: LazyLock<(Value, Validator)> = LazyLock::new(|| {
    let schema = schema();
    let validator = jsonschema::validator_for(&schema);
    let validator = validator.unwrap_or_else(|e| unreachable!("the schema is one: {e}"));
    (schema, validator)
});

/// Most known names that a message lists.
const MOST_NAMES: usize = 40;

/// Something that the schema does not allow.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Violation {
    /// The JSON pointer of the value.
    pub pointer: String,
    /// Whether it is about the key and not about its value.
    pub at_key: bool,
    /// What was expected, what was found.
    pub message: String,
}

/// All of a configuration's.
pub(super) fn violations(config: &Value) -> Vec<Violation> {
    let mut found = Vec::new();
    for error in SCHEMA.1.iter_errors(config) {
        describe(&error, &mut found);
    }
    found
}

/// A pointer as people write paths: `task.rewards.0.kind`.
fn path(pointer: &str) -> String {
    pointer.trim_start_matches('/').replace('/', ".")
}

fn describe(error: &ValidationError<'_>, found: &mut Vec<Violation>) {
    let pointer = error.instance_path().as_str().to_owned();
    // what is missing is shown by the section that misses it
    let at_key = matches!(error.kind(), Kind::Required { .. });
    let mut push = |message: String| {
        found.push(Violation { pointer: pointer.clone(), at_key, message });
    };
    let key = path(&pointer);
    match error.kind() {
        Kind::AdditionalProperties { unexpected } => {
            let known = known_keys(error.schema_path().as_str());
            let section = if key.is_empty() { String::new() } else { format!("{key}: ") };
            found.extend(unexpected.iter().map(|name| Violation {
                pointer: format!("{pointer}/{}", name.replace('~', "~0").replace('/', "~1")),
                at_key: true,
                message: format!("{section}unknown key `{name}`{}", nearest(name, &known)),
            }));
        }
        Kind::Required { property } => {
            let name = property.as_str().unwrap_or_default();
            push(if key.is_empty() { format!("`{name}` is missing") } else { format!("{key}: `{name}` is missing") });
        }
        Kind::AnyOf { context } | Kind::OneOfNotValid { context } => {
            alternatives(error, context, found);
        }
        Kind::Type { kind } => {
            push(format!("{key} must be {}, found {}", types(kind).join(" or "), shown(error.instance())));
        }
        Kind::Constant { expected_value } => push(unknown_value(&key, error.instance(), &[word(expected_value)])),
        Kind::Enum { options } => {
            let names: Vec<String> = options.as_array().into_iter().flatten().map(word).collect();
            push(unknown_value(&key, error.instance(), &names));
        }
        Kind::Minimum { limit } => push(bound(&key, "at least", limit, error)),
        Kind::ExclusiveMinimum { limit } => push(bound(&key, "above", limit, error)),
        Kind::Maximum { limit } => push(bound(&key, "at most", limit, error)),
        Kind::ExclusiveMaximum { limit } => push(bound(&key, "below", limit, error)),
        Kind::Pattern { .. } => push(format!(
            "{key}: {} has an invalid format{}",
            shown(error.instance()),
            example(error.schema_path().as_str())
        )),
        _ => push(format!("{key}: {error}")),
    }
}

fn bound(key: &str, what: &str, limit: &Value, error: &ValidationError<'_>) -> String {
    format!("{key} must be {what} {limit}, found {}", word(error.instance()))
}

/// The alternative that a value comes closest to, or what all of them expect of it.
fn alternatives(error: &ValidationError<'_>, context: &[Vec<ValidationError<'static>>], found: &mut Vec<Violation>) {
    let here = error.instance_path().as_str();
    let fitting: Vec<_> = context.iter().filter(|branch| !wants_other_type(branch, here)).collect();
    if fitting.is_empty() {
        return wrong_type(error, context, found);
    }
    let other_name = |branch: &&&Vec<ValidationError<'static>>| {
        let is_name = |own: &ValidationError<'_>| matches!(own.kind(), Kind::Constant { .. });
        branch.iter().any(is_name)
    };
    let named: Vec<_> = fitting.iter().filter(|branch| !other_name(branch)).collect();
    if let Some(closest) = named.iter().min_by_key(|branch| branch.len()) {
        for own in **closest {
            describe(own, found);
        }
        return;
    }
    // every alternative wants another name: of the value, or of its kind
    let mut names = Vec::new();
    let mut at = None;
    for own in fitting.into_iter().flatten() {
        if let Kind::Constant { expected_value } = own.kind() {
            names.push(word(expected_value));
            at.get_or_insert((own.instance_path().as_str().to_owned(), own.instance()));
        }
    }
    if let Some((pointer, value)) = at {
        let message = unknown_value(&path(&pointer), value, &names);
        found.push(Violation { pointer, at_key: false, message });
    }
}

/// Whether an alternative, of whose errors these are, is one for values of another type, as are all alternatives that
/// it has itself.
fn wants_other_type(errors: &[ValidationError<'_>], here: &str) -> bool {
    let at_value = |own: &&ValidationError<'_>| own.instance_path().as_str() == here;
    errors.iter().filter(at_value).any(|own| match own.kind() {
        Kind::Type { .. } => true,
        Kind::AnyOf { context } | Kind::OneOfNotValid { context } => {
            context.iter().all(|own| wants_other_type(own, here))
        }
        _ => false,
    })
}

/// The types that alternatives and those below them want.
fn wanted_types(errors: &[ValidationError<'_>], wanted: &mut Vec<&'static str>) {
    for own in errors {
        match own.kind() {
            Kind::Type { kind } => wanted.extend(types(kind)),
            Kind::AnyOf { context } | Kind::OneOfNotValid { context } => {
                for own in context {
                    wanted_types(own, wanted);
                }
            }
            _ => {}
        }
    }
}

fn wrong_type(error: &ValidationError<'_>, context: &[Vec<ValidationError<'static>>], found: &mut Vec<Violation>) {
    let mut expected = Vec::new();
    for own in context {
        wanted_types(own, &mut expected);
    }
    expected.sort_by_key(|name| (*name == "null", *name));
    expected.dedup();
    let pointer = error.instance_path().as_str().to_owned();
    found.push(Violation {
        message: format!("{} must be {}, found {}", path(&pointer), expected.join(" or "), shown(error.instance())),
        pointer,
        at_key: false,
    });
}

fn unknown_value(key: &str, value: &Value, names: &[String]) -> String {
    let found = word(value);
    format!("{key}: unknown value `{found}`{}", nearest(&found, names))
}

/// The known name that a wrong one is closest to, and the known ones.
fn nearest(name: &str, known: &[String]) -> String {
    let closeness = |known: &&String| strsim::jaro_winkler(known, name);
    let best = known.iter().max_by(|a, b| closeness(a).total_cmp(&closeness(b)));
    let Some(best) = best else {
        return String::new();
    };
    let listed: Vec<&str> = known.iter().take(MOST_NAMES).map(String::as_str).collect();
    let more = if known.len() > MOST_NAMES { ", …" } else { "" };
    format!("; did you mean `{best}`? Known: {}{more}", listed.join(", "))
}

/// The keys of the section whose schema a violated keyword stands in.
fn known_keys(keyword: &str) -> Vec<String> {
    let section = keyword.rsplit_once('/').map_or("", |(section, _)| section);
    let schema = SCHEMA.0.pointer(section).unwrap_or(&Value::Null);
    let properties = objects(schema).into_iter().filter_map(|object| object.get("properties")?.as_object());
    properties.flat_map(|all| all.keys().cloned()).collect()
}

/// How a value is written whose pattern a keyword of the schema is.
fn example(keyword: &str) -> String {
    let own = keyword.rsplit_once('/').map_or("", |(own, _)| own);
    let examples = SCHEMA.0.pointer(own).and_then(|own| own["examples"].as_array());
    let words: Vec<String> = examples.into_iter().flatten().map(word).collect();
    if words.is_empty() {
        return String::new();
    }
    format!("; write it as in {}", words.join(" or "))
}

fn types(kind: &TypeKind) -> Vec<&'static str> {
    let name = |kind: jsonschema::JsonType| match kind.to_string().as_str() {
        "integer" => "an integer",
        "number" => "a number",
        "string" => "text",
        "boolean" => "true or false",
        "array" => "a list",
        "object" => "a section",
        _ => "null",
    };
    match kind {
        TypeKind::Single(kind) => vec![name(*kind)],
        TypeKind::Multiple(kinds) => {
            let mut names: Vec<_> = kinds.into_iter().map(name).collect();
            names.sort_by_key(|name| *name == "null");
            names
        }
    }
}

/// A value without quotation marks.
fn word(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// A value with what it is.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "nothing (null)".into(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => format!("the text {text:?}"),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "a section".into(),
    }
}
