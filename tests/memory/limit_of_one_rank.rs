//! A limit that one of two ranks exceeds. They are threads of this process, so that what is counted is what both hold.

use crate::own_process::in_own_process;
use firebrick::backends::collective::{Settings, Threads};
use firebrick::engine::config::{RunConfig, parse};
use firebrick::engine::metrics::{Event, Observer};
use firebrick::engine::trainer::Trainer;
use std::path::Path;
use std::sync::{Arc, Mutex};

in_own_process!(a_limit_that_one_rank_exceeds_gives_all_the_plan_of_a_run_that_began_with_it,);

const CONFIG: &str = "
model:
  arch: {model_type: llama, hidden_size: 128, intermediate_size: 384, num_hidden_layers: 4, num_attention_heads: 4,
         max_position_embeddings: 64}
task: {kind: arithmetic, difficulty: 1, partial: true, validation_size: 4}
output: run
device: cpu
rollout: {n: 8, prompt_length: 6, response_length: 24}
update: {ppo_mini_batch_size: 16}
optim: {lr: 1e-4, eps: 1e-4}
trainer: {steps: 2, train_batch_size: 16, seed: 5, test_freq: 0, save_freq: -1}
";

/// The settings of plans that were taken because memory ran out.
#[derive(Clone, Default)]
struct Replans(Arc<Mutex<Vec<Vec<String>>>>);

impl Observer for Replans {
    fn event(&mut self, event: Event<'_>) {
        if let Event::Replanned { settings, .. } = event {
            self.0.lock().unwrap().push(settings.to_vec());
        }
    }
}

/// What a rank came to: its weights, the plans that it took, and the most that was counted.
struct Ran {
    weights: Vec<Vec<f32>>,
    replans: Vec<Vec<String>>,
    peak: u64,
}

/// Two ranks, the second of which has a limit of its own where one is given.
fn ranks(folder: &Path, overrides: &[String], limit: Option<u64>) -> Vec<Ran> {
    let config = |rank: usize| -> RunConfig {
        let mut all = overrides.to_vec();
        all.push(format!("output={}", folder.display()));
        let own = limit.filter(|_| rank == 1);
        all.extend(own.map(|limit| format!("memory.limit={limit}")));
        parse(CONFIG, &all).expect("a configuration")
    };
    let ran = Threads::run(2, Settings::default(), |rank| {
        let replans = Replans::default();
        let builder = Trainer::builder(config(rank.rank())).observer(replans.clone());
        let mut trainer = builder.world(rank).build().expect("a run");
        let summary = trainer.run().expect("a summary");
        let policy = trainer.whole_policy().expect("weights");
        let weights = policy.params().map(|(_, value)| value.download());
        let replans = replans.0.lock().unwrap().clone();
        Ran {
            weights: weights.map(|own| own.expect("values").to_f32()).collect(),
            replans,
            peak: summary.measured_peak_bytes,
        }
    });
    ran.into_iter().map(|rank| rank.expect("a rank")).collect()
}

fn a_limit_that_one_rank_exceeds_gives_all_the_plan_of_a_run_that_began_with_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let free = ranks(&folder.path().join("free"), &[], None);
    assert!(free.iter().all(|rank| rank.replans.is_empty()));
    let limit = free[0].peak * 85 / 100;
    let found = ranks(&folder.path().join("limited"), &[], Some(limit));
    let settings = found[0].replans.last().expect("a cheaper plan").clone();
    assert_eq!(found[0].replans, found[1].replans, "one plan on both ranks");
    assert!(found[0].weights == found[1].weights);
    let begun = ranks(&folder.path().join("begun"), &settings, None);
    assert!(begun[0].replans.is_empty());
    for (found, begun) in found[0].weights.iter().zip(&begun[0].weights) {
        for (found, begun) in found.iter().zip(begun) {
            assert!((found - begun).abs() <= 1e-6, "{found} instead of {begun}");
        }
    }
}
