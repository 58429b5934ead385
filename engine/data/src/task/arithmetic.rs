//! Generated sums such as `37+5=`.
//!
//! A problem is a number below the size of the problem space.

use firebrick_models::tokenizer::Control;
use serde::{Deserialize, Serialize};
use serde_json::json;
use smart_default::SmartDefault;

pub use super::operation::{Operation, Operations};
use super::{Completion, Example, Problems, PromptText, Reward, Split, Task, TaskError};

/// Key of the shuffle that selects held-out problems. It is not the user's seed: a model
/// warmed up under one seed must not have seen the validation problems of another.
const HOLD_OUT: u64 = 0xF1EE_B21C;

const DEFAULT_VALIDATION: u64 = 200;

/// All characters of prompts and answers.
pub fn alphabet() -> &'static str {
    "0123456789+-*="
}

/// Settings of generated arithmetic.
#[derive(Clone, Debug, PartialEq, SmartDefault, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ArithmeticConfig {
    /// Digits of the operands; 2 means 0 to 99.
    #[default(1)]
    #[schemars(range(min = 1, max = 6))]
    pub difficulty: u32,
    /// Any of `+`, `-`, `*` (in `countdown` also `/`): a quoted string such as `"+-"`, or, except in `countdown`, a
    /// list.
    pub operations: Operations,
    /// Seed of the order of training problems, or, for rows, of the choice of held-out rows.
    pub seed: u64,
    /// Problems or rows for validation. `null` holds out 200 problems, or at most a fifth of all; of rows, it takes all
    /// of `validation`, or none of `train`.
    pub validation_size: Option<u64>,
    /// Reward the fraction of correct characters in training.
    pub partial: bool,
    /// Write leading zeros (`07+35=042`), which is easier for very small models.
    pub zero_pad: bool,
}

/// The task of generated sums.
#[derive(Clone, Debug)]
pub struct Arithmetic {
    operations: Vec<Operation>,
    /// Digits of the operands, where numbers are padded to a fixed width.
    padded_digits: Option<usize>,
    /// One more than the largest operand.
    operands: u64,
    problems: Problems,
    partial: bool,
}

impl Arithmetic {
    /// Checks the settings and lays out the splits.
    ///
    /// # Errors
    /// `TaskError::Config` with the setting that is out of range.
    pub fn new(config: &ArithmeticConfig) -> Result<Self, TaskError> {
        TaskError::check("task", config)?;
        let operands = 10u64.pow(config.difficulty);
        let space = operands * operands * config.operations.all().len() as u64;
        let validation = config.validation_size.unwrap_or(DEFAULT_VALIDATION.min(space / 5));
        Ok(Self {
            operations: config.operations.all().to_vec(),
            padded_digits: config.zero_pad.then_some(config.difficulty as usize),
            operands,
            problems: Problems::new(space, HOLD_OUT, validation, config.seed, "task.difficulty")?,
            partial: config.partial,
        })
    }

    fn make_example(&self, a: u64, operation: Operation, b: u64) -> Example {
        let result = operation.apply(a as i64, b as i64);
        let digits = self.padded_digits.unwrap_or(0);
        let answer = format!("{result:0width$}", width = operation.width(digits));
        let symbol = operation.symbol().to_string();
        let fields = [("a", json!(a)), ("b", json!(b)), ("operation", json!(symbol))];
        Example {
            prompt: PromptText::Text(format!("{a:0digits$}{symbol}{b:0digits$}=")),
            solution: Some(answer.clone()),
            answer,
            fields: fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
            control: Control::Everywhere,
        }
    }
}

impl Task for Arithmetic {
    fn name(&self) -> &'static str {
        "arithmetic"
    }

    fn alphabet(&self) -> Option<&str> {
        Some(alphabet())
    }

    fn len(&self, split: Split) -> Option<u64> {
        self.problems.len(split)
    }

    fn example(&self, split: Split, index: u64) -> Result<Example, TaskError> {
        let problem = self.problems.at(self.name(), split, index)?;
        let b = problem % self.operands;
        let a = problem / self.operands % self.operands;
        let operation = self.operations[(problem / self.operands / self.operands) as usize];
        Ok(self.make_example(a, operation, b))
    }

    fn longest(&self) -> Option<Example> {
        let most = self.operands - 1;
        let make = |&operation| [0, most].map(|a| self.make_example(a, operation, most));
        let examples = self.operations.iter().flat_map(make);
        let longest = examples.clone().max_by_key(|example| example.answer.len())?;
        // the longest prompt with the longest answer, which may be those of two problems
        Some(Example { prompt: examples.last()?.prompt, ..longest })
    }

    fn reward(&self, example: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        if self.partial {
            return Ok(Reward::single("partial", correct_fraction(&example.answer, completion)));
        }
        self.validation_reward(example, completion)
    }

    fn validation_reward(&self, example: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        Ok(Reward::exact(&example.answer, completion))
    }
}

/// Fraction of correct characters, place by place from the left. Ending in the right place counts as
/// one more character, so that only a finished right answer is worth 1.
fn correct_fraction(answer: &str, completion: &Completion<'_>) -> f64 {
    let text = completion.text.trim();
    let (expected, length) = (answer.chars().count(), text.chars().count());
    let right = answer.chars().zip(text.chars()).filter(|(a, b)| a == b).count();
    let ended = usize::from(completion.finished && length == expected);
    (right + ended) as f64 / (expected.max(length) + 1) as f64
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn config(json: &str) -> ArithmeticConfig {
        serde_json::from_str(json).expect("configuration")
    }

    fn task(json: &str) -> Arithmetic {
        Arithmetic::new(&config(json)).expect("builds")
    }

    fn refused(json: &str) -> String {
        Arithmetic::new(&config(json)).expect_err("refused").to_string()
    }

    fn prompt(task: &Arithmetic, split: Split, index: u64) -> String {
        match task.example(split, index).expect("example").prompt {
            PromptText::Text(text) => text,
            PromptText::Chat(_) => panic!("arithmetic prompts are plain text"),
        }
    }

    fn answered(text: &str, finished: bool) -> Completion<'_> {
        Completion { text, tokens: &[], finished, max_tokens: 8, in_thought: false }
    }

    #[test]
    fn answers_solve_their_prompts_and_stay_inside_the_alphabet() {
        let task = task(r#"{"difficulty": 6, "operations": ["+", "-", "*"]}"#);
        let mut seen = HashSet::new();
        for index in 0..300 {
            let example = task.example(Split::Train, index).expect("example");
            let text = prompt(&task, Split::Train, index);
            let symbol = example.fields["operation"].as_str().expect("operation").to_owned();
            let (a, b) = text.trim_end_matches('=').split_once(&symbol).expect("a sum");
            let (a, b): (i64, i64) = (a.parse().expect("a"), b.parse().expect("b"));
            let expected = match symbol.as_str() {
                "+" => a + b,
                "-" => a - b,
                _ => a * b,
            };
            assert_eq!(example.answer, expected.to_string(), "{text}");
            assert_eq!(example.solution.as_deref(), Some(example.answer.as_str()));
            assert!(text.chars().chain(example.answer.chars()).all(|c| alphabet().contains(c)));
            seen.insert(symbol);
        }
        assert_eq!(seen.len(), 3, "every operation occurs");
    }

    #[test]
    fn one_digit_sums_train_on_every_problem_that_is_not_held_out() {
        let task = task("{}");
        assert_eq!((task.len(Split::Train), task.len(Split::Validation)), (None, Some(20)));
        let held_out: HashSet<String> = (0..20).map(|i| prompt(&task, Split::Validation, i)).collect();
        let epoch: HashSet<String> = (0..80).map(|i| prompt(&task, Split::Train, i)).collect();
        assert_eq!((held_out.len(), epoch.len()), (20, 80));
        assert!(held_out.is_disjoint(&epoch));
    }

    #[test]
    fn the_seed_changes_the_order_of_training_but_not_what_is_held_out() {
        let (a, b) = (task(r#"{"difficulty": 2}"#), task(r#"{"difficulty": 2, "seed": 1}"#));
        let prompts = |task: &Arithmetic, split| -> Vec<String> { (0..200).map(|i| prompt(task, split, i)).collect() };
        assert_eq!(prompts(&a, Split::Validation), prompts(&b, Split::Validation));
        assert_ne!(prompts(&a, Split::Train), prompts(&b, Split::Train));
        assert_eq!(prompts(&a, Split::Train), prompts(&a.clone(), Split::Train));
    }

    #[test]
    fn padded_numbers_have_a_fixed_width_and_the_same_values() {
        for operations in ["+", "-", "*"] {
            let task = Arithmetic::new(&ArithmeticConfig {
                difficulty: 2,
                zero_pad: true,
                operations: serde_json::from_value(json!(operations)).expect("operations"),
                ..ArithmeticConfig::default()
            })
            .expect("builds");
            let width = if operations == "*" { 4 } else { 3 };
            for index in 0..50 {
                let example = task.example(Split::Train, index).expect("an example");
                let PromptText::Text(prompt) = &example.prompt else { panic!("a text") };
                assert_eq!((prompt.len(), example.answer.len()), (6, width), "{prompt}{}", example.answer);
                let (a, b) = (prompt[..2].parse::<i64>(), prompt[3..5].parse::<i64>());
                let (a, b) = (a.expect("a number"), b.expect("a number"));
                let result = match operations {
                    "+" => a + b,
                    "-" => a - b,
                    _ => a * b,
                };
                assert_eq!(example.answer.parse::<i64>().expect("a number"), result);
            }
        }
    }

    #[test]
    fn only_a_finished_exact_answer_is_right() {
        let task = task("{}");
        let example = Example::text("37+5=", "42");
        let pays = |text, finished| task.reward(&example, &answered(text, finished)).expect("judged").total > 0.5;
        assert!(pays("42", true) && pays(" 42\n", true));
        assert!(!pays("42", false) && !pays("42.", true) && !pays("042", true) && !pays("", true));
    }

    #[test]
    fn the_partial_reward_grows_with_right_characters_and_shapes_training_alone() {
        let task = task(r#"{"partial": true}"#);
        let mut example = task.example(Split::Train, 0).expect("example");
        example.answer = "123".into();
        let share = |text, finished| task.reward(&example, &answered(text, finished)).expect("judged").total;
        assert!((share("123", true) - 1.0).abs() < 1e-12);
        assert!((share("123", false) - 0.75).abs() < 1e-12);
        assert!((share("124", true) - 0.75).abs() < 1e-12);
        assert!((share("12", true) - 0.5).abs() < 1e-12);
        assert!(share("", true).abs() < 1e-12);
        assert!(share("1231111111", true) < 0.3, "rambling on does not pay");
        let validation = task.validation_reward(&example, &answered("124", true)).expect("judged");
        assert_eq!(validation.parts, [("correct".to_owned(), 0.0)]);
        assert_eq!(validation.correct, Some(false));
    }

    #[test]
    fn impossible_settings_are_refused_with_what_to_do() {
        assert_eq!(
            refused(r#"{"validation_size": 100}"#),
            "`task.validation_size`: there are 100 problems, so holding out 100 leaves none to \
             train on; expected at most 99: lower it or raise `task.difficulty`"
        );
        assert_eq!(refused(r#"{"difficulty": 7}"#), "`task.difficulty`: must be at most 6, found 7");
        let operations = |json: &str| serde_json::from_str::<ArithmeticConfig>(json).expect_err("refused").to_string();
        assert!(operations(r#"{"operations": "+/"}"#).contains("of `+-*`, found `/` in \"+/\""));
        assert!(operations(r#"{"operations": ""}"#).contains("at least one of `+-*`"));
        assert!(operations(r#"{"operations": "++"}"#).contains("`+` is repeated"));
    }

    #[test]
    fn validation_ends_where_it_says() {
        let error = task("{}").example(Split::Validation, 20).expect_err("refused").to_string();
        assert_eq!(error, "task `arithmetic` has 20 validation examples; there is no example 20 (from 0)");
    }

    proptest! {
        #[test]
        fn no_training_problem_is_ever_held_out(
            difficulty in 1u32..=6,
            seed: u64,
            size in 0u64..99,
            indices in proptest::collection::vec(any::<u64>(), 1..50),
        ) {
            let config = ArithmeticConfig {
                difficulty, seed, validation_size: Some(size), ..ArithmeticConfig::default()
            };
            let task = Arithmetic::new(&config).expect("builds");
            let held_out: HashSet<u64> = (0..size)
                .map(|i| task.problems.at("arithmetic", Split::Validation, i).expect("held out"))
                .collect();
            prop_assert_eq!(held_out.len() as u64, size);
            for index in indices.into_iter().chain(0..200) {
                let problem = task.problems.at("arithmetic", Split::Train, index).expect("endless");
                prop_assert!(!held_out.contains(&problem), "{} is held out", problem);
            }
        }
    }
}
