//! Equal rows from every format, and errors of unreadable files.

use std::io::Write;
use std::path::{Path, PathBuf};

use ::parquet::basic::{Compression, GzipLevel, ZstdLevel};
use proptest::prelude::*;
use serde_json::{Value, json};

mod formats;
mod sources;
mod verl_rows;

use super::*;
use crate::task::TaskError;
use verl_rows::write_verl;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("temporary folder")
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("created");
    std::fs::write(&path, bytes).expect("written");
    path
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).expect("compressed");
    encoder.finish().expect("compressed")
}

fn zstandard(bytes: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(bytes, 3).expect("compressed")
}

fn all(rows: &Rows) -> Vec<Value> {
    let row = |at| Value::Object(rows.get(at).expect("a row").fields.into());
    (0..rows.len()).map(row).collect()
}

fn read(path: &Path) -> Result<Rows, TaskError> {
    Rows::read(&[path.to_owned()], TRAIN, None, &|_| Ok(()))
}

fn refused(path: &Path) -> String {
    let error = read(path).expect_err("refused").to_string();
    error.replace(&path.display().to_string(), "FILE")
}

/// Rows of different lengths, enough for several blocks.
fn examples() -> Vec<Value> {
    (0..2000).map(|i| json!({"q": "é".repeat(i % 300), "n": i, "deep": {"list": [i, null, {"x": 0.1}]}})).collect()
}

fn as_lines(rows: &[Value]) -> String {
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    lines.join("\n")
}

#[test]
fn the_first_row_of_a_parquet_file_is_read_with_its_nested_fields() {
    let folder = tempfile::tempdir().expect("a folder");
    let rows: Vec<(String, String)> = (0..3).map(|n| (format!("q{n}"), format!("{n}"))).collect();
    write_verl(&folder.path().join("train.parquet"), &rows, "Be brief.", Compression::SNAPPY);
    let row = RowFiles::from("train.parquet").first_row(folder.path()).expect("a row");
    assert_eq!(row["prompt"][1]["content"], "q0");
    assert_eq!(row["reward_model"]["ground_truth"], "0");
    let error = RowFiles::from("nowhere.parquet").first_row(folder.path()).expect_err("no file");
    assert!(error.to_string().contains("nowhere.parquet"), "{error}");
}

#[test]
fn the_same_rows_come_out_of_every_text_format() {
    let (folder, rows) = (folder(), examples());
    let lines = as_lines(&rows);
    let list = serde_json::to_string_pretty(&rows).expect("JSON");
    let files = [
        write(folder.path(), "a.jsonl", lines.as_bytes()),
        write(folder.path(), "a.jsonl.gz", &gzip(lines.as_bytes())),
        write(folder.path(), "a.ndjson.zst", &zstandard(lines.as_bytes())),
        write(folder.path(), "a.json", list.as_bytes()),
        write(folder.path(), "a.json.gz", &gzip(list.as_bytes())),
        write(folder.path(), "lines.json", lines.as_bytes()),
    ];
    for file in files {
        let read = read(&file).expect("rows");
        assert!(all(&read) == rows, "{}", file.display());
        // in any order, too
        for at in [1999, 0, 700, 1, 1500] {
            assert_eq!(read.get(at).expect("a row").fields["n"], at);
        }
    }
}

#[test]
fn verls_parquet_becomes_nested_rows_under_every_compression() {
    let folder = folder();
    let rows: Vec<(String, String)> = (0..2500).map(|i| (format!("{i} + 1 = ?"), (i + 1).to_string())).collect();
    for compression in [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(GzipLevel::default()),
        Compression::ZSTD(ZstdLevel::default()),
    ] {
        let path = folder.path().join("train.parquet");
        write_verl(&path, &rows, "Add.", compression);
        let read = read(&path).expect("rows");
        assert_eq!(read.len(), 2500);
        let expected = json!({
            "data_source": "openai/gsm8k",
            "prompt": [
                {"content": "Add.", "role": "system"},
                {"content": "2100 + 1 = ?", "role": "user"},
            ],
            "ability": "math",
            "reward_model": {"ground_truth": "2101", "style": "rule"},
            "extra_info": {"index": 100, "difficulty": null},
        });
        let row = read.get(2100).expect("a row");
        assert_eq!(Value::Object(row.fields.into()), expected);
        assert!(row.place.to_string().ends_with("train.parquet, row 2101"));
    }
}

#[test]
fn many_rows_take_little_memory() {
    const ROWS: usize = 20_000;
    let folder = folder();
    let rows: Vec<(String, String)> = (0..ROWS)
        .map(|i| {
            let question = format!(
                "Warehouse {i} holds {} boxes on each of {} shelves, and {} trucks bring {} boxes more each. How many boxes are \
                 there when all trucks have been unloaded?",
                i % 97, i % 89, i % 7, i % 53
            );
            (question, (i % 97 * (i % 89) + i % 7 * (i % 53)).to_string())
        })
        .collect();
    let parquet = folder.path().join("rows.parquet");
    write_verl(&parquet, &rows, "Think step by step.", Compression::SNAPPY);
    let packed = read(&parquet).expect("rows");
    let lines = write(folder.path(), "rows.jsonl", as_lines(&all(&packed)).as_bytes());
    let placed = read(&lines).expect("rows");
    assert_eq!((packed.len(), placed.len()), (ROWS as u64, ROWS as u64));
    // of some 450 bytes of JSON each
    let of_each = |rows: &Rows| rows.held_bytes() / ROWS;
    assert!(of_each(&packed) < 100, "{} bytes a row", of_each(&packed));
    assert!(of_each(&placed) <= 12, "{} bytes a row", of_each(&placed));
    for at in [0, 255, 256, 12_345, 19_999] {
        let question = |rows: &Rows| rows.get(at).expect("a row").fields["prompt"][1]["content"].clone();
        assert_eq!(question(&packed), rows[at as usize].0);
        assert_eq!(question(&placed), rows[at as usize].0);
    }
}

#[test]
fn rows_keep_their_line_numbers_across_blank_lines() {
    let folder = folder();
    let text = b"\xEF\xBB\xBF{\"a\": 1}\r\n\n{\"a\": 2}\n";
    for (name, bytes) in [("a.jsonl", text.to_vec()), ("a.jsonl.gz", gzip(text))] {
        let path = write(folder.path(), name, &bytes);
        let rows = read(&path).expect("rows");
        let lines: Vec<usize> = (0..rows.len()).map(|at| rows.get(at).expect("a row").place.line).collect();
        assert_eq!(lines, [1, 3]);
        assert_eq!(all(&rows), [json!({"a": 1}), json!({"a": 2})]);
        let one = Rows::read(&[path], TRAIN, Some(1), &|_| Ok(())).expect("rows");
        assert_eq!(one.len(), 1);
    }
}

#[test]
fn a_bad_line_is_named_with_what_it_has() {
    let folder = folder();
    let refused = |text: &str| refused(&write(folder.path(), "a.jsonl", text.as_bytes()));
    assert_eq!(
        refused("{\"a\": 1}\n{\"a\": }\n"),
        "FILE, line 2: expected one JSON object per line, \
         found invalid JSON at column 7 (expected value)"
    );
    assert!(refused("[1]").contains("line 1: expected one JSON object per line, found a list"));
    assert!(refused("3").ends_with("found the value 3"));
}

#[test]
fn the_first_bad_row_is_the_one_that_is_named() {
    let (folder, mut rows) = (folder(), examples());
    rows[1700] = json!({"n": -1});
    rows[900] = json!({"n": -1});
    let path = write(folder.path(), "a.jsonl", as_lines(&rows).as_bytes());
    let check = |row: crate::task::template::Row| match row.fields["n"].as_i64() {
        Some(-1) => Err(row.bad(TRAIN, "below 0")),
        _ => Ok(()),
    };
    for _ in 0..10 {
        let error = Rows::read(std::slice::from_ref(&path), TRAIN, None, &check).expect_err("refused");
        assert!(error.to_string().contains("line 901: below 0"), "{error}");
    }
}

#[test]
fn an_empty_file_and_a_missing_file_name_the_setting() {
    let folder = folder();
    assert_eq!(
        refused(&write(folder.path(), "a.jsonl", b"\n \n")),
        "the dataset FILE (setting `task.train`) has no rows; expected at least one"
    );
    let text = read(Path::new("no/such.jsonl")).expect_err("missing").to_string();
    assert!(text.starts_with("cannot read the dataset no/such.jsonl (setting `task.train`): "));
    assert!(text.contains("relative to its folder"), "{text}");
}

#[test]
fn a_file_that_was_cut_off_says_how_far_it_was_read() {
    let (folder, rows) = (folder(), examples());
    let lines = as_lines(&rows);
    let cut = |name: &str, bytes: &[u8]| refused(&write(folder.path(), name, &bytes[..bytes.len() * 3 / 4]));
    for text in [
        cut("a.jsonl.gz", &gzip(lines.as_bytes())),
        cut("a.jsonl.zst", &zstandard(lines.as_bytes())),
        cut("a.json", serde_json::to_string(&rows).expect("JSON").as_bytes()),
    ] {
        assert!(text.starts_with("FILE: cannot be read after row "), "{text}");
        assert!(text.contains("incomplete, damaged"), "{text}");
    }
    let path = folder.path().join("a.parquet");
    write_verl(&path, &vec![("q".into(), "a".into()); 50], "S", Compression::SNAPPY);
    let bytes = std::fs::read(&path).expect("read");
    let text = cut("b.parquet", &bytes);
    assert!(text.starts_with("FILE: cannot be read after row 0: "), "{text}");
    // a footer that is whole, over pages that are not: whatever the reader does with them, it is an error with the
    // file's name
    let mut damaged = bytes.clone();
    damaged[4..bytes.len() / 3].fill(0xFF);
    let text = refused(&write(folder.path(), "c.parquet", &damaged));
    assert!(text.starts_with("FILE: cannot be read after row 0: "), "{text}");
}

#[test]
fn a_file_that_changes_after_it_was_checked_is_noticed() {
    let folder = folder();
    let path = write(folder.path(), "a.jsonl", b"{\"a\": 1}\n{\"a\": 2}\n");
    let rows = read(&path).expect("rows");
    std::fs::write(&path, "{\"other\": \"longer than before\"}\n").expect("written");
    let text = rows.get(1).expect_err("changed").to_string();
    assert!(text.contains("line 2: the file was changed"), "{text}");
}

proptest! {
    #[test]
    fn a_split_loses_and_repeats_no_row(len in 1u64..300, share in 0.0..1.0f64, seed: u64) {
        let held_out = (len as f64 * share) as u64;
        let (train, validation) = split(len, held_out, seed);
        prop_assert_eq!(validation.len(), held_out);
        let rows = |part: Indices| -> Vec<u64> {
            let order = Order::plain(part);
            (0..order.len()).filter_map(|at| order.row(at)).collect()
        };
        let (train, validation) = (rows(train), rows(validation));
        prop_assert!(train.is_sorted() && validation.is_sorted());
        let mut joined = [train, validation].concat();
        joined.sort_unstable();
        prop_assert_eq!(joined, (0..len).collect::<Vec<_>>());
    }

    #[test]
    fn a_mixture_draws_by_weight_and_forgets_no_row(
        sources in prop::collection::vec((1u64..200, 0.1..10.0f64), 1..5),
    ) {
        let mut first = 0;
        let parts: Vec<(Indices, f64)> = sources.iter().map(|&(len, weight)| {
            first += len;
            (Indices::Range(first - len..first), weight)
        }).collect();
        let order = Order::weighted(parts);
        let rows: Vec<u64> = (0..order.len()).map(|at| order.row(at).expect("a row")).collect();
        prop_assert_eq!(order.row(order.len()), None);
        let mut distinct = rows.clone();
        distinct.sort_unstable();
        distinct.dedup();
        prop_assert_eq!(distinct, (0..first).collect::<Vec<_>>());
        let total: f64 = sources.iter().map(|(_, weight)| weight).sum();
        let mut start = 0;
        for (len, weight) in sources {
            let count = rows.iter().filter(|row| (start..start + len).contains(*row)).count();
            let wanted = rows.len() as f64 * weight / total;
            prop_assert!((count as f64 - wanted).abs() <= 4.0, "{} of {}, wanted {}", count, rows.len(), wanted);
            start += len;
        }
    }
}
