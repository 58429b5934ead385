//! Comparison with the values that Python reads, and errors.

use super::*;
use firebrick_spec::json;

/// Files and values of `make_rows.py`.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/rows").join(name)
}

/// Rows as their files have them.
fn written(path: &Path) -> Vec<String> {
    let rows = read(path).expect("rows");
    (0..rows.len()).map(|at| rows.get(at).expect("a row").fields.to_text()).collect()
}

#[test]
fn every_type_of_a_column_is_what_pyarrow_reads() {
    let files = [
        "types_none.parquet",
        "types_snappy.parquet",
        "types_gzip.parquet",
        "types_brotli.parquet",
        "types_lz4.parquet",
        "types_zstd.parquet",
        "types.arrow",
        "types_uncompressed.feather",
        "types_lz4.feather",
        "types_zstd.feather",
    ];
    let expected = read(&fixture("types.jsonl")).expect("rows");
    for file in files {
        let rows = read(&fixture(file)).expect(file);
        assert_eq!(rows.len(), 2, "{file}");
        for at in 0..2 {
            let [rows, expected] = [&rows, &expected].map(|rows| rows.get(at).expect("a row").fields);
            for ((name, rows), (also, expected)) in rows.columns().zip(expected.columns()) {
                assert_eq!(name, also, "{file}");
                let is_same = match name.as_str() {
                    "nan" | "inf" => json::to_text(rows) == json::to_text(expected),
                    // pandas has one spelling of floats, and Rust another
                    _ => json::plain(rows) == json::plain(expected),
                };
                assert!(is_same, "{file}, row {at}, {name}: {rows}, expected {expected}");
            }
        }
    }
}

#[test]
fn columns_of_csv_are_what_pandas_reads_and_numbers_stay_as_they_are_written() {
    let rows = [
        r#"{"prompt":"1+1=\n\"?","n":2,"x":1.50,"y":NaN,"ok":true,"code":"007","note":null,"when":"2026-01-02"}"#,
        r#"{"prompt":"2","n":-3,"x":1e5,"y":Infinity,"ok":false,"code":"12","note":"a","when":null}"#,
    ];
    assert_eq!(written(&fixture("rows.csv")), rows);
    assert_eq!(read(&fixture("rows.csv")).expect("rows").get(1).expect("a row").place.line, 4);
    assert_eq!(written(&fixture("rows.tsv")), [r#"{"a":1,"b":"x,y"}"#]);
    let folder = folder();
    // as Parquet, Arrow, bzip2 and ORC begin
    for name in ["PARENT", "PAR1", "ARROW1", "BZh", "ORCID"] {
        let file = write(folder.path(), "names.csv", format!("{name},b\n1,2\n").as_bytes());
        assert_eq!(written(&file), [format!(r#"{{"{name}":1,"b":2}}"#)]);
    }
    let text = std::fs::read(fixture("rows.csv")).expect("read");
    for (name, bytes) in [("a.csv.gz", gzip(&text)), ("a.csv.zst", zstandard(&text))] {
        assert_eq!(written(&write(folder.path(), name, &bytes)), rows);
    }
}

#[test]
fn a_csv_file_of_very_many_columns_is_read_in_time_of_its_size() {
    let commas = ",".repeat(200_000);
    let folder = folder();
    let file = write(folder.path(), "wide.csv", format!("{commas}\n{commas}\n").as_bytes());
    assert_eq!(read(&file).expect("rows").get(0).expect("a row").fields.columns().count(), 200_001);
}

#[test]
fn folders_of_save_to_disk_are_read_by_their_lists() {
    let read = |name: &str, setting| -> Vec<Value> {
        let files = RowFiles::from(fixture(name)).list(Path::new("."), setting).expect("files").concat();
        all(&Rows::read(&files, setting, None, &|_| Ok(())).expect("rows"))
    };
    let row = |n: u64| json!({"q": n.to_string(), "n": n});
    assert_eq!(read("one", TRAIN), [0, 1, 2, 3, 4].map(row));
    assert_eq!(read("splits", TRAIN), [0, 1, 2].map(row));
    assert_eq!(read("splits", "task.validation"), [3, 4].map(row));
    let folder = folder();
    write(folder.path(), "state.json", br#"{"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{}]}"#);
    let error = RowFiles::from(folder.path()).list(Path::new("."), TRAIN).expect_err("refused").to_string();
    assert!(error.contains("_indices_data_files"), "{error}");
}

#[test]
fn numbers_of_json_are_held_as_they_are_written() {
    let rows = [
        r#"{"a":12345678901234567890123,"b":-0,"c":1E3,"d":1.50,"e":NaN,"f":[-Infinity,1e-05]}"#,
        r#"{"a":{"b":0.10000000000000000001}}"#,
    ];
    let folder = folder();
    let lines = rows.join("\n");
    let list = format!("[\n  {},\n  {}\n]\n", rows[0].replace(',', ",\n"), rows[1]);
    for (name, bytes) in [
        ("a.jsonl", lines.clone().into_bytes()),
        ("a.jsonl.gz", gzip(lines.as_bytes())),
        ("a.json", list.clone().into_bytes()),
        ("a.json.zst", zstandard(list.as_bytes())),
    ] {
        assert_eq!(written(&write(folder.path(), name, &bytes)), rows, "{name}");
    }
}

#[test]
fn an_entry_of_a_list_that_is_no_row_is_named_by_its_number() {
    let folder = folder();
    let refused = |text: &str| refused(&write(folder.path(), "a.json", text.as_bytes()));
    for (text, said) in [
        ("[{\"a\": 1}, 3]", "FILE, row 2: expected one JSON object per row, found the value 3"),
        (
            "[{\"a\": 1}, {\"b\": }]",
            "FILE, row 2: expected one JSON object per row, found invalid JSON at column 7 (expected value)",
        ),
        (
            "[{\"a\": 1} {\"b\": 2}]",
            "FILE, row 1: expected one JSON object per row, found invalid JSON at column 10 (trailing characters)",
        ),
        (
            "[{\"a\": 1},]",
            "FILE, row 2: expected one JSON object per row, found invalid JSON at column 0 (EOF while parsing a value)",
        ),
        ("[[1]]", "FILE, row 1: expected one JSON object per row, found the value [1]"),
    ] {
        assert_eq!(refused(text), said, "{text}");
    }
    assert!(refused("[{\"a\": \"]\"}").contains("cannot be read after row 0: the list ends within row 1"));
    assert!(refused("[{\"a\": 1}] x").contains("more text after the list"));
    assert!(refused(" [ ] ").contains("has no rows"));
    assert!(refused("").contains("has no rows"));
}

#[test]
fn a_file_that_is_not_read_is_named_with_its_format() {
    let (folder, row) = (folder(), b"{\"a\": 1}\n");
    let parquet = std::fs::read(fixture("types_snappy.parquet")).expect("read");
    let arrow = std::fs::read(fixture("types.arrow")).expect("read");
    for (name, bytes, said) in [
        ("a.jsonl.xz", b"\xFD7zXZ\0...".to_vec(), "format is xz (.xz), which is not supported"),
        ("a.jsonl.bz2", b"BZh9...".to_vec(), "format is bzip2 (.bz2)"),
        ("a.xlsx", b"PK\x03\x04".to_vec(), "format is Excel (.xlsx)"),
        ("a.jsonl", b"\xFD7zXZ\0...".to_vec(), "compressed with xz"),
        ("a.jsonl", gzip(row), "compressed with gzip, not what its name indicates; rename it to end in .gz"),
        ("a.json", zstandard(row), "rename it to end in .zst"),
        ("a.csv", parquet.clone(), "rename it to end in .parquet"),
        ("a.jsonl", arrow, "rename it to end in .arrow"),
        ("a.parquet.gz", gzip(&parquet), "decompress it"),
        ("a.jsonl", b"\xFF\xFE{\0".to_vec(), "UTF-16"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n".to_vec(), "git lfs pull"),
        (
            "a.jsonl",
            b"{\"a\": \"caf\xE9\"}\n".to_vec(),
            "line 1: expected one JSON object per line, found invalid JSON at column 11 (byte 0xE9 is not UTF-8)",
        ),
        ("a.jsonl", b"[\n{\"a\": 1}]".to_vec(), "a file that is one JSON list has to be called .json"),
        ("a.json", b"{\n \"a\": 1}".to_vec(), "the beginning of a JSON list or object"),
        ("a.csv", b"a,b\n1,2\n3\n".to_vec(), "line 3: 1 fields, expected 2 as in line 1"),
        ("a.csv", b"a,a\n1,2\n".to_vec(), "two columns are named `a`"),
        ("a.csv", b"a\ncaf\xE9\n".to_vec(), "line 2: field 1 is not UTF-8"),
        ("a.csv", b"a,b\n".to_vec(), "has no rows"),
        ("a.parquet", row.to_vec(), "cannot be read after row 0"),
        ("a.arrow", row.to_vec(), "cannot be read after row 0"),
        ("a.jsonl.gz", row.to_vec(), "cannot be read after row 0"),
    ] {
        let text = refused(&write(folder.path(), name, &bytes));
        assert!(text.contains(said), "{name}: {text}");
    }
}
