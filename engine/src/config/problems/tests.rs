use super::*;

fn check(text: &str) -> CheckedFile {
    CheckedFile::parse(text, Some(Path::new(".")), &[]).expect("a text")
}

/// Line and message of each problem.
fn read_problems(text: &str) -> Vec<(usize, String)> {
    let file = check(text);
    assert_eq!(file.config.is_none(), !file.problems.is_empty());
    let line = |problem: &Problem| problem.place.map_or(0, |place| place.line);
    file.problems.iter().map(|problem| (line(problem), problem.message.clone())).collect()
}

const LEAST: &str = "model: {path: m}\ntask: {kind: arithmetic}\noutput: o\n";

#[test]
fn a_file_without_mistakes_gives_the_configuration_that_a_run_has() {
    let text = format!("{LEAST}objective: ppo\nrollout: {{n: 4}}\n");
    let file = check(&text);
    assert_eq!(file.problems, []);
    let folder = std::path::absolute(".").expect("a folder");
    let expected = parse(&text.replace("path: m", &format!("path: {}", folder.join("m").display())), &[]);
    assert_eq!(file.config, Some(expected.expect("a configuration")));
}

#[test]
fn all_mistakes_of_a_file_are_found_at_once_with_their_lines() {
    let text = "\
model: {path: m}
task:
  kind: arithmetic
  dificulty: 2
output: o
rolout: {n: 8}
rollout:
  n: many
  temperature: 0
  top_p: 1.5
memory:
  param_offload: sometimes
  checkpoint_every: 2
  budget: 8 parsecs
optim:
  lr: -1
update: {ppo_mini_batch_size: 5}
";
    let problems = read_problems(text);
    let expected = [
        (4, "task: unknown key `dificulty`; did you mean `difficulty`?"),
        (6, "unknown key `rolout`; did you mean `rollout`?"),
        (8, "rollout.n must be an integer, found the text \"many\""),
        (9, "rollout.temperature must be above 0, found 0"),
        (10, "rollout.top_p must be at most 1, found 1.5"),
        (12, "memory.param_offload: unknown value `sometimes`"),
        (13, "memory.checkpoint_every, checkpoint_layers and checkpoint_ratio"),
        (14, "memory.budget: the text \"8 parsecs\" has an invalid format; write it as in 8GiB"),
        (16, "optim.lr must be above 0, found -1"),
        (17, "update.ppo_mini_batch_size (5 prompts) must divide"),
    ];
    let lines: Vec<usize> = problems.iter().map(|(line, _)| *line).collect();
    assert_eq!(lines, expected.map(|(line, _)| line), "{problems:#?}");
    for ((line, message), (_, part)) in problems.iter().zip(expected) {
        assert!(message.contains(part), "{line}: {message:?} has no {part:?}");
    }
}

#[test]
fn a_place_is_that_of_the_key_or_of_the_value() {
    let file = check(&format!("{LEAST}rollout: {{nn: 3, top_p: high}}\n"));
    let columns: Vec<_> =
        file.problems.iter().map(|problem| problem.place.map(|place| (place.line, place.column))).collect();
    assert_eq!(columns, [Some((4, 11)), Some((4, 25))]);
}

#[test]
fn kinds_of_tasks_and_rewards_are_told_apart() {
    let rows = |rewards: &str| {
        format!("model: {{path: m}}\noutput: o\ntask:\n  kind: jsonl\n  train: t\n  rewards: {rewards}\n")
    };
    for (text, part) in [
        (
            "model: {path: m}\noutput: o\ntask: {kind: arithmetics}\n".to_owned(),
            "task.kind: unknown value `arithmetics`; did you mean `arithmetic`?",
        ),
        ("model: {path: m}\noutput: o\ntask: {difficulty: 2}\n".to_owned(), "task: `kind` is missing"),
        (
            rows("[{kind: exact, ignore_cases: true}]"),
            "task.rewards.0: unknown key `ignore_cases`; did you mean `ignore_case`?",
        ),
        (rows("[{kind: exakt}]"), "task.rewards.0.kind: unknown value `exakt`; did you mean `exact`?"),
        (rows("[{kind: regex}]"), "task.rewards.0: `pattern` is missing"),
        (rows("exact"), "task.rewards must be a list, found the text \"exact\""),
        (rows("[{kind: exact, weight: heavy}]"), "task.rewards.0.weight must be a number"),
    ] {
        let problems = read_problems(&text);
        assert_eq!(problems.len(), 1, "{text}: {problems:?}");
        assert!(problems[0].1.contains(part), "{:?} has no {part:?}", problems[0]);
        assert!(problems[0].0 >= 3, "{problems:?}");
    }
}

#[test]
fn keys_that_exclude_each_other_are_shown_where_they_are() {
    let text = format!(
        "{LEAST}memory:\n  gradient_checkpointing: true\n  checkpoint_ratio: 0.5\n  checkpoint_layers: [0]\nsft:\n  steps: 3\n  epochs: 2\nobjective:\n  name: grpo\n  tau_pos: 2.0\n"
    );
    let problems = read_problems(&text);
    let lines: Vec<usize> = problems.iter().map(|(line, _)| *line).collect();
    assert_eq!(lines.len(), 3, "{problems:?}");
    assert!([6, 7].contains(&lines[0]) && [8, 9, 10].contains(&lines[1]), "{problems:?}");
    assert_eq!(lines[2], 13, "{problems:?}");
}

#[test]
fn a_mistake_is_not_told_a_second_time_by_what_follows_from_it() {
    let problems = read_problems("model: {pth: m}\ntask: {kind: arithmetic}\noutput: o\n");
    assert_eq!(problems.len(), 1, "{problems:?}");
    let problems = read_problems("modle: {path: m}\noutput: o\n");
    let messages: Vec<&str> = problems.iter().map(|(_, message)| message.as_str()).collect();
    assert!(messages[0].contains("`model` is missing"), "{messages:?}");
    assert!(messages[1].contains("did you mean `model`?") && messages.len() == 2, "{messages:?}");
}

#[test]
fn a_text_that_is_not_yaml_or_no_mapping_says_where() {
    let problems = read_problems("model: [unclosed\noutput: o\n");
    assert!(problems.len() == 1 && problems[0].1.contains("is not YAML"), "{problems:?}");
    assert!(problems[0].0 > 0, "{problems:?}");
    let twice = read_problems("output: a\nmodel: {path: m}\noutput: b\n");
    assert!(twice.len() == 1 && twice[0].0 == 3, "{twice:?}");
    let problems = read_problems("- a\n- b\n");
    assert!(problems[0].1.contains("must be a mapping"), "{problems:?}");
}

#[test]
fn what_the_command_line_sets_has_no_line() {
    let overrides = ["rollout.n=0".to_owned(), "objective=gpro".to_owned()];
    let file = CheckedFile::parse(LEAST, Some(Path::new(".")), &overrides).expect("a text");
    let problems: Vec<&str> = file.problems.iter().map(|problem| problem.message.as_str()).collect();
    assert_eq!(problems.len(), 2, "{problems:?}");
    assert!(file.problems.iter().all(|problem| problem.place.is_none()), "{:?}", file.problems);
    assert!(CheckedFile::parse(LEAST, Some(Path::new(".")), &["rollout.n".into()]).is_err());
}

#[test]
fn a_message_of_later_is_placed_by_the_key_that_it_names() {
    let text = format!("{LEAST}memory:\n  train_tokens: 8\n");
    let file = check(&text);
    let line = |message: &str| file.problem(message).place.map(|place| place.line);
    assert_eq!(line("memory.train_tokens (8) should hold a sequence"), Some(5));
    assert_eq!(line("model.arch.vocab_size is missing"), Some(1));
    assert_eq!(line("something else is wrong"), None);
}
