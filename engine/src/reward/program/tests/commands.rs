//! Rewards by a command.

use super::super::{Failure, Program, ProgramResult};
use super::{Bench, LENGTHS, Rows, program, prompt, results, rewards, row};
use crate::task::RewardProgram;
use serde_json::{Map, json};

fn command(script: &str) -> RewardProgram {
    program(json!({
        "kind": "command", "command": ["python3", "-u", "-c", script], "workers": 1, "timeout": 30.0,
    }))
}

const ECHO: &str = r"
import json, os, sys
def answer(**said):
    print(json.dumps(said), flush=True)
for line in sys.stdin:
    HOW
";

/// Lengths of completions by a command whose loop does something else first.
fn by_command(how: &str, texts: &[&str]) -> Vec<ProgramResult> {
    let script = ECHO.replace("HOW", how);
    let program = Program::open("judge", &command(&script), &Rows(vec![row("")]));
    results(&program.expect("opens"), &prompt(row("42")), texts)
}

#[test]
fn a_command_answers_lines_in_any_order() {
    if Bench::new("").is_none() {
        return;
    }
    let outcomes = by_command(
        "q = json.loads(line)
    assert q['row']['target'] == '42' and q['finished'] and q['prompt'] == 'p', q
    held = [] if q['id'] % 3 == 0 else held
    held.insert(0, q)
    if len(held) == 3:
        for q in held: answer(id=q['id'], reward=len(q['completion']), why='long')",
        &["a", "bb", "ccc"],
    );
    let judged: Vec<_> = outcomes.into_iter().map(Result::unwrap).collect();
    let values: Vec<Option<f64>> = judged.iter().map(|score| score.value).collect();
    assert_eq!(values, LENGTHS);
    let mut why = Map::new();
    why.insert("why".to_owned(), json!("long"));
    assert_eq!(judged[0].extra, why);
}

#[test]
fn what_is_no_answer_of_a_command_is_not_taken_for_one() {
    if Bench::new("").is_none() {
        return;
    }
    for (how, reason) in [
        ("print('thinking…', flush=True)", "which is not a JSON object"),
        ("answer(reward=1)", "which has no `id`"),
        ("answer(id=77, reward=1)", "id 77, which it was not asked"),
        ("answer(id=json.loads(line)['id'], reward='1')", "neither a number nor null"),
        ("answer(id=json.loads(line)['id'], error='too hard')", "too hard"),
        ("sys.exit('enough')", "enough"),
    ] {
        let outcomes = by_command(how, &["a", "bb"]);
        for outcome in &outcomes {
            let failure = outcome.as_ref().expect_err(how);
            assert!(failure.to_string().contains(reason), "{how}: {failure}");
            // one that ends may not have done so by itself
            assert_eq!(matches!(failure, Failure::Failed(_)), reason == "enough", "{how}: {failure}");
        }
    }
    // each answer twice: what is left of the first call is not taken for the second's
    let program = ECHO
        .replace("HOW", "q = json.loads(line)\n    for _ in range(2): answer(id=q['id'], reward=len(q['completion']))");
    let program = Program::open("judge", &command(&program), &Rows(vec![row("")]));
    let program = program.expect("opens");
    assert_eq!(rewards(&program, &["a"]), [Some(1.0)]);
    let outcomes = results(&program, &prompt(row("")), &["bb"]);
    let Err(Failure::Misused(reason)) = &outcomes[0] else { panic!("{outcomes:?}") };
    assert!(reason.contains("it answered id 0, which it was not asked, or twice"), "{reason}");
}

#[test]
fn a_command_that_cannot_work_is_refused() {
    let refused = |program: &RewardProgram| {
        let opened = Program::open("judge", program, &Rows(Vec::new()));
        opened.expect_err("refused").to_string()
    };
    let missing = json!({"kind": "command", "command": ["no-such-program"]});
    assert!(refused(&program(missing)).contains("cannot run `no-such-program`"));
    let ends = json!({"kind": "command", "command": ["sh", "-c", "echo no licence >&2; exit 9"]});
    let message = refused(&program(ends));
    assert!(message.contains("exit status: 9") && message.contains("no licence"), "{message}");
}
