use super::*;
use crate::commands::config::problems;
use firebrick::backends::DeviceSpec;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

/// Answers for every kind of model and data, with every reward that goes with them.
fn models_data_rewards() -> Vec<(Model, Data, Reward)> {
    let folder = |name: &str| Model::parse(fixture(name).to_str().unwrap()).unwrap();
    let sums = || Data::parse("arithmetic").unwrap();
    let rows = Data::parse(fixture("gsm8k/train.jsonl").to_str().unwrap()).unwrap();
    let mut all = Vec::new();
    for model in [Model::parse("tiny").unwrap(), folder("models/qwen2-tied")] {
        for reward in ["correct", "partial"] {
            let reward = Reward::parse(reward, &sums()).unwrap();
            all.push((model.clone(), sums(), reward));
        }
    }
    let judge = format!("model:{}", fixture("reward_models/qwen2-chat").display());
    let mut plain = folder("models/llama-gqa");
    if let Model::Folder { chats, .. } = &mut plain {
        *chats = false;
    }
    for model in [folder("models/qwen2-tied"), plain] {
        for reward in [
            "exact",
            "contains",
            "number",
            "gsm8k",
            "regex:#### (-?[0-9]+)\"\\s",
            &judge,
        ] {
            let reward = Reward::parse(reward, &rows).unwrap();
            all.push((model.clone(), rows.clone(), reward));
        }
    }
    all
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
                let found = problems(&file, &[]).unwrap();
                assert!(found.is_empty(), "{answers:?}: {found:#?}\n{text}");
                assert!(
                    text.lines().filter(|line| line.contains('#')).count() >= 8,
                    "{text}"
                );
                cases += 1;
            }
        }
    }
    assert_eq!(cases, 16 * (5 * 4 + 1));
}

#[test]
fn answers_that_cannot_be_are_refused_by_name() {
    let rows = |text: &str| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, text).unwrap();
        Data::parse(path.to_str().unwrap())
    };
    let said = |wrong: Result<(), String>| wrong.unwrap_err();
    assert!(said(Model::parse("no/such").map(drop)).contains("checkpoint folder, or `tiny`"));
    assert!(said(Data::parse("no/such.jsonl").map(drop)).contains("no/such.jsonl"));
    assert!(said(rows("").map(drop)).contains("no rows"));
    let unknown = said(rows("{\"frage\": \"x\", \"antwort\": 1}").map(drop));
    assert!(unknown.contains("frage, antwort"), "{unknown}");
    let plain = rows("{\"question\": \"x\"}").unwrap();
    assert!(said(Reward::parse("exact", &plain).map(drop)).contains("ground truth"));
    assert!(said(Reward::parse("correct", &plain).map(drop)).contains("exact, contains"));
    assert!(said(Reward::parse("exact", &Data::Arithmetic).map(drop)).contains("`correct`"));
    let memory = said(Memory::parse("plenty").map(drop));
    assert!(
        memory.contains("8GiB") && memory.contains("constrained"),
        "{memory}"
    );
    let tiny = Answers {
        model: Model::Tiny,
        data: plain,
        reward: Reward::Regex("x".into()),
        memory: Memory::parse("auto").unwrap(),
        device: DeviceSpec::CPU,
    };
    assert!(said(tiny.check()).contains("--data arithmetic"));
}

#[test]
fn rows_are_read_for_the_fields_that_they_have() {
    let read = |row: &str| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, format!("\n{row}\n")).unwrap();
        match Data::parse(path.to_str().unwrap()).unwrap() {
            Data::Rows {
                question,
                is_chat,
                answer,
                is_marked,
                ..
            } => (question, is_chat, answer.unwrap_or_default(), is_marked),
            Data::Arithmetic => panic!("rows"),
        }
    };
    let verl =
        r#"{"prompt": [{"role": "user", "content": "x"}], "reward_model": {"ground_truth": "72"}}"#;
    let expected = (
        "prompt".into(),
        true,
        "reward_model.ground_truth".into(),
        false,
    );
    assert_eq!(read(verl), expected);
    let gsm8k = r#"{"question": "x", "answer": "so #### 72"}"#;
    assert_eq!(
        read(gsm8k),
        ("question".into(), false, "answer".into(), true)
    );
}
