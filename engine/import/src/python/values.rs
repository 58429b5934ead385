//! Values of expressions, as far as they are certain.

use super::known::{PyKind, PyValue};
use super::{Program, class_fields};
use crate::entry::SourceValue;
use crate::error::ImportResult;
use ruff_python_ast::{
    BoolOp, CmpOp, Expr, ExprAttribute, ExprCompare, ExprDict, ExprFString, ExprSubscript, FStringPart,
    InterpolatedStringElement, Number, Operator, UnaryOp,
};
use ruff_text_size::Ranged;
use serde_json::Value;
use std::collections::BTreeMap;

/// Largest value of a name, by [`PyValue::size`]: one that is larger is unknown, so that no value doubles line by line.
const MAX_VALUE: usize = 1 << 14;

impl<'a> Program<'a> {
    pub(super) fn value(&mut self, expr: &'a Expr) -> ImportResult<PyValue<'a>> {
        Ok(match expr {
            Expr::StringLiteral(literal) => PyValue::constant(literal.value.to_str()),
            Expr::NumberLiteral(literal) => match &literal.value {
                Number::Int(number) => number.as_u64().map_or_else(|| self.unknown(expr), PyValue::constant),
                Number::Float(number) => PyValue::constant(*number),
                Number::Complex { .. } => self.unknown(expr),
            },
            Expr::BooleanLiteral(literal) => PyValue::constant(literal.value),
            Expr::NoneLiteral(_) => PyValue::constant(Value::Null),
            Expr::FString(string) => self.f_string(string)?,
            Expr::Name(name) => self.name(&name.id),
            Expr::List(list) => self.list(&list.elts)?,
            Expr::Tuple(list) => self.list(&list.elts)?,
            Expr::Set(list) => self.list(&list.elts)?,
            Expr::Dict(dict) => self.dict(dict)?,
            Expr::Call(call) => self.call_expression(call)?,
            Expr::Attribute(attribute) => self.attribute(attribute)?,
            Expr::Subscript(subscript) => self.item(subscript)?,
            Expr::UnaryOp(operation) => {
                let known = self.value(&operation.operand)?;
                let value = match (operation.op, known.value()) {
                    (UnaryOp::Not, _) => known.truth().map(|truth| Value::Bool(!truth)),
                    (UnaryOp::USub, Some(Value::Number(number))) => match number.as_i64() {
                        Some(number) => number.checked_neg().map(Value::from),
                        None => number.as_f64().map(|number| (-number).into()),
                    },
                    (UnaryOp::UAdd, Some(value)) => Some(value.clone()),
                    _ => None,
                };
                self.known_or(value, &[known], expr)
            }
            Expr::BinOp(operation) => {
                let (a, b) = (self.value(&operation.left)?, self.value(&operation.right)?);
                self.operate(operation.op, a, b, expr)
            }
            Expr::BoolOp(operation) => {
                let mut last = self.unknown(expr);
                for part in &operation.values {
                    last = self.value(part)?;
                    match last.truth() {
                        None => return Ok(self.unknown(expr)),
                        Some(truth) if truth == (operation.op == BoolOp::Or) => break,
                        Some(_) => {}
                    }
                }
                last
            }
            Expr::Compare(comparison) => self.compare(comparison, expr)?,
            Expr::If(conditional) => {
                let test = self.value(&conditional.test)?.truth();
                let holds = test.unwrap_or_else(|| self.branches.choose(&self.written(&*conditional.test)));
                self.value(if holds { &conditional.body } else { &conditional.orelse })?
            }
            Expr::Named(named) => {
                let known = self.value(&named.value)?;
                if let Expr::Name(name) = &*named.target {
                    self.bind(&name.id, known.clone(), self.line(expr));
                }
                known
            }
            Expr::Await(awaited) => self.value(&awaited.value)?,
            _ => self.unknown(expr),
        })
    }

    fn attribute(&mut self, attribute: &'a ExprAttribute) -> ImportResult<PyValue<'a>> {
        if let Some(kind) = self.written(attribute).strip_prefix("torch.") {
            return Ok(PyValue::constant(kind));
        }
        let known = match self.value(&attribute.value)?.kind {
            PyKind::Class(class) => match class_fields(class).find(|(name, _, _)| *name == attribute.attr.as_str()) {
                Some((_, default, _)) => Some(self.field(default)?.0),
                None => None,
            },
            PyKind::Space(fields) => fields.get(attribute.attr.as_str()).cloned(),
            PyKind::Object(prefix) => {
                let key = format!("{prefix}{}", attribute.attr);
                let setting = self.entries.iter().rev().find(|(entry, _)| entry.key == key);
                setting.and_then(|(entry, lines)| match &entry.value {
                    SourceValue::Known(value) => {
                        Some(PyValue { kind: PyKind::Value(value.clone()), lines: lines.clone() })
                    }
                    SourceValue::Unresolved { .. } => None,
                })
            }
            _ => None,
        };
        Ok(known.unwrap_or_else(|| self.unknown(attribute)))
    }

    fn item(&mut self, subscript: &'a ExprSubscript) -> ImportResult<PyValue<'a>> {
        let key = self.value(&subscript.slice)?;
        if let ("os.environ", Some(Value::String(name))) = (self.written(&*subscript.value).as_str(), key.value()) {
            return Ok((self.environment)(name).map_or_else(|| self.unknown(subscript), PyValue::constant));
        }
        let object = self.value(&subscript.value)?;
        let item = match (&object.kind, key.value()) {
            (_, Some(Value::String(key))) => object.fields().and_then(|mut fields| fields.remove(key)),
            (_, Some(Value::Number(at))) => {
                let items = object.items();
                items.zip(at.as_u64()).and_then(|(items, at)| items.get(at as usize).cloned())
            }
            _ => None,
        };
        Ok(item.unwrap_or_else(|| self.unknown(subscript)))
    }

    pub(super) fn unknown(&self, node: &impl Ranged) -> PyValue<'a> {
        PyValue::new(PyKind::Written(self.written(node)))
    }

    fn known_or(&self, value: Option<Value>, operands: &[PyValue<'a>], node: &impl Ranged) -> PyValue<'a> {
        let lines = operands.iter().flat_map(|operand| operand.lines.iter().cloned()).collect();
        PyValue { kind: value.map_or_else(|| PyKind::Written(self.written(node)), PyKind::Value), lines }
    }

    fn name(&self, name: &str) -> PyValue<'a> {
        if name == "__name__" {
            return PyValue::constant("__main__");
        }
        let local = self.names.iter().skip(1).last().and_then(|names| names.get(name));
        let known = local.or_else(|| self.names[0].get(name));
        let known = known.filter(|known| known.size() <= MAX_VALUE).cloned();
        known.unwrap_or_else(|| PyValue::new(PyKind::Written(name.to_owned())))
    }

    fn list(&mut self, parts: &'a [Expr]) -> ImportResult<PyValue<'a>> {
        let mut items = Vec::new();
        for part in parts {
            match part {
                Expr::Starred(starred) => match self.value(&starred.value)?.items() {
                    Some(more) => items.extend(more),
                    None => items.push(self.unknown(part)),
                },
                part => {
                    let known = self.value(part)?;
                    // the name says more than its unknown value
                    items.push(if matches!(known.kind, PyKind::Written(_)) { self.unknown(part) } else { known });
                }
            }
        }
        Ok(PyValue::from_items(items))
    }

    fn dict(&mut self, dict: &'a ExprDict) -> ImportResult<PyValue<'a>> {
        let mut fields = BTreeMap::new();
        for item in &dict.items {
            let value = self.value(&item.value)?;
            let key = item.key.as_ref().map(|key| self.value(key)).transpose()?;
            match (key.as_ref().map(PyValue::value), value.fields()) {
                (Some(Some(Value::String(key))), _) => drop(fields.insert(key.clone(), value)),
                (None, Some(more)) => fields.extend(more),
                _ => return Ok(self.unknown(dict)),
            }
        }
        Ok(PyValue::from_fields(fields))
    }

    fn f_string(&mut self, string: &'a ExprFString) -> ImportResult<PyValue<'a>> {
        let (mut text, mut operands) = (String::new(), Vec::new());
        for part in &string.value {
            let elements = match part {
                FStringPart::Literal(literal) => {
                    text.push_str(&literal.value);
                    continue;
                }
                FStringPart::FString(inner) => &inner.elements,
            };
            for element in elements {
                match element {
                    InterpolatedStringElement::Literal(literal) => text.push_str(&literal.value),
                    InterpolatedStringElement::Interpolation(inner) => {
                        let known = self.value(&inner.expression)?;
                        let Some(part) = known.value().and_then(to_str).filter(|_| inner.format_spec.is_none()) else {
                            return Ok(self.unknown(string));
                        };
                        text.push_str(&part);
                        operands.push(known);
                    }
                }
            }
        }
        Ok(self.known_or(Some(text.into()), &operands, string))
    }

    fn compare(&mut self, comparison: &'a ExprCompare, expr: &'a Expr) -> ImportResult<PyValue<'a>> {
        let left = self.value(&comparison.left)?;
        let ([op], [right]) = (&*comparison.ops, &*comparison.comparators) else {
            return Ok(self.unknown(expr));
        };
        let right = self.value(right)?;
        let truth = left.value().zip(right.value()).and_then(|(a, b)| {
            let same = match (a.as_f64(), b.as_f64()) {
                (Some(a), Some(b)) => a.total_cmp(&b).is_eq(),
                _ => a == b,
            };
            let numbers = a.as_f64().zip(b.as_f64());
            let within = match (a, b) {
                (a, Value::Array(list)) => Some(list.contains(a)),
                (Value::String(a), Value::String(b)) => Some(b.contains(a)),
                (Value::String(a), Value::Object(map)) => Some(map.contains_key(a)),
                _ => None,
            };
            match op {
                CmpOp::Eq | CmpOp::Is => Some(same),
                CmpOp::NotEq | CmpOp::IsNot => Some(!same),
                CmpOp::Lt => numbers.map(|(a, b)| a < b),
                CmpOp::LtE => numbers.map(|(a, b)| a <= b),
                CmpOp::Gt => numbers.map(|(a, b)| a > b),
                CmpOp::GtE => numbers.map(|(a, b)| a >= b),
                CmpOp::In => within,
                CmpOp::NotIn => within.map(|within| !within),
            }
        });
        Ok(self.known_or(truth.map(Value::Bool), &[left, right], expr))
    }

    pub(super) fn operate(&self, op: Operator, a: PyValue<'a>, b: PyValue<'a>, node: &impl Ranged) -> PyValue<'a> {
        let value = a.value().zip(b.value()).and_then(|(a, b)| apply_operator(op, a, b));
        if let (None, Operator::Add, Some(mut items), Some(more)) = (&value, op, a.items(), b.items()) {
            items.extend(more);
            return PyValue::from_items(items);
        }
        if let (Operator::BitOr, Some(mut fields), Some(more)) = (op, a.fields(), b.fields()) {
            fields.extend(more);
            return PyValue::from_fields(fields);
        }
        self.known_or(value, &[a, b], node)
    }

    /// The source value of a key. A trainer's arguments are objects, which their names describe.
    pub(super) fn source_value(&self, known: &PyValue, expr: &Expr, is_trainer: bool) -> SourceValue {
        let named = |known: &PyValue, written: String| match &known.kind {
            PyKind::Value(Value::String(text)) => text.clone(),
            PyKind::Value(value) => value.to_string(),
            PyKind::Function(function) => function.name.to_string(),
            PyKind::Class(class) => class.name.to_string(),
            PyKind::Written(text) if written.is_empty() => text.clone(),
            _ => written,
        };
        match &known.kind {
            PyKind::Value(value) => SourceValue::Known(value.clone()),
            PyKind::List(items) if is_trainer => {
                SourceValue::Known(items.iter().map(|item| Value::from(named(item, String::new()))).collect())
            }
            _ if is_trainer => SourceValue::Known(named(known, self.written(expr)).into()),
            _ => {
                let text = self.written(expr);
                SourceValue::unresolved(&text, format!("the value of the expression `{text}`"))
            }
        }
    }
}

/// Text of a value, as `str` formats it.
pub(super) fn to_str(value: &Value) -> Option<String> {
    Some(match value {
        Value::Null => "None".to_owned(),
        Value::Bool(truth) => if *truth { "True" } else { "False" }.to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(float) if float.is_f64() => {
            let number = float.as_f64()?;
            // Python writes an exponent from here on
            let plain = number == 0.0 || (1e-4..1e16).contains(&number.abs());
            plain.then(|| format!("{number:?}"))?
        }
        Value::Number(number) => number.to_string(),
        Value::Array(_) | Value::Object(_) => return None,
    })
}

fn apply_operator(op: Operator, a: &Value, b: &Value) -> Option<Value> {
    match (op, a, b) {
        (Operator::Add, Value::String(a), Value::String(b)) => return Some(format!("{a}{b}").into()),
        (Operator::Add, Value::Array(a), Value::Array(b)) => return Some(a.iter().chain(b).cloned().collect()),
        // paths
        (Operator::Div, Value::String(a), Value::String(b)) => {
            return Some(format!("{}/{b}", a.trim_end_matches('/')).into());
        }
        _ => {}
    }
    if let (Some(a), Some(b)) = (a.as_i64(), b.as_i64()) {
        let integer = match op {
            Operator::Add => a.checked_add(b),
            Operator::Sub => a.checked_sub(b),
            Operator::Mult => a.checked_mul(b),
            // Python rounds down
            Operator::FloorDiv => a.checked_div_euclid(b).filter(|_| b > 0),
            Operator::Mod => a.checked_rem_euclid(b).filter(|_| b > 0),
            Operator::Pow if b >= 0 => a.checked_pow(u32::try_from(b).ok()?),
            Operator::LShift => (0..63).contains(&b).then(|| a.checked_mul(1 << b)).flatten(),
            Operator::RShift => a.checked_shr(u32::try_from(b).ok()?),
            _ => None,
        };
        if integer.is_some() || !matches!(op, Operator::Div | Operator::Pow) {
            return integer.map(Value::from);
        }
    }
    let (a, b) = (a.as_f64()?, b.as_f64()?);
    let number = match op {
        Operator::Add => a + b,
        Operator::Sub => a - b,
        Operator::Mult => a * b,
        Operator::Div if b != 0.0 => a / b,
        Operator::Pow => a.powf(b),
        _ => return None,
    };
    serde_json::Number::from_f64(number).map(Value::Number)
}
