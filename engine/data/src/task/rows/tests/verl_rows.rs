//! Rows in verl's Parquet format, for tests.

use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use std::path::Path;
use std::sync::Arc;

/// The columns of verl's files, as pandas and pyarrow write them.
const VERL: &str = "message schema {
    optional binary data_source (UTF8);
    optional group prompt (LIST) {
        repeated group list { optional group element {
            optional binary content (UTF8);
            optional binary role (UTF8);
        } }
    }
    optional binary ability (UTF8);
    optional group reward_model {
        optional binary ground_truth (UTF8);
        optional binary style (UTF8);
    }
    optional group extra_info {
        optional int64 index;
        optional double difficulty;
    }
}";

/// Writes one column of texts, each with its levels.
fn texts(
    group: &mut SerializedRowGroupWriter<'_, std::fs::File>,
    values: &[String],
    definition: i16,
    repetition: Option<&[i16]>,
) {
    let values: Vec<ByteArray> = values.iter().map(|v| v.as_str().into()).collect();
    let levels = vec![definition; values.len()];
    let mut column = group.next_column().expect("a column").expect("one more");
    let writer = column.typed::<ByteArrayType>();
    writer.write_batch(&values, Some(&levels), repetition).expect("written");
    column.close().expect("closed");
}

/// Rows of a question and an answer as verl's preprocessing writes them, some in each row group: a system and a user
/// message, and the ground truth in `reward_model`.
pub fn write_verl(path: &Path, rows: &[(String, String)], system: &str, compression: Compression) {
    let schema = Arc::new(parse_message_type(VERL).expect("a schema"));
    let properties = WriterProperties::builder().set_compression(compression).build();
    let file = std::fs::File::create(path).expect("created");
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).expect("a writer");
    for some in rows.chunks(1000) {
        let mut group = writer.next_row_group().expect("a row group");
        let repeated = |text: &str| vec![text.to_owned(); some.len()];
        let pairs = |first: &str, second: &dyn Fn(&(String, String)) -> String| -> Vec<String> {
            some.iter().flat_map(|row| [first.to_owned(), second(row)]).collect()
        };
        let repetition: Vec<i16> = some.iter().flat_map(|_| [0, 1]).collect();
        texts(&mut group, &repeated("openai/gsm8k"), 1, None);
        texts(&mut group, &pairs(system, &|row| row.0.clone()), 4, Some(&repetition));
        texts(&mut group, &pairs("system", &|_| "user".to_owned()), 4, Some(&repetition));
        texts(&mut group, &repeated("math"), 1, None);
        let answers: Vec<String> = some.iter().map(|row| row.1.clone()).collect();
        texts(&mut group, &answers, 2, None);
        texts(&mut group, &repeated("rule"), 2, None);
        let numbers: Vec<i64> = (0..some.len() as i64).collect();
        let levels = vec![2; some.len()];
        let mut column = group.next_column().expect("a column").expect("one more");
        let integers = column.typed::<Int64Type>();
        integers.write_batch(&numbers, Some(&levels), None).expect("written");
        column.close().expect("closed");
        // no row has a difficulty
        let mut column = group.next_column().expect("a column").expect("one more");
        let doubles = column.typed::<DoubleType>();
        doubles.write_batch(&[], Some(&vec![1; some.len()]), None).expect("written");
        column.close().expect("closed");
        group.close().expect("closed");
    }
    writer.close().expect("closed");
}
