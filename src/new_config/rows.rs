//! What the first row of a dataset says of all of them.

use firebrick::engine::hub::HubName;
use firebrick::engine::task::RowFiles;
use serde_json::{Map, Value};
use std::path::Path;

/// Fields of rows that hold a question, the likeliest first.
const QUESTIONS: [&str; 6] = ["prompt", "question", "problem", "messages", "instruction", "input"];
/// Fields of rows that hold the ground truth, the likeliest first.
const GROUND_TRUTHS: [&str; 6] = ["answer", "ground_truth", "solution", "target", "output", "response"];

/// Rows of files.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows {
    /// Where they are, as a configuration in any folder names it.
    pub place: String,
    /// Whether the same place has rows to validate on.
    pub holds_out: bool,
    /// The field with the question.
    pub question: String,
    /// Whether that field holds a conversation.
    pub is_chat: bool,
    /// The field with the ground truth.
    pub answer: Option<String>,
    /// How ground truths are written.
    pub form: Form,
}

/// How a ground truth is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// As GSM8K's, behind `####`.
    Marked,
    /// In mathematics: it has a command of LaTeX.
    Mathematics,
    /// A number.
    Number,
    /// Anything else.
    Text,
}

impl Rows {
    /// Looks at the first row of a place, fetching it where it is a dataset of the Hub.
    pub fn look(text: &str) -> Result<Self, String> {
        let here = Path::new(".");
        let files = RowFiles::from(text);
        let row = files.first_row(here).map_err(|e| {
            format!(
                "data: {e}; give rows (a JSON Lines, JSON, CSV, Parquet or Arrow file, a pattern, a folder, or a dataset of the Hub), `arithmetic` or \
                 `countdown`"
            )
        })?;
        let has = |field: &&&str| row.get(**field).is_some_and(|value| !value.is_null());
        let Some(question) = QUESTIONS.iter().find(has) else {
            let names: Vec<&str> = row.keys().map(String::as_str).collect();
            return Err(format!(
                "data: the first row of {text} has the fields {}, and none of {}; rename the field with the question",
                names.join(", "),
                QUESTIONS.join(", ")
            ));
        };
        let (answer, form) = ground_truth(&row);
        Ok(Self {
            place: if HubName::is_one(text, here) { text.to_owned() } else { absolute(text) },
            holds_out: files.holds_out(here),
            question: (*question).to_owned(),
            is_chat: row[*question].is_array(),
            answer,
            form,
        })
    }

    /// The rule that compares ground truths of this form.
    pub fn usual_reward(&self) -> &'static str {
        match self.form {
            Form::Marked => "gsm8k",
            Form::Mathematics => "math",
            Form::Number => "number",
            Form::Text => "exact",
        }
    }

    /// Refuses a rule that compares with a ground truth where there is none.
    pub fn check_ground_truth(&self, rule: &str) -> Result<(), String> {
        if self.answer.is_some() {
            return Ok(());
        }
        Err(format!(
            "reward: `{rule}` compares with a ground truth, and the first row has none of the fields {}; rename the field with the \
             answer",
            GROUND_TRUTHS.join(", ")
        ))
    }
}

/// The field with the ground truth, and how that is written.
fn ground_truth(row: &Map<String, Value>) -> (Option<String>, Form) {
    let found =
        GROUND_TRUTHS.iter().find_map(|field| Some((*field, row.get(*field).filter(|value| !value.is_null())?)));
    // verl's rows
    let verls = || {
        let own = row.get("reward_model")?.get("ground_truth")?;
        Some(("reward_model.ground_truth", own))
    };
    let Some((field, truth)) = found.or_else(verls) else {
        return (None, Form::Text);
    };
    let form = match truth {
        Value::Number(_) => Form::Number,
        Value::String(text) if text.contains("####") => Form::Marked,
        Value::String(text) if text.contains('\\') => Form::Mathematics,
        Value::String(text) if is_number(text) => Form::Number,
        _ => Form::Text,
    };
    (Some(field.to_owned()), form)
}

fn is_number(text: &str) -> bool {
    text.trim().replace(',', "").parse::<f64>().is_ok_and(f64::is_finite)
}

/// Where a file is, from any folder.
fn absolute(text: &str) -> String {
    let whole = std::path::absolute(text).unwrap_or_else(|_| text.into());
    whole.to_string_lossy().into_owned()
}
