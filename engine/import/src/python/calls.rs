//! Calls: of configurations and trainers, of the program's own functions and dataclasses, of parsers of arguments.

use super::known::{CALLS as CLASSES, Known, POSITIONAL, Thing};
use super::values::printed;
use super::{CALLS, CLASS, Flow, Program, fields};
use crate::entry::{Absent, Entry, Given};
use crate::error::ImportError;
use crate::literal::{has_word, word};
use crate::source_file::is_known;
use ruff_python_ast::{Arguments, Expr, ExprCall, StmtClassDef, StmtFunctionDef};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Keys of what is given without a name that is known.
const UNPACKED: &str = "**";
const SETATTR: &str = "setattr";
/// Methods of mappings and lists that change them.
const CHANGING: &str = "clear popitem update pop insert remove sort reverse extend";

impl<'a> Program<'a> {
    pub(super) fn called(&mut self, own: &'a ExprCall) -> Result<Known<'a>, ImportError> {
        let name = self.written(&*own.func);
        let class = name.rsplit('.').next().unwrap_or(&name).to_owned();
        let callee = match &*own.func {
            Expr::Attribute(method) => self.value(&method.value)?,
            Expr::Name(_) => self.value(&own.func)?,
            _ => Known::new(Thing::Written(name.clone())),
        };
        let is_method = own.func.is_attribute_expr();
        match callee.thing {
            Thing::Parser(at) if is_method => return self.parser(at, &class, own),
            Thing::Classes(classes) if is_method && class.starts_with("parse") => {
                return self.parsed(&classes, self.line(own));
            }
            Thing::Function(function) if !is_method => {
                let (positional, named) = self.arguments(&own.arguments)?;
                let made = self.call(function, positional, named)?;
                // a function that it makes has no name outside of it
                return Ok(if matches!(made.thing, Thing::Function(_)) { self.unknown(own) } else { made });
            }
            Thing::Class(local) if !is_method => return self.instance(local, Some(&own.arguments), self.line(own)),
            thing @ (Thing::Value(Value::Object(_) | Value::Array(_)) | Thing::Space(_) | Thing::List(_))
                if is_method =>
            {
                return self.method(&class, own, &Known { thing, lines: callee.lines });
            }
            _ => {}
        }
        if let Some((class, prefix)) = CLASSES.iter().find(|(call, _)| *call == class) {
            self.made(class, prefix, self.line(own));
            self.settings(&own.arguments, prefix)?;
            return Ok(Known::new(Thing::Object((*prefix).to_owned())));
        }
        match class.as_str() {
            "ArgumentParser" => {
                self.parsers.push(Vec::new());
                return Ok(Known::new(Thing::Parser(self.parsers.len() - 1)));
            }
            "TrlParser" | "HfArgumentParser" => {
                let classes = own.arguments.find_argument_value("dataclass_types", 0);
                let classes = match classes {
                    Some(Expr::Tuple(own)) => own.elts.iter().collect(),
                    Some(Expr::List(own)) => own.elts.iter().collect(),
                    Some(one) => vec![one],
                    None => Vec::new(),
                };
                let classes = classes.into_iter().map(|class| self.value(class)).collect::<Result<_, _>>()?;
                return Ok(Known::new(Thing::Classes(classes)));
            }
            _ => {}
        }
        if name.starts_with("sys.exit") || matches!(name.as_str(), "exit" | "quit") {
            self.flow = Flow::Exit;
        }
        let (positional, named) = self.arguments(&own.arguments)?;
        let is_change = has_word("setattr replace copy deepcopy", &class);
        if let (Some(Thing::Object(prefix)), true) = (positional.first().map(|own| own.thing.clone()), is_change) {
            self.changed(&class, &prefix, own, &positional, named);
            return Ok(positional[0].clone());
        }
        Ok(self.built_in(&name, &positional, &named).unwrap_or_else(|| self.unknown(own)))
    }

    /// A call with a configuration: `setattr`, `dataclasses.replace`.
    fn changed(
        &mut self,
        call: &str,
        prefix: &str,
        own: &'a ExprCall,
        positional: &[Known<'a>],
        mut named: BTreeMap<String, Known<'a>>,
    ) {
        match (call, positional) {
            ("setattr", [_, name, value]) => match name.text() {
                Some(name) => drop(named.insert(name.to_owned(), value.clone())),
                None => drop(named.insert(SETATTR.to_owned(), name.clone())),
            },
            ("replace", _) => {}
            _ => return,
        }
        for (name, known) in named {
            self.setting(
                &format!("{prefix}{name}"),
                known,
                own.arguments.args.last().unwrap_or(&own.func),
                self.line(own),
            );
        }
    }

    /// Methods of mappings and lists, which may change what a name stands for.
    fn method(&mut self, name: &str, own: &'a ExprCall, before: &Known<'a>) -> Result<Known<'a>, ImportError> {
        let (positional, named) = self.arguments(&own.arguments)?;
        let unknown = self.unknown(own);
        let Expr::Attribute(method) = &*own.func else {
            return Ok(unknown);
        };
        let key = positional.first().and_then(Known::text).unwrap_or_default();
        let default = || positional.get(1).cloned().unwrap_or_else(|| Known::of(Value::Null));
        let (mut fields, mut items) = (before.fields().unwrap_or_default(), before.items().unwrap_or_default());
        let is_mapping = before.fields().is_some();
        let found = fields.get(key).cloned();
        let made = match (name, is_mapping) {
            ("copy", _) => return Ok(before.clone()),
            ("get", true) => return Ok(found.unwrap_or_else(default)),
            ("keys", true) => return Ok(Known::of_items(fields.into_keys().map(Known::of).collect())),
            ("values", true) => return Ok(Known::of_items(fields.into_values().collect())),
            ("items", true) => {
                let pair = |(key, own)| Known::of_items(vec![Known::of(key), own]);
                return Ok(Known::of_items(fields.into_iter().map(pair).collect()));
            }
            ("setdefault", true) => fields.entry(key.to_owned()).or_insert_with(default).clone(),
            ("pop", true) if !key.is_empty() => fields.remove(key).unwrap_or_else(default),
            ("update", true) if positional.iter().all(|own| own.fields().is_some()) => {
                fields.extend(positional.iter().filter_map(Known::fields).flatten().chain(named));
                unknown
            }
            ("append", false) => {
                items.extend(positional);
                unknown
            }
            ("extend", false) if positional.iter().all(|own| own.items().is_some()) => {
                items.extend(positional.iter().filter_map(Known::items).flatten());
                unknown
            }
            _ if !has_word(CHANGING, name) => return Ok(unknown),
            _ => {
                let written = self.unknown(&*method.value);
                if let Some(owner) = self.owner(&method.value) {
                    *owner = written;
                }
                return Ok(unknown);
            }
        };
        if let Some(owner) = self.owner(&method.value) {
            *owner = if is_mapping { Known::of_fields(fields) } else { Known::of_items(items) };
        }
        Ok(made)
    }

    /// Functions of Python's own, of values.
    fn built_in(&self, name: &str, positional: &[Known<'a>], named: &BTreeMap<String, Known<'a>>) -> Option<Known<'a>> {
        if ["dict", "vars", "asdict", "dataclasses.asdict"].contains(&name) {
            let first = positional.first().map_or(Some(BTreeMap::new()), Known::fields)?;
            return Some(Known::of_fields(first.into_iter().chain(named.clone()).collect()));
        }
        let first = positional.first().and_then(Known::value);
        let value = match (name, first) {
            ("os.environ.get" | "os.getenv", Some(Value::String(variable))) => {
                let own = (self.environment)(variable).map(Value::String);
                let default = positional.get(1).or_else(|| named.get("default")).map(Known::value);
                own.or_else(|| default.map_or(Some(Value::Null), Option::<&Value>::cloned))?
            }
            ("int", Some(Value::String(text))) => text.trim().parse::<i64>().ok()?.into(),
            ("int", Some(own)) => own.as_i64().or_else(|| own.as_f64().map(|own| own as i64))?.into(),
            ("float", Some(Value::String(text))) => Some(word(text)).filter(Value::is_number)?.as_f64()?.into(),
            ("float", Some(own)) => own.as_f64()?.into(),
            ("str" | "Path" | "pathlib.Path", Some(own)) => printed(own)?.into(),
            ("bool", _) => positional.first()?.truth()?.into(),
            ("len", _) => positional.first()?.items()?.len().into(),
            ("min" | "max" | "sum" | "abs" | "round", _) => {
                let items =
                    if let [one] = positional { one.items().unwrap_or(vec![one.clone()]) } else { positional.to_vec() };
                let each: Option<Vec<f64>> = items.iter().map(|own| own.value()?.as_f64()).collect();
                let whole = items.iter().all(|own| own.value().is_some_and(Value::is_i64)) || name == "round";
                let number = each?.into_iter().reduce(match name {
                    "min" => f64::min,
                    "max" => f64::max,
                    _ => |a, b| a + b,
                })?;
                let number = match name {
                    "abs" => number.abs(),
                    "round" if positional.len() == 1 => number.round_ties_even(),
                    "round" => return None,
                    _ => number,
                };
                if whole { (number as i64).into() } else { number.into() }
            }
            ("list" | "tuple", Some(own @ Value::Array(_))) => own.clone(),
            ("range", Some(own)) if positional.len() == 1 => (0..own.as_u64()?.min(1000)).collect(),
            ("os.path.join", _) => {
                let parts: Option<Vec<&str>> = positional.iter().map(|own| own.value()?.as_str()).collect();
                parts?.join("/").into()
            }
            _ => return None,
        };
        let mut known = Known::of(value);
        known.lines.extend(positional.iter().flat_map(|own| own.lines.clone()));
        Some(known)
    }

    fn arguments(&mut self, own: &'a Arguments) -> Result<(Vec<Known<'a>>, BTreeMap<String, Known<'a>>), ImportError> {
        let positional = own.args.iter().map(|own| self.value(own)).collect::<Result<_, _>>()?;
        let mut named = BTreeMap::new();
        for keyword in &own.keywords {
            let known = self.value(&keyword.value)?;
            if let Some(name) = &keyword.arg {
                named.insert(name.to_string(), known);
            } else if let Some(fields) = known.fields() {
                named.extend(fields);
            }
        }
        Ok((positional, named))
    }

    /// Runs a function of the program.
    pub(super) fn call(
        &mut self,
        function: &'a StmtFunctionDef,
        positional: Vec<Known<'a>>,
        mut named: BTreeMap<String, Known<'a>>,
    ) -> Result<Known<'a>, ImportError> {
        self.called.insert(function.name.to_string());
        let unknown = Known::new(Thing::Written(format!("{}(…)", function.name)));
        if self.depth >= CALLS {
            return Ok(unknown);
        }
        let mut names = BTreeMap::new();
        let mut positional = positional.into_iter();
        for parameter in function.parameters.iter_non_variadic_params() {
            let name = parameter.name().to_string();
            let own = positional.next().or_else(|| named.remove(&name));
            let own = match (own, parameter.default()) {
                (Some(own), _) => own,
                (None, Some(default)) => self.value(default)?,
                (None, None) => Known::new(Thing::Written(name.clone())),
            };
            names.insert(name, own);
        }
        let variadic = [
            (&function.parameters.vararg, Known::of_items(positional.collect())),
            (&function.parameters.kwarg, Known::of_fields(named)),
        ];
        names.extend(variadic.into_iter().filter_map(|(own, known)| Some((own.as_ref()?.name.to_string(), known))));
        self.depth += 1;
        self.names.push(names);
        let outer = self.returned.take();
        self.block(&function.body)?;
        if self.flow == Flow::Return {
            self.flow = Flow::Next;
        }
        self.names.pop();
        self.depth -= 1;
        Ok(std::mem::replace(&mut self.returned, outer).unwrap_or(unknown))
    }

    /// A configuration is made.
    fn made(&mut self, class: &str, prefix: &str, line: usize) {
        if prefix.is_empty() {
            self.configs.push(line);
            let entry = Entry::new(CLASS, Given::Value(class.into()), &self.place(line));
            self.found.push((entry, std::iter::once((self.file.to_owned(), line)).collect()));
        }
    }

    /// Adds a setting.
    pub(super) fn setting(&mut self, key: &str, known: Known<'a>, expr: &'a Expr, line: usize) {
        let place = self.place(line);
        let is_trainer = key.contains("Trainer.");
        if let (Thing::Space(fields), false) = (&known.thing, is_trainer) {
            for (name, part) in fields.clone() {
                self.setting(&format!("{key}.{name}"), part, expr, line);
            }
            return;
        }
        if [UNPACKED, SETATTR].contains(&key) {
            // any setting may be among them
            let file = format!("`{}`", self.written(expr));
            self.absent.push(Absent { by: String::new(), file, place: place.clone(), has_settings: true });
        }
        let entries = Entry::all(key, self.given(&known, expr, is_trainer), &place);
        let mut lines = known.lines;
        lines.insert((self.file.to_owned(), line));
        self.found.extend(entries.into_iter().map(|entry| (entry, lines.clone())));
    }

    fn settings(&mut self, own: &'a Arguments, prefix: &str) -> Result<(), ImportError> {
        for (at, argument) in own.args.iter().enumerate() {
            let known = self.value(argument)?;
            let names = POSITIONAL.iter().find(|(own, _)| *own == prefix);
            let name = names.and_then(|(_, names)| names.get(at)).filter(|name| !name.is_empty());
            let name = name.map_or_else(|| format!("argument_{}", at + 1), |name| (*name).to_owned());
            self.setting(&format!("{prefix}{name}"), known, argument, self.line(argument));
        }
        for keyword in &own.keywords {
            let known = self.value(&keyword.value)?;
            let name = keyword.arg.as_ref().map_or(UNPACKED, |name| name.as_str());
            let line = self.line(keyword);
            match (name, known.fields()) {
                (UNPACKED, Some(fields)) => {
                    for (key, part) in fields {
                        self.setting(&format!("{prefix}{key}"), part, &keyword.value, line);
                    }
                }
                _ => self.setting(&format!("{prefix}{name}"), known, &keyword.value, line),
            }
        }
        Ok(())
    }

    /// The classes that a class of the program comes from, itself first, and the configuration among them.
    fn ancestors(&self, class: &'a StmtClassDef) -> (Vec<&'a StmtClassDef>, Option<&'static str>) {
        let (mut all, mut at) = (vec![class], 0);
        while at < all.len() && all.len() < CALLS {
            let class: &'a StmtClassDef = all[at];
            for base in class.arguments.iter().flat_map(|own| &own.args) {
                let name = self.written(base);
                let name = name.rsplit('.').next().unwrap_or(&name).to_owned();
                if let Some((config, _)) = CLASSES.iter().find(|(own, prefix)| *own == name && prefix.is_empty()) {
                    return (all, Some(config));
                }
                if let Some(Known { thing: Thing::Class(local), .. }) = self.names[0].get(&name) {
                    all.push(*local);
                }
            }
            at += 1;
        }
        (all, None)
    }

    /// A dataclass of the program: its defaults, and what the call says.
    fn instance(
        &mut self,
        class: &'a StmtClassDef,
        arguments: Option<&'a Arguments>,
        line: usize,
    ) -> Result<Known<'a>, ImportError> {
        let (classes, config) = self.ancestors(class);
        let mut space = BTreeMap::new();
        if let Some(config) = config {
            self.made(config, "", line);
        }
        for class in classes.into_iter().rev() {
            for (name, default, at) in fields(class) {
                let line = self.starts.partition_point(|start| *start <= at);
                let (mut known, default) = self.field(default)?;
                known.lines.insert((self.file.to_owned(), line));
                if config.is_some() {
                    self.setting(name, known, default, line);
                } else {
                    space.insert(name.to_owned(), known);
                }
            }
        }
        match (config, arguments) {
            (Some(_), Some(arguments)) => self.settings(arguments, "")?,
            (None, Some(arguments)) => space.extend(self.arguments(arguments)?.1),
            (_, None) => {}
        }
        Ok(Known::new(if config.is_some() { Thing::Object(String::new()) } else { Thing::Space(space) }))
    }

    /// The default of a field: `field(default=…)`, `field(default_factory=lambda: …)`, or a value.
    pub(super) fn field(&mut self, default: &'a Expr) -> Result<(Known<'a>, &'a Expr), ImportError> {
        let call = default.as_call_expr().filter(|call| self.written(&*call.func).ends_with("field"));
        let Some(call) = call else {
            return Ok((self.value(default)?, default));
        };
        let keyword = |name: &str| call.arguments.find_keyword(name).map(|own| &own.value);
        match (keyword("default"), keyword("default_factory")) {
            (Some(own), _) => Ok((self.value(own)?, own)),
            (None, Some(Expr::Lambda(own))) => Ok((self.value(&own.body)?, &own.body)),
            (None, Some(own)) => {
                let known = match self.written(own).as_str() {
                    "list" => Known::of(Value::Array(Vec::new())),
                    "dict" => Known::of(Value::Object(Map::new())),
                    _ => self.unknown(own),
                };
                Ok((known, own))
            }
            (None, None) => Ok((self.unknown(default), default)),
        }
    }

    /// What a parser of dataclasses gives: one object a class.
    fn parsed(&mut self, classes: &[Known<'a>], line: usize) -> Result<Known<'a>, ImportError> {
        let mut objects = Vec::new();
        for class in classes {
            objects.push(match &class.thing {
                Thing::Class(local) => {
                    let object = self.instance(local, None, line)?;
                    if matches!(object.thing, Thing::Space(_)) {
                        // a field that is a key of an engine is a setting, and its default the value
                        for (name, default, at) in fields(local).filter(|(name, _, _)| is_known(name)) {
                            let line = self.starts.partition_point(|start| *start <= at);
                            let (known, default) = self.field(default)?;
                            self.setting(name, known, default, line);
                        }
                    }
                    object
                }
                Thing::Written(name) => {
                    let name = name.rsplit('.').next().unwrap_or(name);
                    match CLASSES.iter().find(|(own, prefix)| *own == name && prefix.is_empty()) {
                        Some((config, prefix)) => {
                            self.made(config, prefix, line);
                            Known::new(Thing::Object(String::new()))
                        }
                        None => class.clone(),
                    }
                }
                _ => class.clone(),
            });
        }
        if let [one] = &objects[..] {
            return Ok(one.clone());
        }
        Ok(Known::new(Thing::List(objects)))
    }

    /// Calls of an `argparse` parser: its options with their defaults.
    fn parser(&mut self, at: usize, method: &str, own: &'a ExprCall) -> Result<Known<'a>, ImportError> {
        let (positional, named) = self.arguments(&own.arguments)?;
        match method {
            "add_argument" => {
                let flags: Vec<&str> = positional.iter().filter_map(Known::text).collect();
                let dest = named.get("dest").and_then(Known::text).map(str::to_owned);
                let long = flags.iter().find(|flag| flag.starts_with("--")).or(flags.first());
                let Some(name) = dest.or_else(|| Some(long?.trim_start_matches('-').replace('-', "_"))) else {
                    return Ok(self.unknown(own));
                };
                let action = named.get("action").and_then(Known::text);
                let is_required = named.get("required").is_some_and(|own| own.truth() != Some(false))
                    || flags.first().is_some_and(|flag| !flag.starts_with('-'));
                let default = named.get("default").cloned();
                let mut known = default.unwrap_or_else(|| match action {
                    _ if is_required => Known::new(Thing::Written(format!("--{name}"))),
                    Some("store_true") => Known::of(false),
                    Some("store_false") => Known::of(true),
                    _ => Known::of(Value::Null),
                });
                // a default that is a string is read as its type
                let kind = own.arguments.find_keyword("type").map(|own| self.written(&own.value));
                if let (Some("int" | "float"), Thing::Value(Value::String(text))) = (kind.as_deref(), &known.thing) {
                    known.thing = Thing::Value(word(text));
                }
                known.lines.insert((self.file.to_owned(), self.line(own)));
                self.parsers[at].push((name, known));
            }
            "set_defaults" => self.parsers[at].extend(named),
            "add_argument_group" | "add_mutually_exclusive_group" => return Ok(Known::new(Thing::Parser(at))),
            "parse_args" | "parse_known_args" => {
                let space = Known::new(Thing::Space(self.parsers[at].iter().cloned().collect()));
                let rest = Known::of(Value::Array(Vec::new()));
                let is_known = method == "parse_known_args";
                return Ok(if is_known { Known::new(Thing::List(vec![space, rest])) } else { space });
            }
            _ => {}
        }
        Ok(self.unknown(own))
    }
}
