//! Conversions of keys: the cases of `cases.txt`, which documents their format.

use super::{at, environment, imported, outcome};
use crate::{Imported, KeyOutcome, Options, SourceFile, import};
use serde_json::Value;

const SHORT: [(&str, &str); 4] = [("A.", "actor."), ("M.", "model."), ("R.", "rollout."), ("F.", "ref.")];

/// A text with whole names of sections.
fn whole(text: &str) -> String {
    let word = |word: &str| {
        let plain = word.trim_start_matches('+');
        let short = SHORT.iter().find(|(short, _)| plain.starts_with(short));
        short.map_or_else(
            || word.to_owned(),
            |(short, name)| word.replacen(short, &format!("actor_rollout_ref.{name}"), 1),
        )
    };
    text.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

/// A launch of verl's trainer with a model and rows.
pub(super) fn verl(keys: &str) -> Imported {
    launch(&format!(
        "algorithm.adv_estimator=grpo data.train_files=gsm8k.parquet M.path=m data.train_batch_size=8 \
         A.ppo_mini_batch_size=8 {keys}"
    ))
}

/// A launch with nothing but these keys.
pub(super) fn launch(keys: &str) -> Imported {
    imported("run.sh", &whole(&format!("python3 -m verl.trainer.main_ppo {keys}\n")))
}

fn read(input: &str) -> Result<Imported, String> {
    let (kind, text) = input.split_once(' ').expect("a kind and a text");
    let lines = text.replace("\\n", "\n");
    Ok(match kind {
        "verl" => verl(&text.replace('\n', " ")),
        "launch" => launch(text),
        _ => {
            let (name, start) = match kind {
                "nemo" => (
                    "run.yaml",
                    "grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_steps: 100}\n",
                ),
                name => (name, ""),
            };
            let files = [SourceFile::new(name, format!("{start}{lines}\n"))];
            import(&files, &Options::default(), &environment).map_err(|error| error.to_string())?
        }
    })
}

fn same(found: &Value, expected: &Value) -> bool {
    match (found, expected) {
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && b.iter().all(|(key, value)| a.get(key).is_some_and(|own| same(own, value)))
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        _ => match (found.as_f64(), expected.as_f64()) {
            (Some(a), Some(b)) => (a - b).abs() <= 1e-12 * b.abs(),
            _ => found == expected,
        },
    }
}

/// Why something is not as expected.
fn wrong(found: &Imported, expected: &str) -> Option<String> {
    let (first, rest) = expected.split_once(' ').unwrap_or((expected, ""));
    let gaps: Vec<&str> = found.gaps().map(|row| row.key.as_str()).collect();
    match first {
        "gaps" => (gaps.join(" ") != whole(rest)).then(|| gaps.join(" ")),
        "missing" => {
            let keys: Vec<&str> = found.missing.iter().map(|own| own.key.as_str()).collect();
            rest.split(' ').any(|key| !keys.contains(&key)).then(|| keys.join(" "))
        }
        "assumed" => {
            let (key, part) = rest.split_once(' ').expect("a key and a part");
            let row = found.assumed.iter().find(|row| row.key == whole(key))?;
            let KeyOutcome::Mapped { note, .. } = &row.outcome else { return Some(format!("{row:?}")) };
            let holds = if part == "-" { note.is_empty() } else { note.contains(part) };
            (!holds).then(|| note.clone())
        }
        key => {
            let (sign, rest) = rest.split_once(' ').expect("a sign");
            let mismatch = |why: &str| (!why.contains(rest)).then(|| why.to_owned());
            match sign {
                "=" => {
                    let value = at(found, &format!("/{}", key.replace('.', "/")));
                    let expected = if rest == "-" { Value::Null } else { serde_json::from_str(rest).expect("JSON") };
                    (!same(&value, &expected)).then(|| value.to_string())
                }
                _ => match (sign, outcome(found, &whole(key))) {
                    ("~", KeyOutcome::NotNeeded { why }) | ("!", KeyOutcome::Cannot { why }) => mismatch(why),
                    (_, other) => Some(format!("{other:?}")),
                },
            }
        }
    }
}

#[test]
fn every_case_is_as_it_says() {
    let (mut statement, mut input, mut held, mut failures) = ("", String::new(), 0, Vec::new());
    for line in include_str!("cases.txt").lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(own) = line.strip_prefix("== ") {
            statement = own;
        } else if let Some(more) = line.strip_prefix("| ") {
            input = format!("{input}\n{more}");
        } else if let Some(expected) = line.strip_prefix("  ") {
            held += 1;
            let wrong = match (read(&input), expected.strip_prefix("refused ")) {
                (Ok(found), None) => wrong(&found, expected),
                (Err(why), Some(parts)) => parts.split(", ").find(|part| !why.contains(part)).map(|_| why),
                (other, _) => Some(other.map_or_else(|why| why, |found| found.config)),
            };
            failures.extend(wrong.map(|found| format!("{statement}\n  {input}\n  {expected}\n  found: {found}\n")));
        } else {
            line.clone_into(&mut input);
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(held > 150, "{held}");
}
