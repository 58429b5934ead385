//! Several devices: what each of them holds. The trainer is data parallel with tensor or sequence parallelism or stages
//! of a pipeline, samples on groups that share matrices, and refuses the other combinations; `firebrick plan` takes all
//! degrees as options.
//!
//! With `D` data-, `T` tensor- and `S` sequence-parallel devices, the share of one device is:
//!
//! | bytes | share |
//! |---|---|
//! | weights | 1 / T, and 1 / (D · S) more under ZeRO-3 |
//! | gradients | 1 / T, and 1 / (D · S) more from ZeRO-2 on |
//! | masters and moments | 1 / T, and 1 / (D · S) more from ZeRO-1 on |
//! | activations between sublayers (d wide) | 1 / S |
//! | activations inside a sublayer (q, k, f wide) and scores | 1 / (S · T) |
//! | logits | 1 / T, of 1 / S of the scored tokens |
//! | queries, keys, values and what is mixed of them, once more for some heads and all tokens | 1 / S where S is above one |
//! | keys and values | 1 / (S · T) |
//! | sequences of a step | 1 / D; while they are sampled, 1 / (D · S · P) |
//!
//! A stage of `P` has the weights, gradients and state of its layers (`estimate::stages`), and what `P - s`
//! micro-batches keep on stage `s`, from 0; the policy is whole on every device while it samples, is loaded and is
//! saved.
//!
//! Under ZeRO-3 the weights of a segment are whole while it runs, and those of a model while it samples by itself.
//! Groups that share matrices while they sample hold their shares beside the weights that wait. What messages take on
//! their way is in `buffers`. `ZeRO`: arXiv:1910.02054. Tensor and sequence parallelism: arXiv:1909.08053,
//! arXiv:2205.05198, arXiv:2309.14509.

mod buffers;
mod checks;

use crate::Zero;
use crate::estimate::Workload;
use firebrick_arch::{PipelineStage, TensorShare};
use firebrick_spec::{Backend, Cluster, LinkKind};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::fmt;

/// Devices along each kind of parallelism; one device by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, SmartDefault, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parallel {
    /// Replicas that each take a share of the sequences.
    #[default(1)]
    pub data: u64,
    /// State that the replicas shard.
    pub zero: Zero,
    /// Devices that each hold a share of every matrix.
    #[default(1)]
    pub tensor: u64,
    /// Stages that the layers are divided into, each on devices of its own.
    #[default(1)]
    pub pipeline: u64,
    /// Devices that each take a share of every sequence (Ulysses).
    #[default(1)]
    pub sequence: u64,
    /// Devices that each take a share of every sequence of the critic's, where that is another number than `sequence`
    /// (verl's `critic.ulysses_sequence_parallel_size`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub critic_sequence: Option<u64>,
    /// Devices that share every matrix while the policy samples, where that is another number than `tensor` (verl's
    /// `rollout.tensor_model_parallel_size`): all devices are then such groups, each with prompts of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout_tensor: Option<u64>,
    /// True if NCCL moves what the devices send each other, from GPU to GPU: buffers of messages are then in their
    /// memory. Otherwise values pass through the host's.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub nccl: bool,
    /// Machines and links of the devices. Without it messages take no time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<Cluster>,
}

impl Parallel {
    /// Places the devices in machines. If they are NVIDIA GPUs and links are theirs, NCCL uses them.
    #[must_use]
    pub fn on(self, cluster: Cluster, backend: Backend) -> Self {
        let through_host = matches!(cluster.link.kind, LinkKind::Host | LinkKind::Measured);
        Self { nccl: backend == Backend::Cuda && !through_host, cluster: Some(cluster), ..self }
    }

    /// Devices in all.
    pub fn devices(&self) -> u64 {
        [self.tensor, self.pipeline, self.sequence].into_iter().fold(self.data, u64::saturating_mul)
    }

    /// True if there is more than one device.
    pub fn is_several(&self) -> bool {
        self.devices() > 1
    }

    /// True if the trainer runs these degrees: data-parallel ones with tensor- or sequence-parallel ones or stages of a
    /// pipeline, and groups that sample together, which stages do not. It refuses the others, which are arithmetic.
    pub fn is_supported(&self) -> bool {
        let sequence = self.sequence.max(self.critic_sequence.unwrap_or(1));
        let kinds = [self.tensor, sequence, self.pipeline];
        let alone = self.pipeline == 1 || self.rollout_tensor.is_none_or(|n| n == 1);
        kinds.iter().filter(|&&n| n > 1).count() <= 1 && alone
    }

    /// True if the trainer shares a workload's matrices out, and divides its layers, as these degrees say.
    pub fn trains(&self, workload: &Workload) -> bool {
        let divides = |arch| PipelineStage::check(arch, self.pipeline as usize).is_ok();
        let models = std::iter::once(&workload.arch).chain(workload.critic_arch());
        models.into_iter().all(divides) && self.trains_matrices(workload)
    }

    fn trains_matrices(&self, workload: &Workload) -> bool {
        let drops = workload.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        self.tensor == 1 || !drops && TensorShare::check_training(&workload.arch, self.tensor as usize).is_ok()
    }

    /// True if a workload samples on such groups where these degrees ask for them.
    pub fn samples(&self, workload: &Workload) -> bool {
        let together = self.rollout_tensor.unwrap_or(self.tensor);
        together == 1
            || workload.prepack.quantization.is_none() && TensorShare::check(&workload.arch, together as usize).is_ok()
    }

    /// True if devices share matrices while they sample in other groups than in training: each then holds its share
    /// besides.
    pub(crate) fn samples_on_groups(&self) -> bool {
        self.rollout_tensor.is_some_and(|n| n != self.tensor)
    }

    /// The devices as they sample: those that share sequences or layers in training have sequences of their own.
    #[must_use]
    pub fn sampling(self) -> Self {
        match self.rollout_tensor {
            // each stage has the whole policy then, and prompts of its own
            None => Self {
                data: self.replicas().saturating_mul(self.pipeline),
                pipeline: 1,
                sequence: 1,
                critic_sequence: None,
                ..self
            },
            Some(tensor) => Self {
                data: self.devices() / tensor.max(1),
                zero: Zero::Off,
                tensor,
                pipeline: 1,
                sequence: 1,
                critic_sequence: None,
                rollout_tensor: None,
                ..self
            },
        }
    }

    /// The devices as they work for the critic.
    #[must_use]
    pub fn critic(self) -> Self {
        let Some(sequence) = self.critic_sequence else {
            return self;
        };
        Self { data: self.replicas() / sequence.max(1), sequence, critic_sequence: None, ..self }
    }

    /// Devices with the same weights, which `ZeRO` shards among them: sequence-parallel ones too.
    pub fn replicas(&self) -> u64 {
        self.data.saturating_mul(self.sequence)
    }

    /// True if devices shard the update.
    pub(crate) fn shares(&self) -> bool {
        self.zero > Zero::Off && self.replicas() > 1
    }

    /// True if they sum a segment's gradients as soon as these are complete, and keep shares of them.
    pub(crate) fn reduces_each_pass(&self) -> bool {
        self.zero >= Zero::Stage2 && self.replicas() > 1
    }

    /// True if they shard weights, which are gathered where they are used.
    pub(crate) fn gathers(&self) -> bool {
        self.zero == Zero::Stage3 && self.replicas() > 1
    }

    /// The devices without `ZeRO`, for models that are not trained.
    pub(crate) fn replicated(self) -> Self {
        Self { zero: Zero::Off, ..self }
    }

    /// One device's share of the weights.
    pub(crate) fn weights(&self, bytes: u64) -> u64 {
        self.state(bytes, Zero::Stage3)
    }

    /// One device's share of the gradients.
    pub(crate) fn gradients(&self, bytes: u64) -> u64 {
        self.state(bytes, Zero::Stage2)
    }

    /// One device's share of the optimizer's state.
    pub(crate) fn optimizer(&self, bytes: u64) -> u64 {
        self.state(bytes, Zero::Stage1)
    }

    fn state(&self, bytes: u64, from: Zero) -> u64 {
        let replicas = if self.zero >= from { self.replicas() } else { 1 };
        bytes.div_ceil(self.tensor * replicas)
    }

    /// One device's share of activations between sublayers.
    pub(crate) fn between(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.sequence)
    }

    /// One device's share of activations inside a sublayer, or of keys and values.
    pub(crate) fn inside(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.sequence * self.tensor)
    }

    /// One device's share of sequences or prompts.
    pub fn sequences(&self, count: u64) -> u64 {
        count.div_ceil(self.data)
    }

    /// One device's share of a matrix, or of the logits of its tokens.
    pub fn tensor_share(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.tensor)
    }

    /// Copies of each key head among sequence-parallel devices, so that each of them has one.
    pub(crate) fn key_copies(&self, kv_heads: u64) -> u64 {
        let divides = |copies: &u64| (kv_heads * copies).is_multiple_of(self.sequence);
        (1..=self.sequence).find(divides).unwrap_or(1)
    }
}

impl fmt::Display for Parallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stage = match self.zero {
            Zero::Off => "",
            Zero::Stage1 => " (ZeRO-1)",
            Zero::Stage2 => " (ZeRO-2)",
            Zero::Stage3 => " (ZeRO-3)",
        };
        let degrees = [
            ("data", self.data, stage),
            ("tensor", self.tensor, ""),
            ("pipeline", self.pipeline, ""),
            ("sequence", self.sequence, ""),
        ];
        let several: Vec<String> = degrees
            .iter()
            .filter(|(_, n, _)| *n > 1)
            .map(|(name, n, more)| format!("{name} {n}{more}"))
            .chain(self.critic_sequence.map(|n| format!("sequence {n} of the critic")))
            .chain(self.rollout_tensor.map(|n| format!("tensor {n} in sampling")))
            .collect();
        match self.devices() {
            1 => f.write_str("1 device"),
            n => write!(f, "{n} devices: {}", several.join(" x ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stage_of_zero_shares_out_one_thing_more() {
        let of = |zero| {
            let p = Parallel { data: 4, zero, ..Parallel::default() };
            [p.optimizer(400), p.gradients(400), p.weights(400)]
        };
        assert_eq!(of(Zero::Off), [400, 400, 400]);
        assert_eq!(of(Zero::Stage1), [100, 400, 400]);
        assert_eq!(of(Zero::Stage2), [100, 100, 400]);
        assert_eq!(of(Zero::Stage3), [100, 100, 100]);
    }

    #[test]
    fn tensor_parallelism_divides_every_state() {
        let p = Parallel { tensor: 2, pipeline: 4, ..Parallel::default() };
        assert_eq!([p.weights(800), p.gradients(800), p.optimizer(800)], [400; 3]);
        assert_eq!(p.to_string(), "8 devices: tensor 2 x pipeline 4");
    }

    #[test]
    fn stages_of_a_pipeline_sample_as_replicas_and_are_run_alone_or_with_replicas() {
        let p = Parallel { data: 2, pipeline: 4, zero: Zero::Stage1, ..Parallel::default() };
        let sampling = p.sampling();
        assert_eq!([sampling.data, sampling.pipeline], [8, 1]);
        assert!(p.is_supported());
        for other in
            [Parallel { tensor: 2, ..p }, Parallel { sequence: 2, ..p }, Parallel { rollout_tensor: Some(2), ..p }]
        {
            assert!(!other.is_supported(), "{other}");
        }
    }

    #[test]
    fn a_critic_may_share_sequences_over_groups_of_another_size() {
        let p = Parallel { data: 4, sequence: 2, critic_sequence: Some(4), zero: Zero::Stage1, ..Parallel::default() };
        let critic = p.critic();
        assert_eq!([critic.data, critic.sequence, critic.replicas()], [2, 4, 8]);
        assert_eq!(p.to_string(), "8 devices: data 4 (ZeRO-1) x sequence 2 x sequence 4 of the critic");
        assert!(p.is_supported() && !Parallel { tensor: 2, sequence: 1, ..p }.is_supported());
        assert_eq!(Parallel { critic_sequence: None, ..p }.critic().sequence, 2);
    }

    #[test]
    fn sequence_parallelism_divides_activations_and_leaves_weights_whole() {
        let p = Parallel { sequence: 4, ..Parallel::default() };
        assert_eq!([p.between(400), p.inside(400)], [100; 2]);
        assert_eq!([p.weights(400), p.gradients(400), p.optimizer(400)], [400; 3]);
        let shared = Parallel { data: 2, zero: Zero::Stage3, ..p };
        assert_eq!([shared.weights(400), shared.optimizer(400)], [50; 2]);
        assert!(shared.is_supported());
        let sampling = shared.sampling();
        assert_eq!([sampling.data, sampling.sequence], [8, 1]);
        assert_eq!([1, 2, 3, 4].map(|heads| p.key_copies(heads)), [4, 2, 4, 1]);
    }
}
