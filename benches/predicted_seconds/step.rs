//! Steps of GRPO with seconds by phase: as the trainer makes them, without a task's texts and judges.

use super::cases::{PlanCase, Shape};
use burn::tensor::Device;
use firebrick::engine::executor::{Residency, Runtime};
use firebrick::engine::learner::{Accumulated, Learner};
use firebrick::engine::objective::{AdaptiveCoefficients, Objective, ObjectiveConfig, OptimizerStep, PolicyGradient};
use firebrick::engine::optim::OptimConfig;
use firebrick::engine::plan::estimate::{EstimatePhase, Workload};
use firebrick::engine::plan::{MemoryConfig, Plan};
use firebrick::engine::sequence::{Sequence, column};
use firebrick::models::random::{DrawKey, Stream};
use firebrick::models::{Decoder, Prepack};
use firebrick::sampler::{
    GenerationRequest, Generator, MAX_NUM_BATCHED_TOKENS, Sample, SamplingParams, SchedulerConfig,
};
use std::time::Instant;

/// Phases of a step, in their order.
pub const PHASES: [EstimatePhase; 4] =
    [EstimatePhase::Rollout, EstimatePhase::Score, EstimatePhase::Backward, EstimatePhase::Optimizer];

/// What a step took.
pub struct Taken {
    /// By phase, in the order of [`PHASES`].
    pub seconds: [f64; 4],
    /// Tokens of all prompts, once for each completion, and of all completions.
    tokens: [usize; 2],
}

/// A model that takes steps under a plan.
pub struct Steps<'a> {
    shape: &'a Shape,
    learner: Learner,
    plan: Plan,
    objective: PolicyGradient,
    prepack: Prepack,
    step: u32,
    prompts: Vec<GenerationRequest>,
    samples: Vec<Sample>,
    sequences: Vec<Sequence>,
    gradients: Option<Accumulated>,
}

impl<'a> Steps<'a> {
    pub fn new(shape: &'a Shape, plan: &PlanCase, device: &Device) -> Self {
        let mut memory = MemoryConfig::default();
        (plan.turn_on)(&mut memory);
        let slots = shape.prompts * shape.group;
        let plans = memory.plans(&shape.arch, false, None, slots).expect("a plan");
        let mut decoder = Decoder::random(shape.arch.clone(), 1, device);
        let lora = plan.lora();
        let panels = lora.is_none();
        if let Some(lora) = lora {
            decoder = decoder.with_fresh_adapters(lora, 1).expect("adapters");
        }
        let policy = plans.policy().clone();
        let runtime = Runtime::new(device).with_prefetch(policy.prefetch);
        Self {
            shape,
            learner: Learner::new(decoder, policy, OptimConfig::default(), runtime),
            plan: plans,
            objective: ObjectiveConfig::default().build().expect("an objective"),
            // as a run without a budget has it
            prepack: Prepack { panels, quantization: None },
            step: 0,
            prompts: Vec::new(),
            samples: Vec::new(),
            sequences: Vec::new(),
            gradients: None,
        }
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What an estimate is told of these steps: the lengths that they had among it.
    pub fn workload(&self, taken: &[Taken]) -> Workload {
        let Shape { arch, lengths, prompts, group, .. } = self.shape;
        let completions = (prompts * group * taken.len()) as f64;
        let mean = |part: usize| {
            let all: usize = taken.iter().map(|step| step.tokens[part]).sum();
            all as f64 / completions
        };
        Workload {
            max_num_batched_tokens: MAX_NUM_BATCHED_TOKENS as u64,
            prepack: self.prepack,
            lora: self.learner.decoder().lora().cloned(),
            mean_lengths: Some([mean(0), mean(1)]),
            ..Workload::grpo(arch.clone(), lengths.map(|length| length as u64), *prompts as u64, *group as u64)
        }
    }

    /// A whole step.
    pub fn take(&mut self) -> Taken {
        let seconds = PHASES.map(|phase| {
            let started = Instant::now();
            self.run(phase);
            started.elapsed().as_secs_f64()
        });
        let of = |sample: &Sample| self.prompts[sample.request].tokens.len();
        Taken {
            seconds,
            tokens: [self.samples.iter().map(of).sum(), self.samples.iter().map(|sample| sample.tokens.len()).sum()],
        }
    }

    /// One phase; they come in their order.
    pub fn run(&mut self, phase: EstimatePhase) {
        match phase {
            EstimatePhase::Rollout => self.roll_out(),
            EstimatePhase::Score => self.score(),
            EstimatePhase::Backward => self.backward(),
            EstimatePhase::Optimizer => self.update(),
            other => unreachable!("no step has the phase {other}"),
        }
    }

    /// Prompts of half to all of the tokens that they may have.
    fn requests(&self) -> Vec<GenerationRequest> {
        let mut random = Stream::new(5, u64::from(self.step));
        let (vocab, longest) = (self.shape.arch.vocab_size as u32, self.shape.lengths[0] as u32);
        let request = |index: usize| {
            let length = longest / 2 + random.below(longest - longest / 2 + 1);
            GenerationRequest {
                tokens: (0..length.max(1)).map(|_| random.below(vocab)).collect(),
                key: DrawKey { seed: 1, step: self.step, prompt_index: index as u32, sample: 0 },
                max_new_tokens: None,
            }
        };
        (0..self.shape.prompts).map(request).collect()
    }

    fn roll_out(&mut self) {
        self.step += 1;
        self.prompts = self.requests();
        let [_, longest] = self.shape.lengths;
        // random weights draw nearly evenly: a token in so many ends a completion
        let every = longest / 2;
        let sampling = SamplingParams {
            max_new_tokens: longest,
            stop_ids: (0..self.shape.arch.vocab_size as u32).step_by(every).collect(),
            ..SamplingParams::default()
        };
        let model = &mut self.learner.model;
        model.set_residency(Residency::Rollout).expect("weights in their place");
        let generator = Generator::new(self.learner.decoder(), None, &sampling)
            .expect("sampling that works")
            .with_accounts(&self.learner.runtime.accounts)
            .prepack(self.prepack);
        let limits = SchedulerConfig::new(self.shape.prompts * self.shape.group);
        let generated = generator.run_with(&self.prompts, self.shape.group, &limits, |_| {});
        self.samples = generated.expect("completions").samples;
    }

    fn score(&mut self) {
        let samples = self.samples.iter();
        self.sequences =
            samples.map(|sample| Sequence::completion(&self.prompts[sample.request].tokens, &sample.tokens)).collect();
        let learner = &mut self.learner;
        learner.model.set_residency(Residency::Pass).expect("weights in their place");
        let scores = learner.score(&self.sequences, 1.0).expect("log-probs");
        for (sequence, logp) in self.sequences.iter_mut().zip(&scores.logp) {
            sequence.columns.old_logp = Some(column(logp));
        }
    }

    /// Advantages within each group, of a reward for even tokens.
    fn set_advantages(&mut self) {
        let reward = |sample: &Sample| {
            let even = sample.tokens.iter().filter(|token| *token % 2 == 0).count();
            even as f64 / sample.tokens.len() as f64
        };
        let group = self.shape.group;
        let rewards: Vec<f64> = self.samples.iter().map(reward).collect();
        let groups = rewards.chunks(group).zip(self.sequences.chunks_mut(group));
        for (rewards, sequences) in groups {
            let mean = rewards.iter().sum::<f64>() / group as f64;
            for (reward, sequence) in rewards.iter().zip(sequences) {
                sequence.columns.advantage = Some(vec![reward - mean; sequence.positions.len()]);
            }
        }
    }

    fn backward(&mut self) {
        self.set_advantages();
        let mut step = OptimizerStep {
            sequences: &mut self.sequences,
            max_length: self.shape.lengths[1],
            scores: None,
            seed: 1,
            step: u64::from(self.step),
        };
        self.objective.prepare(&mut step, &mut AdaptiveCoefficients::default());
        let gradients = self.learner.accumulate(&self.sequences, 1.0, &self.objective, 1e-6);
        self.gradients = Some(gradients.expect("gradients"));
    }

    fn update(&mut self) {
        let gradients = self.gradients.take().expect("a backward pass before it");
        let updated = self.learner.apply(gradients, 1e-6).expect("an update");
        assert!(updated.outcome.applied, "{:?}", updated.outcome);
    }
}
