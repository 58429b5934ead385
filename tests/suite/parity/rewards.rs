//! Reward models against transformers: what they read of a prompt with its completion, and their scores of it.

use std::path::Path;
use std::sync::Arc;

use firebrick_backends::Precision;
use firebrick_backends::accounts::Accounts;
use firebrick_engine::data::Prompt;
use firebrick_engine::plan::{MemoryConfig, ParamOffload};
use firebrick_engine::reward::{RewardModel, SharedResources};
use firebrick_engine::task::{Example, PromptText, RewardInput, RewardModelConfig};
use firebrick_engine::world::World;
use firebrick_models::tokenizer::{Message, Tokenizer};
use serde::Deserialize;
use serde_json::Value;

use crate::support::{assert_close, checked, device, fixtures, folders, is_foreign, read, report};

/// Scores: absolute up to one, relative above.
const TOLERANCE: f64 = 1e-4;

#[derive(Deserialize)]
struct Golden {
    format: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    input: RewardInput,
    messages: Option<Vec<Message>>,
    #[serde(default)]
    prompt: String,
    #[serde(default)]
    completion: String,
    #[serde(default)]
    prompt_ids: Vec<u32>,
    #[serde(default)]
    completion_ids: Vec<u32>,
    ids: Vec<u32>,
    score_f64: f64,
}

fn absent() -> bool {
    let absent = is_foreign() && !fixtures().join("reward_models").is_dir();
    if absent {
        report("no reward_models/ in FIREBRICK_FIXTURES: none checked");
    }
    absent
}

fn open(dir: &Path, input: RewardInput, memory: &MemoryConfig) -> RewardModel {
    let config = RewardModelConfig {
        path: dir.to_owned(),
        device: None,
        input,
        score_tokens: None,
        param_offload: memory.reference.param_offload,
    };
    let tokenizer = Arc::new(Tokenizer::from_dir(dir).expect("a tokenizer"));
    let around = SharedResources {
        precision: Precision::F32,
        device: &device(),
        memory,
        accounts: &Accounts::new(),
        log: None,
        tokenizer: &tokenizer,
        world: &World::default(),
    };
    RewardModel::open("judge", &config, around).unwrap_or_else(|error| panic!("{error}"))
}

impl Case {
    fn row(&self, model: &RewardModel) -> Vec<u32> {
        let prompt = match &self.messages {
            Some(messages) => PromptText::Chat(messages.clone()),
            None => PromptText::Text(self.prompt.clone()),
        };
        let prompt = Prompt {
            example: Example { prompt, ..Example::text("", "") },
            text: self.prompt.clone(),
            tokens: self.prompt_ids.clone(),
            row: None,
        };
        model.reader.read(&prompt, &self.completion, &self.completion_ids).expect("tokens")
    }
}

#[test]
fn reward_models_read_and_score_what_transformers_does() {
    if absent() {
        return;
    }
    let mut scores = 0;
    for dir in folders("reward_models") {
        let golden: Golden = read(&dir.join("golden.json"));
        assert_eq!(golden.format, "reward-model/1");
        for input in [RewardInput::Chat, RewardInput::Text, RewardInput::Tokens] {
            let cases: Vec<&Case> = golden.cases.iter().filter(|c| c.input == input).collect();
            if cases.is_empty() {
                continue;
            }
            let mut model = open(&dir, input, &MemoryConfig::default());
            let rows: Vec<Vec<u32>> = cases.iter().map(|case| case.row(&model)).collect();
            for (i, (row, case)) in rows.iter().zip(&cases).enumerate() {
                assert_eq!(row, &case.ids, "{}: {input:?} {i}", dir.display());
            }
            let found = model.score(rows).expect("scores");
            for (i, (found, case)) in found.iter().zip(&cases).enumerate() {
                let label = format!("{}: {input:?} {i}", dir.display());
                assert_close(&label, *found, case.score_f64, TOLERANCE);
                scores += 1;
            }
        }
    }
    checked("scores of reward models", scores);
}

#[test]
fn scores_do_not_depend_on_the_batch_nor_on_where_weights_wait() {
    if absent() {
        return;
    }
    for dir in folders("reward_models") {
        let golden: Golden = read(&dir.join("golden.json"));
        let rows: Vec<Vec<u32>> = golden.cases.iter().map(|case| case.ids.clone()).collect();
        let longest = rows.iter().map(Vec::len).max().expect("a case");
        let plain = open(&dir, RewardInput::Text, &MemoryConfig::default()).score(rows.clone()).expect("scores");
        for (score_tokens, param_offload) in
            [(longest, ParamOffload::None), (2 * longest, ParamOffload::Idle), (4 * longest, ParamOffload::Streamed)]
        {
            let mut memory = MemoryConfig { score_tokens, ..MemoryConfig::default() };
            memory.reference.param_offload = param_offload;
            let mut model = open(&dir, RewardInput::Text, &memory);
            // twice: it has been away in between
            for _ in 0..2 {
                let found = model.score(rows.clone()).expect("scores");
                for (found, expected) in found.iter().zip(&plain) {
                    let label = format!("{}: {param_offload:?}", dir.display());
                    assert_close(&label, *found, *expected, 1e-5);
                }
            }
            assert_eq!(model.reader.refuses(longest), None);
            let refusal = model.reader.refuses(score_tokens + 1).expect("too long");
            assert!(refusal.contains("tokens for it"), "{refusal}");
        }
    }
}

/// A copy of a reward model whose config is edited.
fn edited(dir: &Path, edit: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in dir.read_dir().unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    let file = copy.path().join("config.json");
    let mut config: Value = read(&file);
    edit(&mut config);
    std::fs::write(file, config.to_string()).unwrap();
    copy
}

fn refused(dir: &Path, input: RewardInput, policy: &Arc<Tokenizer>, parts: &[&str]) {
    let config = RewardModelConfig {
        path: dir.to_owned(),
        device: None,
        input,
        score_tokens: None,
        param_offload: ParamOffload::None,
    };
    let around = SharedResources {
        precision: Precision::F32,
        device: &device(),
        memory: &MemoryConfig::default(),
        accounts: &Arc::clone(&Accounts::new()),
        log: None,
        tokenizer: policy,
        world: &World::default(),
    };
    let error = RewardModel::open("judge", &config, around).map(|_| ());
    let message = error.expect_err("refused").to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn checkpoints_that_are_no_reward_model_are_refused_with_what_to_do() {
    if absent() {
        return;
    }
    let dir = folders("reward_models").remove(0);
    let own = Arc::new(Tokenizer::from_dir(&dir).unwrap());
    let two = edited(&dir, |config| {
        config["num_labels"] = 2.into();
        config["id2label"] = serde_json::json!({"0": "bad", "1": "good"});
    });
    refused(two.path(), RewardInput::Auto, &own, &["judge", "one label", "this one has 2"]);
    let unnamed = edited(&dir, |config| {
        for key in ["num_labels", "id2label", "label2id"] {
            config.as_object_mut().unwrap().remove(key);
        }
    });
    refused(unnamed.path(), RewardInput::Auto, &own, &["one label", "means two"]);
    let values = edited(&dir, |config| {
        let class = config["architectures"][0].as_str().unwrap();
        let class = class.replace("SequenceClassification", "TokenClassification");
        config["architectures"][0] = class.into();
    });
    refused(values.path(), RewardInput::Auto, &own, &["scores every token", "…ForSequenceClassification"]);
    let policy = fixtures().join("models").join("qwen2-tied");
    refused(&policy, RewardInput::Auto, &own, &["causal language model", "num_labels=1"]);
}

#[test]
fn token_ids_are_shared_only_between_models_of_one_vocabulary() {
    if absent() {
        return;
    }
    let all = folders("reward_models");
    let of = |dir: &Path| Arc::new(Tokenizer::from_dir(dir).unwrap());
    for dir in &all {
        for other in all.iter().filter(|other| of(other).differing_id(&of(dir)).is_some()) {
            refused(dir, RewardInput::Tokens, &of(other), &["`input: tokens`", "id ", "`input: text` or `chat`"]);
        }
    }
    let small = edited(&all[0], |config| config["vocab_size"] = 100.into());
    refused(
        small.path(),
        RewardInput::Tokens,
        &of(&all[0]),
        &["its embedding has 100 rows", "`input: text` or `chat`"],
    );
    refused(small.path(), RewardInput::Text, &of(&all[0]), &["embed_tokens.weight has shape", "expected [100"]);
}
