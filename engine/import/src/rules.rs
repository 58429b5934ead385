//! The tables of keys (`rules/*.txt`): conversions of another engine's keys.
//!
//! A table is lines of text. `#` begins a comment; two spaces separate the parts of a line.
//!
//! ```text
//! NAME: sentence                 a sentence; `$NAME` inserts it in others
//! name? guards -- sentence       a condition, and the reason why a key is not needed if it fails; one of several lines
//!                                with the same name suffices
//! = name                         a named rule, with its cases below it
//! [a. b.]                        sections: prefixes of the keys below
//! + guards  A=B C=D              defaults of the engine; the first of several lines applies
//! - guards  why                  files that are not imported
//! keys  outcome                  the outcome of keys
//! keys                           keys with cases: the first case with true guards applies
//!   guards  outcome
//! ```
//!
//! Spaces separate keys; `a.{b,c}` is two keys, and `a.**` all keys below `a`. An exact key goes before `a.**`. The
//! outcomes, which a `condition?` may precede:
//!
//! - `set A B=C -- note`: Firebrick's key `A` gets the value (`A.*`: the key's last name in section `A`), `B` the value
//!   `C`, or one of the value's forms `<text>`, `<number>`, `<number-1>`, `<whole>`, `<whole+1>`, `<float>`, `<on>`,
//!   `<plain>`, `<value>`
//! - `not_needed why`, `cannot why`. In a sentence `{}` is the text of the value, `{value}` its JSON, `{whole}` its
//!   integer, `{path}` its path relative to the configuration, `{@key}` the text of another key
//! - the name of a rule or of a function in Rust, with its argument (`$1` in a rule)
//!
//! Guards; `!` negates one:
//!
//! - `null`, `off`, `true`, `false`, `text`, `number`, `whole`, `count` (above 0), `many` (none of -1, 0, 1), `float` (a
//!   float type), `float:f32`, `number>0`, `whole=-1`, `is:true` (exactly that value), `a|*b` (one of these words, or a
//!   text with such an end), `has:a` (a text that contains it), `*` (any)
//! - `@key`: another key is true; `@key:guard`: the guard holds for another key's value; `@.key`: a key of the same
//!   section; `{a,b}`: any of the keys
//! - `written`, `written:key`: a file sets the key to a value; `given:a|b`: to a value or an unresolved one;
//!   `below:a.|b.`: a key with that prefix; `same:key`, `equal:key`, `same_float:key`: another key has the same text,
//!   integer, float type; `above:key`: the value exceeds that of another key, 512 by default
//! - `?name`: a condition, or a function in Rust; `?name:a`: a function with an argument

use super::facts::{Facts, truth};
use super::key_mapping::{MappedKey, SourceKey, absent, cannot, float, not_needed, plain, set_all};
use super::literal;
use serde_json::Value;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Rules of all engines.
const SHARED: &str = include_str!("../rules/shared.txt");

/// A function of a table, by its name.
pub(super) enum Function {
    /// Conversion of a key.
    By(fn(&SourceKey) -> MappedKey),
    /// Conversion of a key with an argument, usually a Firebrick key.
    To(fn(&SourceKey, &str) -> MappedKey),
    /// Condition on a key.
    Holds(fn(&SourceKey) -> bool),
    /// Condition with an argument.
    Is(fn(&SourceKey, &str) -> bool),
}

pub(super) type Functions = &'static [(&'static str, Function)];

/// Imports of modules with functions of tables.
pub(super) mod prelude {
    pub(crate) use super::{Functions, functions};
    pub(crate) use crate::key_mapping::{MappedKey, SourceKey, absent, cannot, not_needed, off, plain, set, set_all};
}

/// A table of functions by their names.
macro_rules! functions {
    ($($kind:ident: $($name:ident)+;)+) => {
        &[$($((stringify!($name), $crate::rules::Function::$kind($name))),+),+]
    };
}
pub(super) use functions;

type Number = fn(&SourceKey) -> Option<f64>;
type Comparison = fn(f64, f64) -> bool;
type Guard = Arc<dyn Fn(&SourceKey) -> bool + Send + Sync>;
type Decide = Arc<dyn Fn(&SourceKey) -> MappedKey + Send + Sync>;
type ValueOf = Arc<dyn Fn(&SourceKey) -> Value + Send + Sync>;

/// Rule of a key.
pub(super) struct Rule {
    decide: Decide,
    /// True if no value of the key is needed.
    pub is_not_needed: bool,
}

impl Rule {
    pub fn convert(&self, source: &SourceKey) -> MappedKey {
        (self.decide)(source)
    }
}

/// The rules of an engine by the names of their keys, and its defaults.
#[derive(Default)]
pub(super) struct Rules {
    by_key: BTreeMap<String, Rule>,
    defaults: Vec<(Guard, String, Value)>,
    refused: Vec<(Guard, String)>,
}

impl Rules {
    /// Reads tables.
    pub fn read(tables: &[&str], functions: &[Functions]) -> Result<Self, String> {
        let mut reader = Reader { functions, ..Reader::default() };
        for table in std::iter::once(&SHARED).chain(tables) {
            reader.table(table)?;
        }
        Ok(reader.rules)
    }

    /// The rule of a key, and its name: the exact one, or the longest `a.**` that covers it.
    pub fn find(&self, key: &str) -> Option<(&str, &Rule)> {
        let sections = std::iter::successors(Some(key), |key| key.rsplit_once('.').map(|(section, _)| section));
        let mut below = sections.map(|section| format!("{section}.**"));
        let rule = self.by_key.get_key_value(key).or_else(|| below.find_map(|name| self.by_key.get_key_value(&name)));
        rule.map(|(name, rule)| (name.as_str(), rule))
    }

    /// Defaults of the engine under these facts.
    pub fn defaults(&self, facts: &Facts) -> Vec<(String, Value)> {
        let nothing = SourceKey { key: "", value: &Value::Null, facts };
        let defaults = self.defaults.iter().filter(|(holds, ..)| holds(&nothing));
        defaults.map(|(_, key, value)| (key.clone(), value.clone())).collect()
    }

    /// Reason why the files' run is not imported, if it is not.
    pub fn refusal(&self, facts: &Facts) -> Option<String> {
        let nothing = SourceKey { key: "", value: &Value::Null, facts };
        let (_, why) = self.refused.iter().find(|(holds, _)| holds(&nothing))?;
        Some(filled(why, &nothing))
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_key.keys().map(String::as_str)
    }
}

/// `a.{b,c}` as `a.b` and `a.c`.
fn expanded(name: &str) -> Vec<String> {
    let parts = name.split_once('{').and_then(|(start, rest)| Some((start, rest.split_once('}')?)));
    let Some((start, (middle, end))) = parts else {
        return vec![name.to_owned()];
    };
    middle.split(',').flat_map(|part| expanded(&format!("{start}{part}{end}"))).collect()
}

/// `a|b` as `a` and `b`.
fn alternatives(text: &str) -> Vec<String> {
    text.split('|').flat_map(expanded).collect()
}

/// Returns true if a word equals a text, or is its end after a star.
fn matches(word: &str, text: &str) -> bool {
    word.strip_prefix('*').map_or(word == text, |end| text.ends_with(end))
}

/// Reader of tables.
#[derive(Default)]
struct Reader<'t> {
    functions: &'t [Functions],
    sentences: BTreeMap<&'t str, &'t str>,
    conditions: BTreeMap<&'t str, (Guard, String)>,
    named: BTreeMap<&'t str, Vec<&'t str>>,
    rules: Rules,
}

impl<'t> Reader<'t> {
    fn table(&mut self, text: &'t str) -> Result<(), String> {
        let mut sections = vec![""];
        let mut lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).peekable();
        while let Some(line) = lines.next() {
            let cases: Vec<&str> = std::iter::from_fn(|| lines.next_if(|line| line.starts_with("  "))).collect();
            let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
            if let Some(inner) = line.strip_prefix('[') {
                sections = inner.trim_end_matches(']').split(' ').collect();
            } else if first == "=" {
                self.named.insert(rest, cases);
            } else if let Some(name) = first.strip_suffix('?') {
                let (guards, why) = rest.split_once(" --").ok_or_else(|| format!("no ` --` in {line:?}"))?;
                let (mut holds, why) = (self.guards(guards)?, self.sentence(why.trim())?);
                if let Some((before, _)) = self.conditions.remove(name) {
                    let second = holds;
                    holds = Arc::new(move |source| before(source) || second(source));
                }
                self.conditions.insert(name, (holds, why));
            } else if matches!(first, "+" | "-") {
                let (guards, rest) = rest.split_once("  ").ok_or_else(|| format!("no guards in {line:?}"))?;
                let holds = self.guards(guards)?;
                if first == "-" {
                    self.rules.refused.push((holds, self.sentence(rest)?));
                    continue;
                }
                let settings = literal::settings(sections[0], rest).into_iter();
                self.rules.defaults.extend(settings.map(|(key, value)| (holds.clone(), key, value)));
            } else if let Some(name) = first.strip_suffix(':').filter(|name| !name.contains(char::is_lowercase)) {
                self.sentences.insert(name, rest);
            } else {
                let (keys, outcome) = line.split_once("  ").unwrap_or((line, ""));
                for key in sections.iter().flat_map(|section| keys.split(' ').map(move |key| (section, key))) {
                    for key in expanded(&format!("{}{}", key.0, key.1)) {
                        let rule = Rule {
                            decide: self.row(outcome, &cases).map_err(|why| format!("{key}: {why}"))?,
                            is_not_needed: outcome.starts_with("not_needed "),
                        };
                        if self.rules.by_key.insert(key.clone(), rule).is_some() {
                            return Err(format!("{key} has two rules"));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Outcome or cases of a row, under an optional condition.
    fn row(&self, outcome: &str, cases: &[&str]) -> Result<Decide, String> {
        match outcome.strip_suffix('?') {
            _ if cases.is_empty() => self.outcome(outcome),
            Some(name) => self.conditional(name, self.cases(cases, "")?),
            None => self.cases(cases, ""),
        }
    }

    fn conditional(&self, name: &str, decide: Decide) -> Result<Decide, String> {
        let (holds, why) = self.conditions.get(name).cloned().ok_or_else(|| format!("no condition {name}"))?;
        Ok(Arc::new(move |source| if holds(source) { decide(source) } else { not_needed(why.as_str()) }))
    }

    /// Cases, with the argument in place of `$1`.
    fn cases(&self, lines: &[&str], argument: &str) -> Result<Decide, String> {
        let case = |line: &&str| -> Result<(Guard, Decide), String> {
            let line = line.trim().replace("$1", argument);
            let (guards, outcome) = line.split_once("  ").ok_or_else(|| format!("no outcome in {line:?}"))?;
            Ok((self.guards(guards)?, self.outcome(outcome.trim())?))
        };
        let cases = lines.iter().map(case).collect::<Result<Vec<_>, _>>()?;
        Ok(Arc::new(move |source| {
            cases.iter().find(|(holds, _)| holds(source)).map_or_else(absent, |(_, decide)| decide(source))
        }))
    }

    fn outcome(&self, text: &str) -> Result<Decide, String> {
        let (verb, rest) = text.split_once(' ').unwrap_or((text, ""));
        if let Some(name) = verb.strip_suffix('?') {
            return self.conditional(name, self.outcome(rest)?);
        }
        let argument = self.sentence(rest)?;
        match verb {
            "set" => return Ok(settings(&argument)),
            "not_needed" => return Ok(Arc::new(move |source| not_needed(filled(&argument, source)))),
            "cannot" => return Ok(Arc::new(move |source| cannot(filled(&argument, source)))),
            _ => {}
        }
        if let Some(lines) = self.named.get(verb) {
            return self.cases(lines, rest);
        }
        match self.function(verb) {
            Some(Function::By(decide)) => Ok(Arc::new(decide)),
            Some(Function::To(decide)) => Ok(Arc::new(move |source| decide(source, &argument))),
            _ => Err(format!("no rule or function {verb}")),
        }
    }

    fn function(&self, name: &str) -> Option<&'static Function> {
        self.functions.iter().copied().flatten().find(|(known, _)| *known == name).map(|(_, function)| function)
    }

    /// Inserts sentences for their names.
    fn sentence(&self, text: &str) -> Result<String, String> {
        // of names that begin alike the longest first
        let names = self.sentences.iter().rev();
        let text = names.fold(text.to_owned(), |text, (name, sentence)| text.replace(&format!("${name}"), sentence));
        if text.contains('$') { Err(format!("an unknown name in {text:?}")) } else { Ok(text) }
    }

    fn guards(&self, words: &str) -> Result<Guard, String> {
        let guards = words.split(' ').map(|word| self.guard(word)).collect::<Result<Vec<Guard>, String>>()?;
        Ok(Arc::new(move |source| guards.iter().all(|holds| holds(source))))
    }

    fn guard(&self, word: &str) -> Result<Guard, String> {
        if let Some(word) = word.strip_prefix('!') {
            let holds = self.guard(word)?;
            return Ok(Arc::new(move |source| !holds(source)));
        }
        if let Some(other) = word.strip_prefix('@') {
            let (keys, guard) = other.split_once(':').unwrap_or((other, "true"));
            let (keys, holds) = (expanded(keys), self.guard(guard)?);
            return Ok(Arc::new(move |source| {
                keys.iter().any(|key| holds(&source.with(source.lookup(key).unwrap_or(&Value::Null))))
            }));
        }
        if let Some(name) = word.strip_prefix('?') {
            let (function, argument) = name.split_once(':').unwrap_or((name, ""));
            let argument = argument.to_owned();
            return match (self.conditions.get(name), self.function(function)) {
                (Some((holds, _)), _) => Ok(holds.clone()),
                (None, Some(Function::Holds(holds))) => Ok(Arc::new(holds)),
                (None, Some(Function::Is(is))) => Ok(Arc::new(move |source| is(source, &argument))),
                _ => Err(format!("no condition {name}")),
            };
        }
        let kinds: [(&str, Number); 2] =
            [("number", |source| source.number()), ("whole", |source| source.whole().map(|n| n as f64))];
        for (kind, number) in kinds {
            if let Some(compared) = word.strip_prefix(kind).filter(|rest| !rest.is_empty()) {
                return compare(compared, number);
            }
        }
        if let Some((kind, argument)) = word.split_once(':') {
            let (argument, value, keys) = (argument.to_owned(), literal::word(argument), alternatives(argument));
            match kind {
                "given" => return Ok(Arc::new(move |source| keys.iter().any(|key| source.facts.is_given(key)))),
                "has" => return Ok(Arc::new(move |source| source.text().is_some_and(|text| text.contains(&argument)))),
                "below" => return Ok(Arc::new(move |source| keys.iter().any(|start| source.facts.has_below(start)))),
                "is" => return Ok(Arc::new(move |source| *source.value == value)),
                "equal" => return Ok(Arc::new(move |source| source.whole() == source.facts.whole(&argument))),
                "above" => {
                    return Ok(Arc::new(move |source| source.whole() > source.facts.whole(&argument).or(Some(512))));
                }
                "float" => return Ok(Arc::new(move |source| source.float() == Some(argument.as_str()))),
                "same_float" => {
                    return Ok(Arc::new(move |source| source.float() == float(source.facts.text(&argument))));
                }
                "written" => return Ok(Arc::new(move |source| source.facts.is_written(&argument))),
                "same" => return Ok(Arc::new(move |source| source.text() == source.facts.text(&argument))),
                _ => {}
            }
        }
        let holds: fn(&SourceKey) -> bool = match word {
            "*" => |_| true,
            "null" => |source| source.is_absent(),
            "off" => |source| source.is_off(),
            "true" => |source| source.is_on(),
            "false" => |source| truth(source.value) == Some(false),
            "text" => |source| source.text().is_some(),
            "number" => |source| source.number().is_some(),
            "whole" => |source| source.whole().is_some(),
            "float" => |source| source.float().is_some(),
            "count" => |source| source.count().is_some(),
            "many" => |source| source.whole().is_some_and(|n| !(-1..=1).contains(&n)),
            "written" => |source| source.facts.is_written(source.key),
            words => {
                let words = alternatives(words);
                return Ok(Arc::new(move |source| {
                    source.text().is_some_and(|text| words.iter().any(|word| matches(word, text)))
                }));
            }
        };
        Ok(Arc::new(holds))
    }
}

/// A comparison with a number: `>0`, `<=1`, `=-1`.
fn compare(text: &str, number: Number) -> Result<Guard, String> {
    let signs: [(&str, Comparison); 5] = [
        (">=", |a, b| a >= b),
        ("<=", |a, b| a <= b),
        (">", |a, b| a > b),
        ("<", |a, b| a < b),
        ("=", |a, b| a.partial_cmp(&b) == Some(Ordering::Equal)),
    ];
    let compared = signs.into_iter().find_map(|(sign, holds)| Some((text.strip_prefix(sign)?.parse::<f64>(), holds)));
    match compared {
        Some((Ok(bound), holds)) => Ok(Arc::new(move |source| number(source).is_some_and(|value| holds(value, bound)))),
        _ => Err(format!("expected a comparison with a number, found {text:?}")),
    }
}

/// `A B=C -- note`.
fn settings(text: &str) -> Decide {
    let (settings, note) = text.split_once(" -- ").unwrap_or((text, ""));
    let (takes_null, note) = (settings.split(' ').all(|setting| setting.contains('=')), note.to_owned());
    let setting = |setting: &str| {
        let (key, value) = setting.split_once('=').unwrap_or((setting, "<plain>"));
        (key.to_owned(), value_of(value))
    };
    let settings: Vec<(String, ValueOf)> = settings.split(' ').map(setting).collect();
    Arc::new(move |source| {
        if source.is_absent() && !takes_null {
            return absent();
        }
        let settings = settings.iter().map(|(key, value)| match key.strip_suffix('*') {
            Some(section) => (format!("{section}{}", source.name()), value(source)),
            None => (key.clone(), value(source)),
        });
        set_all(settings).with_note(note.as_str())
    })
}

/// The value of a setting.
fn value_of(text: &str) -> ValueOf {
    let read: fn(&SourceKey) -> Value = match text {
        "<plain>" => |source| plain(source.value),
        "<text>" => |source| source.text().into(),
        "<number>" => |source| source.number().into(),
        "<whole>" => |source| source.whole().into(),
        "<whole+1>" => |source| source.whole().map(|n| n + 1).into(),
        "<number-1>" => |source| source.number().map(|n| n - 1.0).into(),
        "<float>" => |source| source.float().into(),
        "<on>" => |source| source.is_on().into(),
        "<value>" => |source| source.value.clone(),
        constant => {
            let value = literal::word(constant);
            return Arc::new(move |_| value.clone());
        }
    };
    Arc::new(read)
}

/// Fills the placeholders of a sentence.
fn filled(sentence: &str, source: &SourceKey) -> String {
    let (mut filled, mut rest) = (String::new(), sentence);
    while let Some((before, after)) = rest.split_once('{') {
        filled.push_str(before);
        let (name, behind) = after.split_once('}').unwrap_or((after, ""));
        let text = source.text().unwrap_or_default();
        match name {
            "" => filled.push_str(text),
            "value" => filled.push_str(&source.value.to_string()),
            "whole" => filled.push_str(&source.whole().unwrap_or_default().to_string()),
            "path" => filled.push_str(&source.facts.path(text)),
            _ => match name.strip_prefix('@') {
                Some(key) => filled.push_str(source.facts.text(key).unwrap_or_default()),
                None => {
                    // braces of the sentence itself
                    filled.push('{');
                    rest = after;
                    continue;
                }
            },
        }
        rest = behind;
    }
    filled + rest
}
