use super::rows::Rows;
use super::*;
use crate::checked::check;
use firebrick::backends::DeviceSpec;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name)
}

/// Answers for every kind of model and data, with every reward that goes with them.
fn models_data_rewards() -> Vec<(Model, Data, Reward)> {
    let folder = |name: &str| Model::parse(fixture(name).to_str().unwrap()).unwrap();
    let rows = Data::parse(fixture("gsm8k/train.jsonl").to_str().unwrap()).unwrap();
    let mut answers = Vec::new();
    for model in [Model::parse("tiny").unwrap(), folder("models/qwen2-tied")] {
        for data in ["arithmetic", "countdown"] {
            let data = Data::parse(data).unwrap();
            for reward in ["correct", "partial"] {
                let reward = Reward::parse(reward, &data).unwrap();
                answers.push((model.clone(), data.clone(), reward));
            }
        }
    }
    let judge = format!("model:{}", fixture("reward_models/qwen2-chat").display());
    let function = format!("python:{}:digits", example("rewards.py").display());
    let mut plain = folder("models/llama-gqa");
    if let Model::Folder { chats, .. } = &mut plain {
        *chats = false;
    }
    for model in [folder("models/qwen2-tied"), plain] {
        for reward in ["exact", "contains", "number", "gsm8k", "math", &function, "regex:#### (-?[0-9]+)\"\\s", &judge]
        {
            let reward = Reward::parse(reward, &rows).unwrap();
            answers.push((model.clone(), rows.clone(), reward));
        }
    }
    answers
}

#[test]
fn what_is_written_has_no_mistakes_whatever_the_answers_are() {
    let dir = tempfile::tempdir().unwrap();
    let memories = ["8GiB", "auto", "constrained", "balanced", "fast", "huge"];
    let mut cases = 0;
    for (model, data, reward) in models_data_rewards() {
        for memory in memories {
            for device in ["cpu", "auto", "cuda:0", "wgpu"] {
                // what a GPU that is not here has is not known
                if memory == "auto" && device != "cpu" {
                    continue;
                }
                let answers = Answers {
                    model: model.clone(),
                    data: data.clone(),
                    reward: reward.clone(),
                    memory: Memory::parse(memory).unwrap(),
                    device: device.parse::<DeviceSpec>().unwrap(),
                };
                answers.check().unwrap();
                let file = dir.path().join("run.yaml");
                let text = write(&answers, &file);
                std::fs::write(&file, &text).unwrap();
                let problems = check(&file, &[], false).unwrap().problems;
                assert!(problems.is_empty(), "{answers:?}: {problems:#?}\n{text}");
                assert!(text.lines().filter(|line| line.contains('#')).count() >= 8, "{text}");
                cases += 1;
            }
        }
    }
    assert_eq!(cases, 24 * (5 * 4 + 1));
}

#[test]
fn answers_that_cannot_be_are_refused_by_name() {
    let rows = |text: &str| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, text).unwrap();
        Data::parse(path.to_str().unwrap())
    };
    let error = |wrong: Result<(), String>| wrong.unwrap_err();
    assert!(error(Model::parse("no/such/model").map(drop)).contains("checkpoint folder, or `tiny`"));
    assert!(error(Data::parse("no/such.jsonl").map(drop)).contains("no/such.jsonl"));
    assert!(error(rows("").map(drop)).contains("rows.jsonl"));
    let unknown = error(rows("{\"frage\": \"x\", \"antwort\": 1}").map(drop));
    assert!(unknown.contains("frage, antwort"), "{unknown}");
    let plain = rows("{\"question\": \"x\"}").unwrap();
    assert!(error(Reward::parse("exact", &plain).map(drop)).contains("ground truth"));
    assert!(error(Reward::parse("correct", &plain).map(drop)).contains("exact, contains"));
    assert!(error(Reward::parse("exact", &Data::Countdown).map(drop)).contains("`correct`"));
    for wrong in ["python:rewards.py", "python::f", "python:no/such.py:f"] {
        let error = error(Reward::parse(wrong, &plain).map(drop));
        assert!(error.contains("python:FILE:FUNCTION") || error.contains("no file no/such.py"), "{error}");
    }
    let memory = error(Memory::parse("plenty").map(drop));
    assert!(memory.contains("8GiB") && memory.contains("constrained"), "{memory}");
    let tiny = Answers {
        model: Model::Tiny,
        data: plain,
        reward: Reward::Regex("x".into()),
        memory: Memory::parse("auto").unwrap(),
        device: DeviceSpec::CPU,
    };
    assert!(error(tiny.check()).contains("--data arithmetic"));
}

/// The rows of a file with one row.
fn read(row: &str) -> Rows {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.jsonl");
    std::fs::write(&path, format!("\n{row}\n")).unwrap();
    Rows::inspect(path.to_str().unwrap()).unwrap()
}

#[test]
fn rows_are_read_for_the_fields_that_they_have_and_the_reward_that_fits_them() {
    let summary = |row: &str| {
        let rows = read(row);
        let reward = rows.usual_reward();
        (rows.question, rows.is_chat, rows.answer.unwrap_or_default(), reward)
    };
    let expected =
        |question: &str, is_chat, answer: &str, reward| (question.to_owned(), is_chat, answer.to_owned(), reward);
    let verl = r#"{"prompt": [{"role": "user", "content": "x"}], "reward_model": {"ground_truth": "72"}}"#;
    assert_eq!(summary(verl), expected("prompt", true, "reward_model.ground_truth", "number"));
    let gsm8k = r#"{"question": "x", "answer": "so #### 72"}"#;
    assert_eq!(summary(gsm8k), expected("question", false, "answer", "gsm8k"));
    let math = r#"{"problem": "x", "solution": "It is $\\boxed{\\frac12}$."}"#;
    assert_eq!(summary(math), expected("problem", false, "solution", "math"));
    let text = r#"{"question": "x", "target": "yes"}"#;
    assert_eq!(summary(text), expected("question", false, "target", "exact"));
    let number = r#"{"question": "x", "target": "1,234.5"}"#;
    assert_eq!(summary(number), expected("question", false, "target", "number"));
}

#[test]
fn folders_have_their_own_validation_where_a_file_says_so_and_paths_are_absolute() {
    let dir = tempfile::tempdir().unwrap();
    let row = r#"{"question": "x", "answer": "y"}"#;
    let write = |name: &str| std::fs::write(dir.path().join(name), row).unwrap();
    write("train.jsonl");
    let folder = dir.path().to_str().unwrap();
    assert!(!Rows::inspect(&format!("{folder}/train.jsonl")).unwrap().holds_out);
    write("test.jsonl");
    let rows = Rows::inspect(folder).unwrap();
    assert!(rows.holds_out);
    assert_eq!(rows.place, folder);
    let fixture = fixture("gsm8k");
    let relative = fixture.strip_prefix(std::env::current_dir().unwrap()).unwrap();
    let rows = Rows::inspect(relative.to_str().unwrap()).unwrap();
    assert_eq!((Path::new(&rows.place), rows.holds_out), (fixture.as_path(), true));
}
