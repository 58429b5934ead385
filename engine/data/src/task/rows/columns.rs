//! Arrow's columns as rows of JSON: numbers as numbers, decimals and times as Python's `str` writes them, bytes as text
//! if they are UTF-8, else in hexadecimal.

use std::path::Path;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Date32Type, Date64Type, Decimal32Type, Decimal64Type, Decimal128Type, Decimal256Type, Float16Type, Float32Type,
    Float64Type,
};
use arrow_array::{Array, ArrayRef, RecordBatch, downcast_integer_array};
use arrow_schema::{ArrowError, DataType, Fields as Names};
use firebrick_backends::allocation_limit::limited;
use firebrick_spec::json;
use serde_json::{Map, Value};

use super::raw::{ROW_LIMIT, Raw, Sink, Unread};
use super::times;
use crate::task::error::Unit;

/// Sends every row of batches to `sink`.
pub(super) fn send(
    batches: &mut dyn Iterator<Item = Result<RecordBatch, ArrowError>>,
    path: &Path,
    sink: &mut Sink<'_>,
) -> Result<(), Unread> {
    let mut number = 0;
    let name = format!("reading a row of {}", path.display());
    for batch in batches {
        let batch = batch?;
        for at in 0..batch.num_rows() {
            number += 1;
            let read = || object(batch.schema_ref().fields(), batch.columns(), at);
            let row = limited(ROW_LIMIT, &name, read);
            let row = row.map_err(|what| Unread::Refused(format!("row {number}: {what}")))?;
            if sink(Raw::fields(number, Unit::Row, row)).is_break() {
                return Ok(());
            }
        }
    }
    Ok(())
}

fn object(names: &Names, columns: &[ArrayRef], at: usize) -> Result<Map<String, Value>, String> {
    let columns = names.iter().zip(columns);
    let cell = columns.map(|(field, column)| {
        let value = value(column.as_ref(), at).map_err(|what| format!("`{}`: {what}", field.name()))?;
        Ok((field.name().clone(), value))
    });
    cell.collect()
}

/// An entry of a column, with marks.
fn value(column: &dyn Array, at: usize) -> Result<Value, String> {
    if column.is_null(at) {
        return Ok(Value::Null);
    }
    Ok(match column.data_type() {
        DataType::Null => Value::Null,
        DataType::Boolean => column.as_boolean().value(at).into(),
        kind if kind.is_integer() => downcast_integer_array!(
            column => column.value(at).into(),
            _ => Value::Null
        ),
        // the shortest decimal that is the same number, as its text has it
        DataType::Float16 => short(&column.as_primitive::<Float16Type>().value(at).to_string()),
        DataType::Float32 => short(&column.as_primitive::<Float32Type>().value(at).to_string()),
        DataType::Float64 => json::float(column.as_primitive::<Float64Type>().value(at)),
        DataType::Decimal32(..) => column.as_primitive::<Decimal32Type>().value_as_string(at).into(),
        DataType::Decimal64(..) => column.as_primitive::<Decimal64Type>().value_as_string(at).into(),
        DataType::Decimal128(..) => column.as_primitive::<Decimal128Type>().value_as_string(at).into(),
        DataType::Decimal256(..) => column.as_primitive::<Decimal256Type>().value_as_string(at).into(),
        DataType::Utf8 => column.as_string::<i32>().value(at).into(),
        DataType::LargeUtf8 => column.as_string::<i64>().value(at).into(),
        DataType::Utf8View => column.as_string_view().value(at).into(),
        DataType::Binary => bytes(column.as_binary::<i32>().value(at)),
        DataType::LargeBinary => bytes(column.as_binary::<i64>().value(at)),
        DataType::BinaryView => bytes(column.as_binary_view().value(at)),
        DataType::FixedSizeBinary(_) => bytes(column.as_fixed_size_binary().value(at)),
        DataType::Date32 => times::date(column.as_primitive::<Date32Type>().value(at).into())?.into(),
        DataType::Date64 => times::date(column.as_primitive::<Date64Type>().value(at).div_euclid(86_400_000))?.into(),
        DataType::Time32(_)
        | DataType::Time64(_)
        | DataType::Timestamp(..)
        | DataType::Duration(_)
        | DataType::Interval(_) => times::text(column, at)?.into(),
        DataType::List(_) => list(column.as_list::<i32>().value(at).as_ref())?,
        DataType::LargeList(_) => list(column.as_list::<i64>().value(at).as_ref())?,
        DataType::ListView(_) => list(column.as_list_view::<i32>().value(at).as_ref())?,
        DataType::LargeListView(_) => list(column.as_list_view::<i64>().value(at).as_ref())?,
        DataType::FixedSizeList(..) => list(column.as_fixed_size_list().value(at).as_ref())?,
        DataType::Struct(names) => Value::Object(object(names, column.as_struct().columns(), at)?),
        DataType::Map(..) => {
            let entries = column.as_map().value(at);
            let [keys, values] = [0, 1].map(|part| entries.column(part));
            let entry = |at: usize| {
                let key = match value(keys.as_ref(), at)? {
                    Value::String(text) => text,
                    other => json::to_text(&other),
                };
                Ok((key, value(values.as_ref(), at)?))
            };
            Value::Object((0..entries.len()).map(entry).collect::<Result<_, String>>()?)
        }
        DataType::Dictionary(..) => {
            let dictionary = column.as_any_dictionary();
            let key = value(dictionary.keys(), at)?.as_u64().unwrap_or_default();
            value(dictionary.values().as_ref(), key as usize)?
        }
        other => return Err(format!("columns of type {other} are not supported; convert it")),
    })
}

fn list(entries: &dyn Array) -> Result<Value, String> {
    (0..entries.len()).map(|at| value(entries, at)).collect()
}

fn short(text: &str) -> Value {
    text.parse().map_or(Value::Null, json::float)
}

fn bytes(bytes: &[u8]) -> Value {
    std::str::from_utf8(bytes).map_or_else(|_| hex::encode(bytes), str::to_owned).into()
}
