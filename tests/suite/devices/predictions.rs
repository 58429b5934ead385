//! Bytes in use on a GPU, phase by phase, under every technique: predicted, and counted by the backend's pools.
//!
//! The pools are read before every launch of a kernel, when what it reads and what it writes is there; and at the
//! boundaries at which a run reads them itself (docs/guides/memory.md, "Read the memory of a run").

use burn::tensor::Device;
use firebrick_backends::accounts::{Balance, Category, Home};
use firebrick_backends::device::{Backend, open};
use firebrick_backends::launches::before_each;
use firebrick_backends::memory::{read, read_pools};
use firebrick_backends::profile;
use firebrick_engine::executor::{BoundaryLog, Runtime};
use firebrick_engine::learner::Learner;
use firebrick_engine::metrics::Phase;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::plan::estimate::{Workload, estimate};
use firebrick_engine::plan::{MemoryConfig, MomentKind, OptimizerOffload, Order, ParamOffload, Plan};
use firebrick_engine::sequence::{Sequence, TokenColumns};
use firebrick_models::adapter::LoraConfig;
use firebrick_models::random::DrawKey;
use firebrick_models::{Arch, Decoder, Prepack};
use firebrick_sampler::{GenerationRequest, Generator, MAX_NUM_BATCHED_TOKENS, SamplingParams, SchedulerConfig};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::path::Path;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;

use super::training::name;
use super::{backend, on_gpus};
use crate::support::techniques::{ANYWHERE, CHECKPOINTED, KEEPS, MOMENTS, OPTIMIZERS, Technique, settings};
use crate::support::{campaign_points, report};

on_gpus!(predictions_are_within_10_percent_of_the_peak_under_every_technique);

/// How far a prediction may be from the most that was counted in a phase, as a share of it.
const TOLERANCE: f64 = 0.1;

/// Bytes in use up to which a prediction may be a matrix more off, and the bytes of one: the embedding's.
const SMALL: u64 = 64 << 20;
const SLACK: f64 = (4 << 20) as f64;

const VOCABULARY: usize = 4096;
const PROMPTS: usize = 2;
const GROUP: usize = 2;

/// Whether all techniques are compared, on longer sequences: minutes on the stand-in for a card, half an hour on a
/// software driver.
fn is_campaign() -> bool {
    std::env::var("FIREBRICK_CAMPAIGN").is_ok_and(|name| name == "gpu_predictions")
}

/// Tokens of a prompt and of a completion.
fn lengths() -> [usize; 2] {
    if is_campaign() { [96, 32] } else { [16, 6] }
}

/// Techniques that the table of all techniques leaves to settings of sizes.
const OTHERS: [Technique; 2] = [
    ("one sequence a micro-batch", |m| {
        m.micro_batch_size = Some(1);
    }),
    ("everything on the host", |m| {
        m.activation_offload = true;
        m.param_offload = ParamOffload::Streamed;
        m.order = Order::SegmentMajor;
        m.micro_batch_size = Some(1);
        m.grad_offload = true;
        m.optimizer_offload = OptimizerOffload::Cpu;
        m.head_rows = 64;
    }),
];

/// Settings under a name, and whether adapters alone are trained.
struct Row {
    name: String,
    memory: MemoryConfig,
    lora: Option<LoraConfig>,
}

impl Row {
    fn of(parts: &[Technique]) -> Self {
        let (name, memory) = settings(parts);
        Self { name: if name.is_empty() { "plain".to_owned() } else { name }, memory, lora: None }
    }

    fn adapted(self) -> Self {
        Self { name: format!("adapters, {}", self.name), lora: Some(LoraConfig::default()), ..self }
    }
}

/// The plain plan, every technique of the table by itself, with kept inputs where it needs them, and some together.
fn rows() -> Vec<Row> {
    let every = KEEPS[0];
    let mut rows = vec![Row::of(&[])];
    let alone = KEEPS.iter().chain(&ANYWHERE).chain(&OPTIMIZERS);
    rows.extend(alone.chain(&MOMENTS).map(|&t| Row::of(&[t])));
    rows.extend(CHECKPOINTED.iter().map(|&t| Row::of(&[every, t])));
    rows.extend(OTHERS.iter().map(|&t| Row::of(&[every, t])));
    rows.push(Row::of(&[]).adapted());
    rows.push(Row::of(&[every]).adapted());
    rows
}

/// Those that every run of the tests has the time for: the plain plan, and where other things are the peak.
const SAMPLE: [&str; 3] = ["plain", "8-bit moments", "every layer checkpointed + everything on the host"];

fn arch() -> Arch {
    let config = json!({
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 1024,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2
    });
    let Value::Object(config) = config else { unreachable!("an object") };
    Arch::from_config(&config, Path::new("test")).expect("a valid architecture")
}

fn token(index: usize, salt: usize) -> u32 {
    ((index * 7919 + salt * 104_729) % VOCABULARY) as u32
}

fn sequences() -> Vec<Sequence> {
    let [prompt, response] = lengths();
    let row = |salt: usize| {
        let tokens: Vec<u32> = (0..prompt + response).map(|at| token(at, salt)).collect();
        let mut sequence = Sequence::completion(&tokens[..prompt], &tokens[prompt..]);
        sequence.columns = TokenColumns { weight: Some(vec![1e-3; response]), ..TokenColumns::default() };
        sequence
    };
    (0..PROMPTS * GROUP).map(row).collect()
}

const PREPACK: Prepack = Prepack { panels: true, quantization: None };

/// Phases whose bytes are compared, in the order in which a step has them.
const PHASES: [Phase; 3] = [Phase::Generate, Phase::OldLogProbs, Phase::UpdateActor];

/// Bytes in use at the worst moment of each phase, what the pool adds left out; and what the phase does then.
fn predicted(row: &Row, plan: &Plan, device: &Device) -> [(u64, String); 3] {
    let workload = Workload {
        clips: optim(row).clip_grad.is_some(),
        lora: row.lora.clone(),
        prepack: PREPACK,
        max_num_batched_tokens: MAX_NUM_BATCHED_TOKENS as u64,
        ..Workload::grpo(arch(), lengths().map(|tokens| tokens as u64), PROMPTS as u64, GROUP as u64)
    };
    let estimate = estimate(&workload, plan, &profile::assumed(backend(device)));
    PHASES.map(|phase| {
        let parts = phase.estimates().iter();
        let parts = parts.map(|part| estimate.phase(*part).expect("a phase of a step"));
        let worst = parts.max_by_key(|part| part.total_bytes).expect("a part");
        let overhead = worst.categories.get(&Category::Overhead);
        let bytes = worst.total_bytes - overhead.copied().unwrap_or(0);
        (bytes, worst.moment.clone())
    })
}

/// Gradients are clipped wherever they can be.
fn optim(row: &Row) -> OptimConfig {
    let usual = OptimConfig::default();
    OptimConfig { clip_grad: usual.clip_grad.filter(|_| !row.memory.step_in_backward), ..usual }
}

/// Most in use in each phase of the second step, in which all state exists, and who held it.
fn counted(row: &Row, plan: &Plan, device: &Device) -> [(u64, Vec<Balance>); 3] {
    let before = read(device).in_use_bytes;
    let policy = plan.policy().clone();
    let runtime = Runtime::new(device).with_prefetch(policy.prefetch);
    runtime.forget_graphs();
    let log = BoundaryLog::new(&runtime.accounts, None);
    let runtime = runtime.with_log(Arc::clone(&log));
    let mut decoder = Decoder::random(arch(), 1, device);
    if let Some(lora) = &row.lora {
        decoder = decoder.with_fresh_adapters(lora.clone(), 1).expect("adapters");
    }
    let mut learner = Learner::new(decoder, policy, optim(row), runtime);
    let sequences = sequences();
    let accounts = Arc::clone(&learner.runtime.accounts);
    let mut found = [const { (0, Vec::new()) }; 3];
    for step in 1..=2 {
        for (phase, found) in PHASES.into_iter().zip(&mut found) {
            let (_, residency) = phase.models()[0];
            let placed = learner.model.set_residency(residency);
            placed.expect("weights in their place");
            device.sync().expect("a device that works");
            log.begin_phase(step, phase.name(), read_pools(device));
            let most = Rc::new(RefCell::new((0, Vec::new())));
            let (seen, on, accounts) = (Rc::clone(&most), device.clone(), Arc::clone(&accounts));
            let look = move || {
                let now = read_pools(&on).expect("pools").in_use_bytes;
                let mut most = seen.borrow_mut();
                if now > most.0 {
                    *most = (now, accounts.ranked());
                }
            };
            before_each(look, || run(&mut learner, phase, &sequences));
            device.sync().expect("a device that works");
            let at_boundaries = log.pool_peak().expect("the pools were read").in_use_bytes;
            let (most, held) = most.take();
            *found = (at_boundaries.max(most) - before, held);
        }
    }
    drop(learner);
    device.memory_cleanup();
    found
}

fn run(learner: &mut Learner, phase: Phase, sequences: &[Sequence]) {
    match phase {
        Phase::Generate => sample(learner),
        Phase::OldLogProbs => drop(learner.score(sequences, 1.0).expect("scores")),
        _ => {
            let updated = learner.update(sequences, 1.0, &Nll, 1e-4);
            assert!(updated.expect("an update").outcome.applied);
        }
    }
}

fn sample(learner: &Learner) {
    let raise_peak = learner.runtime.peak_reader();
    let [prompt, response] = lengths();
    let sampling = SamplingParams { max_new_tokens: response, ..SamplingParams::default() };
    let request = |index: usize| GenerationRequest {
        tokens: (0..prompt).map(|at| token(at, index)).collect(),
        key: DrawKey { seed: 3, step: 0, prompt_index: index as u32, sample: 0 },
        max_new_tokens: None,
    };
    let requests: Vec<_> = (0..PROMPTS).map(request).collect();
    let limits = SchedulerConfig::new(PROMPTS * GROUP);
    let generator = Generator::new(learner.decoder(), None, &sampling).expect("sampling that works");
    let generated =
        generator.prepack(PREPACK).with_memory_probe(&raise_peak).run_with(&requests, GROUP, &limits, |_| {});
    assert_eq!(generated.expect("completions").samples.len(), PROMPTS * GROUP);
}

/// Runs the test in a process for which the stand-in for a card leaves out what kernels compute: that takes minutes,
/// and changes no byte. Whether it did.
fn left_to_a_stand_in_without_kernels(device: &Device) -> bool {
    let set = |variable| std::env::var_os(variable).is_some();
    if backend(device) != Backend::Cuda || !set("FIREBRICK_STAND_IN") || set(SKIP_KERNELS) {
        return false;
    }
    let test = "devices::predictions::cuda::predictions_are_within_10_percent_of_the_peak_under_every_technique";
    let ended = Command::new(std::env::current_exe().expect("a program"))
        .args(["--exact", "--nocapture", test])
        .env(SKIP_KERNELS, "1")
        .stderr(Stdio::inherit())
        .output()
        .expect("the test itself");
    let said = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success() && said.contains("1 passed"), "{said}");
    true
}

const SKIP_KERNELS: &str = "STAND_IN_SKIP_KERNELS";

fn predictions_are_within_10_percent_of_the_peak_under_every_technique(device: &Device) {
    if left_to_a_stand_in_without_kernels(device) {
        return;
    }
    let mut rows = rows();
    // a software driver takes most of a minute for a row
    let sample = if name(device).starts_with("cuda") { &SAMPLE[..] } else { &SAMPLE[1..] };
    rows.retain(|row| is_campaign() || sample.contains(&row.name.as_str()));
    let (_, info) = open(name(device).parse().expect("a device's name")).expect("it is open");
    if let Some(points) = campaign_points() {
        rows.truncate(points.end as usize);
        rows.drain(..points.start as usize);
    }
    // where the device stores no bf16 such moments are refused
    rows.retain(|row| row.memory.moments != MomentKind::Bf16 || info.dtypes.contains(&"bf16"));
    let few = if is_campaign() { 1 } else { sample.len() };
    assert!(rows.len() >= few, "a row of the sample is gone");
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let mut off = Vec::new();
    for row in &rows {
        let plan = row.memory.plans(&arch(), false, None, PROMPTS * GROUP).expect("a plan");
        let (predicted, counted) = (predicted(row, &plan, device), counted(row, &plan, device));
        let peak = counted.iter().map(|(bytes, _)| *bytes).max().unwrap_or(0);
        for ((phase, (counted, held)), (predicted, moment)) in PHASES.into_iter().zip(counted).zip(&predicted) {
            let line = format!(
                "| {} | {phase}: {moment} | {:.1} | {:.1} | {:+.1} % |{}",
                row.name,
                mib(*predicted),
                mib(counted),
                100.0 * (*predicted as f64 / counted as f64 - 1.0),
                if counted == peak { " peak" } else { "" }
            );
            report(&line);
            let matrix = if counted < SMALL { SLACK } else { 0.0 };
            let allowed = TOLERANCE * counted as f64 + matrix;
            if predicted.abs_diff(counted) as f64 > allowed {
                let on_device = held.iter().filter(|b| b.home == Home::Device);
                let held = on_device.map(|b| format!("{} {:.1}", b.category.name(), mib(b.bytes)));
                let held = held.collect::<Vec<_>>().join(", ");
                off.push(format!("{line}; in the accounts then: {held}"));
            }
        }
    }
    assert!(off.is_empty(), "{}", off.join("\n"));
}
