//! `firebrick new`.

use super::UserError;
use crate::arguments::NewArgs;
use crate::checked;
use crate::new_config::{Answers, Data, EXAMPLES, Memory, Model, Reward, write};
use crate::output;
use firebrick::backends::DeviceSpec;
use std::io::{BufRead, IsTerminal};

/// A question, the option that answers it, and its default.
struct Question<'a> {
    option: &'static str,
    text: &'a str,
    default: Option<&'a str>,
}

pub fn run(args: &NewArgs) -> anyhow::Result<()> {
    let file = &args.output;
    if file.exists() {
        let file = file.display();
        return Err(UserError(format!("{file} exists; name another file with --output")).into());
    }
    let stdin = std::io::stdin();
    let mut lines = stdin.lock();
    let mut asker = Asker::default();
    if stdin.is_terminal() && std::io::stderr().is_terminal() {
        asker.input = Some(&mut lines);
    }
    let example = EXAMPLES.iter().find(|(name, _)| args.example.as_deref() == Some(name));
    let text = match example {
        Some((_, text)) => (*text).to_owned(),
        None => {
            let answers = ask(args, &mut asker)?;
            answers.check().map_err(UserError)?;
            write(&answers, file)
        }
    };
    let cannot = |e| UserError(format!("cannot write {}: {e}", file.display()));
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).map_err(cannot)?;
    }
    std::fs::write(file, text).map_err(cannot)?;
    let checked = checked::check(file, &[], false)?;
    if let Some(first) = checked.problems.first() {
        anyhow::bail!("{} was written, but it cannot run with these answers: {}", file.display(), first.message);
    }
    let file = file.display();
    if !asker.taken.is_empty() {
        output::message(&format!("taken without asking: {}", asker.taken.join(", ")));
    }
    output::print(&format!(
        "written to {file}\n  firebrick plan {file}     what it will need\n  firebrick train {file}    run it\n"
    ))
}

/// Source of answers without options.
#[derive(Default)]
struct Asker<'a> {
    /// The terminal's input; without a terminal, the defaults apply.
    input: Option<&'a mut dyn BufRead>,
    /// The used defaults, as options.
    taken: Vec<String>,
}

/// The given answers; asks for the others one by one.
fn ask(args: &NewArgs, asker: &mut Asker<'_>) -> anyhow::Result<Answers> {
    let model = Question {
        option: "--model",
        text: "Which model? A checkpoint folder, a name on the Hub, or `tiny` for a small one from random weights",
        default: Some("tiny"),
    };
    let model = model.answer(args.model.as_deref(), asker, Model::parse)?;
    let data = Question {
        option: "--data",
        text: "Which data? Rows (a JSON or Parquet file, a folder, a dataset of the Hub), or `arithmetic` or `countdown`, which are generated",
        default: (model == Model::Tiny).then_some("arithmetic"),
    };
    let data = data.answer(args.data.as_deref(), asker, Data::parse)?;
    let text = format!("Which reward? One of {}", data.rewards());
    let reward = Question { option: "--reward", text: &text, default: Some(data.usual_reward()) };
    let reward = reward.answer(args.reward.as_deref(), asker, |text| Reward::parse(text, &data))?;
    let memory = Question {
        option: "--memory",
        text: "How much device memory? A size as 8GiB, `auto` for what there is, or a preset: constrained, balanced, fast, huge",
        default: Some("auto"),
    };
    let memory = memory.answer(args.memory.as_deref(), asker, Memory::parse)?;
    let device = Question {
        option: "--device",
        text: "Which device? cpu, cuda[:n], wgpu[:n], vulkan[:n], metal[:n], or auto",
        default: Some("auto"),
    };
    let parse = |text: &str| text.parse::<DeviceSpec>().map_err(|e| e.to_string());
    let device = device.answer(args.device.as_deref(), asker, parse)?;
    Ok(Answers { model, data, reward, memory, device })
}

impl Question<'_> {
    /// A given answer, or else the first valid one.
    fn answer<T>(
        &self,
        given: Option<&str>,
        asker: &mut Asker<'_>,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> anyhow::Result<T> {
        if let Some(text) = given {
            return Ok(read(text).map_err(UserError)?);
        }
        let option = self.option;
        let Some(input) = &mut asker.input else {
            let default = self.default.ok_or_else(|| {
                UserError(format!(
                    "without a terminal no question can be asked, and {option} has no default: give it (see \
                     `firebrick new --help`)"
                ))
            })?;
            asker.taken.push(format!("{option} {default}"));
            return Ok(read(default).map_err(UserError)?);
        };
        loop {
            let default = self.default.map(|default| format!(" [{default}]")).unwrap_or_default();
            output::message(&format!("{}{default}", self.text));
            let mut line = String::new();
            if input.read_line(&mut line)? == 0 {
                return Err(UserError(format!("no answer was given; {option} gives one")).into());
            }
            let text = match (line.trim(), self.default) {
                ("", Some(default)) => default,
                ("", None) => continue,
                (text, _) => text,
            };
            match read(text) {
                Ok(answer) => return Ok(answer),
                Err(wrong) => output::message(&wrong),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn none(output: &str) -> NewArgs {
        NewArgs {
            model: None,
            data: None,
            reward: None,
            memory: None,
            device: None,
            example: None,
            output: output.into(),
        }
    }

    #[test]
    fn questions_are_asked_again_until_the_answer_can_be_read_and_empty_lines_take_the_default() {
        let typed = "no/such/model\n\narithmetics\n\npartial\nplenty\n1GiB\ncpu\n";
        let mut typed = typed.as_bytes();
        let mut asker = Asker { input: Some(&mut typed), ..Asker::default() };
        let answers = ask(&none("run.yaml"), &mut asker).unwrap();
        assert_eq!(answers.model, Model::Tiny);
        assert_eq!(answers.data, Data::Arithmetic);
        assert_eq!(answers.reward, Reward::Generated { partial: true });
        assert_eq!(answers.memory, Memory::parse("1GiB").unwrap());
        assert_eq!(answers.device, DeviceSpec::CPU);
    }

    #[test]
    fn what_is_given_is_not_asked_for_and_an_input_that_ends_is_an_error() {
        let mut args = none("run.yaml");
        args.model = Some("tiny".into());
        args.data = Some("arithmetic".into());
        let mut typed = "correct\n".as_bytes();
        let mut asker = Asker { input: Some(&mut typed), ..Asker::default() };
        let error = ask(&args, &mut asker).unwrap_err();
        assert!(error.to_string().contains("--memory gives one"), "{error}");
    }

    #[test]
    fn where_nobody_answers_defaults_are_taken_and_told_and_what_has_none_is_named() {
        let mut asker = Asker::default();
        let mut args = none("run.yaml");
        args.device = Some("cpu".into());
        let answers = ask(&args, &mut asker).unwrap();
        assert_eq!((answers.model, answers.data), (Model::Tiny, Data::Arithmetic));
        assert_eq!(answers.device, DeviceSpec::CPU);
        assert_eq!(asker.taken, ["--model tiny", "--data arithmetic", "--reward correct", "--memory auto"]);
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/qwen2-tied");
        args.model = Some(model.to_string_lossy().into_owned());
        let error = ask(&args, &mut Asker::default()).unwrap_err().to_string();
        assert!(error.contains("--data has no default"), "{error}");
    }
}
