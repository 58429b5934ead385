//! Rewards that are normalised by everything they have given: the same numbers, whatever number of ranks judges.

use super::{Noted, Ran, config, facts, same_on_all};
use firebrick_backends::collective::{Collective, Settings, Threads};
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
        let steps: Vec<BTreeMap<String, u64>> = metrics
            .filter(|step: &BTreeMap<_, _>| step.contains_key("actor/pg_loss"))
            .collect();
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
