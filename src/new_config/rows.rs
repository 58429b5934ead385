//! Properties of a dataset by its first row.

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
    /// Their path, valid in any folder.
    pub place: String,
    /// True if the same source has validation rows.
    pub holds_out: bool,
    /// The field with the question.
    pub question: String,
    /// True if that field holds a conversation.
    pub is_chat: bool,
    /// The field with the ground truth.
    pub answer: Option<String>,
    /// Format of ground truths.
    pub form: Form,
}

/// Format of a ground truth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// As GSM8K's, after `####`.
    Marked,
    /// In mathematics: it has a command of LaTeX.
    Mathematics,
    /// A number.
    Number,
    /// Anything else.
    Text,
}

impl Rows {
    /// Reads the first row of a source, and downloads it from the Hub if necessary.
    pub fn inspect(text: &str) -> Result<Self, String> {
        let here = Path::new(".");
        let files = RowFiles::from(text);
        let row = files.first_row(here).map_err(|e| {
            format!(
                "data: {e}; give rows (a JSON Lines, JSON, CSV, Parquet or Arrow file, a pattern, a folder, or a dataset \
                 of the Hub), `arithmetic` or `countdown`"
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

    /// Rejects a rule that compares with a missing ground truth.
    pub fn check_ground_truth(&self, rule: &str) -> Result<(), String> {
        if self.answer.is_some() {
            return Ok(());
        }
        Err(format!(
            "reward: `{rule}` compares with a ground truth, and the first row has none of the fields {}; rename the \
             field with the answer",
            GROUND_TRUTHS.join(", ")
        ))
    }
}

/// The field with the ground truth, and its format.
fn ground_truth(row: &Map<String, Value>) -> (Option<String>, Form) {
    let known =
        GROUND_TRUTHS.iter().find_map(|field| Some((*field, row.get(*field).filter(|value| !value.is_null())?)));
    let in_verl = || Some(("reward_model.ground_truth", row.get("reward_model")?.get("ground_truth")?));
    let Some((field, truth)) = known.or_else(in_verl) else {
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

/// The absolute path of a file; the text itself if there is none.
fn absolute(text: &str) -> String {
    let absolute = std::path::absolute(text).unwrap_or_else(|_| text.into());
    absolute.to_string_lossy().into_owned()
}
