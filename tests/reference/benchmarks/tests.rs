//! Pages of small results, and errors that name the file.

use super::*;

const PAGE: &str = r#"{"title": "Benchmarks", "keys": {"step": ["size"]}, "sections": [
    {"heading": "Time", "machines": true, "text": ["All in f32.", "", "- a step takes {step|small|time, s} s", "  ({step})"],
     "tables": [{"bench": "step", "columns": ["size", "time, s"]},
                {"bench": "step", "rows": ["small"], "summary": {"by": "size", "of": "tokens/s", "count": "runs"}}]}]}"#;
const MACHINES: &str = r#"{"m": {"processor": "P", "cores": 2, "memory_gib": null, "os": "Linux"},
    "unused": {"processor": "Q", "cores": 1, "memory_gib": 1, "os": "Linux"}}"#;
const OLD: &str = r#"{"bench": "step", "title": "A step", "date": "2026-01-01", "machine": "m", "commit": "aaaaaaaa",
    "command": "run", "what": "Old.", "columns": ["size", "time, s", "tokens/s"],
    "rows": [["small", 9.5, 1], ["wide", 2.25, 1234567]]}"#;
const NEW: &str = r#"{"bench": "step", "title": "A step", "date": "2026-01-02", "machine": "m", "commit": "bbbbbbbb",
    "command": "run", "peer": "T 1.0", "what": "Medians.", "columns": ["size", "time, s", "tokens/s"],
    "rows": [["small", 0.5, -1234.5]]}"#;

/// A repository with these files of the bench `step`.
fn repository(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a folder");
    let folder = root.path().join("benches/results");
    std::fs::create_dir_all(folder.join("step")).expect("a folder");
    for (name, text) in [("page.json", PAGE), ("machines.json", MACHINES)].iter().chain(files) {
        std::fs::write(folder.join(name), text).expect("a file");
    }
    root
}

#[test]
fn a_page_has_the_newest_rows_in_the_order_and_the_columns_of_its_description() {
    let root = repository(&[("step/2026-01-01_m_aaaaaaaa.json", OLD), ("step/2026-01-02_m_bbbbbbbb.json", NEW)]);
    let expected = "\
<!-- generated from benches/results: see \"How to reproduce\" -->

# Benchmarks

## Time

All in f32.

- a step takes 0.5 s (`step/2026-01-01_m_aaaaaaaa`, `step/2026-01-02_m_bbbbbbbb`)

| machine | processor | cores | memory, GiB | OS |
|---|---|---:|---|---|
| `m` | P | 2 | | Linux |

### A step

Medians.

| size | time, s |
|---|---:|
| small | 0.5 |
| wide | 2.25 |

`run`: `step/2026-01-01_m_aaaaaaaa`, `step/2026-01-02_m_bbbbbbbb`. Compared with T 1.0.

### A step

Medians.

| size | runs | tokens/s, least | median | most |
|---|---:|---:|---:|---:|
| small | 1 | -1,234.5 | -1,234.5 | -1,234.5 |

`run`: `step/2026-01-01_m_aaaaaaaa`, `step/2026-01-02_m_bbbbbbbb`. Compared with T 1.0.
";
    assert_eq!(render(root.path()).unwrap(), expected);
}

#[test]
fn a_bad_file_is_named_with_what_is_wrong() {
    let name = "step/2026-01-02_m_bbbbbbbb.json";
    let new = |from: &str, to: &str| NEW.replace(from, to);
    let page = |from: &str, to: &str| PAGE.replace(from, to);
    for (name, text, what) in [
        (name, "{".to_owned(), "EOF"),
        (name, new("\"what\"", "\"wat\""), "unknown field `wat`"),
        (name, new("0.5, ", ""), "row 1 has 2 cells; there are 3 columns"),
        (name, new("0.5, ", "true, "), "row 1 has a cell"),
        (name, new("\"m\"", "\"n\""), "the name of the file is not 2026-01-02_n_bbbbbbbb.json"),
        (name, new("\"size\"", "\"sizes\""), "step has no column \"size\""),
        ("step/2026-01-02_n_bbbbbbbb.json", new("\"m\"", "\"n\""), "machines.json has no machine `n`"),
        ("page.json", page("small|", "tiny|"), "no row \"tiny\""),
        ("page.json", page("{step}", "{stride}"), "there are no results of stride"),
    ] {
        let mut files = vec![(name, text.as_str())];
        if name == "page.json" {
            files.push(("step/2026-01-02_m_bbbbbbbb.json", NEW));
        }
        let root = repository(&files);
        let error = format!("{:#}", render(root.path()).unwrap_err());
        let file = Path::new(name).file_name().and_then(OsStr::to_str).unwrap();
        assert!(error.contains(file) && error.contains(what), "{error}");
    }
}

#[test]
fn an_older_file_with_other_columns_is_named() {
    let old = OLD.replace("tokens/s", "rate");
    let root =
        repository(&[("step/2026-01-01_m_aaaaaaaa.json", old.as_str()), ("step/2026-01-02_m_bbbbbbbb.json", NEW)]);
    let error = format!("{:#}", render(root.path()).unwrap_err());
    assert!(error.contains("2026-01-01_m_aaaaaaaa.json has other columns than"), "{error}");
}
