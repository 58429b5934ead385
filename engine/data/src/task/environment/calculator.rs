//! Generated products of long numbers, with a calculator as a tool.

use super::{Environment, EnvironmentError, Environments, Observation, Turn, tool_answer};
use crate::task::operation::{Operation, Operations};
use crate::task::{Completion, Example, Problems, PromptText, Reward, Split, Task, TaskError};
use firebrick_models::tokenizer::{Control, Message};
use math_answer::Arithmetic;
use num_traits::ToPrimitive;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Key of the shuffle that selects held-out problems; not the user's seed.
const HOLD_OUT: u64 = 0xCA1C_0417;

/// All characters of a conversation, which include those of tool errors.
const ALPHABET: &str =
    concat!(" !\"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxyz{|}~", "\n");

/// The tool.
const NAME: &str = "calculate";

/// Text around the expression of a call.
const OPEN: &str = r#"<tool_call>{"name": "calculate", "arguments": {"expression": ""#;
const CLOSE: &str = r#""}}</tool_call>"#;

/// The chat template of a model that starts from random weights.
const TEMPLATE: &str = "{%- for message in messages -%}
{{ '<' + message.role + '>' + message.content }}{%- if message.role == 'assistant' -%}{{ eos_token }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<assistant>' }}{%- endif -%}";

/// Settings of generated problems for a calculator.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CalculatorConfig {
    /// Digits of both operands. The first is at least 4, so that all results of `*` have the same length.
    #[schemars(range(min = 1, max = 9))]
    pub digits: u32,
    /// Any of `+`, `-`, `*`, as in `arithmetic`.
    pub operations: Operations,
    /// Offer the tool `calculate(expression)`; otherwise a rollout is one turn.
    pub tool: bool,
    /// Seed of the order of training problems.
    pub seed: u64,
    /// Held-out problems.
    pub validation_size: u64,
}

impl Default for CalculatorConfig {
    fn default() -> Self {
        Self { digits: 4, operations: Operations::only_multiply(), tool: true, seed: 0, validation_size: 200 }
    }
}

/// The task of generated problems with a calculator.
#[derive(Debug)]
pub struct Calculator {
    config: CalculatorConfig,
    /// Operands are this and so many more.
    least: u64,
    operands: u64,
    problems: Problems,
    tools: CalculatorTool,
}

impl Calculator {
    /// Checks the settings and lays out the splits.
    ///
    /// # Errors
    /// `TaskError::Config` with the setting that is out of range.
    pub fn new(config: &CalculatorConfig) -> Result<Self, TaskError> {
        TaskError::check("task", config)?;
        let unit = 10u64.pow(config.digits - 1);
        let (least, operands) = (4 * unit, 6 * unit);
        let space = operands * operands * config.operations.all().len() as u64;
        Ok(Self {
            config: config.clone(),
            least,
            operands,
            problems: Problems::new(space, HOLD_OUT, config.validation_size, config.seed, "task.digits")?,
            tools: CalculatorTool::new(),
        })
    }

    fn make_example(&self, a: i64, operation: Operation, b: i64) -> Example {
        let answer = operation.apply(a, b).to_string();
        let expression = format!("{a}{}{b}", operation.symbol());
        let prompt = Message::new("user", expression.clone());
        let Value::Object(mut fields) = json!({"expression": expression}) else { unreachable!("an object") };
        if self.config.tool {
            fields.insert(crate::task::TOOLS.to_owned(), self.tools.tools.clone());
        }
        let solution = Some(answer.clone());
        let fields = fields.into();
        Example { prompt: PromptText::Chat(vec![prompt]), solution, answer, fields, control: Control::Everywhere }
    }
}

impl Task for Calculator {
    fn name(&self) -> &'static str {
        "calculator"
    }

    fn alphabet(&self) -> Option<&str> {
        Some(ALPHABET)
    }

    fn tokens(&self) -> &[&str] {
        &["<system>", "<user>", "<assistant>", "<tool>", OPEN, CLOSE]
    }

    fn chat_template(&self) -> Option<&str> {
        Some(TEMPLATE)
    }

    fn len(&self, split: Split) -> Option<u64> {
        self.problems.len(split)
    }

    fn example(&self, split: Split, index: u64) -> Result<Example, TaskError> {
        let problem = self.problems.at(self.name(), split, index)?;
        let operand = |number: u64| (self.least + number % self.operands) as i64;
        let (a, b) = (operand(problem), operand(problem / self.operands));
        let operation = self.config.operations.all()[(problem / self.operands / self.operands) as usize];
        Ok(self.make_example(a, operation, b))
    }

    fn longest(&self) -> Option<Example> {
        // all operands have as many digits
        let [min, max] = [0, self.operands - 1].map(|offset| (self.least + offset) as i64);
        let operations = self.config.operations.all().iter();
        let examples = operations.flat_map(|&operation| [min, max].map(|a| self.make_example(a, operation, max)));
        examples.max_by_key(|example| example.answer.len())
    }

    fn demonstration(&self, example: &Example) -> Option<Vec<Message>> {
        let expression = example.fields.get("expression")?.as_str()?;
        let mut turns = Vec::new();
        if self.config.tool {
            turns.push(Message::new("assistant", format!("{OPEN}{expression}{CLOSE}")));
            turns.push(tool_answer(NAME, example.answer.clone()));
        }
        turns.push(Message::new("assistant", example.answer.clone()));
        Some(turns)
    }

    fn environments(&self) -> Option<&dyn Environments> {
        self.config.tool.then_some(&self.tools as &dyn Environments)
    }

    fn reward(&self, example: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        Ok(Reward::exact(&example.answer, completion))
    }
}

/// A calculator as a tool.
#[derive(Debug)]
struct CalculatorTool {
    tools: Value,
}

impl CalculatorTool {
    fn new() -> Self {
        Self {
            tools: json!([{
                "type": "function",
                "function": {
                    "name": NAME,
                    "description": r"Computes an expression of numbers with + - * / and brackets.",
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "expression": {"type": "string", "description": "The expression, such as 12*(3+4)."}
                        },
                        "required": ["expression"]
                    }
                }
            }]),
        }
    }
}

impl Environments for CalculatorTool {
    fn tools(&self) -> &Value {
        &self.tools
    }

    fn make(&self, _: usize) -> Box<dyn Environment> {
        Box::new(OneCalculator)
    }
}

/// The calculator of a rollout: it remembers nothing.
struct OneCalculator;

impl Environment for OneCalculator {
    fn reset(&mut self, _: &Example) -> Result<Option<String>, EnvironmentError> {
        Ok(None)
    }

    fn step(&mut self, turn: &Turn) -> Result<Observation, EnvironmentError> {
        Ok(Observation::of_calls(turn, |call| {
            if call.name != NAME {
                return Err(format!("there is no tool {:?}; there is calculate", call.name));
            }
            match call.arguments.get("expression") {
                Some(Value::String(expression)) => calculate(expression),
                _ => Err("calculate needs `expression`, a string".to_owned()),
            }
        }))
    }
}

/// Longest expression, in bytes.
const MAX_BYTES: usize = 1_000;

/// The value of an expression as text: an integer, or else up to 12 decimal places.
fn calculate(text: &str) -> Result<String, String> {
    if text.len() > MAX_BYTES {
        return Err(format!("the expression is longer than {MAX_BYTES} bytes"));
    }
    let value = Arithmetic { depth: 50, decimals: true }.evaluate(text)?.value;
    if value.is_integer() {
        return Ok(value.to_integer().to_string());
    }
    let number = value.to_f64().filter(|number| number.is_finite()).ok_or("the value is too large")?;
    Ok(format!("{number:.12}").trim_end_matches('0').trim_end_matches('.').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::ToolParser;
    use crate::task::environment::TOOL;
    use std::collections::HashSet;

    fn task(json: &str) -> Calculator {
        let config: CalculatorConfig = serde_json::from_str(json).expect("settings");
        Calculator::new(&config).expect("builds")
    }

    fn prompt(example: &Example) -> String {
        match &example.prompt {
            PromptText::Chat(messages) => messages[0].text().into_owned(),
            PromptText::Text(_) => panic!("a conversation"),
        }
    }

    #[test]
    fn a_demonstration_calls_the_tool_and_says_what_it_says() {
        let task = task("{}");
        for index in 0..200 {
            let example = task.example(Split::Train, index).expect("an example");
            let turns = task.demonstration(&example).expect("turns");
            let roles: Vec<&str> = turns.iter().map(Message::role).collect();
            assert_eq!(roles, ["assistant", TOOL, "assistant"]);
            let text = turns[0].text().into_owned();
            let turn = Turn { calls: ToolParser::Hermes.parse(&text, &Value::Null), text };
            let environments = task.environments().expect("a calculator");
            let reply = environments.make(0).step(&turn).expect("an answer");
            assert_eq!((reply.messages, reply.failed_calls), (turns[1..2].to_vec(), 0));
            assert_eq!(turns[2].text(), example.answer);
            let digits = prompt(&example).len();
            assert_eq!(digits, 9, "two numbers of four digits and a sign");
            assert_eq!(example.answer.len(), 8, "every product");
            assert!(ALPHABET.contains(|c| prompt(&example).contains(c)));
        }
    }

    #[test]
    fn without_the_tool_there_is_none() {
        let task = task(r#"{"tool": false}"#);
        let example = task.example(Split::Train, 0).expect("an example");
        assert!(task.environments().is_none() && !example.fields.contains_key("tools"));
        let turns = task.demonstration(&example).expect("turns");
        assert_eq!(turns.len(), 1);
        assert_eq!(turns[0].text(), example.answer);
    }

    #[test]
    fn held_out_problems_are_never_trained_on() {
        let task = task(r#"{"digits": 1, "validation_size": 10, "operations": "+"}"#);
        let of = |split, count| -> HashSet<String> {
            let each = (0..count).map(|i| prompt(&task.example(split, i).expect("an example")));
            each.collect()
        };
        let (held_out, epoch) = (of(Split::Validation, 10), of(Split::Train, 26));
        assert_eq!((held_out.len(), epoch.len()), (10, 26));
        assert!(held_out.is_disjoint(&epoch));
    }

    #[test]
    fn settings_that_make_no_problem_are_refused() {
        for (json, part) in [
            (r#"{"digits": 0}"#, "`task.digits`: must be at least 1, found 0"),
            (r#"{"digits": 1, "validation_size": 36}"#, "leaves none to train on"),
        ] {
            let config: CalculatorConfig = serde_json::from_str(json).expect("settings");
            let error = Calculator::new(&config).expect_err("refused").to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn expressions_are_computed_exactly() {
        for (text, value) in [
            ("4821*9733", "46922793"),
            (" 12 + 3*(4 - 10) ", "-6"),
            ("-2*-3--1", "7"),
            ("1/3*3", "1"),
            ("1/8", "0.125"),
            ("2/3", "0.666666666667"),
            ("0.1+0.2", "0.3"),
            ("99999999999999999999*99999999999999999999", "9999999999999999999800000000000000000001"),
        ] {
            assert_eq!(calculate(text).as_deref(), Ok(value), "{text}");
        }
    }

    #[test]
    fn what_is_no_expression_says_why() {
        for (text, reason) in [
            ("", "expected a number, found its end"),
            ("1+", "expected a number, found its end"),
            ("two", "expected a number, found 't'"),
            ("1 2", "unexpected '2'"),
            ("(1", "not closed"),
            ("1/(2-2)", "division by zero"),
            (&"(".repeat(60), "within one another"),
            (&"1".repeat(2000), "longer than"),
        ] {
            let error = calculate(text).expect_err(text);
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
