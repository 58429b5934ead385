//! Problems have solutions, the splits share none, and answers are counted exactly.

use super::*;
use proptest::prelude::*;

fn task(json: &str) -> Countdown {
    let config = serde_json::from_str(json).expect("configuration");
    Countdown::new(&config).expect("builds")
}

fn refused(json: &str) -> String {
    let config = serde_json::from_str(json).expect("configuration");
    Countdown::new(&config).expect_err("refused").to_string()
}

fn pays(task: &Countdown, example: &Example, text: &str) -> f64 {
    let completion = Completion { text, tokens: &[], finished: true, max_tokens: 100, in_thought: false };
    task.reward(example, &completion).expect("judged").total
}

fn problem(example: &Example) -> CountdownProblem {
    CountdownProblem::parse(&example.answer).expect("a problem")
}

#[test]
fn every_problem_has_the_solution_it_was_made_from() {
    for settings in ["{}", r#"{"numbers": 6}"#, r#"{"style": "short", "numbers": 3, "max_number": 9}"#] {
        let task = task(settings);
        for split in [Split::Train, Split::Validation] {
            for index in 0..200 {
                let example = task.example(split, index).expect("example");
                let solution = example.solution.as_deref().expect("a solution");
                assert!(pays(&task, &example, solution) > 0.5, "{solution} of {}", example.answer);
                let problem = problem(&example);
                assert!((1..=task.config.max_target).contains(&problem.target));
                assert_eq!(problem.numbers.len(), task.config.numbers);
            }
        }
    }
}

#[test]
fn a_short_problem_stays_inside_the_alphabet() {
    let task = task(r#"{"style": "short", "numbers": 3, "max_number": 9}"#);
    let alphabet = task.alphabet().expect("an alphabet");
    for index in 0..100 {
        let example = task.example(Split::Train, index).expect("example");
        let PromptText::Text(prompt) = &example.prompt else { panic!("a text") };
        let solution = example.solution.as_deref().expect("a solution");
        assert!(format!("{prompt}{solution}").chars().all(|c| alphabet.contains(c)));
    }
}

#[test]
fn an_expression_that_misses_pays_what_the_settings_say_and_nothing_in_validation() {
    let task = task(r#"{"format_score": 0.1}"#);
    let mut example = task.example(Split::Train, 0).expect("example");
    example.answer = r#"{"target": 24, "numbers": [2, 3, 4]}"#.into();
    for (text, expected) in [
        ("<answer>2 * 3 * 4</answer>", 1.0),
        ("<answer>2 × 3 × 4 = 24</answer>", 1.0),
        ("so \\boxed{4 \\times (2 \\cdot 3)}", 1.0),
        ("first 1+1\n2*3*4", 1.0),
        ("<answer>2 + 3 + 4</answer>", 0.1),
        ("<answer>24</answer>", 0.0),
        ("<answer>4 * 3 * 2 * 1</answer>", 0.0),
        ("<answer>4 * 6</answer>", 0.0),
        ("<answer>2 * 3 * 4 + 4 - 4</answer>", 0.0),
        ("<answer>2 / 0 * 3 * 4</answer>", 0.0),
        ("<answer>2 3 4</answer>", 0.0),
        ("<answer>-2 * 3 * 4</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("", 0.0),
    ] {
        assert!((pays(&task, &example, text) - expected).abs() < 1e-12, "{text}");
    }
    let completion = Completion {
        text: "<answer>2 + 3 + 4</answer>",
        tokens: &[],
        finished: true,
        max_tokens: 100,
        in_thought: false,
    };
    let validation = task.validation_reward(&example, &completion).expect("judged");
    assert!(validation.total.abs() < 1e-12 && validation.correct == Some(false));
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    assert!(refused(r#"{"numbers": 1}"#).contains("`task.numbers`: must be at least 2, found 1"));
    assert!(refused(r#"{"operations": "+%"}"#).contains("one or more of `+-*/`"));
    assert!(refused(r#"{"max_target": 0}"#).contains("`task.max_target`"));
    assert!(refused(r#"{"format_score": 2}"#).contains("`task.format_score`"));
    assert!(refused(r#"{"numbers": 2, "max_number": 2, "validation_size": 500}"#).contains("too few"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn no_training_problem_is_held_out(seed: u64, start: u64) {
        let task = task(&format!(r#"{{"numbers": 3, "max_number": 12, "seed": {seed}}}"#));
        let held_out: HashSet<_> = task
            .validation
            .iter()
            .map(|puzzle| (puzzle.problem.sorted(), puzzle.problem.target))
            .collect();
        prop_assert_eq!(held_out.len(), 200);
        for index in (0..50).map(|i| start.wrapping_add(i)) {
            let problem = problem(&task.example(Split::Train, index).expect("example"));
            prop_assert!(!held_out.contains(&(problem.sorted(), problem.target)));
        }
    }

    #[test]
    fn no_answer_makes_the_rule_panic(text in "[-+*/()0-9 =x×<>answer]{0,60}") {
        let task = task("{}");
        let example = task.example(Split::Train, 0).expect("example");
        prop_assert!(pays(&task, &example, &text) <= 1.0);
    }
}
