//! The checker on pairs made by hand, and on texts that want to break it.

use super::*;
use proptest::prelude::*;
use serde::Deserialize;
use std::fmt::Write;
use std::time::Instant;

/// 300 ground truths with completions over all forms, and whether the completion is right.
const PAIRS: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/rewards/math_pairs.jsonl"));

#[derive(Deserialize)]
struct Pair {
    form: String,
    gold: String,
    completion: String,
    right: bool,
}

const CHECKER: Checker = Checker { source: AnswerSource::Any, tolerance: 0.0 };

fn pairs() -> Vec<Pair> {
    let lines = PAIRS.lines();
    lines.map(|line| serde_json::from_str(line).expect("a pair")).collect()
}

fn verdict(gold: &str, completion: &str) -> Verdict {
    CHECKER.check(gold, completion).expect("a ground truth that can be read")
}

fn right(gold: &str, answer: &str) -> bool {
    verdict(gold, &format!("\\boxed{{{answer}}}")).is_equal()
}

#[test]
fn every_pair_made_by_hand_is_judged_right_or_declared_undecided() {
    let (mut wrong, mut seen) = (String::new(), 0);
    for pair in pairs() {
        let verdict = verdict(&pair.gold, &pair.completion);
        let undecided = pair.form == "undecided";
        let expected = if undecided { None } else { Some(pair.right) };
        let decided = !matches!(verdict.comparison, Comparison::Undecided(_));
        let fits = decided.then_some(verdict.is_equal()) == expected;
        if !fits {
            let Pair { form, gold, completion, right } = &pair;
            writeln!(wrong, "{form}: {gold} | {completion} | {right}: {verdict:?}").expect("text");
        }
        seen += 1;
    }
    assert!(wrong.is_empty(), "\n{wrong}");
    assert_eq!(seen, 300);
}

#[test]
fn every_ground_truth_is_equal_to_itself() {
    for pair in pairs() {
        let boxed = format!("\\boxed{{{}}}", gold_source(&pair.gold));
        assert!(verdict(&pair.gold, &boxed).is_equal(), "{}", pair.gold);
    }
}

#[test]
fn equal_numbers_are_read_as_equal_texts() {
    let read = |answer: &str| CHECKER.read(&format!("\\boxed{{{answer}}}"));
    for (a, b) in [
        ("\\frac{1}{2}", "0.50"),
        ("1\\frac12", "3/2"),
        ("2\\sqrt{3}", "\\sqrt{12}"),
        ("x = 5", "5"),
        ("\\{1, 2\\}", "\\{2, 1\\}"),
        ("1{,}000", "10^3"),
    ] {
        assert_eq!(read(a), read(b), "{a} {b}");
    }
    assert_ne!(read("0.5"), read("0.51"));
    assert_eq!(CHECKER.read("no answer here"), None);
}

#[test]
fn a_tolerance_is_relative_to_the_ground_truth() {
    let near = Checker { tolerance: 0.01, ..CHECKER };
    let value = |gold: &str, answer: &str| {
        let text = format!("\\boxed{{{answer}}}");
        near.check(gold, &text).expect("a verdict").is_equal()
    };
    assert!(value("100", "101") && value("100", "99") && !value("100", "102"));
    assert!(value("\\pi", "3.14") && !value("\\pi", "3.2"));
    assert!(!right("100", "101") && !right("\\pi", "3.14"));
}

#[test]
fn trl_reads_boxes_and_formulas_after_final_answer_alone() {
    let latex = Checker { source: AnswerSource::Latex, ..CHECKER };
    let value = |text: &str| latex.check("7", text).expect("a verdict").is_equal();
    assert!(value("\\boxed{7}") && value("The final answer is $7$. I hope it is correct."));
    // a dollar behind a backslash is an amount's and ends no formula
    assert!(value("The final answer is $\\$7$. I hope it is correct."));
    assert!(!value("The final answer is \\$7 and not $8$."));
    assert!(!value("#### 7") && !value("The answer is 7") && !value("7"));
}

#[test]
fn an_empty_ground_truth_is_an_error() {
    assert!(CHECKER.check("  ", "\\boxed{1}").is_err());
}

/// Texts that are long, deep, or made of what costs most.
fn hostile() -> Vec<String> {
    let long = |piece: &str| piece.repeat(1_000_000 / piece.len());
    let pieces = [
        "\\boxed{",
        "{",
        "}",
        "(",
        "((1+",
        "[",
        "\\frac{",
        "\\frac1",
        "\\sqrt{",
        "\\left(",
        "-",
        "+",
        "$",
        "$.",
        "9",
        "1/",
        "9^",
        "9^{9^{",
        "!",
        "9!",
        "x^",
        "|",
        "\\{",
        ",",
        "1,",
        "\\pm",
        "\\sin",
        "log",
        "\n",
        " ",
        "answer is ",
        "####",
        "a",
        "é",
        "\\text{",
        "\\begin{matrix}",
        "&",
        "\\\\",
        "**",
        "\"",
        "=",
        "x=",
        "<",
        "1<",
        "\\cup",
        "\\lfloor ",
        "</think>",
        "%",
        "°",
        "_",
        "_1",
        "√",
        "0.\\overline{3}",
    ];
    let mut texts: Vec<String> = pieces.into_iter().map(long).collect();
    let boxed = |inner: String| format!("\\boxed{{{inner}}}");
    texts.extend([
        boxed("9".repeat(1_900)),
        boxed(format!("9^{{{}}}", "9".repeat(1_000))),
        boxed("(1/3)^{999}+".repeat(150) + "1"),
        boxed("(1/3)^{4999}+".repeat(140) + "1"),
        boxed("500!".repeat(400)),
        boxed("1000!-".repeat(300) + "1"),
        boxed("\\binom{1000}{500}".repeat(100)),
        boxed("2^".repeat(900) + "2"),
        boxed("(".repeat(900) + "1" + &")".repeat(900)),
        boxed("\\frac{1}{".repeat(200) + "1" + &"}".repeat(200)),
        boxed("x+".repeat(900) + "x"),
        boxed("\\{".repeat(400) + "1" + &"\\}".repeat(400)),
        boxed("1,".repeat(900) + "1"),
        boxed("\\sin x\\cos x".repeat(100)),
        boxed("1/".repeat(900) + "1"),
        boxed(format!("9{}", "!".repeat(1_500))),
        boxed("\\sqrt[64]{".repeat(100) + "2" + &"}".repeat(100)),
    ]);
    texts
}

#[test]
fn hostile_texts_are_judged_in_bounded_time() {
    for gold in ["42", "x^2 + 1", "\\{1, 2\\}"] {
        for text in hostile() {
            let started = Instant::now();
            let verdict = verdict(gold, &text);
            let seconds = started.elapsed().as_secs_f64();
            let start: String = text.chars().take(30).collect();
            assert!(!verdict.is_equal() || gold == "42", "{start}");
            // a fraction of a second here; an exponential path would take for ever
            assert!(seconds < 10.0, "{start}: {seconds} s");
        }
    }
}

#[test]
fn a_hostile_ground_truth_is_bounded_too() {
    for text in hostile() {
        // most of them are ground truths that only their own text equals, or none at all
        if let Ok(verdict) = CHECKER.check(&text, "\\boxed{5}") {
            assert_eq!(verdict.answer.as_deref(), Some("5"));
        }
    }
}

/// Pieces of answers, put together at random.
fn soup() -> impl Strategy<Value = String> {
    let pieces = [
        "1",
        "23",
        "0",
        ".5",
        "x",
        "y",
        "e",
        "i",
        "pi",
        "\\pi",
        "+",
        "-",
        "*",
        "/",
        "^",
        "_",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "\\{",
        "\\}",
        "\\frac",
        "\\frac{1}{2}",
        "\\sqrt",
        "\\sqrt[3]{8}",
        "\\sin",
        "\\log_2",
        "\\text{cm}",
        "cm",
        "%",
        "°",
        "^\\circ",
        "!",
        "|",
        ",",
        ";",
        "=",
        "<",
        "\\le",
        "\\cup",
        "\\in",
        "\\infty",
        "\\pm",
        "\\left(",
        "\\right)",
        " ",
        "$",
        "and",
        "\\boxed{",
        "\\begin{pmatrix}",
        "&",
        "\\\\",
        "\\end{pmatrix}",
        "\\binom",
        "\\lfloor",
        "\\rfloor",
        "0.\\overline{3}",
        "1,000",
        "é",
        "√",
    ];
    prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..24).prop_map(|p| p.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn no_text_makes_the_rule_panic(gold in soup(), answer in soup(), noise in ".{0,40}") {
        for text in [format!("\\boxed{{{answer}}}"), answer.clone(), format!("The answer is {answer}"), noise] {
            if let Ok(verdict) = CHECKER.check(&gold, &text) {
                prop_assert!(verdict.answer.is_some() || !verdict.is_equal());
            }
        }
    }

    #[test]
    fn whatever_is_written_twice_is_the_same(answer in soup()) {
        let text = format!("\\boxed{{{answer}}}");
        if let Some(read) = CHECKER.read(&text)
            && !read.is_empty()
        {
            let gold = extract(&text, AnswerSource::Any).unwrap_or_default().to_owned();
            if let Ok(verdict) = CHECKER.check(&gold, &text) {
                prop_assert!(verdict.is_equal() || gold_source(&gold) != gold, "{gold:?} {verdict:?}");
            }
        }
    }

    #[test]
    fn fractions_are_equal_where_their_numbers_are(a in -500_i64..500, b in 1_i64..500, c in -500_i64..500, d in 1_i64..500) {
        let (gold, other) = (format!("\\frac{{{a}}}{{{b}}}"), format!("{c}/{d}"));
        let (plain, tripled) = (format!("{a}/{b}"), format!("\\dfrac{{{}}}{{{}}}", 3 * a, 3 * b));
        prop_assert_eq!(right(&gold, &other), a * d == c * b);
        prop_assert!(right(&plain, &tripled));
    }

    #[test]
    fn decimals_are_equal_where_their_digits_are(whole in 0_u32..10_000, cents in 0_u32..100) {
        let plain = format!("{whole}.{cents:02}");
        let hundredths = u64::from(whole) * 100 + u64::from(cents);
        let (fraction, dollars) = (format!("{hundredths}/100"), format!("\\${plain}"));
        let other = format!("{whole}.{:02}", (cents + 1) % 100);
        prop_assert!(right(&plain, &fraction));
        prop_assert!(right(&dollars, &plain));
        prop_assert!(!right(&plain, &other));
    }
}
