//! Rows of CSV files. As in pandas a column is of numbers or of booleans if all of its cells are, else of text, and an
//! empty cell is null. A number stays as it is written.

use std::io::{BufRead, Read};
use std::path::Path;

use ::csv::{ErrorKind, Reader, ReaderBuilder, StringRecord};
use firebrick_spec::json;
use serde_json::{Map, Value};

use super::format::Compression;
use super::raw::{Raw, Sink, Unread};
use super::text;
use crate::task::error::Unit;

/// Possible types of a column's cells.
struct Column {
    name: String,
    numbers: bool,
    booleans: bool,
}

/// Sends every row of a file to `sink`.
pub(super) fn rows(path: &Path, compression: Compression, separator: u8, sink: &mut Sink<'_>) -> Result<(), Unread> {
    let open = || -> Result<Reader<Box<dyn BufRead>>, Unread> {
        Ok(ReaderBuilder::new().delimiter(separator).from_reader(text::open(path, compression)?))
    };
    let mut reader = open()?;
    let mut columns = columns(&reader.headers().map_err(csv_error)?.clone())?;
    for_each_record(&mut reader, |_, record| {
        for (column, cell) in columns.iter_mut().zip(record) {
            column.narrow(cell);
        }
        true
    })?;
    for_each_record(&mut open()?, |line, record| {
        let fields: Map<String, Value> =
            columns.iter().zip(record).map(|(column, cell)| (column.name.clone(), column.value(cell))).collect();
        sink(Raw::fields(line, Unit::Line, fields)).is_continue()
    })
}

fn for_each_record<R: Read>(
    reader: &mut Reader<R>,
    mut take: impl FnMut(usize, &StringRecord) -> bool,
) -> Result<(), Unread> {
    let mut record = StringRecord::new();
    while reader.read_record(&mut record).map_err(csv_error)? {
        let line = record.position().map_or(0, |place| place.line() as usize);
        if !take(line, &record) {
            break;
        }
    }
    Ok(())
}

fn columns(names: &StringRecord) -> Result<Vec<Column>, Unread> {
    let mut columns: Vec<Column> = Vec::new();
    for (at, name) in names.iter().enumerate() {
        // pandas' name of the index that it writes
        let name = if name.is_empty() { format!("Unnamed: {at}") } else { name.to_owned() };
        if columns.iter().any(|column| column.name == name) {
            return Err(Unread::Refused(format!("line 1: two columns are named `{name}`; rename one")));
        }
        columns.push(Column { name, numbers: true, booleans: true });
    }
    Ok(columns)
}

impl Column {
    fn narrow(&mut self, cell: &str) {
        if cell.is_empty() {
            return;
        }
        self.numbers &= number(cell).is_some();
        self.booleans &= boolean(cell).is_some();
    }

    fn value(&self, cell: &str) -> Value {
        let typed = match self {
            _ if cell.is_empty() => Some(Value::Null),
            Self { numbers: true, .. } => number(cell),
            Self { booleans: true, .. } => boolean(cell),
            _ => None,
        };
        typed.unwrap_or_else(|| Value::from(cell))
    }
}

fn number(cell: &str) -> Option<Value> {
    match cell {
        "nan" => Some(json::float(f64::NAN)),
        "inf" => Some(json::float(f64::INFINITY)),
        "-inf" => Some(json::float(f64::NEG_INFINITY)),
        _ => Some(json::number(cell)).filter(|value| !value.is_string()),
    }
}

fn boolean(cell: &str) -> Option<Value> {
    match cell {
        "True" | "TRUE" | "true" => Some(Value::Bool(true)),
        "False" | "FALSE" | "false" => Some(Value::Bool(false)),
        _ => None,
    }
}

fn csv_error(error: ::csv::Error) -> Unread {
    let text = error.to_string();
    let line = error.position().map_or(String::new(), |place| format!("line {}: ", place.line()));
    match error.into_kind() {
        ErrorKind::Io(error) => error.into(),
        ErrorKind::UnequalLengths { expected_len, len, .. } => Unread::Refused(format!(
            "{line}{len} fields, expected {expected_len} as in line 1; put a field with a separator or a line break into \
             double quotes"
        )),
        ErrorKind::Utf8 { err, .. } => {
            Unread::Refused(format!("{line}field {} is not UTF-8; write the file in UTF-8", err.field() + 1))
        }
        _ => Unread::Damaged(text),
    }
}
