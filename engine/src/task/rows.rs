//! Reading a JSON Lines file into rows, and holding some of them out.

use std::collections::HashSet;
use std::path::Path;

use serde_json::Value;

use super::error::{Place, TaskError};
use super::shuffle::Permutation;
use super::template::Row;

/// Reads every row of a file, at most `limit`. Blank lines are skipped; no row at all is an error.
pub(crate) fn read(
    path: &Path,
    setting: &'static str,
    limit: Option<u64>,
) -> Result<Vec<Row>, TaskError> {
    let text = std::fs::read_to_string(path).map_err(|error| TaskError::Read {
        setting,
        path: path.to_owned(),
        error,
    })?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let limit = limit.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX));
    let rows: Vec<Row> = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .take(limit)
        .map(|(at, line)| {
            parse(
                line,
                Place {
                    path: path.to_owned(),
                    line: at + 1,
                },
            )
        })
        .collect::<Result<_, _>>()?;
    if rows.is_empty() {
        return Err(TaskError::Empty {
            setting,
            path: path.to_owned(),
        });
    }
    Ok(rows)
}

fn parse(line: &str, place: Place) -> Result<Row, TaskError> {
    let found = match serde_json::from_str(line) {
        Ok(Value::Object(fields)) => return Ok(Row { place, fields }),
        Ok(Value::Array(_)) => {
            "a list; rewrite a file that is one JSON list with one row per line".to_owned()
        }
        Ok(value) => format!("the value {value}"),
        Err(error) => format!(
            "invalid JSON at column {} ({})",
            error.column(),
            kind(&error)
        ),
    };
    Err(TaskError::NotARow { place, found })
}

/// What the JSON reader said, without its own `line 1`: the line is that of the file.
fn kind(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ")
        .next()
        .unwrap_or_default()
        .to_owned()
}

/// Splits rows into those to train on and `held_out` others, chosen by `seed`; both keep their
/// order.
pub(crate) fn split<T>(rows: Vec<T>, held_out: u64, seed: u64) -> (Vec<T>, Vec<T>) {
    let shuffle = Permutation::new(rows.len() as u64, seed, 0);
    let chosen: HashSet<u64> = (0..held_out).map(|i| shuffle.of(i)).collect();
    let (mut train, mut validation) = (Vec::new(), Vec::new());
    for (at, row) in (0u64..).zip(rows) {
        if chosen.contains(&at) {
            validation.push(row);
        } else {
            train.push(row);
        }
    }
    (train, validation)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("temporary file");
        std::fs::write(file.path(), text).expect("written");
        file
    }

    fn refused(text: &str) -> String {
        let file = file(text);
        let error = read(file.path(), "task.train", None)
            .expect_err("refused")
            .to_string();
        error.replace(&file.path().display().to_string(), "FILE")
    }

    #[test]
    fn rows_keep_their_line_numbers_across_blank_lines() {
        let file = file("\u{feff}{\"a\": 1}\r\n\n{\"a\": 2}\n");
        let rows = read(file.path(), "task.train", None).expect("rows");
        assert_eq!(
            rows.iter().map(|row| row.place.line).collect::<Vec<_>>(),
            [1, 3]
        );
        assert_eq!(
            read(file.path(), "task.train", Some(1))
                .expect("rows")
                .len(),
            1
        );
    }

    #[test]
    fn a_bad_line_is_named_with_what_it_has() {
        assert_eq!(
            refused("{\"a\": 1}\n{\"a\": }\n"),
            "FILE, line 2: expected one JSON object per line, \
             found invalid JSON at column 7 (expected value)"
        );
        assert!(refused("[1]").contains("line 1: expected one JSON object per line, found a list"));
        assert!(refused("3").ends_with("found the value 3"));
    }

    #[test]
    fn an_empty_file_and_a_missing_file_name_the_setting() {
        assert_eq!(
            refused("\n \n"),
            "the dataset FILE (setting `task.train`) has no rows; expected one JSON object per line"
        );
        let error = read(Path::new("no/such.jsonl"), "task.train", None).expect_err("missing");
        let text = error.to_string();
        assert!(text.starts_with("cannot read the dataset no/such.jsonl (setting `task.train`): "));
        assert!(text.contains("relative to its folder"), "{text}");
    }

    proptest! {
        #[test]
        fn a_split_loses_and_repeats_no_row(len in 1u64..300, share in 0.0..1.0f64, seed: u64) {
            let held_out = (len as f64 * share) as u64;
            let rows: Vec<u64> = (0..len).collect();
            let (train, validation) = split(rows.clone(), held_out, seed);
            prop_assert_eq!(validation.len() as u64, held_out);
            prop_assert!(train.is_sorted() && validation.is_sorted());
            let mut all = [train, validation].concat();
            all.sort_unstable();
            prop_assert_eq!(all, rows);
        }
    }
}
