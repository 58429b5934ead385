//! `train --dry-run`: what it says, and that it leaves nothing.

use super::{Bench, refused, stderr, succeeded};

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
    assert!(said.lines().any(|line| line.trim().ends_with('=')), "{said}");
    assert!(!bench.path("run").exists());
}

#[test]
fn a_rule_that_gives_the_tasks_own_answers_nothing_is_refused_before_the_first_step() {
    let bench = Bench::new();
    bench.write("rows.jsonl", "{\"prompt\": \"1+1=\", \"answer\": \"2\"}\n{\"prompt\": \"1+2=\", \"answer\": \"3\"}\n");
    let task = |pattern: &str| {
        format!(
            "task={{kind: jsonl, train: {}, answer_field: answer, rewards: [{{kind: regex, pattern: \"{pattern}\"}}]}}",
            bench.path("rows.jsonl").display()
        )
    };
    let model = format!("model={{path: {}}}", crate::support::fixtures().join("models/qwen2-tied").display());
    let run = |pattern: &str| {
        let args = [&model, &task(pattern), "rollout.prompt_length=16", "--dry-run"];
        bench.firebrick("train", &args)
    };
    let said = succeeded(&run("[23]"));
    assert!(said.contains("2 graded, 0 of them earn nothing"), "{said}");
    refused(&run("^never$"), &["2 of 2 reference answers earn nothing", "task.answer_field", "\"2\"", "\"3\""]);
    assert!(!bench.path("run").exists());
}

/// Texts that steer a terminal: colours, the window's title, a cleared screen, the cursor, text turned around, a bell,
/// half a sequence.
const HOSTILE: [&str; 7] = [
    "\u{1b}[31mred\u{1b}[0m",
    "\u{1b}]0;title\u{7}",
    "\u{1b}[2J\u{1b}[1;1H",
    "over\rwritten\u{8}\u{8}",
    "\u{202e}turned\u{2066}",
    "\u{9b}31m\u{90}q\u{9c}",
    "\u{0}\u{1b}",
];

#[test]
fn prompts_and_answers_cannot_steer_the_terminal() {
    let bench = Bench::new();
    let row = |text: &&str| serde_json::json!({"prompt": format!("{text}?"), "answer": format!("{text}!")}).to_string();
    let rows: Vec<String> = HOSTILE.iter().map(row).collect();
    bench.write("rows.jsonl", &rows.join("\n"));
    let model = crate::support::fixtures().join("models/qwen2-tied");
    let model = format!("model={{path: {}}}", model.display());
    let steers = |text: &str| {
        text.chars().find(|&c| {
            (c.is_control() && c != '\n')
                || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        })
    };
    let task = |pattern: &str| {
        format!(
            "task={{kind: dataset, train: rows.jsonl, answer_field: answer, rewards: [{{kind: regex, pattern: '{pattern}'}}]}}"
        )
    };
    let mut shown = String::new();
    for seed in 0..4 {
        let seed = format!("trainer.seed={seed}");
        let args = [&model, &task("!"), "rollout.prompt_length=64", &seed, "--dry-run"];
        let output = bench.firebrick("train", &args);
        let said = succeeded(&output);
        assert_eq!(steers(&said), None, "{said:?}");
        assert_eq!(steers(&stderr(&output)), None, "{:?}", stderr(&output));
        shown.push_str(&said);
    }
    // they are there all the same, as codes
    assert!(shown.contains("\\u{1b}"), "{shown}");
    let never = [&model, &task("^never$"), "rollout.prompt_length=64", "--dry-run"];
    let output = bench.firebrick("train", &never);
    refused(&output, &["7 of 7 reference answers earn nothing"]);
    assert_eq!(steers(&stderr(&output)), None, "{:?}", stderr(&output));
    // and so do the prompts of `data`
    let looked = [&model, &task("!"), "rollout.prompt_length=64", "--samples=7"];
    let said = succeeded(&bench.firebrick("data", &looked));
    assert_eq!(steers(&said), None, "{said:?}");
}

#[test]
fn prompts_that_are_too_long_are_told_of_once() {
    let bench = Bench::new();
    let row = |sum: &str| format!("{{\"prompt\": \"{sum}=\", \"answer\": \"2\"}}\n");
    let rows = row("1+1") + &row(&"1+".repeat(60));
    let file = bench.write("rows.jsonl", &rows.repeat(4));
    let model = crate::support::fixtures().join("models/qwen2-tied");
    let settings = [
        format!("model={{path: {}}}", model.display()),
        format!(
            "task={{kind: jsonl, train: {0}, validation: {0}, answer_field: answer, rewards: [{{kind: exact}}]}}",
            file.display()
        ),
    ];
    for more in [&[][..], &["memory.budget=1GiB"], &["warmup.sft.steps=1"]] {
        let settings = settings.iter().map(String::as_str);
        let args: Vec<&str> =
            ["--dry-run", "rollout.prompt_length=16"].into_iter().chain(settings).chain(more.iter().copied()).collect();
        let said = stderr(&bench.firebrick("train", &args));
        let count = said.matches("skipped 4 of 8 validation prompts").count();
        assert_eq!(count, 1, "{more:?}: {said}");
    }
}

#[test]
fn of_ranks_that_were_started_together_one_says_what_the_run_would_do() {
    let bench = Bench::new();
    for rank in ["0", "1"] {
        let mut command = bench.command("train", &["--dry-run"]);
        command.env("OMPI_COMM_WORLD_SIZE", "2");
        command.env("OMPI_COMM_WORLD_RANK", rank);
        let said = succeeded(&command.output().unwrap());
        assert_eq!(said.contains("a step at most"), rank == "0", "{said}");
        assert_eq!(said.is_empty(), rank == "1", "{said}");
    }
}
