//! Scores and errors of each rule reward.

mod rules;

use super::*;

const TOKENS: [u32; 100] = [7; 100];

fn completion(text: &str, tokens: usize) -> Completion<'_> {
    Completion { text, tokens: &TOKENS[..tokens], finished: true, max_tokens: 100, in_thought: false }
}

fn configs(json: &str) -> Vec<RewardConfig> {
    serde_json::from_str(json).expect("reward configuration")
}

fn total(json: &str, answer: &str, text: &str, tokens: usize) -> Result<f64, String> {
    let rewards = Rewards::new(&configs(&format!("[{json}]"))).map_err(|e| e.to_string())?;
    rewards.score(answer, &completion(text, tokens)).map(|reward| reward.total).map_err(|e| e.to_string())
}

fn pays(json: &str, answer: &str, text: &str) -> f64 {
    total(json, answer, text, 10).expect("judged")
}

fn refuses(json: &str) -> String {
    Rewards::new(&configs(&format!("[{json}]"))).expect_err("refused").to_string()
}

/// Scores of three completions by two programs, at these places of the list.
fn scores(programs: [(usize, [Option<f64>; 3]); 2]) -> Vec<Scores> {
    let score = |value| Score { value, ..Score::default() };
    programs.map(|(place, values)| (place, values.map(score).to_vec())).to_vec()
}

const EQUAL: f64 = 1e-12;

#[test]
fn gsm8k_strict_wants_the_mark_and_flexible_the_last_number() {
    let (strict, flexible) = (r#"{"kind": "gsm8k"}"#, r#"{"kind": "gsm8k", "method": "flexible"}"#);
    for (text, by_strict, by_flexible) in [
        ("so #### 1,024", 1.0, 1.0),
        ("#### 7\nno: #### 1024", 1.0, 1.0),
        ("#### 1024\n#### 7", 0.0, 0.0),
        ("The answer is 1024.", 0.0, 1.0),
        ("#### 1024 apples of 2000", 1.0, 0.0),
        ("no number", 0.0, 0.0),
        ("1.0.2.4", 0.0, 0.0),
    ] {
        assert_eq!(pays(strict, "1024", text).to_bits(), f64::to_bits(by_strict), "{text}");
        assert_eq!(pays(flexible, "1,024", text).to_bits(), f64::to_bits(by_flexible), "{text}");
    }
}

#[test]
fn what_a_rule_reads_is_what_it_compares() {
    let list = r#"[{"kind": "gsm8k"}, {"kind": "number"}, {"kind": "contains"},
                   {"kind": "regex", "pattern": "x=([0-9]+)"}, {"kind": "exact"}]"#;
    let rewards = Rewards::new(&configs(list)).expect("settings");
    let read = |text| -> Vec<_> {
        let readings = rewards.readings(text);
        readings.map(|(name, text)| (name.to_owned(), text.map(String::from))).collect()
    };
    let expected = |texts: [Option<&str>; 4]| -> Vec<_> {
        let names = ["gsm8k", "number", "regex", "exact"].map(str::to_owned);
        names.into_iter().zip(texts.map(|text| text.map(str::to_owned))).collect()
    };
    assert_eq!(
        read(" x=3-5 #### 1,000. "),
        expected([Some("1,000."), Some("1,000"), Some("3"), Some("x=3-5 #### 1,000.")])
    );
    assert_eq!(read("none"), expected([None, None, None, Some("none")]));
}

#[test]
fn a_ground_truth_that_is_no_number_is_an_error_with_its_reason() {
    let error = total(r#"{"kind": "gsm8k"}"#, "so #### 42", "#### 42", 1).expect_err("refused");
    assert_eq!(
        error,
        "reward `gsm8k` failed on this sample: the ground truth \"so #### 42\" is not a decimal \
         number; for GSM8K rows set `answer_extract: gsm8k`"
    );
    let error = total(r#"{"kind": "number", "name": "close"}"#, "", "42", 1).expect_err("refused");
    assert!(error.starts_with("reward `close` failed on this sample"), "{error}");
}

#[test]
fn exact_trims_and_may_ignore_case() {
    assert!(pays(r#"{"kind": "exact"}"#, "Yes", " Yes\n") > 0.5);
    assert!(pays(r#"{"kind": "exact"}"#, "Yes", "yes") < 0.5);
    assert!(pays(r#"{"kind": "exact", "ignore_case": true}"#, "Yes", "yES") > 0.5);
    assert!(pays(r#"{"kind": "exact"}"#, "Yes", "Yes!") < 0.5);
}

#[test]
fn contains_refuses_an_empty_answer_since_every_text_contains_it() {
    assert!(pays(r#"{"kind": "contains"}"#, "Paris", "It is Paris.") > 0.5);
    assert!(pays(r#"{"kind": "contains"}"#, "paris", "It is Paris.") < 0.5);
    assert!(pays(r#"{"kind": "contains", "ignore_case": true}"#, "paris", "It is Paris.") > 0.5);
    let error = total(r#"{"kind": "contains"}"#, " ", "anything", 1).expect_err("refused");
    assert!(error.contains("the ground truth is empty"), "{error}");
}

#[test]
fn regex_compares_its_group_with_the_answer_or_just_matches() {
    let answer = r#"{"kind": "regex", "pattern": "<answer>(.*?)</answer>"}"#;
    assert!(pays(answer, "4", "<answer>3</answer> no <answer> 4\n</answer>") > 0.5);
    assert!(pays(answer, "4", "<answer>4</answer> no <answer>3</answer>") < 0.5);
    assert!(pays(answer, "4", "4") < 0.5);
    let format = r#"{"kind": "regex", "pattern": "^<think>.*</think>"}"#;
    assert!(pays(format, "", "<think>\nhm\n</think>") > 0.5);
    assert!(pays(format, "", "hm") < 0.5);
}

#[test]
fn an_invalid_pattern_is_named_with_what_is_wrong() {
    let error = refuses(r#"{"kind": "regex", "pattern": "(a"}"#);
    assert_eq!(error, "the regular expression \"(a\" of `rewards.regex.pattern` is invalid: error: unclosed group");
}

#[test]
fn number_compares_the_last_number_within_a_tolerance() {
    assert!(pays(r#"{"kind": "number"}"#, "0.5", "x = 1/2 = .5") > 0.5);
    assert!(pays(r#"{"kind": "number"}"#, "0.5", "about 0.51") < 0.5);
    assert!(pays(r#"{"kind": "number", "tolerance": 0.02}"#, "0.5", "about 0.51") > 0.5);
    assert!(pays(r#"{"kind": "number"}"#, "5", "none") < 0.5);
    assert!(
        refuses(r#"{"kind": "number", "tolerance": -1}"#)
            .contains("`rewards.number.tolerance`: must be at least 0, found -1")
    );
}

#[test]
fn the_overlong_penalty_falls_linearly_inside_the_buffer() {
    let dapo = r#"{"kind": "length", "buffer": 20}"#;
    for (tokens, expected) in [(10, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0)] {
        let reward = total(dapo, "", "", tokens).expect("judged");
        assert!((reward - expected).abs() < EQUAL, "{tokens} tokens: {reward}");
    }
    let error = total(r#"{"kind": "length", "buffer": 101}"#, "", "", 1).expect_err("refused");
    assert!(error.contains("buffer of 101 tokens exceeds the completion limit of 100"));
}

#[test]
fn the_overlong_penalty_of_a_limit_of_its_own_falls_on_beyond_it() {
    // NeMo RL's `apply_reward_shaping` and verl's DAPO manager: min(-(length - (limit - buffer)) / buffer, 0)
    let length = r#"{"kind": "length", "buffer": 20, "limit": 60}"#;
    for (tokens, expected) in [(40, 0.0), (45, -0.25), (60, -1.0), (80, -2.0)] {
        let reward = total(length, "", "", tokens).expect("judged");
        assert!((reward - expected).abs() < EQUAL, "{tokens} tokens: {reward}");
    }
    for wrong in [r#"{"kind": "length", "buffer": 20, "limit": 10}"#, r#"{"kind": "length", "max": 20, "limit": 30}"#] {
        assert!(refuses(wrong).contains("`rewards.length.limit`"), "{wrong}");
    }
}

#[test]
fn length_penalties_around_a_target_and_beyond_a_maximum() {
    let target = r#"{"kind": "length", "target": 40}"#;
    for (tokens, expected) in [(40, 0.0), (30, -0.25), (50, -0.25), (0, -1.0), (100, -1.0)] {
        let reward = total(target, "", "", tokens).expect("judged");
        assert!((reward - expected).abs() < EQUAL, "{tokens} tokens: {reward}");
    }
    let max = r#"{"kind": "length", "max": 40, "weight": 0.5}"#;
    assert!(total(max, "", "", 40).expect("judged").abs() < EQUAL);
    assert!((total(max, "", "", 41).expect("judged") + 0.5).abs() < EQUAL);
}

#[test]
fn length_wants_exactly_one_shape() {
    assert_eq!(
        refuses(r#"{"kind": "length"}"#),
        "`rewards.length`: expected exactly one of `target`, `max` and `buffer`, found none"
    );
    assert!(refuses(r#"{"kind": "length", "max": 1, "buffer": 1}"#).ends_with("found several"));
    assert!(
        refuses(r#"{"kind": "length", "target": 0}"#).contains("`rewards.length.target`: must be at least 1, found 0")
    );
}

#[test]
fn the_total_is_the_weighted_sum_and_parts_are_shown_before_weighting() {
    let rewards = Rewards::new(&configs(
        r#"[{"kind": "exact", "weight": 2}, {"kind": "length", "target": 5, "weight": 0.5, "name": "brief"}]"#,
    ))
    .expect("compiles");
    let reward = rewards.score("a", &completion("a", 10)).expect("judged");
    assert!((reward.total - 1.5).abs() < EQUAL);
    assert_eq!(reward.parts, [("exact".to_owned(), 1.0), ("brief".to_owned(), -1.0)]);
    assert_eq!(rewards.needs_answer(), Some("exact"));
}

#[test]
fn lists_that_cannot_be_reported_are_refused() {
    let two = r#"{"kind": "exact"}, {"kind": "exact"}"#;
    assert_eq!(refuses(two), "`rewards`: two rewards are named `exact`; set a different `name` for one of them");
    assert!(Rewards::new(&[]).expect_err("refused").to_string().contains("at least one reward"));
}

#[test]
fn unknown_keys_are_rejected() {
    let error = serde_json::from_str::<RewardConfig>(r#"{"kind": "exact", "wieght": 1}"#);
    assert!(error.expect_err("refused").to_string().contains("unknown field `wieght`"));
}

#[test]
fn a_reward_that_does_not_apply_adds_nothing_and_stays_out_of_statistics() {
    let rewards = Rewards::new(&configs(
        r#"[{"kind": "python", "file": "r.py", "normalize": true, "weight": 2}, {"kind": "exact"},
            {"kind": "command", "command": ["judge"], "weight": -1}]"#,
    ))
    .expect("settings");
    let names: Vec<&str> = rewards.scorers().map(|(name, _)| name).collect();
    assert_eq!(names, ["python", "exact", "command"]);
    let score = |text| rewards.score("a", &completion(text, 1)).expect("judged");
    let programs = || scores([(0, [Some(1.0), None, Some(3.0)]), (2, [None, None, Some(0.5)])]);
    let totals = |statistics: Option<&RewardStats>| {
        let mut scored = [score("a"), score("a"), score("b")];
        rewards.complete(&mut scored, programs(), statistics);
        assert_eq!(scored[1].parts.len(), 3);
        assert!(scored[1].parts[0].1.is_nan() && scored[1].parts[2].1.is_nan());
        scored.map(|reward| reward.total)
    };
    let plain = totals(None).map(f64::to_bits);
    assert_eq!(plain, [3.0, 1.0, 5.5].map(f64::to_bits));
    let mut scored = [score("a"), score("a"), score("b")];
    rewards.insert(&mut scored, programs());
    let normalized = rewards.normalized(&scored);
    assert_eq!(normalized, [("python".to_owned(), vec![1.0, 3.0])]);
    let mut running = RunningStats::default();
    for &value in &normalized[0].1 {
        running.add(value);
    }
    let statistics = [("python".to_owned(), running)].into();
    let [first, second, third] = totals(Some(&statistics));
    // 1 and 3 lie 1 from their mean, their standard deviation is √2, and the weight 2
    let apart = 2.0 / 2.0_f64.sqrt();
    assert!((first - (1.0 - apart)).abs() < 1e-6, "{first}");
    assert!((second - 1.0).abs() < EQUAL);
    assert!((third - (apart - 0.5)).abs() < 1e-6, "{third}");
}

#[test]
fn a_completion_to_which_no_reward_applies_has_none() {
    let rewards = Rewards::new(&configs(
        r#"[{"kind": "python", "file": "r.py", "clip": [0, 1]}, {"kind": "command", "command": ["judge"], "weight": -1}]"#,
    ))
    .expect("settings");
    for statistics in [None, Some(&RewardStats::new())] {
        let mut scored: Vec<Reward> = (0..3).map(|_| rewards.score("", &completion("a", 1)).expect("judged")).collect();
        let programs = scores([(0, [None, Some(0.5), None]), (1, [None, None, Some(0.0)])]);
        rewards.complete(&mut scored, programs, statistics);
        assert_eq!(scored.iter().map(Reward::value).collect::<Vec<_>>(), [None, Some(0.5), Some(0.0)]);
        // an environment's reward is then all of it, and one that does not apply changes nothing
        scored[0].add("environment", f64::NAN, 1.0);
        assert_eq!(scored[0].value(), None);
        scored[0].add("environment", 2.0, 1.0);
        assert_eq!(scored[0].value(), Some(2.0));
    }
}

#[test]
fn settings_of_programs_that_make_no_sense_are_refused() {
    for (json, part) in [
        (r#"{"kind": "python", "file": "r.py", "workers": 0}"#, "rewards.python.workers"),
        (r#"{"kind": "python", "file": "r.py", "timeout": 0}"#, "rewards.python.timeout"),
        (r#"{"kind": "command", "command": [], "name": "c"}"#, "rewards.c.command"),
    ] {
        let message = refuses(json);
        assert!(message.contains(part), "{message}");
    }
}
