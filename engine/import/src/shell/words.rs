//! Word expansion: quotes, variables and their defaults, patterns, lists, command output.

use super::Shell;
use super::strings::{alternatives, joined, trimmed, unescaped};
use super::value::{Fields, Mode, Text, Variable};
use crate::error::ImportResult;
use brush_parser::ast::Word;
use brush_parser::word::{
    Parameter, ParameterExpr, ParameterTestType, ParameterTransformOp, SpecialParameter, SubstringMatchKind, TildeExpr,
    WordPiece, WordPieceWithSource,
};
use brush_parser::{pattern, word};
use regex::Regex;

/// Longest word, in characters: a limit for variables that double each other.
const MAX_WORD_CHARS: usize = 1 << 18;

/// Braces of a word that may be open at a time: brush's parser reads the inside of an open one twice.
const MAX_BRACES: usize = 10;

/// Most braces that are open at a time in a word, outside of quotes.
fn open_braces(raw: &str) -> usize {
    let (mut open, mut most, mut quote) = (0_usize, 0, None);
    let mut characters = raw.chars();
    while let Some(c) = characters.next() {
        match c {
            '\\' if quote != Some('\'') => drop(characters.next()),
            '\'' | '"' if quote.is_none() => quote = Some(c),
            c if quote == Some(c) => quote = None,
            '{' if quote.is_none() => open += 1,
            '}' if quote.is_none() => open = open.saturating_sub(1),
            _ => {}
        }
        most = most.max(open);
    }
    most
}

/// Value of a parameter.
struct ParameterValue {
    /// `None` if it is unset.
    items: Option<Vec<Text>>,
    /// `@` and `*`: all of a list.
    is_all: bool,
    joins: bool,
    /// The variable's name, if it is one.
    name: Option<String>,
}

impl Shell<'_> {
    /// Expands words to arguments.
    pub(super) fn fields<'w>(&mut self, words: impl IntoIterator<Item = &'w Word>) -> ImportResult<Vec<Text>> {
        let mut arguments = Vec::new();
        for word in words {
            for raw in self.braces(&word.value)? {
                let mut fields = Fields::new(Mode::Words, self.separators().as_deref());
                self.expand(&raw, &mut fields)?;
                fields.finish();
                arguments.extend(fields.done);
            }
        }
        Ok(arguments)
    }

    /// Expands a word to one string.
    pub(super) fn text(&mut self, raw: &str, mode: Mode) -> ImportResult<Text> {
        let mut fields = Fields::new(mode, None);
        self.expand(raw, &mut fields)?;
        Ok(fields.into_text())
    }

    fn separators(&self) -> Option<String> {
        Some(self.scope.variables.get("IFS")?.at("0")?.text.clone())
    }

    /// `{a,b}` and `{1..3}`.
    fn braces(&self, raw: &str) -> ImportResult<Vec<String>> {
        let expands = raw.contains('{') && (raw.contains(',') || raw.contains(".."));
        if expands && open_braces(raw) > MAX_BRACES {
            return Err(
                self.error(format!("a word has more than {MAX_BRACES} braces open at a time; write its words out"))
            );
        }
        let parsed = expands.then(|| word::parse_brace_expansions(raw, &self.options).ok().flatten()).flatten();
        Ok(parsed.map_or_else(|| vec![raw.to_owned()], |pieces| alternatives(&pieces)))
    }

    fn expand(&mut self, raw: &str, into: &mut Fields) -> ImportResult {
        self.deeper()?;
        let Ok(pieces) = word::parse(raw, &self.options) else {
            return Err(self.error(format!("expected a word of bash, found `{raw}`; correct it")));
        };
        self.pieces(raw, &pieces, false, into)?;
        self.depth -= 1;
        Ok(())
    }

    /// Expands the text of a here-document.
    pub(super) fn document(&mut self, raw: &str) -> ImportResult<Text> {
        let mut fields = Fields::new(Mode::Value, None);
        let pieces = word::parse_heredoc(raw, &self.options).unwrap_or_default();
        self.pieces(raw, &pieces, true, &mut fields)?;
        Ok(fields.into_text())
    }

    fn pieces(&mut self, raw: &str, pieces: &[WordPieceWithSource], quoted: bool, into: &mut Fields) -> ImportResult {
        for piece in pieces {
            let written = raw.get(piece.start_index..piece.end_index).unwrap_or(raw);
            match &piece.piece {
                // a line that continues within quotes
                WordPiece::Text(text) if quoted => into.literal(&text.replace("\\\n", ""), true),
                WordPiece::Text(text) => into.literal(text, false),
                WordPiece::SingleQuotedText(text) => into.literal(text, true),
                WordPiece::AnsiCQuotedText(text) => into.literal(&unescaped(text), true),
                WordPiece::EscapeSequence(text) => match text.strip_prefix('\\') {
                    Some("\n") => {}
                    escaped => into.literal(escaped.unwrap_or(text), true),
                },
                WordPiece::DoubleQuotedSequence(inner) | WordPiece::GettextDoubleQuotedSequence(inner) => {
                    if inner.is_empty() {
                        into.literal("", true);
                    }
                    self.pieces(raw, inner, true, into)?;
                }
                WordPiece::TildeExpansion(tilde) => into.value(&self.tilde(tilde, written), true),
                WordPiece::ParameterExpansion(expression) => self.parameter(expression, written, quoted, into)?,
                WordPiece::CommandSubstitution(command) | WordPiece::BackquotedCommandSubstitution(command) => {
                    let output = self.substitute(command, written)?;
                    into.value(&output, quoted);
                }
                WordPiece::ArithmeticExpression(expression) => {
                    let number = self.arithmetic(&expression.value)?;
                    into.value(&self.known_or(number, written, &format!("the value of {written}")), quoted);
                }
            }
            if into.current.as_ref().is_some_and(|word| word.text.len() > MAX_WORD_CHARS) {
                return Err(self.error("a word becomes longer than 256 KiB; do variables double each other?"));
            }
        }
        Ok(())
    }

    fn known_or(&mut self, known: Option<Text>, written: &str, needs: &str) -> Text {
        known.unwrap_or_else(|| self.unknown(written, needs, false))
    }

    fn tilde(&mut self, tilde: &TildeExpr, written: &str) -> Text {
        let name = match tilde {
            TildeExpr::Home => "HOME",
            TildeExpr::WorkingDir => "PWD",
            _ => return Text::new(written),
        };
        self.variable(name).and_then(|variable| variable.at("0").cloned()).unwrap_or_else(|| Text::new(written))
    }

    /// A variable of the script or the environment.
    pub(super) fn variable(&mut self, name: &str) -> Option<Variable> {
        if let Some(value) = self.scope.variables.get(name) {
            return Some(value.clone());
        }
        if let Some(value) = (self.environment)(name) {
            return Some(Variable::text(Text::new(value)));
        }
        let place = self.scope.sourced.clone()?;
        let needs = format!("the variable {name}, which {place} may set");
        if self.branches.choose(&format!("source {place}")) {
            return None;
        }
        Some(Variable::text(self.unknown(&format!("${name}"), &needs, false)))
    }

    fn find(&mut self, parameter: &Parameter) -> ImportResult<ParameterValue> {
        let many =
            |items, joins, name: Option<&String>| ParameterValue { items, is_all: true, joins, name: name.cloned() };
        let one = |item: Option<Text>, name: Option<&String>| ParameterValue {
            items: item.map(|item| vec![item]),
            is_all: false,
            joins: false,
            name: name.cloned(),
        };
        Ok(match parameter {
            Parameter::Positional(number) => one(self.scope.arguments.get(*number as usize - 1).cloned(), None),
            Parameter::Special(SpecialParameter::AllPositionalParameters { concatenate }) => {
                many(Some(self.scope.arguments.clone()).filter(|arguments| !arguments.is_empty()), *concatenate, None)
            }
            Parameter::Special(special) => one(
                match special {
                    SpecialParameter::PositionalParameterCount => {
                        Some(Text::new(self.scope.arguments.len().to_string()))
                    }
                    SpecialParameter::ShellName => Some(Text::new(self.scope.name.clone())),
                    SpecialParameter::LastExitStatus => {
                        self.scope.status.map(|ok| Text::new(if ok { "0" } else { "1" }))
                    }
                    _ => None,
                }
                .or_else(|| Some(self.unknown(&format!("${special}"), "a value of the running script", false))),
                None,
            ),
            Parameter::Named(name) => {
                one(self.variable(name).and_then(|variable| variable.at("0").cloned()), Some(name))
            }
            Parameter::NamedWithIndex { name, index } => {
                let key = self.key(name, index)?;
                one(self.variable(name).and_then(|variable| variable.at(&key).cloned()), None)
            }
            Parameter::NamedWithAllIndices { name, concatenate } => {
                many(self.variable(name).map(|list| list.texts()), *concatenate, Some(name))
            }
        })
    }

    /// The key of an item: a list's index or a mapping's word.
    pub(super) fn key(&mut self, name: &str, index: &str) -> ImportResult<String> {
        let is_mapping = self.scope.mappings.contains(name);
        if !is_mapping && let Some(number) = self.arithmetic(index)? {
            return Ok(number.text);
        }
        Ok(self.text(index, Mode::Value)?.text)
    }

    fn parameter(
        &mut self,
        expression: &ParameterExpr,
        written: &str,
        quoted: bool,
        into: &mut Fields,
    ) -> ImportResult {
        use ParameterExpr as E;
        let (parameter, indirect) = match expression {
            E::MemberKeys { variable_name, .. } => {
                let keys = self.variable(variable_name).unwrap_or_default().items;
                let keys: Vec<Text> = keys.into_iter().map(|(key, item)| item.with(key)).collect();
                into.list(&keys, quoted);
                return Ok(());
            }
            E::VariableNames { .. } => {
                let unknown = self.unknown(written, "the names of variables", false);
                into.value(&unknown, quoted);
                return Ok(());
            }
            E::Parameter { parameter, indirect }
            | E::UseDefaultValues { parameter, indirect, .. }
            | E::AssignDefaultValues { parameter, indirect, .. }
            | E::IndicateErrorIfNullOrUnset { parameter, indirect, .. }
            | E::UseAlternativeValue { parameter, indirect, .. }
            | E::ParameterLength { parameter, indirect }
            | E::RemoveSmallestSuffixPattern { parameter, indirect, .. }
            | E::RemoveLargestSuffixPattern { parameter, indirect, .. }
            | E::RemoveSmallestPrefixPattern { parameter, indirect, .. }
            | E::RemoveLargestPrefixPattern { parameter, indirect, .. }
            | E::Substring { parameter, indirect, .. }
            | E::Transform { parameter, indirect, .. }
            | E::UppercaseFirstChar { parameter, indirect, .. }
            | E::UppercasePattern { parameter, indirect, .. }
            | E::LowercaseFirstChar { parameter, indirect, .. }
            | E::LowercasePattern { parameter, indirect, .. }
            | E::ReplaceSubstring { parameter, indirect, .. } => (parameter, *indirect),
        };
        let mut value = self.find(parameter)?;
        if indirect {
            let name = value.items.and_then(|items| Some(items.first()?.text.clone())).unwrap_or_default();
            let target = word::parse_parameter(&name, &self.options).unwrap_or(Parameter::Named(name));
            value = self.find(&target)?;
        }
        let Some(items) = self.items(expression, &mut value, quoted, into)? else {
            return Ok(());
        };
        let items = self.transformed(expression, &value, items, written)?;
        if value.is_all && !(value.joins && quoted) {
            into.list(&items, quoted);
        } else if value.is_all {
            let by =
                self.separators().and_then(|separators| separators.chars().next()).map_or(" ".to_owned(), String::from);
            into.value(&joined(&items, &by), quoted);
        } else {
            into.value(items.first().unwrap_or(&Text::default()), quoted);
        }
        Ok(())
    }

    /// Items of a parameter; `None` if its default or alternative went to `into`.
    fn items(
        &mut self,
        expression: &ParameterExpr,
        value: &mut ParameterValue,
        quoted: bool,
        into: &mut Fields,
    ) -> ImportResult<Option<Vec<Text>>> {
        use ParameterExpr as E;
        let or_empty = |test: &ParameterTestType| matches!(test, ParameterTestType::UnsetOrNull);
        let is_empty = value.items.as_ref().is_none_or(|items| items.iter().all(|item| item.text.is_empty()));
        let is_set = |test: &ParameterTestType| value.items.is_some() && !(or_empty(test) && is_empty);
        let word = match expression {
            E::UseDefaultValues { test_type, default_value, .. }
            | E::AssignDefaultValues { test_type, default_value, .. } => (!is_set(test_type)).then_some(default_value),
            E::UseAlternativeValue { test_type, alternative_value, .. } => {
                if !is_set(test_type) {
                    return Ok(None);
                }
                Some(alternative_value)
            }
            E::IndicateErrorIfNullOrUnset { test_type, .. } if !is_set(test_type) => {
                value.items = None;
                None
            }
            _ => None,
        };
        if let Some(word) = word {
            let raw = word.as_deref().unwrap_or_default();
            if let (E::AssignDefaultValues { .. }, Some(name)) = (expression, &value.name) {
                let text = self.text(raw, Mode::Value)?;
                into.value(&text, quoted);
                self.scope.variables.insert(name.clone(), Variable::text(text));
            } else if quoted {
                let text = self.text(raw, Mode::Value)?;
                into.value(&text, true);
            } else {
                self.expand(raw, into)?;
            }
            return Ok(None);
        }
        if value.items.is_none() && value.is_all {
            return Ok(Some(Vec::new()));
        }
        Ok(Some(value.items.clone().unwrap_or_else(|| {
            let (written, needs) = match &value.name {
                Some(name) => (
                    format!("${name}"),
                    format!("the variable {name}, which neither the script nor the environment sets"),
                ),
                None => (parameter_name(expression), "an argument of the script".to_owned()),
            };
            vec![self.unknown(&written, &needs, true)]
        })))
    }

    fn transformed(
        &mut self,
        expression: &ParameterExpr,
        value: &ParameterValue,
        items: Vec<Text>,
        written: &str,
    ) -> ImportResult<Vec<Text>> {
        use ParameterExpr as E;
        if let E::ParameterLength { .. } = expression {
            let length =
                if value.is_all { items.len() } else { items.first().map_or(0, |item| item.text.chars().count()) };
            let known = value.is_all || items.iter().all(Text::is_known);
            let length = known.then(|| joined(&items, "").with(length.to_string()));
            return Ok(vec![self.known_or(length, written, &format!("the value of {written}"))]);
        }
        if let (E::Substring { offset, length, .. }, true) = (expression, value.is_all) {
            let (from, count) =
                (self.integer(&offset.value)?, self.optional_integer(length.as_ref().map(|length| &length.value))?);
            // `${@:1}` begins with the first argument
            let from = from.unwrap_or(0).max(0) as usize - usize::from(value.name.is_none() && from.unwrap_or(0) > 0);
            return Ok(items.into_iter().skip(from).take(count.map_or(usize::MAX, |n| n.max(0) as usize)).collect());
        }
        let mut texts = Vec::new();
        for item in items {
            let changed = match expression {
                E::Parameter { .. }
                | E::UseDefaultValues { .. }
                | E::AssignDefaultValues { .. }
                | E::IndicateErrorIfNullOrUnset { .. } => Some(item.clone()),
                _ if !item.is_known() => None,
                _ => self.changed(expression, &item.text)?.map(|text| item.with(text)),
            };
            texts.push(self.known_or(changed, written, &format!("the value of {written}")));
        }
        Ok(texts)
    }

    fn changed(&mut self, expression: &ParameterExpr, text: &str) -> ImportResult<Option<String>> {
        use ParameterExpr as E;
        Ok(Some(match expression {
            E::RemoveSmallestSuffixPattern { pattern, .. }
            | E::RemoveLargestSuffixPattern { pattern, .. }
            | E::RemoveSmallestPrefixPattern { pattern, .. }
            | E::RemoveLargestPrefixPattern { pattern, .. } => {
                let at_start =
                    matches!(expression, E::RemoveSmallestPrefixPattern { .. } | E::RemoveLargestPrefixPattern { .. });
                let longest =
                    matches!(expression, E::RemoveLargestSuffixPattern { .. } | E::RemoveLargestPrefixPattern { .. });
                let pattern = self.pattern(pattern.as_deref(), "^(?:", ")$")?;
                return Ok(trimmed(text, pattern.as_ref(), at_start, longest));
            }
            E::ReplaceSubstring { pattern, replacement, match_kind, .. } => {
                let (before, after) = match match_kind {
                    SubstringMatchKind::Prefix => ("^(?:", ")"),
                    SubstringMatchKind::Suffix => ("(?:", ")$"),
                    SubstringMatchKind::FirstOccurrence | SubstringMatchKind::Anywhere => ("", ""),
                };
                let by = self.text(replacement.as_deref().unwrap_or_default(), Mode::Value)?.text;
                let Some(regex) = self.pattern(Some(pattern), before, after)? else {
                    return Ok(None);
                };
                let times = usize::from(!matches!(match_kind, SubstringMatchKind::Anywhere));
                regex.replacen(text, times, regex::NoExpand(&by)).into_owned()
            }
            E::Substring { offset, length, .. } => {
                let chars: Vec<char> = text.chars().collect();
                let (from, count) =
                    (self.integer(&offset.value)?, self.optional_integer(length.as_ref().map(|length| &length.value))?);
                let at =
                    |n: i64| if n < 0 { chars.len().saturating_sub(n.unsigned_abs() as usize) } else { n as usize };
                let from = at(from.unwrap_or(0)).min(chars.len());
                let to =
                    count.map_or(chars.len(), |n| if n < 0 { at(n) } else { (from + n as usize).min(chars.len()) });
                chars[from..to.max(from)].iter().collect()
            }
            E::UppercasePattern { .. } | E::Transform { op: ParameterTransformOp::ToUpperCase, .. } => {
                text.to_uppercase()
            }
            E::LowercasePattern { .. } | E::Transform { op: ParameterTransformOp::ToLowerCase, .. } => {
                text.to_lowercase()
            }
            E::UppercaseFirstChar { .. } | E::Transform { op: ParameterTransformOp::CapitalizeInitial, .. } => {
                let mut chars = text.chars();
                chars.next().into_iter().flat_map(char::to_uppercase).chain(chars).collect()
            }
            E::LowercaseFirstChar { .. } => {
                let mut chars = text.chars();
                chars.next().into_iter().flat_map(char::to_lowercase).chain(chars).collect()
            }
            _ => return Ok(None),
        }))
    }

    /// Converts a pattern to a regular expression; `None` if it is unknown.
    pub(super) fn pattern(&mut self, raw: Option<&str>, before: &str, after: &str) -> ImportResult<Option<Regex>> {
        let pattern = self.text(raw.unwrap_or_default(), Mode::Pattern)?;
        let text = self.without_unset(&pattern);
        let regex = text.and_then(|text| pattern::pattern_to_regex_str(&text, true).ok());
        Ok(regex.and_then(|regex| Regex::new(&format!("(?s){before}{regex}{after}")).ok()))
    }
}

/// The name of an argument of the script.
fn parameter_name(expression: &ParameterExpr) -> String {
    match expression {
        ParameterExpr::Parameter { parameter, .. } => parameter.to_string(),
        _ => "an argument".to_owned(),
    }
}
