//! Violations of a schema by a value, in the words of this program.

use crate::schema::{SAME_AS, alternatives, schema_of};
use regex::Regex;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

/// Words of a schema that bound a number, and how they are said.
pub(crate) const BOUNDS: [(&str, &str); 4] =
    [("minimum", "at least"), ("exclusiveMinimum", "above"), ("maximum", "at most"), ("exclusiveMaximum", "below")];

/// Most known names that a message lists.
const MAX_NAMES: usize = 40;

/// Something that a schema does not allow.
#[derive(Clone, Debug, PartialEq)]
pub struct Violation {
    /// JSON pointer of the value.
    pub pointer: String,
    /// True if it is about the key and not about its value.
    pub at_key: bool,
    /// Expectation and finding; it begins with the dotted path.
    pub message: String,
}

impl Violation {
    /// The dotted path of the value, and the message without it.
    pub fn parts(&self) -> (String, &str) {
        let path = path(&self.pointer);
        let detail = self.message.strip_prefix(&path).unwrap_or(&self.message);
        (path, detail.trim_start_matches([':', ' ']))
    }
}

/// All violations of a schema of [`schema_of`]: unknown keys, wrong types, unknown values, numbers out of their range,
/// and keys that have no effect beside the others.
pub fn violations(schema: &Value, value: &Value) -> Vec<Violation> {
    walk(schema, value, "")
}

/// The violations of settings in code, whose NaN and infinities are null.
pub fn violations_of<T: JsonSchema + Serialize>(settings: &T) -> Vec<Violation> {
    violations(&schema_of::<T>(), &serde_json::to_value(settings).unwrap_or_default())
}

/// True if a value turns something on: it is not null, false or 0.
pub fn is_on(value: &Value) -> bool {
    !matches!(value, Value::Null | Value::Bool(false)) && value.as_f64() != Some(0.0)
}

/// A pointer as people write paths: `task.rewards.0.kind`.
fn path(pointer: &str) -> String {
    pointer.trim_start_matches('/').replace('/', ".")
}

fn below(pointer: &str, name: &str) -> String {
    format!("{pointer}/{}", name.replace('~', "~0").replace('/', "~1"))
}

/// A mistake in the value at a pointer.
fn wrong(pointer: &str, what: &str) -> Violation {
    Violation { pointer: pointer.to_owned(), at_key: false, message: format!("{}{what}", path(pointer)) }
}

/// A mistake in the section at a pointer, shown at a key.
fn at_key(pointer: String, section: &str, what: &str) -> Violation {
    let colon = if section.is_empty() { "" } else { ": " };
    Violation { pointer, at_key: true, message: format!("{}{colon}{what}", path(section)) }
}

/// A key that a section lacks: what is wrong is the section.
fn missing(section: &str, name: &str) -> Violation {
    let pointer = if section.is_empty() { below(section, name) } else { section.to_owned() };
    at_key(pointer, section, &format!("`{name}` is missing"))
}

fn walk(schema: &Value, value: &Value, at: &str) -> Vec<Violation> {
    let options = alternatives(schema);
    let fitting: Vec<&Value> = options.iter().copied().filter(|one| takes(one, value)).collect();
    match (value, fitting.as_slice()) {
        (_, []) => {
            let expected = type_names(&options).join(" or ");
            vec![wrong(at, &format!(" must be {expected}, found {}", shown(value)))]
        }
        (Value::String(text), _) => word_of(&fitting, text, at).into_iter().collect(),
        (Value::Object(map), _) => section_of(&fitting, map, at),
        (Value::Array(list), _) => closest(fitting.iter().map(|one| entries(one, list, at))),
        (Value::Number(_), [first, ..]) => bound(first, value, at).into_iter().collect(),
        _ => Vec::new(),
    }
}

/// The violations of the alternative that a value comes closest to.
fn closest(options: impl Iterator<Item = Vec<Violation>>) -> Vec<Violation> {
    options.min_by_key(Vec::len).unwrap_or_default()
}

fn types(schema: &Value) -> Vec<&str> {
    match &schema["type"] {
        Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
        kind => kind.as_str().into_iter().collect(),
    }
}

/// True if a value has a type that a schema takes; one without a type takes any.
fn takes(schema: &Value, value: &Value) -> bool {
    let types = types(schema);
    let is_of = |kind: &&str| match *kind {
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => value.is_null(),
    };
    types.is_empty() || types.iter().any(is_of)
}

fn type_names(options: &[&Value]) -> Vec<&'static str> {
    let name = |kind| match kind {
        "integer" => "an integer",
        "number" => "a number",
        "string" => "text",
        "boolean" => "true or false",
        "array" => "a list",
        "object" => "a section",
        _ => "null",
    };
    let mut names: Vec<_> = options.iter().flat_map(|one| types(one)).map(name).collect();
    names.sort_by_key(|name| (*name == "null", *name));
    names.dedup();
    names
}

fn bound(schema: &Value, value: &Value, at: &str) -> Option<Violation> {
    let number = value.as_f64()?;
    let broken = BOUNDS.into_iter().find_map(|(word, words)| {
        let limit = &schema[word];
        let bound = limit.as_f64()?;
        let holds = match word {
            "minimum" => number >= bound,
            "exclusiveMinimum" => number > bound,
            "maximum" => number <= bound,
            _ => number < bound,
        };
        (!holds).then(|| format!("be {words} {limit}, found {value}"))
    });
    let excluded = || (schema["not"]["const"] == *value).then(|| format!("not be {value}"));
    let because = schema["x-because"].as_str().map_or_else(String::new, |because| format!(": {because}"));
    broken.or_else(excluded).map(|what| wrong(at, &format!(" must {what}{because}")))
}

/// A text: one of some names, or any that has the form of a pattern.
fn word_of(fitting: &[&Value], text: &str, at: &str) -> Option<Violation> {
    let is_free = |one: &&&Value| one.get("const").is_none() && one.get("enum").is_none();
    let Some(free) = fitting.iter().find(is_free) else {
        return unknown_value(at, text, &names(fitting));
    };
    let pattern = free["pattern"].as_str().and_then(|pattern| Regex::new(pattern).ok())?;
    let examples: Vec<&str> = free["examples"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let as_in = if examples.is_empty() { String::new() } else { format!("; write it as in {}", examples.join(" or ")) };
    let what = format!(": the text {text:?} has an invalid format{as_in}");
    (!pattern.is_match(text)).then(|| wrong(at, &what))
}

/// The names that alternatives take.
fn names(fitting: &[&Value]) -> Vec<String> {
    let of = |one: &&Value| {
        let listed = one["enum"].as_array().into_iter().flatten().filter_map(Value::as_str);
        one["const"].as_str().into_iter().chain(listed).map(str::to_owned).collect::<Vec<_>>()
    };
    fitting.iter().flat_map(of).collect()
}

fn unknown_value(at: &str, text: &str, names: &[String]) -> Option<Violation> {
    let is_known = names.iter().any(|name| name == text);
    (!is_known).then(|| wrong(at, &format!(": unknown value `{text}`{}", nearest(text, names))))
}

/// The known name that a wrong one is closest to, and the known ones.
fn nearest(name: &str, known: &[String]) -> String {
    let closeness = |known: &&String| strsim::jaro_winkler(known, name);
    let best = known.iter().max_by(|a, b| closeness(a).total_cmp(&closeness(b)));
    let Some(best) = best else { return String::new() };
    let listed: Vec<&str> = known.iter().take(MAX_NAMES).map(String::as_str).collect();
    let more = if known.len() > MAX_NAMES { ", …" } else { "" };
    format!("; did you mean `{best}`? Known: {}{more}", listed.join(", "))
}

fn entries(schema: &Value, list: &[Value], at: &str) -> Vec<Violation> {
    if let Some(violation) = count(schema, ["minItems", "maxItems"], list.len(), at) {
        return vec![violation];
    }
    let entries = list.iter().enumerate();
    entries.flat_map(|(nr, entry)| walk(&schema["items"], entry, &below(at, &nr.to_string()))).collect()
}

/// The bound of a number of entries that is not kept.
fn count(schema: &Value, [least, most]: [&str; 2], len: usize, at: &str) -> Option<Violation> {
    let bound = |word: &str| Some(schema[word].as_u64()? as usize);
    let few = bound(least).filter(|least| len < *least).map(|least| ("at least", least));
    let (words, limit) = few.or_else(|| bound(most).filter(|most| len > *most).map(|most| ("at most", most)))?;
    let entries = if limit == 1 { "entry" } else { "entries" };
    Some(wrong(at, &format!(" must have {words} {limit} {entries}, found {len}")))
}

/// A section: of those that a key of it names by a constant, the one with that name.
fn section_of(fitting: &[&Value], map: &Map<String, Value>, at: &str) -> Vec<Violation> {
    let tag = |one: &Value| {
        let properties = one["properties"].as_object()?;
        properties.iter().find_map(|(name, key)| Some((name.clone(), key["const"].as_str()?.to_owned())))
    };
    let is_named =
        |one: &&&Value| tag(one).is_none_or(|(name, kind)| map.get(&name).is_some_and(|named| *named == *kind));
    if fitting.iter().any(|one| is_named(&one)) {
        return closest(fitting.iter().filter(is_named).map(|one| section(one, map, at)));
    }
    let (names, kinds): (Vec<String>, Vec<String>) = fitting.iter().filter_map(|one| tag(one)).unzip();
    match map.get(&names[0]) {
        Some(kind) => unknown_value(&below(at, &names[0]), &word(kind), &kinds).into_iter().collect(),
        None => vec![missing(at, &names[0])],
    }
}

fn section(schema: &Value, map: &Map<String, Value>, at: &str) -> Vec<Violation> {
    let none = Map::new();
    let properties = schema["properties"].as_object().unwrap_or(&none);
    let mut violations = Vec::from_iter(count(schema, ["minProperties", "maxProperties"], map.len(), at));
    for (name, value) in map {
        let key = below(at, name);
        match properties.get(name) {
            Some(schema_of_key) => {
                let mut wrongs = walk(schema_of_key, value, &key);
                for wrong in wrongs.iter_mut().filter(|wrong| wrong.at_key && !at.is_empty()) {
                    let inner = wrong.pointer.strip_prefix(&key).and_then(|inner| inner.strip_prefix('/'));
                    if let Some(inner) = inner.filter(|inner| properties.contains_key(*inner)) {
                        wrong.message = format!("{}.{inner}: unknown key; set it only in `{}`", path(&key), path(at));
                    }
                }
                let idle = idle(schema_of_key, value, properties, map).filter(|_| wrongs.is_empty());
                violations.extend(wrongs);
                violations.extend(
                    idle.map(|(other, with)| wrong(&key, &format!(" requires {}{with}", path(&below(at, other))))),
                );
            }
            None if schema["additionalProperties"] == false => {
                let known: Vec<String> = properties.keys().cloned().collect();
                violations.push(at_key(key, at, &format!("unknown key `{name}`{}", nearest(name, &known))));
            }
            None => violations.extend(walk(&schema["additionalProperties"], value, &key)),
        }
    }
    let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let absent = required.filter(|name| !map.contains_key(*name));
    violations.extend(absent.map(|name| missing(at, name)));
    violations
}

/// The key that another must go with to have an effect, and what it should be, where it is not that and the other is
/// set to something else than its default. Null turns something off, and is never refused.
fn idle<'s>(
    key: &'s Value,
    value: &Value,
    properties: &Map<String, Value>,
    map: &Map<String, Value>,
) -> Option<(&'s str, String)> {
    let with = key.get("x-with")?;
    let named = with.as_object().and_then(|with| with.iter().next());
    let other = named.map_or_else(|| with.as_str().unwrap_or_default(), |(other, _)| other.as_str());
    let schema = properties.get(other)?;
    let current = map.get(other).unwrap_or(&schema["default"]);
    if value.is_null() || is_default(key, value) {
        return None;
    }
    let Some(values) = named.and_then(|(_, values)| values.as_array()) else {
        let above = if current.is_number() || schema["default"].is_number() { " above 0" } else { "" };
        return (!is_on(current)).then(|| (other, above.to_owned()));
    };
    let known = alternatives(schema).into_iter().find(|one| one["const"] == *current);
    let current = known.and_then(|one| one.get(SAME_AS)).unwrap_or(current);
    let values: Vec<String> = values.iter().map(word).collect();
    let is_one = values.iter().any(|value| *value == word(current));
    (!is_one).then(|| (other, format!(": {}; it is {}", one_of(&values), word(current))))
}

/// Names joined as `a, b or c`.
fn one_of(names: &[String]) -> String {
    match names {
        [rest @ .., last] if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        names => names.concat(),
    }
}

fn is_default(key: &Value, value: &Value) -> bool {
    match (value, &key["default"]) {
        (Value::Object(map), _) => map.iter().all(|(name, value)| is_default(&key["properties"][name], value)),
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (value, default) => value == default,
    }
}

/// A value without quotation marks.
pub(crate) fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// A value with what it is.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "nothing (null)".into(),
        Value::String(text) => format!("the text {text:?}"),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "a section".into(),
        plain => plain.to_string(),
    }
}
