//! `firebrick new`.

use super::{UserError, config};
use crate::arguments::NewArgs;
use crate::new_config::{Answers, Data, Memory, Model, Reward, write};
use crate::output;
use firebrick::backends::DeviceSpec;
use std::io::{BufRead, IsTerminal};

/// A question, the option that answers it, and what an empty line means.
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
    let answers = if stdin.is_terminal() && std::io::stderr().is_terminal() {
        asked(args, &mut stdin.lock())?
    } else {
        given(args)?
    };
    answers.check().map_err(UserError)?;
    let text = write(&answers, file);
    let cannot = |e| UserError(format!("cannot write {}: {e}", file.display()));
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).map_err(cannot)?;
    }
    std::fs::write(file, text).map_err(cannot)?;
    let found = config::problems(file, &[])?;
    if let Some(first) = found.first() {
        anyhow::bail!(
            "{} was written, but it cannot run with these answers: {}",
            file.display(),
            first.message
        );
    }
    let file = file.display();
    output::print(&format!(
        "written to {file}\n  firebrick plan {file}     what it will need\n  firebrick train {file}    run it\n"
    ))
}

/// The answers that were given as options; without a terminal, none can be asked for.
fn given(args: &NewArgs) -> anyhow::Result<Answers> {
    let options = [
        ("--model", &args.model),
        ("--data", &args.data),
        ("--reward", &args.reward),
        ("--memory", &args.memory),
        ("--device", &args.device),
    ];
    let missing: Vec<&str> = options
        .iter()
        .filter(|(_, answer)| answer.is_none())
        .map(|(option, _)| *option)
        .collect();
    if !missing.is_empty() {
        let missing = missing.join(", ");
        return Err(UserError(format!(
            "without a terminal nothing can be asked for; missing: {missing} (see `firebrick new --help`)"
        ))
        .into());
    }
    asked(args, &mut std::io::empty())
}

/// The answers, asked for one after the other where they were not given.
fn asked(args: &NewArgs, input: &mut dyn BufRead) -> anyhow::Result<Answers> {
    let model = answer(
        args.model.as_deref(),
        input,
        &Question {
            option: "--model",
            text: "Which model? A checkpoint folder, a name on the Hub, or `tiny` for a small one from random weights",
            default: Some("tiny"),
        },
        Model::parse,
    )?;
    let data = answer(
        args.data.as_deref(),
        input,
        &Question {
            option: "--data",
            text: "Which data? Rows (a JSON or Parquet file, a folder, a dataset of the Hub), or `arithmetic` or `countdown`, which are generated",
            default: (model == Model::Tiny).then_some("arithmetic"),
        },
        Data::parse,
    )?;
    let text = format!("Which reward? One of {}", data.rewards());
    let reward = answer(
        args.reward.as_deref(),
        input,
        &Question {
            option: "--reward",
            text: &text,
            default: Some(data.usual_reward()),
        },
        |text| Reward::parse(text, &data),
    )?;
    let memory = answer(
        args.memory.as_deref(),
        input,
        &Question {
            option: "--memory",
            text: "How much device memory? A size as 8GiB, `auto` for what there is, or a preset: constrained, balanced, fast, huge",
            default: Some("auto"),
        },
        Memory::parse,
    )?;
    let device = answer(
        args.device.as_deref(),
        input,
        &Question {
            option: "--device",
            text: "Which device? cpu, cuda[:n], wgpu[:n], vulkan[:n], metal[:n], or auto",
            default: Some("auto"),
        },
        |text| text.parse::<DeviceSpec>().map_err(|e| e.to_string()),
    )?;
    Ok(Answers {
        model,
        data,
        reward,
        memory,
        device,
    })
}

/// An answer that was given, or else one that is asked for until it can be read.
fn answer<T>(
    given: Option<&str>,
    input: &mut dyn BufRead,
    question: &Question<'_>,
    read: impl Fn(&str) -> Result<T, String>,
) -> anyhow::Result<T> {
    if let Some(text) = given {
        return Ok(read(text).map_err(UserError)?);
    }
    loop {
        let default = question.default.map(|own| format!(" [{own}]"));
        let default = default.unwrap_or_default();
        output::message(&format!("{}{default}", question.text));
        let mut line = String::new();
        if input.read_line(&mut line)? == 0 {
            let option = question.option;
            return Err(UserError(format!("no answer was given; {option} gives one")).into());
        }
        let text = match (line.trim(), question.default) {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn none(output: &str) -> NewArgs {
        NewArgs {
            model: None,
            data: None,
            reward: None,
            memory: None,
            device: None,
            output: output.into(),
        }
    }

    #[test]
    fn questions_are_asked_again_until_the_answer_can_be_read_and_empty_lines_take_the_default() {
        let typed = "no/such/model\n\narithmetics\n\npartial\nplenty\n1GiB\ncpu\n";
        let answers = asked(&none("run.yaml"), &mut typed.as_bytes()).unwrap();
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
        let error = asked(&args, &mut "correct\n".as_bytes()).unwrap_err();
        assert!(error.to_string().contains("--memory gives one"), "{error}");
        let error = given(&args).unwrap_err().to_string();
        assert!(
            error.contains("missing: --reward, --memory, --device"),
            "{error}"
        );
    }
}
