//! The model folders: a decoder, its manifest, and the rows its goldens were computed on.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Int, Tensor, TensorData};
use firebrick_engine::batch::DropoutStep;
use firebrick_engine::executor::{Executor, Gradients, HeadLoss, Residency, ResidentModel, Runtime};
use firebrick_engine::objective::{LossSums, MicroScores};
use firebrick_engine::plan::{MemoryConfig, ModelPlan, Role};
use firebrick_engine::sequence::Sequence;
use firebrick_models::decoder::Param;
use firebrick_models::unit::ParamSpec;
use firebrick_models::{Checkpoint, Decoder};
use serde::Deserialize;

use super::golden::Golden;
use super::tolerance::{F32_ELSEWHERE, LINEAR_ATTENTION};
use super::{device, read, values};

/// What a manifest says that the tests go by.
#[derive(Deserialize)]
pub struct Manifest {
    pub loss: Option<f64>,
    pub grad_norm: Option<f64>,
    pub greedy: Option<Greedy>,
    /// By sample: whether a forward with the cache gives other tokens than one without.
    #[serde(default)]
    pub cache_changes_greedy: Vec<bool>,
}

/// Greedy continuations, each computed alone.
#[derive(Deserialize)]
pub struct Greedy {
    pub max_new_tokens: usize,
    pub eos_ignored: bool,
    pub samples: Vec<GreedySample>,
    /// By sample: whether all of them in one left-padded batch give the same.
    pub left_padded_batch_gives_same: Vec<bool>,
}

#[derive(Deserialize)]
pub struct GreedySample {
    pub prompt_ids: Vec<u32>,
    pub new_ids: Vec<u32>,
    pub logprobs: Vec<f64>,
}

impl Manifest {
    /// Whether a token's scores depend on nothing but the tokens before it: not on the rest of the batch,
    /// and not on where a forward with the cache was cut.
    pub fn is_local(&self) -> bool {
        let padded = self.greedy.as_ref().map(|g| &g.left_padded_batch_gives_same);
        padded.is_none_or(|same| same.iter().all(|&s| s)) && !self.cache_changes_greedy.contains(&true)
    }
}

/// The model whose layers' matrices are what 8 bits leave of them: each output's numbers are the nearest of 255 even
/// steps up to its largest.
pub fn in_8_bits(decoder: &Decoder) -> Decoder {
    let round = |row: &[f32]| {
        let step = row.iter().fold(0.0_f32, |most, w| most.max(w.abs())) / 127.0;
        let rounded = row.iter().map(|w| step * (w / step).round_ties_even());
        rounded.collect::<Vec<_>>()
    };
    let mut rounded = decoder.clone();
    let all = rounded.update(|_, spec, param| match param {
        Param::Device(w) if spec.slot.is_linear() => {
            let (shape, place) = (w.dims(), (&w.device(), w.dtype()));
            let values: Vec<f32> = w.cast(DType::F32).try_into_vec_as().expect("values");
            let values: Vec<f32> = values.chunks(shape[1]).flat_map(round).collect();
            let w = Tensor::from_data(TensorData::new(values, shape), place);
            Ok::<_, firebrick_models::Error>(Param::Device(w))
        }
        other => Ok(other),
    });
    all.expect("weights on the device");
    rounded
}

/// A checkpoint folder with goldens.
pub struct Model {
    pub name: String,
    pub dir: PathBuf,
    pub manifest: Manifest,
    pub decoder: Decoder,
    /// The optimizer step whose dropout its backward passes have, where it has adapters with dropout.
    pub dropout: DropoutStep,
    /// Coefficient of the routers' auxiliary loss in its backward passes.
    pub router_aux_loss_coef: f64,
}

impl Model {
    pub fn load(dir: &Path) -> Self {
        let name = dir.file_name().expect("a name").to_string_lossy().into_owned();
        let checkpoint = Checkpoint::open(dir).unwrap_or_else(|error| panic!("{error}"));
        Self {
            decoder: checkpoint.load(&device()).unwrap_or_else(|error| panic!("{error}")),
            manifest: read(&dir.join("golden/manifest.json")),
            dir: dir.to_owned(),
            dropout: DropoutStep::default(),
            router_aux_loss_coef: 0.0,
            name,
        }
    }

    /// A file of its `golden` folder.
    pub fn golden(&self, file: &str) -> Golden {
        Golden::open(&self.dir.join("golden").join(file))
    }

    /// Its golden gradients, where it has them.
    pub fn golden_gradients(&self) -> Option<Golden> {
        let path = self.dir.join("golden/grads.safetensors");
        path.is_file().then(|| Golden::open(&path))
    }

    /// How far numbers of transformers may be away: linear attention has one form for training and another for
    /// sampling, in f32 both.
    pub fn tolerance(&self) -> f64 {
        match self.decoder.arch().delta_net {
            Some(_) => LINEAR_ATTENTION,
            None => F32_ELSEWHERE,
        }
    }

    /// Settings with small head chunks.
    pub fn plain(&self, head_rows: usize) -> ModelPlan {
        memory(head_rows).plan(self.decoder.arch()).expect("a plan")
    }

    /// The same with every layer's input kept instead of its graph.
    pub fn checkpointed(&self, head_rows: usize, blocks: usize) -> ModelPlan {
        let memory = MemoryConfig { gradient_checkpointing: true, checkpoint_every: blocks, ..memory(head_rows) };
        memory.plan(self.decoder.arch()).expect("a plan")
    }

    pub fn ids(&self, rows: &[i64]) -> Tensor<1, Int> {
        Tensor::from_data(TensorData::new(rows.to_vec(), [rows.len()]), self.decoder.device())
    }

    /// The decoder with its weights where a plan wants them.
    fn placed(&self, plan: &ModelPlan, runtime: &Runtime) -> ResidentModel {
        let decoder = self.decoder.clone();
        let mut placed = ResidentModel::new(decoder, plan.clone(), Role::Policy, &runtime.accounts);
        placed.set_residency(Residency::Pass).expect("weights in their place");
        placed
    }

    fn runtime(&self, plan: &ModelPlan) -> Runtime {
        Runtime::new(self.decoder.device()).with_prefetch(plan.prefetch)
    }

    /// Log-probs and entropies of one micro-batch.
    pub fn score(&self, plan: &ModelPlan, temperature: f64, rows: &[Sequence]) -> MicroScores {
        let runtime = self.runtime(plan);
        let placed = self.placed(plan, &runtime);
        let executor = Executor::new(plan, &runtime, temperature);
        let micro = vec![rows.iter().collect()];
        let scores = executor.score(&placed.decoder, &micro);
        scores.expect("scoring").remove(0)
    }

    /// Loss and gradients by parameter name of micro-batches that add up to one step.
    pub fn backward<'l>(
        &self,
        plan: &ModelPlan,
        temperature: f64,
        loss: impl Into<HeadLoss<'l>>,
        micros: &[Vec<&Sequence>],
    ) -> (LossSums, BTreeMap<String, Vec<f64>>) {
        let runtime = self.runtime(plan);
        self.backward_with(&runtime, plan, temperature, loss, micros)
    }

    /// The same, with accounts to look at afterwards.
    pub fn backward_with<'l>(
        &self,
        runtime: &Runtime,
        plan: &ModelPlan,
        temperature: f64,
        loss: impl Into<HeadLoss<'l>>,
        micros: &[Vec<&Sequence>],
    ) -> (LossSums, BTreeMap<String, Vec<f64>>) {
        let mut placed = self.placed(plan, runtime);
        let decoder = &mut placed.decoder;
        let mut gradients = Gradients::planned(decoder.specs().count(), plan, runtime);
        let sums = Executor::new(plan, runtime, temperature)
            .with_dropout(self.dropout)
            .with_router_loss(self.router_aux_loss_coef, micros.iter().flatten().map(|s| s.tokens.len()).sum())
            .backward(decoder, micros, loss, &mut gradients, None)
            .unwrap_or_else(|error| panic!("{}: {error}", self.name));
        let named = decoder.specs().enumerate().filter_map(|(i, spec)| {
            let gradient = gradients.take(i)?.into_device(decoder.device());
            Some(by_tensor(spec, &values(gradient)))
        });
        (sums, named.flatten().collect())
    }
}

/// The values of a parameter by the names of the tensors that a checkpoint has of it.
pub fn by_tensor(spec: &ParamSpec, values: &[f64]) -> Vec<(String, Vec<f64>)> {
    let mut rest = values;
    let own = spec.tensors().into_iter().map(|tensor| {
        let (values, after) = rest.split_at(tensor.numel());
        rest = after;
        let mut values = values.to_vec();
        tensor.into_checkpoint(&mut values);
        (tensor.name, values)
    });
    own.collect()
}

fn memory(head_rows: usize) -> MemoryConfig {
    MemoryConfig { head_rows, share_prefix: false, ..MemoryConfig::default() }
}

/// The real tokens of padded rows.
pub fn unpadded(ids: &[Vec<i64>], mask: &[Vec<i64>]) -> Vec<Vec<u32>> {
    let row = |(ids, mask): (&Vec<i64>, &Vec<i64>)| {
        let real = ids.iter().zip(mask).filter(|(_, m)| **m == 1);
        real.map(|(&id, _)| u32::try_from(id).expect("a token id")).collect()
    };
    ids.iter().zip(mask).map(row).collect()
}

/// The golden rows with every position scored, the last one for its entropy alone.
pub fn scored_rows(golden: &Golden) -> Vec<Sequence> {
    let rows = unpadded(&golden.int_rows("input_ids_right"), &golden.int_rows("attention_mask_right"));
    rows.into_iter()
        .map(|tokens| Sequence { positions: (0..tokens.len()).collect(), tokens, ..Sequence::default() })
        .collect()
}

/// The golden rows weighted for the mean negative log-likelihood over their targets.
pub fn nll_rows(golden: &Golden) -> Vec<Sequence> {
    let mut rows = scored_rows(golden);
    for row in &mut rows {
        row.positions.pop();
    }
    let targets: usize = rows.iter().map(|row| row.positions.len()).sum();
    for row in &mut rows {
        row.columns.weight = Some(vec![1.0 / targets as f64; row.positions.len()]);
    }
    rows
}
