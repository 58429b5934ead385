//! Rows: lines without end, decompressors and dictionaries that expand, headers that lie.

use super::{Bench, Job, Kind, Random, TERMINAL, any, damage, link, nested, refused, row, write_sparse};
use arrow_array::{ArrayRef, DictionaryArray, Int32Array, NullArray, RecordBatch, StringArray};
use arrow_ipc::CompressionType;
use arrow_ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use arrow_schema::Schema;
use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression as PageCompression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use std::fs::{self, File};
use std::io::Write;
use std::sync::Arc;

/// A word of a file outside of all folders that a run may read.
pub(super) const MARK: &str = "outside-of-the-folder";

pub(super) const KINDS: &[Kind] = &[
    refused("a line without end", Job::Data, |bench, random| {
        write_sparse(bench, "rows.jsonl", random.power(26, 42) as u64);
        Vec::new()
    }),
    refused("a list without end", Job::Data, |bench, random| {
        let inner = random.pick(&["[", "[\"", "[{\"q\": \"", "[[", "[{"]);
        bench.write("rows.json", inner);
        let file = fs::OpenOptions::new().write(true).open(bench.path("rows.json")).unwrap();
        file.set_len(random.power(26, 42) as u64).unwrap();
        train("rows.json")
    }),
    refused("a gzip bomb", Job::Data, |bench, random| {
        let name = random.pick(&["rows.jsonl.gz", "rows.json.gz", "rows.csv.gz"]);
        let mut file = GzEncoder::new(File::create(bench.path(name)).unwrap(), Compression::fast());
        expand(&mut file, random);
        file.finish().unwrap();
        train(name)
    }),
    refused("a Zstandard bomb", Job::Data, |bench, random| {
        let name = random.pick(&["rows.jsonl.zst", "rows.json.zst", "rows.csv.zst"]);
        let mut file = zstd::Encoder::new(File::create(bench.path(name)).unwrap(), 1).unwrap();
        expand(&mut file, random);
        file.finish().unwrap();
        train(name)
    }),
    refused("depth of a row", Job::Data, |bench, random| {
        let depth = random.power(8, 20);
        let value = match random.below(3) {
            0 => nested("[", "", "]", depth),
            1 => nested("{\"a\":", "1", "}", depth),
            _ => "[".repeat(depth),
        };
        bench.write("rows.jsonl", &format!("{{\"q\": \"1\", \"a\": \"2\", \"x\": {value}}}\n"));
        Vec::new()
    }),
    any("many values in a row", Job::Data, |bench, random| {
        let value = random.pick(&["0,", "[],", "{},", "{\"a\":0},", "1e9999,", "\"\","]);
        let values = value.repeat(random.power(20, 24) / value.len());
        bench.write(
            "rows.jsonl",
            &format!("{{\"q\": \"1\", \"a\": \"2\", \"x\": [{}]}}\n", values.trim_end_matches(',')),
        );
        Vec::new()
    }),
    any("numbers of a row", Job::Data, |bench, random| {
        let digits = "9".repeat(random.power(4, 20));
        let number = match random.below(4) {
            0 => digits,
            1 => format!("1e{digits}"),
            2 => format!("0.{digits}"),
            _ => format!("-{digits}e-{digits}"),
        };
        bench.write("rows.jsonl", &format!("{{\"q\": {number}, \"a\": {number}}}\n"));
        Vec::new()
    }),
    any("terminal codes of a row", Job::Data, |bench, random| {
        let key = random.pick(&["q", "a", "x", TERMINAL]);
        let mut row = row("1+1=");
        row[key] = TERMINAL.into();
        bench.write("rows.jsonl", &format!("{row}\n"));
        random.pick(&[&["task.answer_field=none"][..], &[]]).iter().map(|&arg| arg.to_owned()).collect()
    }),
    any("a damaged Parquet file", Job::Data, |bench, random| {
        parquet(bench, &texts(&["a"; 50]), PageCompression::SNAPPY);
        damage(bench, "rows.parquet", random);
        train("rows.parquet")
    }),
    refused("sizes in a footer of Parquet", Job::Data, |bench, random| {
        // a list of so many structs, as Thrift's compact protocol writes it, after the version
        let count = random.pick(&[u32::MAX, 1 << 31, (1 << 31) - 1, 1 << 28]);
        let mut footer = vec![0x15, 2, 0x19, 0xfc];
        let mut left = count;
        while left >= 0x80 {
            footer.push(left as u8 | 0x80);
            left >>= 7;
        }
        footer.push(left as u8);
        footer.extend(vec![0; random.below(64) as usize]);
        let length = random.pick(&[footer.len() as u32, footer.len() as u32, u32::MAX, 1 << 30]);
        let bytes = [b"PAR1", &footer[..], &length.to_le_bytes(), b"PAR1"].concat();
        fs::write(bench.path("rows.parquet"), bytes).unwrap();
        train("rows.parquet")
    }),
    refused("a dictionary of Parquet", Job::Data, |bench, random| {
        // the writer hashes all the text that a reader would make of it
        let (length, whole) = (random.power(20, 23), random.power(29, 30));
        let text: ArrayRef = Arc::new(StringArray::from(vec!["a".repeat(length)]));
        let keys = Int32Array::from(vec![0; whole / length]);
        let column: ArrayRef = Arc::new(DictionaryArray::new(keys, text));
        let batch = RecordBatch::try_from_iter([("q", column.clone()), ("a", column)]).unwrap();
        parquet(bench, &batch, PageCompression::ZSTD(ZstdLevel::default()));
        train("rows.parquet")
    }),
    refused("a page of Parquet", Job::Data, |bench, _| {
        let text = "a".repeat(100 << 20);
        parquet(bench, &texts(&[text.as_str()]), PageCompression::ZSTD(ZstdLevel::default()));
        train("rows.parquet")
    }),
    any("a damaged Arrow file", Job::Data, |bench, random| {
        let name = random.pick(&["rows.arrow", "rows.feather"]);
        arrow(bench, name, &texts(&["a"; 50]), random.below(2) == 0);
        damage(bench, name, random);
        train(name)
    }),
    any("sizes in an Arrow file", Job::Data, |bench, random| {
        let name = random.pick(&["rows.arrow", "rows.feather"]);
        arrow(bench, name, &texts(&["aaaaaaaa"; 5000]), true);
        let mut bytes = fs::read(bench.path(name)).unwrap();
        let size = random.pick(&[i64::MAX, 1 << 62, 1 << 40, 1 << 31, -1, -2]).to_le_bytes();
        // every size is at a multiple of eight bytes or of four
        let at = 4 * random.below(bytes.len() as u64 / 4 - 2) as usize;
        let len = random.pick(&[4, 8]);
        bytes[at..at + len].copy_from_slice(&size[..len]);
        fs::write(bench.path(name), bytes).unwrap();
        train(name)
    }),
    refused("rows of nothing in Arrow", Job::Data, |bench, random| {
        let nulls: ArrayRef = Arc::new(NullArray::new(random.power(28, 40)));
        arrow(bench, "rows.arrow", &RecordBatch::try_from_iter([("q", nulls)]).unwrap(), false);
        train("rows.arrow")
    }),
    refused("a text of Arrow that expands", Job::Data, |bench, _| {
        let text = "a".repeat(100 << 20);
        arrow(bench, "rows.arrow", &texts(&[text.as_str()]), true);
        train("rows.arrow")
    }),
    any("fields of a CSV file", Job::Data, |bench, random| {
        let columns = random.power(8, 18);
        let text = match random.below(4) {
            0 => format!("q,a\n\"{}", "a".repeat(random.power(20, 25))),
            1 => format!("q,a{}\n1,2\n", ",x".repeat(columns)),
            2 => format!("q,a\n1,2{}\n", ",x".repeat(columns)),
            _ => {
                (0..columns.min(1 << 14)).fold(String::new(), |line, at| line + "c" + &at.to_string() + ",") + "\n1,2\n"
            }
        };
        bench.write("rows.csv", &text);
        train("rows.csv")
    }),
    refused("a CSV file without end", Job::Data, |bench, random| {
        bench.write("rows.csv", random.pick(&["q,a\n\"", "q,a\n", "", "\""]));
        let file = fs::OpenOptions::new().write(true).open(bench.path("rows.csv")).unwrap();
        file.set_len(random.power(28, 42) as u64).unwrap();
        train("rows.csv")
    }),
    refused("files of a saved dataset that are elsewhere", Job::Data, |bench, random| {
        bench.write("secret.arrow", MARK);
        bench.write("saved/inner.arrow", MARK);
        let name = random.pick(&["../secret.arrow", "/etc/passwd", "link.arrow", "../../../../../etc/passwd"]);
        link(bench, "saved/link.arrow", "../secret.arrow");
        bench.write("saved/state.json", &format!("{{\"_data_files\": [{{\"filename\": \"{name}\"}}]}}"));
        train("saved")
    }),
    refused("a line without end for logprobs", Job::Logprobs, |bench, random| {
        write_sparse(bench, "rows.jsonl", random.power(26, 42) as u64);
        Vec::new()
    }),
    refused("tokens for logprobs", Job::Logprobs, |bench, random| {
        let tokens = match random.below(4) {
            0 => format!("[{}]", random.number()),
            1 => "[".repeat(random.power(8, 18)),
            2 => "[\"\u{1b}[2J\"]".to_owned(),
            _ => format!("[{}1]", "1,".repeat(random.power(16, 22))),
        };
        bench.write("rows.jsonl", &format!("{{\"input_ids\": {tokens}}}\n"));
        Vec::new()
    }),
];

fn train(name: &str) -> Vec<String> {
    vec![format!("task.train={name}")]
}

/// Writes 75 to 100 MiB of few bytes.
fn expand(to: &mut impl Write, random: &mut Random) {
    let chunk = random.pick(&["a", "\n", " ", "[", "{}\n", "{\"q\": \"1\", \"a\": \"2\"}\n", "[1,2],", "\"", "q,a\n"]);
    let chunk = chunk.repeat((1 << 16) / chunk.len());
    to.write_all(random.pick(&["", "[", "{\"q\": \"", "q,a\n\""]).as_bytes()).unwrap();
    for _ in 0..1200 + random.below(400) {
        to.write_all(chunk.as_bytes()).unwrap();
    }
}

fn texts(texts: &[&str]) -> RecordBatch {
    let column: ArrayRef = Arc::new(StringArray::from_iter_values(texts));
    RecordBatch::try_from_iter([("q", column.clone()), ("a", column)]).unwrap()
}

fn parquet(bench: &Bench, batch: &RecordBatch, compression: PageCompression) {
    let properties = WriterProperties::builder()
        .set_compression(compression)
        .set_dictionary_page_size_limit(1 << 30)
        .set_data_page_size_limit(1 << 30)
        .build();
    let file = File::create(bench.path("rows.parquet")).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
}

/// Writes a stream, as `datasets` does, or a file with a footer.
fn arrow(bench: &Bench, name: &str, batch: &RecordBatch, compressed: bool) {
    let options = IpcWriteOptions::default();
    let options = options.try_with_compression(compressed.then_some(CompressionType::ZSTD)).unwrap();
    let (file, schema): (File, Arc<Schema>) = (File::create(bench.path(name)).unwrap(), batch.schema());
    if name == "rows.arrow" {
        let mut writer = StreamWriter::try_new_with_options(file, &schema, options).unwrap();
        writer.write(batch).unwrap();
        writer.finish().unwrap();
    } else {
        let mut writer = FileWriter::try_new_with_options(file, &schema, options).unwrap();
        writer.write(batch).unwrap();
        writer.finish().unwrap();
    }
}
