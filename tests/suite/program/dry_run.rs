//! `train --dry-run`: what it says, and that it leaves nothing.

use super::{Bench, refused, succeeded};

#[test]
fn a_dry_run_says_what_the_run_would_do_and_leaves_nothing() {
    let bench = Bench::new();
    let said = succeeded(&bench.firebrick("train", &["--dry-run"]));
    for part in [
        "device      cpu",
        "generated prompts, 10 for validation",
        "memory",
        "a step at most",
        "3 steps; estimated",
        "for checkpoints",
        "0 of them earn nothing",
        "prompt 3",
    ] {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
    // a prompt such as 3+4=
    assert!(
        said.lines().any(|line| line.trim().ends_with('=')),
        "{said}"
    );
    assert!(!bench.path("run").exists());
}

#[test]
fn a_rule_that_gives_the_tasks_own_answers_nothing_is_refused_before_the_first_step() {
    let bench = Bench::new();
    bench.write(
        "rows.jsonl",
        "{\"prompt\": \"1+1=\", \"answer\": \"2\"}\n{\"prompt\": \"1+2=\", \"answer\": \"3\"}\n",
    );
    let task = |pattern: &str| {
        format!(
            "task={{kind: jsonl, train: {}, answer_field: answer, rewards: [{{kind: regex, pattern: \"{pattern}\"}}]}}",
            bench.path("rows.jsonl").display()
        )
    };
    let model = format!(
        "model={{path: {}}}",
        crate::support::fixtures()
            .join("models/qwen2-tied")
            .display()
    );
    let run = |pattern: &str| {
        let args = [
            &model,
            &task(pattern),
            "rollout.prompt_length=16",
            "--dry-run",
        ];
        bench.firebrick("train", &args)
    };
    let said = succeeded(&run("[23]"));
    assert!(said.contains("2 graded, 0 of them earn nothing"), "{said}");
    refused(
        &run("^never$"),
        &[
            "2 of 2 reference answers earn nothing",
            "task.answer_field",
            "\"2\"",
            "\"3\"",
        ],
    );
    assert!(!bench.path("run").exists());
}
