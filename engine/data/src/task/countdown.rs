//! Generated countdown problems: reach a target with given numbers.
//!
//! A problem is made from its solution, so each has one. A hash of the problem selects the held-out ones: training never
//! draws one of them, under any seed.

use std::collections::HashSet;

use firebrick_models::random::{Stream, philox};
use firebrick_models::tokenizer::Control;
use serde::{Deserialize, Serialize};
use serde_json::json;
use smart_default::SmartDefault;

use super::reward::{CountdownProblem, Reached, countdown_answer};
use super::{Completion, Example, PromptText, Reward, Split, Task, TaskError};

/// Key of the hash that selects held-out problems; it is not the user's seed.
const HOLD_OUT: u64 = 0xC00D_0417;

/// One of this many problems may be held out.
const HELD_OUT_RATIO: u32 = 8;

/// Draws of a problem before an error.
const MAX_ATTEMPTS: u64 = 4_096;

/// Largest value within a solution.
const MAX_VALUE: i64 = 10_000;

/// Settings of generated countdown problems.
#[derive(Clone, Debug, PartialEq, SmartDefault, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CountdownConfig {
    /// Given integers.
    #[default(4)]
    #[schemars(range(min = 2, max = 6))]
    pub numbers: usize,
    /// Largest given integer.
    #[default(99)]
    #[schemars(range(min = 1, max = MAX_VALUE))]
    pub max_number: i64,
    /// Largest target.
    #[default(99)]
    #[schemars(range(min = 1, max = MAX_VALUE))]
    pub max_target: i64,
    /// Operations of the generated solutions. Answers may use all four.
    #[default("+-*/")]
    pub operations: String,
    /// Form of prompts and answers.
    pub style: CountdownStyle,
    /// Training reward if every integer is used once but the target is missed.
    #[schemars(range(min = 0, max = 1))]
    pub format_score: f64,
    /// Seed of the training problems.
    pub seed: u64,
    /// Held-out problems.
    #[default(200)]
    pub validation_size: usize,
}

/// Form of prompts and answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CountdownStyle {
    /// An instruction; the answer is between `<answer>` and `</answer>`.
    #[default]
    Words,
    /// `3,5,8=16:`; the answer is the expression.
    Short,
}

/// A problem with a solution.
#[derive(Clone, Debug)]
struct Puzzle {
    problem: CountdownProblem,
    solution: String,
}

/// The task of generated countdown problems.
#[derive(Clone, Debug)]
pub struct Countdown {
    config: CountdownConfig,
    operations: Vec<char>,
    validation: Vec<Puzzle>,
}

impl Countdown {
    /// Checks the settings and draws the problems that are held out.
    ///
    /// # Errors
    /// `TaskError::Config` with the setting that is out of range, or if no problem exists.
    pub fn new(config: &CountdownConfig) -> Result<Self, TaskError> {
        TaskError::check("task", config)?;
        let operations: Vec<char> = config.operations.chars().collect();
        let known = operations.iter().all(|c| "+-*/".contains(*c));
        let distinct: HashSet<&char> = operations.iter().collect();
        if operations.is_empty() || !known || distinct.len() != operations.len() {
            let detail = format!("expected one or more of `+-*/`, each once, found {:?}", config.operations);
            return Err(TaskError::config("task.operations", detail));
        }
        let mut task = Self { config: config.clone(), operations, validation: Vec::new() };
        task.validation = task.held_out()?;
        task.puzzle(Split::Train, config.seed, 0)?;
        Ok(task)
    }

    /// The validation problems: all different.
    fn held_out(&self) -> Result<Vec<Puzzle>, TaskError> {
        let (mut seen, mut puzzles) = (HashSet::new(), Vec::new());
        let mut index = 0;
        let wanted = self.config.validation_size;
        while puzzles.len() < wanted {
            if index > 20 * wanted as u64 + MAX_ATTEMPTS {
                let detail = format!(
                    "the settings allow too few problems to hold out {wanted}; lower it, or raise `task.max_number`"
                );
                return Err(TaskError::config("task.validation_size", detail));
            }
            let puzzle = self.puzzle(Split::Validation, HOLD_OUT, index)?;
            if seen.insert((puzzle.problem.sorted(), puzzle.problem.target)) {
                puzzles.push(puzzle);
            }
            index += 1;
        }
        Ok(puzzles)
    }

    /// The problem of an index: the first of its draws that belongs to the split.
    fn puzzle(&self, split: Split, seed: u64, index: u64) -> Result<Puzzle, TaskError> {
        for attempt in 0..MAX_ATTEMPTS {
            let mut draws = Stream::new(seed, index.wrapping_mul(MAX_ATTEMPTS).wrapping_add(attempt));
            if let Some(puzzle) = self.draw(&mut draws).filter(|puzzle| split_of(&puzzle.problem) == split) {
                return Ok(puzzle);
            }
        }
        let detail = "the settings allow no problem, or too few; raise `task.max_target` or `task.max_number`";
        Err(TaskError::config("task", detail))
    }

    /// A problem, if these draws give one.
    fn draw(&self, draws: &mut Stream) -> Option<Puzzle> {
        let config = &self.config;
        let numbers: Vec<i64> =
            (0..config.numbers).map(|_| 1 + i64::from(draws.below(config.max_number as u32))).collect();
        let mut terms: Vec<Term> = numbers.iter().map(|&n| Term::number(n)).collect();
        while terms.len() > 1 {
            let a = terms.swap_remove(draws.below(terms.len() as u32) as usize);
            let b = terms.swap_remove(draws.below(terms.len() as u32) as usize);
            // the first operation with a positive integer result, from a random one on
            let count = self.operations.len();
            let first = draws.below(count as u32) as usize;
            let mut signs = (0..count).map(|i| self.operations[(first + i) % count]);
            let next = signs.find_map(|sign| a.with(sign, &b).or_else(|| b.with(sign, &a)));
            terms.push(next?);
        }
        let term = terms.pop()?;
        let target = term.value;
        (1..=config.max_target)
            .contains(&target)
            .then_some(Puzzle { problem: CountdownProblem { target, numbers }, solution: term.text })
    }

    fn make_example(&self, puzzle: Puzzle) -> Example {
        let Puzzle { problem, solution } = puzzle;
        let solution = match self.config.style {
            CountdownStyle::Words => format!("<answer>{solution}</answer>"),
            CountdownStyle::Short => solution,
        };
        let fields = [("numbers", json!(problem.numbers)), ("target", json!(problem.target))];
        Example {
            prompt: PromptText::Text(self.prompt(&problem)),
            answer: problem.to_string(),
            solution: Some(solution),
            fields: fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
            control: Control::Everywhere,
        }
    }

    fn prompt(&self, problem: &CountdownProblem) -> String {
        let numbers = |between: &str| {
            let numbers: Vec<String> = problem.numbers.iter().map(i64::to_string).collect();
            numbers.join(between)
        };
        let target = problem.target;
        match self.config.style {
            CountdownStyle::Words => {
                let list = numbers(", ");
                let opening = format!(r"Using the numbers [{list}], write an expression that equals {target}.");
                format!(
                    "{opening} You can use the operations + - * / and brackets, and each number has to be used exactly \
                     once. Write the expression between <answer> and </answer>, for example \
                     <answer>(1 + 2) / 3</answer>.\n"
                )
            }
            CountdownStyle::Short => format!("{}={target}:", numbers(",")),
        }
    }
}

/// Reward of a completion; an expression that misses the target gets `near`.
fn score(example: &Example, completion: &Completion<'_>, near: f64) -> Result<Reward, TaskError> {
    let problem = CountdownProblem::parse(&example.answer)
        .map_err(|reason| TaskError::Reward { reward: "countdown".to_owned(), reason })?;
    let expression = countdown_answer(completion.answering()).unwrap_or_default();
    let reached = problem.reached(expression, true);
    let value = match reached {
        Reached::Target => 1.0,
        Reached::Numbers => near,
        Reached::Nothing => 0.0,
    };
    let reward = Reward::single("countdown", value);
    Ok(reward.judged(reached == Reached::Target, expression, &example.answer))
}

/// Split of a problem.
fn split_of(problem: &CountdownProblem) -> Split {
    let mut hash = [problem.target as u32, HOLD_OUT as u32];
    for number in problem.sorted() {
        let mixed = philox([number as u32, 0, 0, 0], hash);
        hash = [mixed[0], mixed[1]];
    }
    if hash[0].is_multiple_of(HELD_OUT_RATIO) { Split::Validation } else { Split::Train }
}

/// A part of a solution: its value, its text, and its sign of the lowest precedence.
struct Term {
    value: i64,
    text: String,
    sign: Option<char>,
}

impl Term {
    fn number(value: i64) -> Self {
        Self { value, text: value.to_string(), sign: None }
    }

    /// Two terms with a sign between them, if the result is a positive integer up to [`MAX_VALUE`].
    fn with(&self, sign: char, other: &Self) -> Option<Self> {
        let value = match sign {
            '+' => self.value + other.value,
            '-' => self.value - other.value,
            '*' => self.value * other.value,
            _ if self.value % other.value == 0 => self.value / other.value,
            _ => return None,
        };
        let bracketed = |term: &Self, needed: bool| {
            if needed { format!("({})", term.text) } else { term.text.clone() }
        };
        let loose = |term: &Self| matches!(term.sign, Some('+' | '-'));
        let left = bracketed(self, matches!(sign, '*' | '/') && loose(self));
        let right = match sign {
            '+' => false,
            '-' | '*' => loose(other) || (sign == '*' && other.sign == Some('/')),
            _ => other.sign.is_some(),
        };
        let right = bracketed(other, right);
        (1..=MAX_VALUE).contains(&value).then(|| Self { value, text: format!("{left}{sign}{right}"), sign: Some(sign) })
    }
}

impl Task for Countdown {
    fn name(&self) -> &'static str {
        "countdown"
    }

    fn alphabet(&self) -> Option<&str> {
        match self.config.style {
            CountdownStyle::Words => None,
            CountdownStyle::Short => Some("0123456789+-*/(),=:"),
        }
    }

    fn len(&self, split: Split) -> Option<u64> {
        match split {
            Split::Train => None,
            Split::Validation => Some(self.validation.len() as u64),
        }
    }

    fn example(&self, split: Split, index: u64) -> Result<Example, TaskError> {
        let puzzle = match split {
            Split::Train => self.puzzle(split, self.config.seed, index)?,
            Split::Validation => {
                let len = self.validation.len() as u64;
                let puzzle = usize::try_from(index).ok().and_then(|at| self.validation.get(at)).cloned();
                puzzle.ok_or_else(|| TaskError::no_such_example(self.name(), split, index, len))?
            }
        };
        Ok(self.make_example(puzzle))
    }

    fn longest(&self) -> Option<Example> {
        let CountdownConfig { numbers, max_number, max_target, .. } = self.config;
        let problem = CountdownProblem { target: max_target, numbers: vec![max_number; numbers] };
        // each operation has a sign and at most two pairs of brackets
        let solution = problem.numbers.iter().map(i64::to_string).collect::<Vec<_>>().join("(()+)");
        Some(self.make_example(Puzzle { problem, solution }))
    }

    fn reward(&self, example: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        score(example, completion, self.config.format_score)
    }

    fn validation_reward(&self, example: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        score(example, completion, 0.0)
    }
}

#[cfg(test)]
mod tests;
