//! Rows of CSV files. As in pandas a column is of numbers or of booleans if all of its cells are, else of text, and an
//! empty cell is null. A number stays as it is written.

use std::collections::HashSet;
use std::io::{self, BufRead, Read};
use std::path::Path;

use ::csv::{ErrorKind, Reader, ReaderBuilder, StringRecord};
use firebrick_spec::file::MAX_LINE_BYTES;
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
    let open = || -> Result<Reader<RowBytes>, Unread> {
        let bytes = RowBytes { bytes: text::open(path, compression)?, left: MAX_LINE_BYTES };
        Ok(ReaderBuilder::new().delimiter(separator).from_reader(bytes))
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

/// The bytes of a file, up to a limit for each row: a quote that nothing closes takes all that follows.
struct RowBytes {
    bytes: Box<dyn BufRead>,
    left: usize,
}

impl Read for RowBytes {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            let detail = format!("a row has more than {MAX_LINE_BYTES} bytes, the most that a row may have");
            return Err(io::Error::new(io::ErrorKind::InvalidData, detail));
        }
        let len = into.len().min(self.left);
        let read = self.bytes.read(&mut into[..len])?;
        self.left -= read;
        Ok(read)
    }
}

fn for_each_record(
    reader: &mut Reader<RowBytes>,
    mut take: impl FnMut(usize, &StringRecord) -> bool,
) -> Result<(), Unread> {
    let mut record = StringRecord::new();
    while reader.read_record(&mut record).map_err(csv_error)? {
        reader.get_mut().left = MAX_LINE_BYTES;
        let line = record.position().map_or(0, |place| place.line() as usize);
        if !take(line, &record) {
            break;
        }
    }
    Ok(())
}

fn columns(names: &StringRecord) -> Result<Vec<Column>, Unread> {
    let (mut columns, mut known) = (Vec::new(), HashSet::new());
    for (at, name) in names.iter().enumerate() {
        // pandas' name of the index that it writes
        let name = if name.is_empty() { format!("Unnamed: {at}") } else { name.to_owned() };
        if !known.insert(name.clone()) {
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
