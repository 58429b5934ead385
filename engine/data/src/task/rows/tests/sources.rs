//! Files of a path, a folder, a pattern and a list of sources.

use std::path::Path;

use super::super::*;
use super::{TRAIN, folder, write};

fn listed(folder: &Path, path: &str, setting: &'static str) -> Result<Vec<String>, String> {
    let files = RowFiles::from(path).list(folder, setting);
    let short = |text: String| text.replace(&format!("{}/", folder.display()), "");
    let files = files.map_err(|error| short(error.to_string()))?.concat();
    Ok(files.iter().map(|file| short(file.display().to_string())).collect())
}

#[test]
fn folders_and_patterns_stand_for_their_files() {
    let folder = folder();
    for name in [
        "verl/train.parquet",
        "verl/test.parquet",
        "parts/b.jsonl",
        "parts/a.jsonl",
        "parts/notes.txt",
        "parts/dataset_info.json",
        "both/train.jsonl",
        "both/train.parquet",
    ] {
        write(folder.path(), name, b"");
    }
    let of = |path, setting| listed(folder.path(), path, setting);
    assert_eq!(of("verl", TRAIN).expect("files"), ["verl/train.parquet"]);
    assert_eq!(of("verl", "task.validation").expect("files"), ["verl/test.parquet"]);
    assert_eq!(of("parts", TRAIN).expect("files"), ["parts/a.jsonl", "parts/b.jsonl"]);
    assert_eq!(of("parts/*.jsonl", TRAIN).expect("files"), ["parts/a.jsonl", "parts/b.jsonl"]);
    let text = of("*/none*.jsonl", TRAIN).expect_err("refused");
    assert!(text.contains("`task.train`: no file matches */none*.jsonl"), "{text}");
    let text = of("both", TRAIN).expect_err("refused");
    assert!(text.contains("several formats: train.jsonl, train.parquet"), "{text}");
}

#[test]
fn sources_are_read_from_a_path_a_list_and_a_list_with_weights() {
    let parse = |json: &str| serde_json::from_str::<RowFiles>(json).map_err(|e| e.to_string());
    for json in [
        r#""a.jsonl""#,
        r#"["a.jsonl","b.parquet"]"#,
        r#"[{"path":"a.jsonl","weight":0.5},{"path":"b.jsonl","weight":2.0}]"#,
    ] {
        let files = parse(json).expect("parses");
        assert_eq!(serde_json::to_string(&files).expect("writes"), json);
    }
    let refused = |json: &str| parse(json).expect_err("refused");
    assert!(refused(r#"[{"path": "a", "wieght": 1}]"#).contains("unknown field `wieght`"));
    assert!(refused(r#"[{"path": "a", "weight": 0}]"#).contains("a number above 0, found 0"));
    assert!(refused("[]").contains("at least one path"));
    assert!(refused("3").contains("expected a path, or a list of paths"));
    let some = parse(r#"[{"path": "a", "weight": 1}, "b"]"#).expect("parses");
    let text = some.weights(TRAIN).expect_err("refused").to_string();
    assert!(text.contains("for each of the 2 sources or for none, found 1"), "{text}");
}

#[test]
fn validation_is_several_sets_under_their_names_and_nothing_else_is() {
    let parse = |json: &str| serde_json::from_str::<RowFiles>(json).map_err(|e| e.to_string());
    let json = r#"{"gsm8k":"a.jsonl","math":["b.jsonl","c.parquet"]}"#;
    let files = parse(json).expect("parses");
    assert_eq!(serde_json::to_string(&files).expect("writes"), json);
    let sets: Vec<_> = files.0.iter().map(|own| own.set.as_deref()).collect();
    assert_eq!(sets, [Some("gsm8k"), Some("math"), Some("math")]);
    let listed = files.list(Path::new("d"), "task.validation");
    assert_eq!(listed.expect("listed").concat()[1], Path::new("d/b.jsonl"));
    let text = files.list(Path::new("d"), TRAIN).expect_err("refused");
    assert!(text.to_string().contains("names a set, `gsm8k`"), "{text}");
    let refused = |json: &str| parse(json).expect_err("refused");
    assert!(refused("{}").contains("at least one set"));
    assert!(refused(r#"{"a": []}"#).contains("a: expected at least one path"));
    assert!(refused(r#"{"a": 3}"#).contains("a: expected a path"));
    assert!(refused(r#"{" ": "b"}"#).contains("a name for every set"));
}
