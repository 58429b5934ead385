//! Memory that runs out on one of several ranks: all adopt the same cheaper plan and do the work again.

use super::{Ran, config, facts};
use firebrick_backends::collective::{Settings, Threads};
use firebrick_engine::metrics::{Event, Observer};
use firebrick_engine::objective::{
    AdaptiveCoefficients, Loss, Needs, Objective, OptimizerStep, Scores, TokenInputs, TokenLoss,
};
use firebrick_engine::rollout::Rollout;
use firebrick_engine::trainer::{Start, Trainer};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// An objective whose next loss may find no memory.
struct Refused {
    own: Box<dyn Objective>,
    next: AtomicBool,
}

impl TokenLoss for Refused {
    fn loss(&self, scores: &Scores, inputs: &TokenInputs) -> Loss {
        let refused = self.next.swap(false, Ordering::SeqCst);
        assert!(!refused, "CUDA_ERROR_OUT_OF_MEMORY, as told");
        self.own.loss(scores, inputs)
    }

    fn separates(&self) -> bool {
        self.own.separates()
    }
}

impl Objective for Refused {
    fn needs(&self) -> Needs {
        self.own.needs()
    }

    fn compute_advantages(
        &self,
        rollouts: &mut [Rollout],
        coefficients: &mut AdaptiveCoefficients,
    ) -> Vec<(String, f64)> {
        self.own.compute_advantages(rollouts, coefficients)
    }

    fn prepare(&self, step: &mut OptimizerStep<'_>, coefficients: &mut AdaptiveCoefficients) {
        self.own.prepare(step, coefficients);
    }
}

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

/// Large enough for plans that take less memory.
const LARGER: [&str; 4] = [
    "model.arch={model_type: llama, hidden_size: 128, intermediate_size: 384, num_hidden_layers: 3, num_attention_heads: 4, \
     max_position_embeddings: 64}",
    "trainer.steps=2",
    "optim.lr=1e-4",
    "optim.eps=1e-4",
];

/// What two ranks come to, and the settings of the cheaper plans that each took; the first loss of rank 1 finds no
/// memory if it is told so.
fn ranks(overrides: &[&str], refused: bool) -> Vec<(Ran, Vec<Vec<String>>)> {
    let folder = tempfile::tempdir().unwrap();
    let overrides = [&LARGER, overrides].concat();
    let config = config(&folder.path().join("run"), &overrides);
    let done = Threads::run(2, Settings::default(), |rank| {
        let replans = Replans::default();
        let objective = Refused {
            own: Box::new(config.objective.build().unwrap()),
            next: AtomicBool::new(refused && rank.rank() == 1),
        };
        let mut trainer = Trainer::builder(config.clone())
            .start(Start::Fresh)
            .observer(replans.clone())
            .objective(objective)
            .world(rank)
            .build()
            .unwrap();
        trainer.run().unwrap();
        let settings = replans.0.lock().unwrap().clone();
        (facts(&mut trainer, Vec::new()), settings)
    });
    done.into_iter().map(|rank| rank.unwrap()).collect()
}

#[test]
fn memory_that_runs_out_on_one_rank_gives_all_the_plan_of_a_run_that_began_with_it() {
    let stages: [&[&str]; 11] = [
        &[],
        &["memory.zero_stage=1"],
        &["memory.zero_stage=2"],
        &["memory.zero_stage=3", "memory.gradient_checkpointing=true"],
        // with gathers on their way that no rank will wait for
        &["memory.zero_stage=3", "memory.gradient_checkpointing=true", "memory.prefetch=3"],
        &["memory.ulysses_sequence_parallel_size=2"],
        &[
            "memory.ulysses_sequence_parallel_size=2",
            "memory.zero_stage=3",
            "memory.gradient_checkpointing=true",
            "memory.prefetch=2",
        ],
        &["memory.ulysses_sequence_parallel_size=2", "memory.zero_stage=2"],
        &["memory.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2"],
        &["memory.pipeline_model_parallel_size=2"],
        &["rollout.tensor_model_parallel_size=2", "memory.zero_stage=3", "memory.gradient_checkpointing=true"],
    ];
    for overrides in stages {
        let found = ranks(overrides, true);
        assert_eq!(found[0].1.len(), 1, "{overrides:?}");
        assert_eq!(found[0].1, found[1].1, "{overrides:?}");
        assert!(found[0].0.weights == found[1].0.weights, "{overrides:?}");
        let settings = found[0].1[0].iter().map(String::as_str);
        let begun: Vec<&str> = overrides.iter().copied().chain(settings).collect();
        let begun = ranks(&begun, false);
        assert!(begun[0].1.is_empty(), "{overrides:?}");
        for (name, found) in &found[0].0.weights {
            for (found, begun) in found.iter().zip(&begun[0].0.weights[name]) {
                let [found, begun] = [found, begun].map(|&bits| f64::from_bits(bits));
                let near = (found - begun).abs() <= 1e-6;
                assert!(near, "{overrides:?}, {name}: {found} instead of {begun}");
            }
        }
    }
}
