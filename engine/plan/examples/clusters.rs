//! Plans for clusters of H100s on paper: the tables of `docs/guides/multi_gpu.md` and BENCHMARKS.md.
//!
//! `cargo run --release -p firebrick-plan --example clusters` prints a model of 70 billion parameters on 8 to 1,024
//! GPUs, the guides' sizes by model, and their presets for several GPUs; with the name of a table (`scale`, `sizes`,
//! `presets`) that one alone.

use firebrick_plan::estimate::rules::{SMALLEST_DEVICE, public, with_preset};
use firebrick_plan::estimate::{Estimate, Parallel, PhaseEstimate, Sizes, Workload};
use firebrick_plan::planner::{ClusterFit, Degrees, Request};
use firebrick_plan::size::Bytes;
use firebrick_plan::{Error, MemoryConfig, OptimizerOffload, ParamOffload, Preset, Result, Zero};
use firebrick_spec::{Backend, Cluster, DeviceProfile, KernelTable, Operation, Precision};

const GIB: u64 = 1 << 30;

/// Bytes of host memory of a machine of eight such GPUs: 2 TiB.
const HOST: u64 = 2048 * GIB;

/// GPUs of a machine.
const NODE: u64 = 8;

/// An H100 of 80 GiB, of which a plan uses nine tenths, with as much host memory as its share of a machine's.
fn request(workload: Workload, gib: u64, memory: MemoryConfig) -> Request {
    let kernels = KernelTable::new(Operation::ALL).with_vocabulary_tile(8192);
    let profile =
        DeviceProfile::known("NVIDIA H100 80GB HBM3").unwrap_or_else(|| DeviceProfile::assumed(Backend::Cuda));
    Request {
        workload,
        memory,
        max_num_seqs: 256,
        profile: profile.with_kernels(kernels),
        budget: Some(gib * GIB),
        host_budget: Some(HOST / NODE),
        parallel: Parallel::default(),
        ranks: 1,
    }
}

/// A step of `prompts` groups of 8 completions, 512 + 512 tokens, in bf16.
fn grpo(model: &str, prompts: u64) -> Result<Workload> {
    let arch = public(model)?.in_precision(Precision::Bf16);
    Ok(Workload::grpo(arch, [512, 512], prompts, 8))
}

fn machines(gpus: u64) -> Cluster {
    let [link, node_link] = Cluster::usual_links("H100", false);
    Cluster::new(gpus.div_ceil(NODE), gpus.min(NODE), link, node_link)
}

fn degrees(parallel: &Parallel) -> String {
    let text = parallel.to_string();
    let own = text.split_once(": ").map(|(_, own)| own.to_owned());
    own.unwrap_or(text)
}

/// Bytes that a GPU sends in a step, and the seconds that they take.
fn sent(estimate: &Estimate) -> (u64, f64) {
    let all = estimate.communication.iter();
    all.fold((0, 0.0), |(bytes, seconds), own| (bytes + own.bytes, seconds + own.seconds))
}

/// Degrees, bytes of a GPU and its host, seconds, messages, and what binds.
fn row(found: &ClusterFit) -> String {
    let estimate = &found.fit.estimate;
    let (sent, waits) = sent(estimate);
    let step = estimate.seconds.total();
    let phases = estimate.seconds.by_phase();
    let longest = phases.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
    let longest = longest.map_or(String::new(), |(name, seconds)| format!("{name} {:.0} %", 100.0 * seconds / step));
    let peak = estimate.peak_phase().map_or("", |phase| phase.name.name());
    format!(
        "{} | {} | {} | {step:.1} s | {} | {:.0} % | memory in {peak}; time in {longest}",
        degrees(&found.request.parallel),
        Bytes(estimate.peak_bytes),
        Bytes(estimate.host_peak_bytes),
        Bytes(sent),
        100.0 * waits / step,
    )
}

/// The most frugal plan's bytes over what may be used, in the words of a table.
fn too_much(error: Error) -> Result<String> {
    match error {
        Error::Infeasible(found) => {
            let over = found.over_by().map_or("host memory".to_owned(), |bytes| Bytes(bytes).to_string());
            let least = found.smallest_bytes.map_or_else(String::new, |bytes| Bytes(bytes).to_string());
            Ok(format!("nothing fits | {least} | | | | | {over} too much"))
        }
        other => Err(other),
    }
}

fn fitted(request: &Request, gpus: u64, asked: &Degrees) -> Result<String> {
    match request.fit_cluster(machines(gpus), asked) {
        Ok(found) => Ok(row(&found)),
        Err(error) => too_much(error),
    }
}

const ESTIMATED: Degrees = Degrees {
    data: None,
    zero: None,
    tensor: None,
    pipeline: None,
    sequence: None,
    critic_sequence: None,
    rollout_tensor: None,
    estimated: true,
};

#[allow(clippy::print_stdout, reason = "a program that prints tables")]
fn scale() -> Result<()> {
    println!(
        "Llama-3.1-70B in bf16 on H100s of 80 GiB, 1,024 rollouts of 512 + 512 tokens a step\n\n\
         | GPUs | `train` runs it | degrees | a GPU | its host | a step | sent a GPU | waiting | binds |\n|---:|---|---|---:|---:|---:|---:|---:|---|"
    );
    for gpus in [8, 64, 512, 1024] {
        let request = request(grpo("Llama-3.1-70B", 128)?, 80, MemoryConfig::default());
        println!("| {gpus} | yes | {} |", fitted(&request, gpus, &Degrees::default())?);
        // what estimates would be faster with
        match request.fit_cluster(machines(gpus), &ESTIMATED) {
            Ok(found) if !found.request.is_run() => println!("| {gpus} | no | {} |", row(&found)),
            _ => {}
        }
    }
    Ok(())
}

/// A size of the guides, a model of about that size, and GPUs with their GiB.
type GuideSize = (&'static str, &'static str, [(u64, u64); 2]);

/// Models of about the sizes that the guides speak of, and the GPUs whose memory adds up to the least that they name
/// and to what they recommend.
const SIZES: [GuideSize; 3] = [
    ("3B", "Qwen2.5-3B", [(1, 16), (1, 24)]),
    ("8B", "Qwen3-8B", [(1, 40), (1, 80)]),
    ("32B", "Qwen2.5-32B", [(2, 80), (4, 80)]),
];

#[allow(clippy::print_stdout, reason = "a program that prints tables")]
fn sizes() -> Result<()> {
    println!(
        "| the guides | GPUs | in all | here: what `train` runs | a GPU | its host | a step | sent a GPU | waiting | binds |\n\
         |---|---|---:|---|---:|---:|---:|---:|---:|---|"
    );
    for (size, model, [least, recommended]) in SIZES {
        let named = SMALLEST_DEVICE.iter().find(|(name, _)| *name == size);
        let stated = named.map(|(_, gib)| *gib);
        assert_eq!(stated, Some(least.0 * least.1), "the guides' least for {size}");
        let mut all = vec![(least, "least"), (recommended, "recommended")];
        // more of the same GPUs
        let more = [(2, "2 GPUs"), (8, "8 GPUs")].map(|(n, word)| ((n, recommended.1), word));
        all.extend(more.into_iter().filter(|(gpus, _)| *gpus != least));
        for ((gpus, gib), word) in all {
            let request = request(grpo(model, 16)?, gib, MemoryConfig::default());
            let found = fitted(&request, gpus, &Degrees::default())?;
            println!("| {size}, {word} ({model}) | {gpus} x {gib} GiB | {} GiB | {found} |", gpus * gib);
        }
    }
    Ok(())
}

/// What the guides' presets for several GPUs set, as settings here: name, model, GPUs, memory, tensor-parallel degree
/// of sampling, and how the states are shared out.
type GuidePreset = (&'static str, &'static str, u64, fn(&mut MemoryConfig), u64, Zero);

const PRESETS: [GuidePreset; 3] = [
    (
        "multi-GPU with large models (70B+)",
        "Llama-3.1-70B",
        8,
        |m| {
            m.gradient_checkpointing = true;
            m.activation_offload = true;
            m.param_offload = ParamOffload::Idle;
            m.optimizer_offload = OptimizerOffload::Idle;
            m.reshard_after_forward = true;
        },
        4,
        Zero::Stage3,
    ),
    (
        "multi-GPU with a large model",
        "Qwen2.5-32B",
        8,
        |m| {
            m.gradient_checkpointing = true;
            m.param_offload = ParamOffload::Idle;
            m.optimizer_offload = OptimizerOffload::Idle;
            m.train_tokens = 16_384;
        },
        4,
        Zero::Stage3,
    ),
    (
        "very large models (100B+)",
        "Qwen3-235B-A22B",
        32,
        |m| {
            m.gradient_checkpointing = true;
            m.activation_offload = true;
            m.param_offload = ParamOffload::Idle;
            m.grad_offload = true;
            m.optimizer_offload = OptimizerOffload::Cpu;
            m.offload_fraction = 1.0;
        },
        4,
        Zero::Stage3,
    ),
];

#[allow(clippy::print_stdout, reason = "a program that prints tables")]
fn presets() -> Result<()> {
    println!(
        "| preset of the guides | model | GPUs | a GPU, in a step | while it loads and saves | its host | a step | waiting | fits 80 GiB |\n|---|---|---:|---|---:|---:|---:|---:|---|"
    );
    for (name, model, gpus, change, rollout, zero) in PRESETS {
        let mut memory = with_preset(Preset::Balanced)?;
        change(&mut memory);
        memory.zero_stage = zero.number();
        let mut request = request(grpo(model, 128)?, 80, memory);
        request.max_num_seqs = 64;
        let request = request.spread(Parallel {
            data: gpus,
            zero,
            rollout_tensor: Some(rollout),
            ..Parallel::default().on(machines(gpus), Backend::Cuda)
        })?;
        let found = request.as_configured()?.estimate;
        let (_, waits) = sent(&found);
        let once = |phase: &&PhaseEstimate| !phase.name.is_of_a_step();
        let most = |is_once: bool| {
            let phases = found.phases.iter();
            let own = phases.filter(|phase| once(phase) == is_once);
            own.max_by_key(|phase| phase.total_bytes)
        };
        let (Some(in_step), Some(besides)) = (most(false), most(true)) else {
            continue;
        };
        let step = found.seconds.total();
        let fits = |bytes: u64| request.allowed().is_some_and(|allowed| bytes <= allowed);
        let parameters = Sizes::of(&request.workload.arch, None).total() as f64 / 1e9;
        println!(
            "| {name} | {model}, {parameters:.0} billion | {gpus} | {}, in {} | {} | {} | {step:.0} s | {:.0} % | {} |",
            Bytes(in_step.total_bytes),
            in_step.name,
            Bytes(besides.total_bytes),
            Bytes(found.host_peak_bytes),
            100.0 * waits / step,
            match (fits(in_step.total_bytes), fits(besides.total_bytes)) {
                (true, true) => "yes",
                (true, false) => "a step does, loading does not",
                _ => "no",
            },
        );
    }
    Ok(())
}

#[allow(clippy::print_stdout, reason = "a program that prints tables")]
fn main() -> Result<()> {
    let asked = std::env::args().nth(1);
    let wanted = |name: &str| asked.as_deref().is_none_or(|own| own == name);
    if wanted("scale") {
        scale()?;
    }
    if wanted("sizes") {
        sizes()?;
    }
    if wanted("presets") {
        presets()?;
    }
    Ok(())
}
