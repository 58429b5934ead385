//! Rewards that are normalised by everything they have given: the same numbers, whatever number of ranks judges.

use super::{Noted, Ran, config, facts, same_on_all};
use firebrick_backends::collective::{Collective, Settings, Threads};
use firebrick_engine::config::parse;
use firebrick_engine::task::{Completion, Example, Reward, Rewards, Split, Task, TaskError};
use firebrick_engine::trainer::Trainer;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Prompts of one digit; completions are worth more the nearer they are to two tokens, and the less they repeat.
struct Short(Rewards);

impl Short {
    fn new() -> Self {
        let rewards = r#"[{"kind": "length", "target": 2, "normalize": true, "clip": [-2, 2]},
                          {"kind": "repetition", "ngram_size": 1, "unit": "tokens", "normalize": true, "weight": 0.5}]"#;
        let rewards: Vec<_> = serde_json::from_str(rewards).unwrap();
        Self(Rewards::new(&rewards).unwrap())
    }
}

impl Task for Short {
    fn name(&self) -> &'static str {
        "short"
    }

    fn len(&self, _: Split) -> Option<u64> {
        Some(10)
    }

    fn example(&self, _: Split, index: u64) -> Result<Example, TaskError> {
        Ok(Example::text(format!("{}+", index % 10), ""))
    }

    fn alphabet(&self) -> Option<&str> {
        Some("0123456789+=")
    }

    fn rewards(&self) -> Option<&Rewards> {
        Some(&self.0)
    }

    fn reward(&self, example: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        self.0.score(&example.answer, completion)
    }
}

fn run(folder: &Path, ranks: Arc<dyn Collective>) -> Ran {
    let noted = Noted::default();
    let mut trainer = Trainer::builder(config(folder, &[]))
        .task(Short::new())
        .observer(noted.clone())
        .world(ranks)
        .build()
        .unwrap_or_else(|error| panic!("{error}"));
    trainer.run().unwrap_or_else(|error| panic!("{error}"));
    let metrics = noted.0.lock().unwrap().clone();
    facts(&mut trainer, metrics)
}

#[test]
fn statistics_of_rewards_are_those_of_all_completions_in_their_order() {
    let folders = tempfile::tempdir().unwrap();
    let steps = |size: usize| {
        let folder = folders.path().join(size.to_string());
        let ranks = Threads::run(size, Settings::default(), |rank| run(&folder, rank));
        let ranks: Vec<Ran> = ranks.into_iter().map(Result::unwrap).collect();
        same_on_all(&ranks);
        let metrics = ranks[0].metrics.iter().cloned().map(BTreeMap::from_iter);
        let steps: Vec<BTreeMap<String, u64>> =
            metrics.filter(|step: &BTreeMap<_, _>| step.contains_key("actor/pg_loss")).collect();
        steps
    };
    let alone = steps(1);
    let rewards = |step: &BTreeMap<String, u64>| {
        let names = ["critic/score/mean", "critic/score/min", "critic/score/max"];
        names.map(|name| step[name])
    };
    // the rewards differ, so that there is something to normalise
    let [_, least, most] = rewards(&alone[0]).map(f64::from_bits);
    assert!(least < -0.1 && most > 0.1, "{least} to {most}");
    for size in [2, 4] {
        let found = steps(size);
        assert_eq!(found.len(), alone.len());
        // the first step samples the same completions
        assert_eq!(rewards(&found[0]), rewards(&alone[0]), "{size} ranks");
    }
}

/// The example with a reward model, on two ranks: the metrics of its steps, and the most bytes of that model that the
/// first had.
fn judged_by_a_model(folder: &Path, overrides: &[&str]) -> (Vec<BTreeMap<String, f64>>, u64) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let example = std::fs::read_to_string(root.join("examples/reward_model.yaml")).unwrap();
    let fixtures = format!("{}/", root.join("tests/fixtures").display());
    let example = example.replace("../tests/fixtures/", &fixtures);
    let smaller = [
        "trainer.steps=2",
        "trainer.train_batch_size=3",
        "trainer.test_freq=0",
        "trainer.save_freq=-1",
        // three completions on one rank, and six on the other
        "rollout.n=3",
        "optim.eps=1e-4",
    ];
    let overrides = [&smaller[..], overrides].concat();
    let overrides: Vec<String> = overrides.iter().map(|o| (*o).to_owned()).collect();
    let mut config = parse(&example, &overrides).unwrap();
    folder.clone_into(&mut config.output);
    let ranks = Threads::run(2, Settings::default(), |rank| {
        let noted = Noted::default();
        let builder = Trainer::builder(config.clone()).observer(noted.clone());
        let mut trainer = builder.world(rank).build().unwrap();
        trainer.run().unwrap();
        let metrics = noted.0.lock().unwrap().clone();
        facts(&mut trainer, metrics)
    });
    let ranks: Vec<Ran> = ranks.into_iter().map(Result::unwrap).collect();
    same_on_all(&ranks);
    let metrics = ranks[0].metrics.iter().map(|step| {
        let numbers = step.iter();
        numbers.map(|(name, bits)| (name.clone(), f64::from_bits(*bits))).collect()
    });
    let readings = std::fs::read_to_string(folder.join("memory.jsonl")).unwrap();
    let bytes = readings.lines().filter_map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let phase = line["phase"] == "update_actor";
        let accounts = line["accounts"].as_array().unwrap().clone();
        let own = accounts.into_iter().filter(|a| a["category"] == "reward_model");
        let bytes = own.map(|account| account["bytes"].as_u64().unwrap()).sum::<u64>();
        phase.then_some(bytes)
    });
    (metrics.collect(), bytes.max().unwrap())
}

#[test]
fn ranks_share_out_a_reward_model_which_scores_as_a_whole_one_does() {
    let folders = tempfile::tempdir().unwrap();
    let (whole, all) = judged_by_a_model(&folders.path().join("whole"), &[]);
    let shared = ["memory.zero_stage=3", "memory.gradient_checkpointing=true"];
    let (found, part) = judged_by_a_model(&folders.path().join("shared"), &shared);
    assert!(part > 0 && part < all, "{part} of {all} bytes");
    assert_eq!(found.len(), whole.len());
    let mut compared = 0;
    for (found, whole) in found.iter().zip(&whole) {
        for (name, expected) in whole.iter().filter(|(name, _)| name.starts_with("reward/")) {
            let found = found[name];
            assert!((found - expected).abs() < 1e-4, "{name}: {found} instead of {expected}");
            compared += 1;
        }
    }
    assert!(compared >= 4, "{compared} metrics of rewards");
}

#[test]
fn a_reward_function_that_raises_on_one_rank_ends_all_as_an_error_that_the_user_can_fix() {
    if std::process::Command::new("python3").arg("--version").output().is_err() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let line = |row: i32| format!("{{\"q\": \"{row}+1=\", \"row\": {row}}}\n");
    let rows = (0..8).map(line).collect::<Vec<_>>().concat();
    std::fs::write(at("rows.jsonl"), rows).unwrap();
    let function = "def score(completions, row, **kwargs):\n    assert row[0] != 5, 'no fifth'\n    \
                    return [float(len(text)) for text in completions]\n";
    std::fs::write(at("rewards.py"), function).unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/qwen2-tied");
    let text = format!(
        "model: {{path: {}}}\ntask: {{kind: dataset, train: {}, prompt: '{{q}}',\n  \
         rewards: [{{kind: python, file: {}, function: score, workers: 1}}]}}\n\
         output: {}\ndevice: cpu\nrollout: {{n: 2, prompt_length: 16, response_length: 4}}\n\
         trainer: {{steps: 2, train_batch_size: 4, save_freq: 1}}\n",
        model.display(),
        at("rows.jsonl").display(),
        at("rewards.py").display(),
        at("run").display()
    );
    let config = parse(&text, &[]).unwrap();
    let ended = Threads::run(2, Settings::default(), |rank| {
        let mut trainer = Trainer::builder(config.clone()).world(rank).build().unwrap();
        trainer.run().map(drop).unwrap_err()
    });
    let errors: Vec<_> = ended.into_iter().map(Result::unwrap).collect();
    for error in &errors {
        let message = error.to_string();
        for part in ["(train row 5)", "`score` raised AssertionError: no fifth (", "rewards.py, line 2)"] {
            assert!(message.contains(part), "{part:?} is not in {message}");
        }
    }
    // whichever rank scored the row
    assert!(errors.iter().all(firebrick_engine::Error::is_user_error), "{errors:?}");
}
