//! Calls: of configurations, trainers, the program's functions and dataclasses, argument parsers.

use super::known::{POSITIONAL, PyKind, PyValue, SETTING_CALLS};
use super::values::to_str;
use super::{CLASS, Flow, MAX_CALL_DEPTH, Program, class_fields};
use crate::entry::{Entry, MissingFile, SourceValue};
use crate::error::ImportResult;
use crate::literal::{has_word, word};
use crate::source_file::is_known;
use ruff_python_ast::{Arguments, Expr, ExprCall, ExprList, ExprTuple, StmtClassDef, StmtFunctionDef};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Key of unpacked keyword arguments.
const UNPACKED: &str = "**";
const SETATTR: &str = "setattr";
/// Methods that change mappings and lists.
const MUTATING_METHODS: &str = "clear popitem update pop insert remove sort reverse extend";

impl<'a> Program<'a> {
    pub(super) fn call_expression(&mut self, call: &'a ExprCall) -> ImportResult<PyValue<'a>> {
        let name = self.written(&*call.func);
        let class = name.rsplit('.').next().unwrap_or(&name).to_owned();
        let callee = match &*call.func {
            Expr::Attribute(method) => self.value(&method.value)?,
            Expr::Name(_) => self.value(&call.func)?,
            _ => PyValue::new(PyKind::Written(name.clone())),
        };
        let is_method = call.func.is_attribute_expr();
        match callee.kind {
            PyKind::Parser(at) if is_method => return self.parser(at, &class, call),
            PyKind::Classes(classes) if is_method && class.starts_with("parse") => {
                return self.parsed_classes(&classes, self.line(call));
            }
            PyKind::Function(function) if !is_method => {
                let (positional, named) = self.arguments(&call.arguments)?;
                let returned = self.call(function, positional, named)?;
                // a returned function has no name outside of it
                return Ok(if matches!(returned.kind, PyKind::Function(_)) { self.unknown(call) } else { returned });
            }
            PyKind::Class(local) if !is_method => return self.instance(local, Some(&call.arguments), self.line(call)),
            kind @ (PyKind::Value(Value::Object(_) | Value::Array(_)) | PyKind::Space(_) | PyKind::List(_))
                if is_method =>
            {
                return self.method(&class, call, &PyValue { kind, lines: callee.lines });
            }
            _ => {}
        }
        if let Some((class, prefix)) = SETTING_CALLS.iter().find(|(known, _)| *known == class) {
            self.record_config(class, prefix, self.line(call));
            self.settings(&call.arguments, prefix)?;
            return Ok(PyValue::new(PyKind::Object((*prefix).to_owned())));
        }
        match class.as_str() {
            "ArgumentParser" => {
                self.parsers.push(Vec::new());
                return Ok(PyValue::new(PyKind::Parser(self.parsers.len() - 1)));
            }
            "TrlParser" | "HfArgumentParser" => {
                let classes = call.arguments.find_argument_value("dataclass_types", 0);
                let classes = match classes {
                    Some(Expr::Tuple(ExprTuple { elts, .. }) | Expr::List(ExprList { elts, .. })) => {
                        elts.iter().collect()
                    }
                    Some(one) => vec![one],
                    None => Vec::new(),
                };
                let classes = classes.into_iter().map(|class| self.value(class)).collect::<Result<_, _>>()?;
                return Ok(PyValue::new(PyKind::Classes(classes)));
            }
            _ => {}
        }
        if name.starts_with("sys.exit") || matches!(name.as_str(), "exit" | "quit") {
            self.flow = Flow::Exit;
        }
        let (positional, named) = self.arguments(&call.arguments)?;
        let is_update = has_word("setattr replace copy deepcopy", &class);
        if let (Some(PyKind::Object(prefix)), true) = (positional.first().map(|first| first.kind.clone()), is_update) {
            self.update_config(&class, &prefix, call, &positional, named);
            return Ok(positional[0].clone());
        }
        Ok(self.built_in(&name, &positional, &named).unwrap_or_else(|| self.unknown(call)))
    }

    /// Sets fields of a configuration: `setattr`, `dataclasses.replace`.
    fn update_config(
        &mut self,
        function: &str,
        prefix: &str,
        call: &'a ExprCall,
        positional: &[PyValue<'a>],
        mut named: BTreeMap<String, PyValue<'a>>,
    ) {
        match (function, positional) {
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
                call.arguments.args.last().unwrap_or(&call.func),
                self.line(call),
            );
        }
    }

    /// Calls a method of a mapping or list, which may change a variable.
    fn method(&mut self, name: &str, call: &'a ExprCall, before: &PyValue<'a>) -> ImportResult<PyValue<'a>> {
        let (positional, named) = self.arguments(&call.arguments)?;
        let unknown = self.unknown(call);
        let Expr::Attribute(method) = &*call.func else {
            return Ok(unknown);
        };
        let key = positional.first().and_then(PyValue::text).unwrap_or_default();
        let default = || positional.get(1).cloned().unwrap_or_else(|| PyValue::constant(Value::Null));
        let (mut fields, mut items) = (before.fields().unwrap_or_default(), before.items().unwrap_or_default());
        let is_mapping = before.fields().is_some();
        let entry = fields.get(key).cloned();
        let made = match (name, is_mapping) {
            ("copy", _) => return Ok(before.clone()),
            ("get", true) => return Ok(entry.unwrap_or_else(default)),
            ("keys", true) => return Ok(PyValue::from_items(fields.into_keys().map(PyValue::constant).collect())),
            ("values", true) => return Ok(PyValue::from_items(fields.into_values().collect())),
            ("items", true) => {
                let pair = |(key, value)| PyValue::from_items(vec![PyValue::constant(key), value]);
                return Ok(PyValue::from_items(fields.into_iter().map(pair).collect()));
            }
            ("setdefault", true) => fields.entry(key.to_owned()).or_insert_with(default).clone(),
            ("pop", true) if !key.is_empty() => fields.remove(key).unwrap_or_else(default),
            ("update", true) if positional.iter().all(|argument| argument.fields().is_some()) => {
                fields.extend(positional.iter().filter_map(PyValue::fields).flatten().chain(named));
                unknown
            }
            ("append", false) => {
                items.extend(positional);
                unknown
            }
            ("extend", false) if positional.iter().all(|argument| argument.items().is_some()) => {
                items.extend(positional.iter().filter_map(PyValue::items).flatten());
                unknown
            }
            _ if !has_word(MUTATING_METHODS, name) => return Ok(unknown),
            _ => {
                let written = self.unknown(&*method.value);
                if let Some(owner) = self.variable(&method.value) {
                    *owner = written;
                }
                return Ok(unknown);
            }
        };
        if let Some(owner) = self.variable(&method.value) {
            *owner = if is_mapping { PyValue::from_fields(fields) } else { PyValue::from_items(items) };
        }
        Ok(made)
    }

    /// Calls a built-in function on known values.
    fn built_in(
        &self,
        name: &str,
        positional: &[PyValue<'a>],
        named: &BTreeMap<String, PyValue<'a>>,
    ) -> Option<PyValue<'a>> {
        if ["dict", "vars", "asdict", "dataclasses.asdict"].contains(&name) {
            let first = positional.first().map_or(Some(BTreeMap::new()), PyValue::fields)?;
            return Some(PyValue::from_fields(first.into_iter().chain(named.clone()).collect()));
        }
        let first = positional.first().and_then(PyValue::value);
        let value = match (name, first) {
            ("os.environ.get" | "os.getenv", Some(Value::String(variable))) => {
                let value = (self.environment)(variable).map(Value::String);
                let default = positional.get(1).or_else(|| named.get("default")).map(PyValue::value);
                value.or_else(|| default.map_or(Some(Value::Null), Option::<&Value>::cloned))?
            }
            ("int", Some(Value::String(text))) => text.trim().parse::<i64>().ok()?.into(),
            ("int", Some(number)) => number.as_i64().or_else(|| number.as_f64().map(|number| number as i64))?.into(),
            ("float", Some(Value::String(text))) => Some(word(text)).filter(Value::is_number)?.as_f64()?.into(),
            ("float", Some(number)) => number.as_f64()?.into(),
            ("str" | "Path" | "pathlib.Path", Some(value)) => to_str(value)?.into(),
            ("bool", _) => positional.first()?.truth()?.into(),
            ("len", _) => positional.first()?.items()?.len().into(),
            ("min" | "max" | "sum" | "abs" | "round", _) => {
                let items =
                    if let [one] = positional { one.items().unwrap_or(vec![one.clone()]) } else { positional.to_vec() };
                let numbers: Option<Vec<f64>> = items.iter().map(|item| item.value()?.as_f64()).collect();
                let is_integer = items.iter().all(|item| item.value().is_some_and(Value::is_i64)) || name == "round";
                let number = numbers?.into_iter().reduce(match name {
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
                if is_integer { (number as i64).into() } else { number.into() }
            }
            ("list" | "tuple", Some(list @ Value::Array(_))) => list.clone(),
            ("range", Some(count)) if positional.len() == 1 => (0..count.as_u64()?.min(1000)).collect(),
            ("os.path.join", _) => {
                let parts: Option<Vec<&str>> = positional.iter().map(|part| part.value()?.as_str()).collect();
                parts?.join("/").into()
            }
            _ => return None,
        };
        let mut known = PyValue::constant(value);
        known.lines.extend(positional.iter().flat_map(|argument| argument.lines.clone()));
        Some(known)
    }

    fn arguments(
        &mut self,
        arguments: &'a Arguments,
    ) -> ImportResult<(Vec<PyValue<'a>>, BTreeMap<String, PyValue<'a>>)> {
        let positional = arguments.args.iter().map(|argument| self.value(argument)).collect::<Result<_, _>>()?;
        let mut named = BTreeMap::new();
        for keyword in &arguments.keywords {
            let known = self.value(&keyword.value)?;
            if let Some(name) = &keyword.arg {
                named.insert(name.to_string(), known);
            } else if let Some(fields) = known.fields() {
                named.extend(fields);
            }
        }
        Ok((positional, named))
    }

    /// Calls a function of the program.
    pub(super) fn call(
        &mut self,
        function: &'a StmtFunctionDef,
        positional: Vec<PyValue<'a>>,
        mut named: BTreeMap<String, PyValue<'a>>,
    ) -> ImportResult<PyValue<'a>> {
        self.called.insert(function.name.to_string());
        let unknown = PyValue::new(PyKind::Written(format!("{}(…)", function.name)));
        if self.depth >= MAX_CALL_DEPTH {
            return Ok(unknown);
        }
        let mut names = BTreeMap::new();
        let mut positional = positional.into_iter();
        for parameter in function.parameters.iter_non_variadic_params() {
            let name = parameter.name().to_string();
            let value = positional.next().or_else(|| named.remove(&name));
            let value = match (value, parameter.default()) {
                (Some(value), _) => value,
                (None, Some(default)) => self.value(default)?,
                (None, None) => PyValue::new(PyKind::Written(name.clone())),
            };
            names.insert(name, value);
        }
        let variadic = [
            (&function.parameters.vararg, PyValue::from_items(positional.collect())),
            (&function.parameters.kwarg, PyValue::from_fields(named)),
        ];
        names.extend(
            variadic.into_iter().filter_map(|(parameter, known)| Some((parameter.as_ref()?.name.to_string(), known))),
        );
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

    /// Records the construction of a configuration.
    fn record_config(&mut self, class: &str, prefix: &str, line: usize) {
        if prefix.is_empty() {
            self.configs.push(line);
            let entry = Entry::new(CLASS, SourceValue::Known(class.into()), &self.place(line));
            self.entries.push((entry, std::iter::once((self.file.to_owned(), line)).collect()));
        }
    }

    /// Adds a setting.
    pub(super) fn setting(&mut self, key: &str, known: PyValue<'a>, expr: &'a Expr, line: usize) {
        let place = self.place(line);
        let is_trainer = key.contains("Trainer.");
        if let (PyKind::Space(fields), false) = (&known.kind, is_trainer) {
            for (name, part) in fields.clone() {
                self.setting(&format!("{key}.{name}"), part, expr, line);
            }
            return;
        }
        if [UNPACKED, SETATTR].contains(&key) {
            // it may hold any setting
            let file = format!("`{}`", self.written(expr));
            self.absent.push(MissingFile { by: String::new(), file, place: place.clone(), has_settings: true });
        }
        let entries = Entry::flattened(key, self.source_value(&known, expr, is_trainer), &place);
        let mut lines = known.lines;
        lines.insert((self.file.to_owned(), line));
        self.entries.extend(entries.into_iter().map(|entry| (entry, lines.clone())));
    }

    fn settings(&mut self, arguments: &'a Arguments, prefix: &str) -> ImportResult {
        for (at, argument) in arguments.args.iter().enumerate() {
            let known = self.value(argument)?;
            let names = POSITIONAL.iter().find(|(known, _)| *known == prefix);
            let name = names.and_then(|(_, names)| names.get(at)).filter(|name| !name.is_empty());
            let name = name.map_or_else(|| format!("argument_{}", at + 1), |name| (*name).to_owned());
            self.setting(&format!("{prefix}{name}"), known, argument, self.line(argument));
        }
        for keyword in &arguments.keywords {
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

    /// A class of the program with its base classes, and the configuration class among them.
    fn ancestors(&self, class: &'a StmtClassDef) -> (Vec<&'a StmtClassDef>, Option<&'static str>) {
        let (mut classes, mut at) = (vec![class], 0);
        while at < classes.len() && classes.len() < MAX_CALL_DEPTH {
            let class: &'a StmtClassDef = classes[at];
            for base in class.arguments.iter().flat_map(|arguments| &arguments.args) {
                let name = self.written(base);
                let name = name.rsplit('.').next().unwrap_or(&name).to_owned();
                if let Some((config, _)) =
                    SETTING_CALLS.iter().find(|(known, prefix)| *known == name && prefix.is_empty())
                {
                    return (classes, Some(config));
                }
                if let Some(PyValue { kind: PyKind::Class(local), .. }) = self.names[0].get(&name) {
                    classes.push(*local);
                }
            }
            at += 1;
        }
        (classes, None)
    }

    /// An instance of a dataclass: its defaults and the call's arguments.
    fn instance(
        &mut self,
        class: &'a StmtClassDef,
        arguments: Option<&'a Arguments>,
        line: usize,
    ) -> ImportResult<PyValue<'a>> {
        let (classes, config) = self.ancestors(class);
        let mut fields = BTreeMap::new();
        if let Some(config) = config {
            self.record_config(config, "", line);
        }
        for class in classes.into_iter().rev() {
            for (name, default, at) in class_fields(class) {
                let line = self.starts.partition_point(|start| *start <= at);
                let (mut known, default) = self.field(default)?;
                known.lines.insert((self.file.to_owned(), line));
                if config.is_some() {
                    self.setting(name, known, default, line);
                } else {
                    fields.insert(name.to_owned(), known);
                }
            }
        }
        match (config, arguments) {
            (Some(_), Some(arguments)) => self.settings(arguments, "")?,
            (None, Some(arguments)) => fields.extend(self.arguments(arguments)?.1),
            (_, None) => {}
        }
        Ok(PyValue::new(if config.is_some() { PyKind::Object(String::new()) } else { PyKind::Space(fields) }))
    }

    /// The default of a field: `field(default=…)`, `field(default_factory=lambda: …)`, or a value.
    pub(super) fn field(&mut self, default: &'a Expr) -> ImportResult<(PyValue<'a>, &'a Expr)> {
        let call = default.as_call_expr().filter(|call| self.written(&*call.func).ends_with("field"));
        let Some(call) = call else {
            return Ok((self.value(default)?, default));
        };
        let keyword = |name: &str| call.arguments.find_keyword(name).map(|keyword| &keyword.value);
        match (keyword("default"), keyword("default_factory")) {
            (Some(default), _) => Ok((self.value(default)?, default)),
            (None, Some(Expr::Lambda(lambda))) => Ok((self.value(&lambda.body)?, &lambda.body)),
            (None, Some(default)) => {
                let known = match self.written(default).as_str() {
                    "list" => PyValue::constant(Value::Array(Vec::new())),
                    "dict" => PyValue::constant(Value::Object(Map::new())),
                    _ => self.unknown(default),
                };
                Ok((known, default))
            }
            (None, None) => Ok((self.unknown(default), default)),
        }
    }

    /// Objects of a dataclass parser, one per class.
    fn parsed_classes(&mut self, classes: &[PyValue<'a>], line: usize) -> ImportResult<PyValue<'a>> {
        let mut objects = Vec::new();
        for class in classes {
            objects.push(match &class.kind {
                PyKind::Class(local) => {
                    let object = self.instance(local, None, line)?;
                    if matches!(object.kind, PyKind::Space(_)) {
                        // a field named like an engine's key is a setting with its default as value
                        for (name, default, at) in class_fields(local).filter(|(name, _, _)| is_known(name)) {
                            let line = self.starts.partition_point(|start| *start <= at);
                            let (known, default) = self.field(default)?;
                            self.setting(name, known, default, line);
                        }
                    }
                    object
                }
                PyKind::Written(name) => {
                    let name = name.rsplit('.').next().unwrap_or(name);
                    match SETTING_CALLS.iter().find(|(known, prefix)| *known == name && prefix.is_empty()) {
                        Some((config, prefix)) => {
                            self.record_config(config, prefix, line);
                            PyValue::new(PyKind::Object(String::new()))
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
        Ok(PyValue::new(PyKind::List(objects)))
    }

    /// Calls a method of an `argparse` parser.
    fn parser(&mut self, at: usize, method: &str, call: &'a ExprCall) -> ImportResult<PyValue<'a>> {
        let (positional, named) = self.arguments(&call.arguments)?;
        match method {
            "add_argument" => {
                let flags: Vec<&str> = positional.iter().filter_map(PyValue::text).collect();
                let dest = named.get("dest").and_then(PyValue::text).map(str::to_owned);
                let long = flags.iter().find(|flag| flag.starts_with("--")).or(flags.first());
                let Some(name) = dest.or_else(|| Some(long?.trim_start_matches('-').replace('-', "_"))) else {
                    return Ok(self.unknown(call));
                };
                let action = named.get("action").and_then(PyValue::text);
                let is_required = named.get("required").is_some_and(|required| required.truth() != Some(false))
                    || flags.first().is_some_and(|flag| !flag.starts_with('-'));
                let default = named.get("default").cloned();
                let mut known = default.unwrap_or_else(|| match action {
                    _ if is_required => PyValue::new(PyKind::Written(format!("--{name}"))),
                    Some("store_true") => PyValue::constant(false),
                    Some("store_false") => PyValue::constant(true),
                    _ => PyValue::constant(Value::Null),
                });
                // a string default is parsed as its type
                let kind = call.arguments.find_keyword("type").map(|keyword| self.written(&keyword.value));
                if let (Some("int" | "float"), PyKind::Value(Value::String(text))) = (kind.as_deref(), &known.kind) {
                    known.kind = PyKind::Value(word(text));
                }
                known.lines.insert((self.file.to_owned(), self.line(call)));
                self.parsers[at].push((name, known));
            }
            "set_defaults" => self.parsers[at].extend(named),
            "add_argument_group" | "add_mutually_exclusive_group" => return Ok(PyValue::new(PyKind::Parser(at))),
            "parse_args" | "parse_known_args" => {
                let space = PyValue::new(PyKind::Space(self.parsers[at].iter().cloned().collect()));
                let rest = PyValue::constant(Value::Array(Vec::new()));
                let is_known = method == "parse_known_args";
                return Ok(if is_known { PyValue::new(PyKind::List(vec![space, rest])) } else { space });
            }
            _ => {}
        }
        Ok(self.unknown(call))
    }
}
