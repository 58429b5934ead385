//! What expressions are, as far as that is certain.

use super::known::{Known, Thing};
use super::{Program, fields};
use crate::entry::Given;
use crate::error::ImportError;
use ruff_python_ast::{
    BoolOp, CmpOp, Expr, ExprAttribute, ExprCompare, ExprDict, ExprFString, ExprSubscript, FStringPart,
    InterpolatedStringElement, Number, Operator, UnaryOp,
};
use ruff_text_size::Ranged;
use serde_json::Value;
use std::collections::BTreeMap;

impl<'a> Program<'a> {
    pub(super) fn value(&mut self, expr: &'a Expr) -> Result<Known<'a>, ImportError> {
        Ok(match expr {
            Expr::StringLiteral(own) => Known::of(own.value.to_str()),
            Expr::NumberLiteral(own) => match &own.value {
                Number::Int(own) => own.as_u64().map_or_else(|| self.unknown(expr), Known::of),
                Number::Float(own) => Known::of(*own),
                Number::Complex { .. } => self.unknown(expr),
            },
            Expr::BooleanLiteral(own) => Known::of(own.value),
            Expr::NoneLiteral(_) => Known::of(Value::Null),
            Expr::FString(own) => self.f_string(own)?,
            Expr::Name(own) => self.name(&own.id),
            Expr::List(own) => self.list(&own.elts)?,
            Expr::Tuple(own) => self.list(&own.elts)?,
            Expr::Set(own) => self.list(&own.elts)?,
            Expr::Dict(own) => self.dict(own)?,
            Expr::Call(own) => self.called(own)?,
            Expr::Attribute(own) => self.attribute(own)?,
            Expr::Subscript(own) => self.item(own)?,
            Expr::UnaryOp(own) => {
                let known = self.value(&own.operand)?;
                let value = match (own.op, known.value()) {
                    (UnaryOp::Not, _) => known.truth().map(|truth| Value::Bool(!truth)),
                    (UnaryOp::USub, Some(Value::Number(own))) => match own.as_i64() {
                        Some(own) => Some((-own).into()),
                        None => own.as_f64().map(|own| (-own).into()),
                    },
                    (UnaryOp::UAdd, Some(own)) => Some(own.clone()),
                    _ => None,
                };
                self.known_or(value, &[known], expr)
            }
            Expr::BinOp(own) => {
                let (a, b) = (self.value(&own.left)?, self.value(&own.right)?);
                self.operate(own.op, a, b, expr)
            }
            Expr::BoolOp(own) => {
                let mut last = self.unknown(expr);
                for part in &own.values {
                    last = self.value(part)?;
                    match last.truth() {
                        None => return Ok(self.unknown(expr)),
                        Some(truth) if truth == (own.op == BoolOp::Or) => break,
                        Some(_) => {}
                    }
                }
                last
            }
            Expr::Compare(own) => self.compare(own, expr)?,
            Expr::If(own) => {
                let test = self.value(&own.test)?.truth();
                let holds = test.unwrap_or_else(|| self.choose(&self.written(&*own.test)));
                self.value(if holds { &own.body } else { &own.orelse })?
            }
            Expr::Named(own) => {
                let known = self.value(&own.value)?;
                if let Expr::Name(name) = &*own.target {
                    self.bind(&name.id, known.clone(), self.line(expr));
                }
                known
            }
            Expr::Await(own) => self.value(&own.value)?,
            _ => self.unknown(expr),
        })
    }

    fn attribute(&mut self, own: &'a ExprAttribute) -> Result<Known<'a>, ImportError> {
        if let Some(kind) = self.written(own).strip_prefix("torch.") {
            return Ok(Known::of(kind));
        }
        let known = match self.value(&own.value)?.thing {
            Thing::Class(class) => match fields(class).find(|(name, _, _)| *name == own.attr.as_str()) {
                Some((_, default, _)) => Some(self.field(default)?.0),
                None => None,
            },
            Thing::Space(space) => space.get(own.attr.as_str()).cloned(),
            Thing::Object(prefix) => {
                let key = format!("{prefix}{}", own.attr);
                let found = self.found.iter().rev().find(|(entry, _)| entry.key == key);
                found.and_then(|(entry, lines)| match &entry.given {
                    Given::Value(value) => Some(Known { thing: Thing::Value(value.clone()), lines: lines.clone() }),
                    Given::Open { .. } => None,
                })
            }
            _ => None,
        };
        Ok(known.unwrap_or_else(|| self.unknown(own)))
    }

    fn item(&mut self, own: &'a ExprSubscript) -> Result<Known<'a>, ImportError> {
        let key = self.value(&own.slice)?;
        if let ("os.environ", Some(Value::String(name))) = (self.written(&*own.value).as_str(), key.value()) {
            return Ok((self.environment)(name).map_or_else(|| self.unknown(own), Known::of));
        }
        let owner = self.value(&own.value)?;
        let item = match (&owner.thing, key.value()) {
            (_, Some(Value::String(key))) => owner.fields().and_then(|mut own| own.remove(key)),
            (_, Some(Value::Number(at))) => {
                let items = owner.items();
                items.zip(at.as_u64()).and_then(|(items, at)| items.get(at as usize).cloned())
            }
            _ => None,
        };
        Ok(item.unwrap_or_else(|| self.unknown(own)))
    }

    pub(super) fn unknown(&self, node: &impl Ranged) -> Known<'a> {
        Known::new(Thing::Written(self.written(node)))
    }

    fn known_or(&self, value: Option<Value>, of: &[Known<'a>], node: &impl Ranged) -> Known<'a> {
        let lines = of.iter().flat_map(|own| own.lines.iter().cloned()).collect();
        Known { thing: value.map_or_else(|| Thing::Written(self.written(node)), Thing::Value), lines }
    }

    fn name(&self, name: &str) -> Known<'a> {
        if name == "__name__" {
            return Known::of("__main__");
        }
        let of_function = self.names.iter().skip(1).last().and_then(|names| names.get(name));
        let known = of_function.or_else(|| self.names[0].get(name)).cloned();
        known.unwrap_or_else(|| Known::new(Thing::Written(name.to_owned())))
    }

    fn list(&mut self, parts: &'a [Expr]) -> Result<Known<'a>, ImportError> {
        let mut items = Vec::new();
        for part in parts {
            match part {
                Expr::Starred(own) => match self.value(&own.value)?.items() {
                    Some(more) => items.extend(more),
                    None => items.push(self.unknown(part)),
                },
                part => {
                    let known = self.value(part)?;
                    // a name says more than what it was assigned
                    items.push(if matches!(known.thing, Thing::Written(_)) { self.unknown(part) } else { known });
                }
            }
        }
        Ok(Known::of_items(items))
    }

    fn dict(&mut self, own: &'a ExprDict) -> Result<Known<'a>, ImportError> {
        let mut fields = BTreeMap::new();
        for item in &own.items {
            let value = self.value(&item.value)?;
            let key = item.key.as_ref().map(|key| self.value(key)).transpose()?;
            match (key.as_ref().map(Known::value), value.fields()) {
                (Some(Some(Value::String(key))), _) => drop(fields.insert(key.clone(), value)),
                (None, Some(more)) => fields.extend(more),
                _ => return Ok(self.unknown(own)),
            }
        }
        Ok(Known::of_fields(fields))
    }

    fn f_string(&mut self, own: &'a ExprFString) -> Result<Known<'a>, ImportError> {
        let (mut text, mut of) = (String::new(), Vec::new());
        for part in &own.value {
            let elements = match part {
                FStringPart::Literal(own) => {
                    text.push_str(&own.value);
                    continue;
                }
                FStringPart::FString(own) => &own.elements,
            };
            for element in elements {
                match element {
                    InterpolatedStringElement::Literal(own) => text.push_str(&own.value),
                    InterpolatedStringElement::Interpolation(inner) => {
                        let known = self.value(&inner.expression)?;
                        let Some(part) = known.value().and_then(printed).filter(|_| inner.format_spec.is_none()) else {
                            return Ok(self.unknown(own));
                        };
                        text.push_str(&part);
                        of.push(known);
                    }
                }
            }
        }
        Ok(self.known_or(Some(text.into()), &of, own))
    }

    fn compare(&mut self, own: &'a ExprCompare, expr: &'a Expr) -> Result<Known<'a>, ImportError> {
        let left = self.value(&own.left)?;
        let ([op], [right]) = (&*own.ops, &*own.comparators) else {
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
                CmpOp::NotIn => within.map(|own| !own),
            }
        });
        Ok(self.known_or(truth.map(Value::Bool), &[left, right], expr))
    }

    pub(super) fn operate(&self, op: Operator, a: Known<'a>, b: Known<'a>, node: &impl Ranged) -> Known<'a> {
        let value = a.value().zip(b.value()).and_then(|(a, b)| operated(op, a, b));
        if let (None, Operator::Add, Some(mut items), Some(more)) = (&value, op, a.items(), b.items()) {
            items.extend(more);
            return Known::of_items(items);
        }
        if let (Operator::BitOr, Some(mut fields), Some(more)) = (op, a.fields(), b.fields()) {
            fields.extend(more);
            return Known::of_fields(fields);
        }
        self.known_or(value, &[a, b], node)
    }

    /// What is given for a key. A trainer is given objects: their names say what they are.
    pub(super) fn given(&self, known: &Known, expr: &Expr, is_trainer: bool) -> Given {
        let named = |known: &Known, written: String| match &known.thing {
            Thing::Value(Value::String(text)) => text.clone(),
            Thing::Value(value) => value.to_string(),
            Thing::Function(own) => own.name.to_string(),
            Thing::Class(own) => own.name.to_string(),
            Thing::Written(own) if written.is_empty() => own.clone(),
            _ => written,
        };
        match &known.thing {
            Thing::Value(value) => Given::Value(value.clone()),
            Thing::List(items) if is_trainer => {
                Given::Value(items.iter().map(|item| Value::from(named(item, String::new()))).collect())
            }
            _ if is_trainer => Given::Value(named(known, self.written(expr)).into()),
            _ => {
                let text = self.written(expr);
                Given::open(&text, format!("the value of the expression `{text}`"))
            }
        }
    }
}

/// A value as `str` has it.
pub(super) fn printed(value: &Value) -> Option<String> {
    Some(match value {
        Value::Null => "None".to_owned(),
        Value::Bool(own) => if *own { "True" } else { "False" }.to_owned(),
        Value::String(own) => own.clone(),
        Value::Number(own) if own.is_f64() => {
            let number = own.as_f64()?;
            // Python writes an exponent from here on
            let plain = number == 0.0 || (1e-4..1e16).contains(&number.abs());
            plain.then(|| format!("{number:?}"))?
        }
        Value::Number(own) => own.to_string(),
        Value::Array(_) | Value::Object(_) => return None,
    })
}

fn operated(op: Operator, a: &Value, b: &Value) -> Option<Value> {
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
        let whole = match op {
            Operator::Add => a.checked_add(b),
            Operator::Sub => a.checked_sub(b),
            Operator::Mult => a.checked_mul(b),
            // Python rounds down
            Operator::FloorDiv => a.checked_div_euclid(b).filter(|_| b > 0),
            Operator::Mod => a.checked_rem_euclid(b).filter(|_| b > 0),
            Operator::Pow if b >= 0 => a.checked_pow(u32::try_from(b).ok()?),
            Operator::LShift => a.checked_shl(u32::try_from(b).ok()?),
            Operator::RShift => a.checked_shr(u32::try_from(b).ok()?),
            _ => None,
        };
        if whole.is_some() || !matches!(op, Operator::Div | Operator::Pow) {
            return whole.map(Value::from);
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
