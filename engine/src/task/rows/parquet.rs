//! Rows of Parquet files, with nested structs, lists and maps, as JSON.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use firebrick_backends::device::panic_message;
use parquet::file::reader::SerializedFileReader;
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use serde_json::{Map, Number, Value};

use super::raw::{Raw, Sink, Unread};

/// Gives every row of a file, row group by row group.
pub(super) fn rows(path: &Path, sink: &mut Sink<'_>) -> Result<(), Unread> {
    let file = File::open(path)?;
    // the reader asserts what a damaged file need not keep
    let read = catch_unwind(AssertUnwindSafe(|| -> Result<(), Unread> {
        let reader = SerializedFileReader::new(file)?;
        let rows = RowIter::from_file_into(Box::new(reader));
        for (at, row) in rows.enumerate() {
            if sink(Raw::row(at + 1, object(&row?))).is_break() {
                break;
            }
        }
        Ok(())
    }));
    read.unwrap_or_else(|panic| Err(Unread(panic_message(panic.as_ref()))))
}

fn object(row: &Row) -> Map<String, Value> {
    let columns = row.get_column_iter();
    columns.map(|(name, field)| (name.clone(), value(field))).collect()
}

/// A field as JSON: numbers as numbers, dates and decimals as text, bytes as text where they are UTF-8 and in
/// hexadecimal where they are not.
fn value(field: &Field) -> Value {
    // the shortest decimal that is the same number, as f32's own text has it
    let short = |text: String| text.parse().map_or(Value::Null, float);
    match field {
        Field::Null => Value::Null,
        Field::Bool(is) => Value::Bool(*is),
        Field::Byte(n) => (*n).into(),
        Field::Short(n) => (*n).into(),
        Field::Int(n) => (*n).into(),
        Field::Long(n) => (*n).into(),
        Field::UByte(n) => (*n).into(),
        Field::UShort(n) => (*n).into(),
        Field::UInt(n) => (*n).into(),
        Field::ULong(n) => (*n).into(),
        Field::Float16(n) => short(n.to_string()),
        Field::Float(n) => short(n.to_string()),
        Field::Double(n) => float(*n),
        Field::Str(text) => Value::String(text.clone()),
        Field::Bytes(bytes) => Value::String(match std::str::from_utf8(bytes.data()) {
            Ok(text) => text.to_owned(),
            Err(_) => hexadecimal(bytes.data()),
        }),
        Field::Group(row) => Value::Object(object(row)),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        Field::MapInternal(map) => {
            let entries = map.entries().iter().map(|(key, entry)| {
                let key = match value(key) {
                    Value::String(text) => text,
                    other => other.to_string(),
                };
                (key, value(entry))
            });
            Value::Object(entries.collect())
        }
        Field::Decimal(_)
        | Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_) => Value::String(field.to_string()),
    }
}

/// A number that JSON has; null for the others.
fn float(n: f64) -> Value {
    Number::from_f64(n).map_or(Value::Null, Value::Number)
}

fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // writing to a string cannot fail
        let _ = write!(text, "{byte:02x}");
        text
    })
}
