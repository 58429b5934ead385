//! Rows of Parquet files.

use std::fs::File;
use std::path::Path;

use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::errors::ParquetError;

use super::columns;
use super::raw::{Sink, Unread};

/// Approximate bytes of rows per batch.
const BATCH_BYTES: i64 = 4 << 20;
/// Most rows per batch. A batch has the whole text of each row, also of rows that share it in the file.
const BATCH_ROWS: i64 = 64;

/// Sends every row of a file to `sink`.
pub(super) fn rows(path: &Path, sink: &mut Sink<'_>) -> Result<(), Unread> {
    let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(path)?).map_err(unread)?;
    let groups = reader.metadata().row_groups();
    let (bytes, rows) = groups.iter().fold((0_i64, 0_i64), |(bytes, rows), group| {
        (bytes.saturating_add(group.total_byte_size()), rows.saturating_add(group.num_rows()))
    });
    let batch = (BATCH_BYTES / (bytes / rows.max(1)).max(1)).clamp(1, BATCH_ROWS);
    let mut reader = reader.with_batch_size(batch as usize).build().map_err(unread)?;
    columns::send(&mut reader, path, sink)
}

fn unread(error: ParquetError) -> Unread {
    match error {
        ParquetError::NYI(what) => Unread::Refused(format!("it has what is not supported: {what}; write it again")),
        other => other.into(),
    }
}
