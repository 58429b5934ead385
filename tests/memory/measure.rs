//! What a plan needs on the CPU: predicted, and counted by the allocator while it runs.

use firebrick::backends::Precision;
use firebrick::backends::allocator;
use firebrick::backends::device::{Backend, DeviceSpec, open};
use firebrick::backends::profile;
use firebrick::engine::batch::Batch;
use firebrick::engine::executor::{Executor, Gradients, HeadLoss, Residency, ResidentModel, Runtime};
use firebrick::engine::learner::{Learner, train_cut};
use firebrick::engine::objective::sft::Nll;
use firebrick::engine::objective::value::ValueLoss;
use firebrick::engine::optim::OptimConfig;
use firebrick::engine::plan::estimate::{CriticWork, Estimate, EstimatePhase, Parallel, Workload, estimate_stages};
use firebrick::engine::plan::{MemoryConfig, Plan, Role, Zero};
use firebrick::engine::sequence::{Sequence, TokenColumns};
use firebrick::engine::world::World;
use firebrick::models::adapter::LoraConfig;
use firebrick::models::random::DrawKey;
use firebrick::models::unit::TargetModule;
use firebrick::models::{Arch, BaseFormat, Decoder, Prepack, Quantization};
use firebrick::sampler::{GenerationRequest, Generator, MAX_NUM_BATCHED_TOKENS, SamplingParams};
use serde_json::Value;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use crate::loopback::Loopback;

/// Memory settings by name.
pub type Plans = Vec<(&'static str, Value)>;

/// A model and how much is trained on at a time.
pub struct Case {
    pub name: &'static str,
    pub arch: Arch,
    pub prompt: usize,
    pub response: usize,
    pub sequences: usize,
    /// Completions a prompt.
    pub group: usize,
    /// Whether sampling is measured too: it takes long.
    pub samples: bool,
    /// Copies of its matrices while it is sampled.
    pub prepack: Prepack,
    pub lora: Option<LoraConfig>,
    /// Whether a critic of the same size is trained beside the policy.
    pub critic: bool,
    /// Ranks that share the critic's sequences, where these are other ones than share the policy's.
    pub critic_sequence: Option<usize>,
}

impl Case {
    pub fn new(name: &'static str, config: &Value, lengths: [usize; 3]) -> Self {
        let Value::Object(map) = config else { panic!("a config is an object") };
        let arch = Arch::from_config(map, Path::new(name)).expect("a valid architecture");
        let [prompt, response, sequences] = lengths;
        Self {
            name,
            arch,
            prompt,
            response,
            sequences,
            group: 1,
            samples: false,
            prepack: Prepack::default(),
            lora: None,
            critic: false,
            critic_sequence: None,
        }
    }

    /// The same with copies of its matrices while it is sampled.
    pub fn packed(self, quantization: Option<Quantization>) -> Self {
        Self { prepack: Prepack { panels: true, quantization }, ..self }
    }

    /// The same, sampled in groups of this size.
    pub fn sampled(self, group: usize) -> Self {
        Self { group, samples: true, ..self }
    }

    /// The same in groups of this size.
    pub fn grouped(self, group: usize) -> Self {
        Self { group, ..self }
    }

    /// The same in another precision.
    pub fn in_precision(self, precision: Precision) -> Self {
        Self { arch: self.arch.in_precision(precision), ..self }
    }

    /// The same with adapters.
    pub fn adapted(self) -> Self {
        Self { lora: Some(LoraConfig::default().in_arch(&self.arch)), ..self }
    }

    /// The same with adapters beside the matrices of all experts, too.
    pub fn adapted_experts(self, dropout: f64) -> Self {
        let mut targets = TargetModule::all();
        targets.extend([TargetModule::ExpertGateUp, TargetModule::ExpertDown]);
        let lora = LoraConfig { target_modules: targets, dropout, ..LoraConfig::default() };
        Self { lora: Some(lora.in_arch(&self.arch)), ..self }
    }

    /// The same with its layers' matrices as a frozen base in few bits.
    pub fn beside(self, base: BaseFormat) -> Self {
        Self { arch: self.arch.with_base(Some(base)), ..self }
    }

    /// The same with a critic.
    pub fn criticised(self) -> Self {
        Self { critic: true, ..self }
    }

    /// The same with a critic whose sequences so many ranks share.
    pub fn criticised_by(self, ranks: usize) -> Self {
        Self { critic_sequence: Some(ranks), ..self.criticised() }
    }

    pub fn critic_arch(&self) -> Option<Arch> {
        self.critic.then(|| self.arch.clone().with_value_head())
    }

    pub fn workload(&self) -> Workload {
        let prompts = (self.sequences / self.group) as u64;
        let lengths = [self.prompt as u64, self.response as u64];
        Workload {
            max_num_batched_tokens: MAX_NUM_BATCHED_TOKENS as u64,
            prepack: self.prepack,
            lora: self.lora.clone(),
            critic: self.critic_arch().map(|arch| CriticWork { arch, clips: true, starts_from_policy: true }),
            ..Workload::grpo(self.arch.clone(), lengths, prompts, self.group as u64)
        }
    }

    /// A completion; those of a group have one prompt.
    fn sequence(&self, index: usize) -> Sequence {
        let vocab = self.arch.vocab_size;
        let token = |i: usize| {
            let salt = if i < self.prompt { index / self.group } else { index };
            ((i * 7919 + salt * 104_729) % vocab) as u32
        };
        let length = self.prompt + self.response;
        let tokens: Vec<u32> = (0..length).map(token).collect();
        let mut sequence = Sequence::completion(&tokens[..self.prompt], &tokens[self.prompt..]);
        sequence.columns = TokenColumns {
            weight: Some(vec![1e-3; self.response]),
            returns: Some(vec![1.0; self.response]),
            value: Some(vec![0.0; self.response]),
            ..TokenColumns::default()
        };
        sequence
    }
}

/// Bytes of one phase.
pub struct Phase {
    pub name: EstimatePhase,
    pub predicted: u64,
    pub measured: u64,
    pub moment: String,
}

fn counted<T>(work: impl FnOnce() -> T) -> (T, u64) {
    allocator::reset_peak();
    let out = work();
    let heap = allocator::heap().expect("the counting allocator is installed");
    (out, heap.peak_bytes)
}

/// Bytes on the heap before the first measurement.
fn baseline() -> u64 {
    static BEFORE: OnceLock<u64> = OnceLock::new();
    *BEFORE.get_or_init(|| allocator::heap().map_or(0, |h| h.current_bytes))
}

/// Runs two steps under a plan and compares the second, in which all state exists, with the prediction, on each stage.
fn measure(case: &Case, memory: &MemoryConfig) -> Vec<Vec<Phase>> {
    let before = baseline();
    let plan = memory.plans(&case.arch, false, case.critic_arch().as_ref(), case.sequences).expect("a plan");
    let profile = profile::assumed(Backend::Cpu);
    let zero = plan.policy().zero;
    let parallel = Parallel {
        // as many as share state out
        data: if zero > Zero::Off { 2 } else { 1 },
        zero,
        sequence: memory.ulysses_sequence_parallel_size as u64,
        critic_sequence: case.critic_sequence.map(|ranks| ranks as u64),
        tensor: memory.tensor_model_parallel_size as u64,
        pipeline: memory.pipeline_model_parallel_size as u64,
        ..Parallel::default()
    };
    let parallel = match (case.critic_sequence, parallel.devices()) {
        (Some(ranks), 1) => Parallel { data: ranks as u64, ..parallel },
        _ => parallel,
    };
    let stages = estimate_stages(&case.workload(), &plan, &profile, &parallel);
    let of_stage = |(stage, predicted): (usize, Estimate)| {
        let phases = run(case, &plan, one_of(&parallel, stage)).into_iter();
        let phases = phases.map(|(name, measured)| {
            let phase = predicted.phase(name).expect("a phase");
            Phase { name, predicted: phase.total_bytes, measured: measured - before, moment: phase.moment.clone() }
        });
        phases.collect()
    };
    stages.into_iter().enumerate().map(of_stage).collect()
}

/// One of the ranks that have a stage, alone.
fn one_of(parallel: &Parallel, stage: usize) -> World {
    let Parallel { data, tensor, pipeline, sequence, critic_sequence, .. } = *parallel;
    let [data, tensor, pipeline, sequence] = [data, tensor, pipeline, sequence].map(|degree| degree as usize);
    let world = match (parallel.devices() as usize, pipeline) {
        (1, _) => World::default(),
        (ranks, 1) => World::new(Arc::new(Loopback::first(ranks))),
        (_, stages) => World::new(Arc::new(Loopback::of_stage(stage, stages, data))),
    };
    let world = world.with_sequence_parallel(sequence);
    let world = world.and_then(|world| match critic_sequence {
        Some(ranks) => world.with_critic_sequence_parallel(ranks as usize),
        None => Ok(world),
    });
    let world = world.and_then(|world| world.with_tensor_parallel(tensor));
    let world = world.and_then(|world| world.with_pipeline_stages(pipeline));
    world.expect("a mesh")
}

fn run(case: &Case, plan: &Plan, world: World) -> Vec<(EstimatePhase, u64)> {
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
    let mut decoder = Decoder::random(case.arch.clone(), 1, &device);
    if let Some(lora) = &case.lora {
        decoder = decoder.with_fresh_adapters(lora.clone(), 1).expect("adapters");
    }
    let config = OptimConfig { lr: 1e-6, ..OptimConfig::default() };
    let prefetch = plan.models.values().map(|m| m.prefetch).max().unwrap_or(0);
    let (share, stage) = (world.tensor_share(), world.pipeline_stage());
    let part = |whole: Decoder| match (share, stage) {
        (Some(share), _) => whole.training_shard(share).expect("a share"),
        (None, Some(stage)) => whole.with_stage(stage).expect("a stage"),
        (None, None) => whole,
    };
    let runtime = Runtime::new(&device).with_prefetch(prefetch);
    let runtime = Arc::new(runtime.with_world(world));
    let critic = plan.critic().map(|own| {
        let decoder = part(decoder.with_value_head(1));
        let runtime = Arc::new(runtime.for_critic());
        Learner::for_role(Role::Critic, decoder, own.clone(), config.clone(), runtime)
    });
    let mut learner = Learner::new(part(decoder), plan.policy().clone(), config, runtime);
    let sequences: Vec<Sequence> = (0..case.sequences).map(|i| case.sequence(i)).collect();
    // a first step over little, so that moments exist
    let mut short = case.sequence(0);
    short.positions.truncate(8);
    short.columns = short.columns.map(|column| column[..8].to_vec());
    short.tokens.truncate(case.prompt + 8);
    let batches = [vec![short], sequences];
    let mut peaks = Vec::new();
    let mut critic = critic;
    for batch in &batches {
        peaks.clear();
        if let Some(critic) = &mut critic {
            learner.model.set_residency(Residency::Idle).expect("weights away");
            critic.model.set_residency(Residency::Pass).expect("weights in place");
            let (_, values) = counted(|| critic.values(batch).expect("values"));
            let [backward, update] = step(critic, batch, ValueLoss { clip_range: 0.5 });
            peaks.extend([
                (EstimatePhase::Values, values),
                (EstimatePhase::CriticBackward, backward),
                (EstimatePhase::CriticOptimizer, update),
            ]);
            critic.model.set_residency(Residency::Idle).expect("weights away");
        }
        learner.model.set_residency(Residency::Pass).expect("weights in place");
        let (_, score) = counted(|| learner.score(batch, 1.0).expect("scores"));
        let [backward, update] = step(&mut learner, batch, &Nll);
        peaks.extend([
            (EstimatePhase::Score, score),
            (EstimatePhase::Backward, backward),
            (EstimatePhase::Optimizer, update),
        ]);
    }
    if case.samples {
        let ((), rollout) = counted(|| sample(case, &mut learner));
        peaks.push((EstimatePhase::Rollout, rollout));
    }
    peaks
}

fn sample(case: &Case, learner: &mut Learner) {
    learner.model.set_residency(Residency::Rollout).expect("weights in place");
    let sampling = SamplingParams { max_new_tokens: case.response, ..SamplingParams::default() };
    Generator::new(learner.decoder(), None, &sampling)
        .map(|g| g.prepack(case.prepack))
        .and_then(|g| g.run(&requests(case), case.group, case.sequences))
        .expect("samples");
}

/// The prompts of a case.
pub fn requests(case: &Case) -> Vec<GenerationRequest> {
    let request = |i: usize| GenerationRequest {
        tokens: case.sequence(i).tokens[..case.prompt].to_vec(),
        key: DrawKey { seed: 1, step: 0, prompt_index: i as u32, sample: 0 },
        max_new_tokens: None,
    };
    (0..case.sequences / case.group).map(request).collect()
}

/// Bytes of a backward pass and of the update after it.
fn step<'l>(learner: &mut Learner, sequences: &[Sequence], loss: impl Into<HeadLoss<'l>>) -> [u64; 2] {
    let (gradients, backward) = counted(|| backward(learner, sequences, loss));
    let Learner { model, optimizer, runtime, .. } = learner;
    let (outcome, update) =
        counted(|| optimizer.step(&mut model.decoder, gradients, 1e-6, runtime).expect("an update"));
    assert!(outcome.applied, "{outcome:?}");
    [backward, update]
}

fn backward<'l>(learner: &mut Learner, sequences: &[Sequence], loss: impl Into<HeadLoss<'l>>) -> Gradients {
    let Learner { model, runtime, dropout, .. } = learner;
    let role = model.role();
    let ResidentModel { decoder, plan, .. } = model;
    let world = runtime.world();
    let mut gradients = Gradients::planned(decoder.specs().count(), plan, runtime).for_decoder(decoder);
    let cut = train_cut(plan, decoder);
    let batch = Batch::pack_for(sequences, cut, world.data_size()).expect("micro-batches");
    let (all, mut dealt) = (batch.micros(), batch.deal(world.data_size()));
    let own = dealt.swap_remove(world.data_rank()).into_iter();
    let micros: Vec<_> = own.map(|micro| all[micro].clone()).collect();
    Executor::new(plan, runtime, 1.0)
        .for_role(role)
        .with_dropout(*dropout)
        .backward(decoder, &micros, loss, &mut gradients, None)
        .expect("a backward pass");
    if world.stages() > 1 {
        gradients.reduce(decoder, runtime).expect("sums");
    }
    gradients
}

/// Predicted and measured bytes of a plan at its peak, and by phase.
pub struct Row {
    pub case: &'static str,
    pub plan: String,
    pub phases: Vec<Phase>,
}

impl Row {
    pub fn predicted(&self) -> u64 {
        self.phases.iter().map(|p| p.predicted).max().unwrap_or(0)
    }

    pub fn measured(&self) -> u64 {
        self.phases.iter().map(|p| p.measured).max().unwrap_or(0)
    }
}

/// Predicted over measured, less one.
pub fn error(predicted: u64, measured: u64) -> f64 {
    predicted as f64 / measured as f64 - 1.0
}

/// Measures every case under its plans; `seen` is told of each.
pub fn rows(cases: Vec<(Case, Plans)>, mut seen: impl FnMut(&Row)) -> Vec<Row> {
    let mut all = Vec::new();
    for (case, plans) in cases {
        for (name, settings) in plans {
            let memory = serde_json::from_value(settings).expect("settings of the memory section");
            let stages = measure(&case, &memory);
            let several = stages.len() > 1;
            for (stage, phases) in stages.into_iter().enumerate() {
                let row = Row {
                    case: case.name,
                    plan: if several { format!("{name}, stage {stage}") } else { name.to_owned() },
                    phases,
                };
                seen(&row);
                all.push(row);
            }
        }
    }
    all
}
