//! Comparison of the rules with verl's and TRL's code on the same texts.

use super::*;
use proptest::prelude::*;
use serde::Deserialize;

/// verl's and TRL's scores: `tests/fixtures/scripts/make_rule_scores.py`.
const SCORES: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/rewards/rule_scores.jsonl"));

#[derive(Deserialize)]
struct Scored {
    gold: String,
    completion: String,
    strict: f64,
    flexible: f64,
    math: f64,
    think: f64,
}

fn rewards(json: &str) -> Rewards {
    let configs: Vec<RewardConfig> = serde_json::from_str(&format!("[{json}]")).expect("settings");
    Rewards::new(&configs).expect("rewards")
}

fn refused(json: &str) -> String {
    let configs: Vec<RewardConfig> = serde_json::from_str(&format!("[{json}]")).expect("settings");
    Rewards::new(&configs).expect_err("refused").to_string()
}

fn completion<'a>(text: &'a str, tokens: &'a [u32]) -> Completion<'a> {
    Completion { text, tokens, finished: true, max_tokens: 1_000, in_thought: false }
}

fn pays(json: &str, answer: &str, text: &str) -> f64 {
    let judged = rewards(json).score(answer, &completion(text, &[]));
    judged.expect("judged").total
}

#[test]
fn scores_are_those_of_verl_and_trl() {
    let rules = [
        r#"{"kind": "verl_gsm8k", "format_score": 0.25}"#,
        r#"{"kind": "verl_gsm8k", "method": "flexible", "format_score": 0.25}"#,
        r#"{"kind": "verl_math"}"#,
        r#"{"kind": "trl_think_format"}"#,
    ]
    .map(rewards);
    let mut count = 0;
    for line in SCORES.lines() {
        let scored: Scored = serde_json::from_str(line).expect("a line");
        let expected = [scored.strict, scored.flexible, scored.math, scored.think];
        for (rule, expected) in rules.iter().zip(expected) {
            let judged = rule.score(&scored.gold, &completion(&scored.completion, &[]));
            let reward = judged.expect("judged");
            assert!((reward.total - expected).abs() < 1e-12, "{expected}: {reward:?} of {line}");
        }
        count += 1;
    }
    assert!(count > 1_000);
}

#[test]
fn tags_are_wanted_in_order_and_once() {
    let only = r#"{"kind": "format", "tags": ["think", "answer"]}"#;
    let right = "<think>so</think>\n<answer>4</answer>";
    for (text, expected) in [
        (right, 1.0),
        (" <think></think><answer></answer>\n", 1.0),
        ("<answer>4</answer><think>so</think>", 0.0),
        ("<think>so</think>", 0.0),
        ("<think>so</think> and <answer>4</answer>", 0.0),
        ("<think>so</think><answer>4</answer>.", 0.0),
        ("<think><think>so</think><answer>4</answer>", 0.0),
        ("<think>so<answer>4</answer></think>", 0.0),
        ("", 0.0),
    ] {
        assert!((pays(only, "", text) - expected).abs() < 1e-12, "{text}");
    }
    let any = r#"{"kind": "format", "tags": ["think"], "only": false}"#;
    assert!(pays(any, "", "well <think>so</think> 4") > 0.5);
    let opened = r#"{"kind": "format", "tags": ["think", "answer"], "opened": true}"#;
    assert!(pays(opened, "", "so</think><answer>4</answer>") > 0.5);
    assert!(pays(opened, "", right) < 0.5);
    assert!(
        refused(r#"{"kind": "format", "tags": []}"#)
            .contains("`rewards.format.tags`: must have at least 1 entry, found 0")
    );
    assert!(
        refused(r#"{"kind": "format", "tags": ["<think>"]}"#)
            .contains("\"<think>\" has an invalid format; write it as in think")
    );
    assert!(refused(r#"{"kind": "format", "tags": ["a", "a"]}"#).contains("named twice"));
}

#[test]
fn json_has_to_fit_the_schema() {
    let rule = r#"{"kind": "json_schema", "schema": {"type": "object", "required": ["city"],
        "properties": {"city": {"type": "string", "pattern": "^[A-Z]"}, "days": {"type": "integer", "minimum": 1}}}}"#;
    for (text, expected) in [
        (r#"{"city": "Bonn", "days": 2}"#, 1.0),
        ("Sure:\n```json\n{\"city\": \"Bonn\"}\n```\nDone.", 1.0),
        ("<think>{}</think> {\"city\": \"Bonn\"}", 1.0),
        (r#"{"city": "bonn"}"#, 0.0),
        (r#"{"days": 2}"#, 0.0),
        (r#"{"city": "Bonn", "days": 0}"#, 0.0),
        (r#"{"city": "Bonn""#, 0.0),
        ("Bonn", 0.0),
        ("```", 0.0),
    ] {
        assert!((pays(rule, "", text) - expected).abs() < 1e-12, "{text}");
    }
    assert!(pays(rule, "", &"[".repeat(1_000_000)) < 0.5);
    let error = refused(r#"{"kind": "json_schema", "schema": {"type": "no such type"}}"#);
    assert!(error.contains("`rewards.json_schema.schema`: it is not a valid JSON schema"), "{error}");
    let error = refused(r#"{"kind": "json_schema", "schema": {"$ref": "https://example.com/a.json"}}"#);
    assert!(error.contains("not a valid JSON schema"), "{error}");
}

#[test]
fn the_letter_settled_on_is_the_choice() {
    let rule = r#"{"kind": "choice", "letters": "ABCD"}"#;
    for (text, expected) in [
        ("\\boxed{B}", 1.0),
        ("\\boxed{\\text{B}}", 1.0),
        ("\\boxed{(B) Paris}", 1.0),
        ("The answer is (B).", 1.0),
        ("The answer is B because of it", 1.0),
        ("Answer: **B**", 1.0),
        ("answer: b", 1.0),
        ("A is wrong.\nB", 1.0),
        ("A is wrong.\n(B) Paris", 1.0),
        ("\\boxed{A} no \\boxed{B}", 1.0),
        ("\\boxed{A}", 0.0),
        ("The answer is A. Not B.", 0.0),
        ("Because it is so.", 0.0),
        ("A good question", 0.0),
        ("\\boxed{Beta}", 0.0),
        ("", 0.0),
    ] {
        assert!((pays(rule, "B", text) - expected).abs() < 1e-12, "{text}");
    }
    assert!(pays(rule, "(B)", "\\boxed{B}") > 0.5);
    let error = rewards(rule).check_answer("E").expect_err("refused").to_string();
    assert!(error.contains("\"E\" is none of the letters ABCD"), "{error}");
    assert!(refused(r#"{"kind": "choice", "letters": "AA"}"#).contains("different upper-case"));
}

#[test]
fn countdown_rows_of_others_are_read_and_broken_ones_named() {
    let rule = r#"{"kind": "countdown"}"#;
    let answer = r#"{"target": 6, "nums": [1, 2, 3]}"#;
    assert!(pays(rule, answer, "<answer>1 + 2 + 3</answer>") > 0.5);
    assert!(pays(rule, answer, "<answer>2 * 3</answer>") < 0.5);
    let some = r#"{"kind": "countdown", "use_all": false}"#;
    assert!(pays(some, answer, "<answer>2 * 3</answer>") > 0.5);
    assert!(pays(some, answer, "<answer>3 + 3</answer>") < 0.5);
    let error = rewards(rule).check_answer("6").expect_err("refused").to_string();
    assert!(error.contains("\"6\" is not a countdown problem"), "{error}");
    assert!(error.contains(r#"`answer: '{{"target": {target}, "numbers": {nums}}}'`"#), "{error}");
}

#[test]
fn saying_the_same_again_costs_its_share() {
    let words = r#"{"kind": "repetition", "ngram_size": 2}"#;
    assert!(pays(words, "", "a b c d").abs() < 1e-12);
    // a b, b a, a b: two of three are different
    assert!((pays(words, "", "a b A b") + 1.0 / 3.0).abs() < 1e-12);
    assert!(pays(words, "", "a").abs() < 1e-12 && pays(words, "", "").abs() < 1e-12);
    let tokens = rewards(r#"{"kind": "repetition", "ngram_size": 1, "unit": "tokens"}"#);
    let judged = tokens.score("", &completion("", &[7, 7, 7, 8])).expect("judged");
    assert!((judged.total + 0.5).abs() < 1e-12);
    assert!(
        refused(r#"{"kind": "repetition", "ngram_size": 0}"#)
            .contains("`rewards.repetition.ngram_size`: must be at least 1, found 0")
    );
}

#[test]
fn a_ground_truth_that_its_own_rule_pays_nothing_is_an_error() {
    let error = |json: &str, answer: &str| {
        let error = rewards(json).check_answer(answer).expect_err("refused");
        error.to_string()
    };
    let text = error(r#"{"kind": "verl_gsm8k"}"#, "1,000");
    assert_eq!(
        text,
        "reward `verl_gsm8k` failed on this sample: it scores its ground truth 0 instead of 1 (answer \"1,000\", \
         completion \"#### 1,000\", parsed as \"1000\"); set `answer_extract`, or use another rule"
    );
    assert!(error(r#"{"kind": "verl_math"}"#, "5}").contains("scores its ground truth 0"));
    for (json, answer) in [
        (r#"{"kind": "verl_gsm8k"}"#, "1000"),
        (r#"{"kind": "verl_math"}"#, "\\frac12"),
        (r#"{"kind": "gsm8k"}"#, "1,000"),
        (r#"{"kind": "math"}"#, "\\int x dx"),
        (r#"{"kind": "trl_accuracy"}"#, "so \\boxed{5}"),
        (r#"{"kind": "exact"}"#, " yes "),
    ] {
        rewards(json).check_answer(answer).expect("a ground truth of its own");
    }
}

#[test]
fn no_answer_is_read_in_a_thought_that_has_not_ended_but_by_the_rules_of_verl_and_trl() {
    let countdown = r#"{"target": 6, "numbers": [1, 2, 3]}"#;
    for (json, answer, text, in_thought) in [
        (r#"{"kind": "math"}"#, "4", "maybe \\boxed{4}, let me check", 0.0),
        (r#"{"kind": "math"}"#, "4", "the answer is 4", 0.0),
        (r#"{"kind": "math"}"#, "4", "4", 0.0),
        (r#"{"kind": "choice", "letters": "ABCD"}"#, "B", "perhaps \\boxed{B}", 0.0),
        (r#"{"kind": "countdown"}"#, countdown, "<answer>1 + 2 + 3</answer>", 0.0),
        (r#"{"kind": "json_schema", "schema": {"type": "array"}}"#, "", "[1]", 0.0),
        (r#"{"kind": "gsm8k"}"#, "4", "perhaps #### 4", 0.0),
        (r#"{"kind": "number"}"#, "4", "perhaps 4", 0.0),
        (r#"{"kind": "verl_math"}"#, "4", "maybe \\boxed{4}, let me check", 1.0),
        (r#"{"kind": "trl_accuracy"}"#, "4", "maybe \\boxed{4}, let me check", 1.0),
    ] {
        let ended = completion(text, &[]);
        let paid = |own: &Completion<'_>| rewards(json).score(answer, own).expect("judged");
        assert!((paid(&ended).total - 1.0).abs() < 1e-12, "{json}: {text}");
        let cut = paid(&Completion { in_thought: true, finished: false, ..ended });
        assert!((cut.total - in_thought).abs() < 1e-12, "{json}: {text}");
        let read = cut.readings.iter().find_map(|reading| reading.parsed.clone()).unwrap_or_default();
        assert_eq!(read.is_empty(), in_thought < 0.5, "{json}: {read}");
    }
}

#[test]
fn a_reward_says_what_was_read_and_whether_it_is_right() {
    let list = r#"{"kind": "format", "tags": ["a"]}, {"kind": "math"}, {"kind": "verl_math"}"#;
    let reward = rewards(list).score("0.5", &completion("\\boxed{\\frac{1}{2}}", &[]));
    let reward = reward.expect("judged");
    assert_eq!(reward.correct, Some(true));
    let read = |at: usize| {
        let reading = &reward.readings[at];
        (reading.reward.as_str(), reading.parsed.as_deref(), reading.gold.as_deref())
    };
    assert_eq!(read(0), ("math", Some("1/2"), Some("1/2")));
    assert_eq!(read(1), ("verl_math", Some("\\frac{1}{2}"), Some("0.5")));
    let unsure = rewards(r#"{"kind": "math"}"#).score("\\int x dx", &completion("\\boxed{5}", &[]));
    let unsure = unsure.expect("judged");
    assert_eq!(unsure.correct, Some(false));
    assert!(unsure.readings[0].undecided.is_some());
    let form = rewards(r#"{"kind": "format", "tags": ["a"]}"#);
    assert_eq!(form.score("", &completion("", &[])).expect("judged").correct, None);
}

#[test]
fn every_rule_judges_a_megabyte() {
    let of_letters = rewards(r#"{"kind": "choice"}"#);
    let countdown = rewards(r#"{"kind": "countdown"}"#);
    let others = rewards(
        r#"{"kind": "gsm8k"}, {"kind": "verl_gsm8k"}, {"kind": "verl_math"}, {"kind": "math"}, {"kind": "trl_accuracy"},
           {"kind": "trl_think_format"}, {"kind": "format", "tags": ["a", "b"]}, {"kind": "repetition"},
           {"kind": "json_schema", "schema": {"type": "array"}}, {"kind": "number"}, {"kind": "exact"}"#,
    );
    for piece in ["\\boxed{", "#### 1", "<a>", "[", "\\frac", "\\sqrt", "1 ", "(1+", "```", "{\"a\":", "é"] {
        let text = piece.repeat(1_000_000 / piece.len());
        others.score("5", &completion(&text, &[])).expect("judged");
        of_letters.score("B", &completion(&text, &[])).expect("judged");
        let problem = r#"{"target": 6, "numbers": [1, 2, 3]}"#;
        let judged = countdown.score(problem, &completion(&text, &[]));
        assert!(judged.expect("judged").total < 0.5);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn no_text_makes_a_rule_panic(
        gold in "[-0-9A-E./\\\\{}frac=sqt%,]{1,12}",
        text in "[-0-9A-E./\\\\{}boxedfrac=sqt<>think#$ \n%,\"é]{0,80}",
    ) {
        let rules = rewards(
            r#"{"kind": "verl_gsm8k"}, {"kind": "verl_gsm8k", "name": "f", "method": "flexible"}, {"kind": "verl_math"},
               {"kind": "math"}, {"kind": "trl_accuracy"}, {"kind": "trl_think_format"},
               {"kind": "format", "tags": ["think", "b"]}, {"kind": "repetition"},
               {"kind": "json_schema", "schema": {"type": "array"}}"#,
        );
        // a ground truth of nothing but marks is an error
        if let Ok(reward) = rules.score(&gold, &completion(&text, &[])) {
            prop_assert!(reward.total.is_finite());
        }
    }
}
