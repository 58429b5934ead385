//! The examples of a task: prompts, and their answers.

use firebrick_models::tokenizer::{ChatOptions, Control, Message, SpecialTokens};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::fields::Fields;

/// The field of a row with the tools for its chat template: a list of JSON schemas, as in transformers and TRL.
pub const TOOLS: &str = "tools";

/// The field of a row with more variables for the chat template of its conversation.
pub const TEMPLATE_KWARGS: &str = "chat_template_kwargs";

/// Part of a task's examples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Examples to learn from.
    Train,
    /// Examples held out: never among [`Split::Train`].
    Validation,
}

impl Split {
    /// The split's name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Validation => "validation",
        }
    }
}

/// A prompt and its answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Example {
    /// The prompt.
    pub prompt: PromptText,
    /// The ground truth that rewards compare with; empty if the task has none.
    pub answer: String,
    /// A demonstration of a good completion, for supervised training.
    pub solution: Option<String>,
    /// The row of the example, for custom rewards and the sample log.
    pub fields: Fields,
    /// Parts of the prompt in which the spelling of a special token is that token: never in a row's text.
    pub control: Control,
}

impl Example {
    /// A text prompt and the ground truth that its completions are compared with; no demonstration, no row.
    pub fn text(prompt: impl Into<String>, answer: impl Into<String>) -> Self {
        Self {
            prompt: PromptText::Text(prompt.into()),
            answer: answer.into(),
            solution: None,
            fields: Fields::default(),
            control: Control::NOWHERE,
        }
    }

    /// Treatment of spelled special tokens in its conversation and its solution.
    pub fn special_tokens(&self) -> SpecialTokens {
        match self.control {
            Control::Everywhere => SpecialTokens::Allow,
            Control::In(_) => SpecialTokens::Text,
        }
    }

    /// Options of the chat template for its conversation, with a generation prompt.
    pub fn chat_options(&self) -> ChatOptions<'_> {
        ChatOptions {
            tools: self.fields.column(TOOLS),
            kwargs: self.fields.column(TEMPLATE_KWARGS).and_then(Value::as_object),
            special_tokens: self.special_tokens(),
            ..ChatOptions::prompt()
        }
    }
}

/// A prompt before tokenization.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub enum PromptText {
    /// Text, encoded as it is.
    Text(String),
    /// A conversation, rendered by the model's chat template with a generation prompt.
    Chat(Vec<Message>),
}
