//! Training on ranks that share out state, beside one rank that has all of it: the loss, every gradient, and the
//! weights of some updates.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};
use firebrick_backends::accounts::{Category, Home};
use firebrick_backends::collective::{Collective, OperationKind, Settings, Solo, Threads, Traffic};
use firebrick_engine::batch::Batch;
use firebrick_engine::executor::{Executor, Gradients, Residency, Runtime, rounds};
use firebrick_engine::learner::{Learner, train_cut};
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::plan::{MemoryConfig, MomentKind, OptimizerOffload, Order, ParamOffload, Partition, Zero};
use firebrick_engine::sequence::{SampleId, Sequence};
use firebrick_engine::world::World;
use firebrick_models::Decoder;
use firebrick_models::adapter::LoraConfig;
use firebrick_models::decoder::{ShardSlice, Unit};
use firebrick_models::random::Stream;
use firebrick_models::unit::TargetModule;

use super::model::{Model, nll_rows};
use super::techniques::Technique;
use super::{assert_close, assert_gradient, values};

pub const UPDATES: usize = 3;
const LR: f64 = 1e-2;

/// What goes with shared state, each by itself; what sharing them out refuses is not among them.
pub const TECHNIQUES: [Technique; 11] = [
    ("plain", |_| {}),
    ("every layer checkpointed", |m| {
        m.gradient_checkpointing = true;
    }),
    ("inputs on the host", |m| {
        m.gradient_checkpointing = true;
        m.activation_offload = true;
    }),
    ("gradients on the host", |m| m.grad_offload = true),
    ("weights streamed", |m| {
        m.gradient_checkpointing = true;
        m.param_offload = ParamOffload::Streamed;
    }),
    ("weights streamed, segment by segment", |m| {
        m.gradient_checkpointing = true;
        m.param_offload = ParamOffload::Streamed;
        m.order = Order::SegmentMajor;
    }),
    ("state away between updates", |m| {
        m.optimizer_offload = OptimizerOffload::Idle;
    }),
    ("updated on the host", |m| {
        m.optimizer_offload = OptimizerOffload::Cpu;
    }),
    ("half of it updated on the host", |m| {
        m.optimizer_offload = OptimizerOffload::Cpu;
        m.offload_fraction = 0.5;
    }),
    ("bf16 moments", |m| m.moments = MomentKind::Bf16),
    ("8-bit moments", |m| m.moments = MomentKind::Block8),
];

/// How much is shared out.
pub const STAGES: [Technique; 4] = [
    ("ZeRO-1", |m| m.zero_stage = 1),
    ("ZeRO-2", |m| m.zero_stage = 2),
    ("ZeRO-3", |m| {
        m.zero_stage = 3;
        m.gradient_checkpointing = true;
    }),
    ("ZeRO-3 without resharding", |m| {
        m.zero_stage = 3;
        m.reshard_after_forward = false;
    }),
];

/// The settings of a technique, all sequences of a rank one behind the other in a micro-batch.
pub fn packed(turn_on: fn(&mut MemoryConfig)) -> MemoryConfig {
    MemoryConfig { micro_batch_size: None, ..settings(turn_on) }
}

/// The settings of a technique, a sequence a micro-batch.
pub fn settings(turn_on: fn(&mut MemoryConfig)) -> MemoryConfig {
    let mut memory = MemoryConfig { micro_batch_size: Some(1), ..MemoryConfig::default() };
    turn_on(&mut memory);
    memory
}

/// A model's golden rows, some of them twice, so that four ranks have unlike numbers of micro-batches.
pub fn rows(model: &Model) -> Vec<Sequence> {
    let mut rows = nll_rows(&model.golden("forward.safetensors"));
    let again: Vec<Sequence> = rows.iter().cycle().take(7 - rows.len().min(6)).cloned().collect();
    rows.extend(again);
    for (sample, row) in rows.iter_mut().enumerate() {
        row.id = SampleId { prompt_index: 3, sample };
    }
    rows
}

/// The same model with adapters that are all there is to train.
pub fn with_adapters(model: Model) -> Model {
    with_dropped_adapters(model, 0.0)
}

/// The same whose adapters drop this share of their inputs.
pub fn with_dropped_adapters(mut model: Model, dropout: f64) -> Model {
    let mut targets = TargetModule::all();
    targets.extend([TargetModule::ExpertGateUp, TargetModule::ExpertDown]);
    let lora = LoraConfig { rank: 3, alpha: 6.0, use_rslora: false, dropout, target_modules: targets };
    let mut random = Stream::new(13, 1);
    let adapted = model.decoder.with_adapters(lora, |_, spec| {
        let values: Vec<f32> = (0..spec.numel()).map(|_| 0.1 * random.normal()).collect();
        let data = TensorData::new(values, spec.rows_cols());
        Ok::<_, firebrick_models::Error>(Tensor::from_data(data, model.decoder.device()))
    });
    model.decoder = adapted.expect("adapters");
    model
}

/// Losses and norms of some updates, the weights after them and what the optimizer keeps.
#[derive(Clone)]
pub struct Trained {
    pub steps: Vec<[f64; 2]>,
    pub weights: BTreeMap<String, Vec<f64>>,
    /// Log-probs of the rows under these weights.
    pub scores: Vec<Vec<f32>>,
    /// This rank's part of the first gradient, by name; where a rank has none of it, nothing.
    pub gradients: BTreeMap<String, Vec<f64>>,
    /// Most bytes held for moments, for gradients and for weights.
    pub held: [u64; 3],
    /// What was sent during the updates: operations and bytes.
    pub operations: [u64; OperationKind::COUNT],
    pub bytes: [u64; OperationKind::COUNT],
    /// Passes that every rank makes in an update, where gradients are summed in each.
    pub rounds: usize,
    /// All-to-alls among the ranks that share this one's sequences during the updates, and the bytes that it sent in
    /// them.
    pub exchanges: [u64; 2],
    /// Operations among the ranks that share this one's matrices during the updates.
    pub shared: [u64; OperationKind::COUNT],
    /// Micro-batches of an update that it has, or a part of.
    pub micro_batches: usize,
    /// Operations among the ranks of this one's pipeline during the updates, and the bytes that it sent in them.
    pub pipeline: Traffic,
}

/// What a rank runs with.
pub fn runtime(model: &Model, memory: &MemoryConfig, world: &World) -> Runtime {
    Runtime::new(model.decoder.device()).with_prefetch(memory.prefetch).with_world(world.clone())
}

/// What a rank trains. `clip` as the optimizer's `clip_grad`.
pub fn trained(
    model: &Model,
    rows: &[Sequence],
    memory: &MemoryConfig,
    clip: Option<f64>,
    ranks: Arc<dyn Collective>,
) -> Trained {
    let world = groups(memory, ranks);
    let gradients = gradients(model, rows, memory, &world);
    let mut learner = learner(model, memory, clip, &world);
    let cut = train_cut(&learner.model.plan, &model.decoder);
    let batch = Batch::pack_for(rows, cut, world.data_size()).expect("every row fits");
    let dealt = batch.deal(world.data_size());
    let rounds = rounds(&learner.model.plan, &dealt, Zero::Off);
    learner.runtime.accounts.reset_peaks();
    let before: Traffic = world.traffic();
    let shared = world.sequence_traffic();
    let summed = world.tensor_ranks().traffic();
    let passed = world.part_ranks().traffic();
    let mut steps = Vec::new();
    for _ in 0..UPDATES {
        let updated = learner.update(rows, 1.0, &Nll, LR);
        let updated = updated.unwrap_or_else(|error| panic!("{}: {error}", model.name));
        assert!(updated.outcome.applied);
        steps.push([updated.sums.loss, updated.outcome.grad_norm]);
    }
    let after = world.traffic();
    let exchanged = world.sequence_traffic();
    let sums = world.tensor_ranks().traffic();
    let stages = world.part_ranks().traffic();
    let (kind, messages) = (OperationKind::AllToAll as usize, exchanged.operations);
    let micro_batches = dealt[world.data_rank()].len();
    let categories = [Category::Moments, Category::Gradients, Category::Parameters];
    let held = categories.map(|category| {
        let homes = [Home::Device, Home::Host].into_iter();
        let balances = homes.map(|home| learner.runtime.accounts.balance(category, home));
        balances.map(|balance| balance.peak_bytes).sum()
    });
    let scores = learner.score(rows, 1.0).expect("scores").logp;
    learner.model.make_whole().expect("whole weights");
    Trained {
        steps,
        weights: whole_weights(&learner),
        scores,
        gradients,
        held,
        operations: std::array::from_fn(|kind| after.operations[kind] - before.operations[kind]),
        bytes: std::array::from_fn(|kind| after.bytes[kind] - before.bytes[kind]),
        rounds,
        exchanges: [messages[kind] - shared.operations[kind], exchanged.bytes[kind] - shared.bytes[kind]],
        shared: std::array::from_fn(|kind| sums.operations[kind] - summed.operations[kind]),
        micro_batches,
        pipeline: Traffic {
            operations: std::array::from_fn(|k| stages.operations[k] - passed.operations[k]),
            bytes: std::array::from_fn(|k| stages.bytes[k] - passed.bytes[k]),
        },
    }
}

/// The groups of ranks that settings ask for.
pub fn groups(memory: &MemoryConfig, ranks: Arc<dyn Collective>) -> World {
    World::new(ranks)
        .with_sequence_parallel(memory.ulysses_sequence_parallel_size)
        .and_then(|world| world.with_tensor_parallel(memory.tensor_model_parallel_size))
        .and_then(|world| world.with_pipeline_stages(memory.pipeline_model_parallel_size))
        .expect("degrees that divide the ranks")
}

/// A rank's share of a model, where ranks share matrices, or the model with its stage.
pub fn own_share(decoder: &Decoder, world: &World) -> Decoder {
    if let Some(stage) = world.pipeline_stage() {
        return decoder.clone().with_stage(stage).expect("a stage");
    }
    match world.tensor_share() {
        Some(share) => decoder.training_shard(share).expect("a share"),
        None => decoder.clone(),
    }
}

/// The weights of a model in f64, by name, put together where ranks share its matrices.
pub fn whole_weights(learner: &Learner) -> BTreeMap<String, Vec<f64>> {
    let whole = learner.model.assembled(true).expect("whole weights");
    let decoder = whole.as_ref().unwrap_or(learner.decoder());
    let weights = decoder.params().map(|(spec, value)| {
        let values = value.download().expect("values").to_f64();
        (spec.name.clone(), values)
    });
    weights.collect()
}

/// A learner of a rank, its weights in their place.
pub fn learner(model: &Model, memory: &MemoryConfig, clip: Option<f64>, world: &World) -> Learner {
    let plan = memory.plan(model.decoder.arch()).expect("a plan");
    let optim = OptimConfig { lr: LR, clip_grad: clip, ..OptimConfig::default() };
    let runtime = runtime(model, memory, world);
    let decoder = own_share(&model.decoder, world);
    let mut learner = Learner::new(decoder, plan, optim, runtime);
    let placed = learner.model.set_residency(Residency::Pass);
    placed.expect("weights in their place");
    learner
}

/// A rank's part of the gradients of the first update.
fn gradients(model: &Model, rows: &[Sequence], memory: &MemoryConfig, world: &World) -> BTreeMap<String, Vec<f64>> {
    let learner = learner(model, memory, None, world);
    let (plan, runtime) = (&learner.model.plan, &learner.runtime);
    let mut decoder = learner.decoder().clone();
    let cut = train_cut(plan, &decoder);
    let batch = Batch::pack_for(rows, cut, world.data_size()).expect("every row fits");
    let all = batch.micros();
    let dealt = batch.deal(world.data_size());
    let own = dealt[world.data_rank()].iter().map(|&i| all[i].clone());
    let own: Vec<Vec<&Sequence>> = own.collect();
    let mut gradients = Gradients::planned(decoder.specs().count(), plan, runtime).for_decoder(&decoder);
    Executor::new(plan, runtime, 1.0)
        .with_rounds(rounds(plan, &dealt, Zero::Stage2))
        .backward(&mut decoder, &own, &Nll, &mut gradients, None)
        .expect("a backward pass");
    gradients.reduce(&decoder, runtime).expect("sums");
    let names: Vec<String> = decoder.specs().map(|spec| spec.name.clone()).collect();
    let device = decoder.device();
    let own = names.into_iter().enumerate().filter_map(|(index, name)| {
        let gradient = values(gradients.take(index)?.into_device(device));
        let gradient = match decoder.shard_slice(index) {
            Some(own) if memory.zero_stage == 0 => whole_gradient(world, &own, &gradient),
            _ => gradient,
        };
        Some((name, gradient))
    });
    own.collect()
}

/// A gradient of which each of the ranks that share matrices has a part.
fn whole_gradient(world: &World, own: &ShardSlice, part: &[f64]) -> Vec<f64> {
    let [rows, columns] = own.part.clone();
    let mut message = Vec::new();
    for (row, values) in rows.zip(part.chunks_exact(columns.len())) {
        for (column, value) in columns.clone().zip(values) {
            message.extend(((row * own.whole[1] + column) as u64).to_le_bytes());
            message.extend(value.to_le_bytes());
        }
    }
    let mut whole = vec![f64::NAN; own.whole[0] * own.whole[1]];
    for bytes in world.tensor_ranks().exchange(message).expect("parts") {
        for pair in bytes.chunks_exact(16) {
            let [place, value] = [&pair[..8], &pair[8..]].map(|b| b.try_into().expect("8 bytes"));
            let (place, value) = (u64::from_le_bytes(place), f64::from_le_bytes(value));
            let known = &mut whole[place as usize];
            // those that have the same part have the same bits
            assert!(known.is_nan() || known.to_bits() == value.to_bits(), "unlike copies");
            *known = value;
        }
    }
    whole
}

/// What one rank trains.
pub fn alone(model: &Model, rows: &[Sequence], memory: &MemoryConfig, clip: Option<f64>) -> Trained {
    trained(model, rows, memory, clip, Arc::new(Solo))
}

/// What the ranks of a world train: the same weights, losses and norms on all, to the bit.
pub fn on_ranks(
    model: &Model,
    rows: &[Sequence],
    memory: &MemoryConfig,
    clip: Option<f64>,
    size: usize,
) -> Vec<Trained> {
    let ranks = Threads::run(size, Settings::default(), |rank| trained(model, rows, memory, clip, rank));
    let ranks = ranks.into_iter();
    let ranks = ranks.map(|rank| rank.unwrap_or_else(|panic| panic!("{}: {panic}", model.name)));
    let ranks: Vec<Trained> = ranks.collect();
    for other in &ranks {
        assert!(other.steps == ranks[0].steps, "{}: unlike steps", model.name);
        assert!(other.weights == ranks[0].weights, "{}: unlike weights", model.name);
        assert!(other.scores == ranks[0].scores, "{}: unlike scores", model.name);
    }
    ranks
}

/// Whether ranks have trained what one rank trains.
pub fn assert_same(label: &str, memory: &MemoryConfig, found: &[Trained], expected: &Trained, tolerance: f64) {
    for (found, expected) in found[0].steps.iter().zip(&expected.steps) {
        assert_close(&format!("{label}: loss"), found[0], expected[0], tolerance);
        assert_close(&format!("{label}: norm"), found[1], expected[1], tolerance);
    }
    for (name, values) in &found[0].weights {
        let expected = &expected.weights[name];
        assert_gradient(&format!("{label}: {name}"), values, expected, tolerance);
    }
    for (found, expected) in found[0].scores.iter().zip(&expected.scores) {
        for (found, expected) in found.iter().zip(expected) {
            // read off in f32, of weights that are as near
            let label = format!("{label}: scores");
            assert_close(&label, f64::from(*found), f64::from(*expected), 1e-4);
        }
    }
    if memory.tensor_model_parallel_size > 1 && memory.zero_stage > 0 {
        // shards of parts
        return;
    }
    if memory.pipeline_model_parallel_size > 1 {
        // each stage has its own
        return;
    }
    for (name, expected) in &expected.gradients {
        let parts = found.iter().enumerate().map(|(rank, own)| {
            let partition = Partition::new(found.len(), rank);
            let part = own.gradients.get(name).cloned().unwrap_or_default();
            if memory.zero_stage == 0 {
                return if rank == 0 { part } else { Vec::new() };
            }
            assert_eq!(part.len(), partition.range(expected.len()).len(), "{label}: {name}");
            part
        });
        let whole: Vec<f64> = parts.flatten().collect();
        let label = format!("{label}: gradient of {name}");
        assert_gradient(&label, &whole, expected, tolerance);
    }
}

/// Elements that a rank has most of, of all parameters; and those of the largest unit, and of the largest layer or end.
pub fn share(model: &Model, size: usize) -> [u64; 3] {
    let partition = Partition::new(size, 0);
    let own = model.decoder.specs().filter(|spec| spec.trainable);
    let own = own.map(|spec| partition.range(spec.numel()).len() as u64).sum();
    let unit = |unit: &Unit| unit.specs.iter().map(|spec| spec.numel() as u64).sum::<u64>();
    let units: Vec<u64> = model.decoder.units().iter().map(unit).collect();
    let ends = units[0].max(units[units.len() - 1]);
    let layers = units[model.decoder.body()].chunks(2);
    let layers = layers.map(|halves| halves.iter().sum());
    [own, units.iter().copied().max().unwrap_or(0), layers.max().unwrap_or(0).max(ends)]
}
