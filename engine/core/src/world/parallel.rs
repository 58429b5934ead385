//! Degrees of parallelism: how the ranks of a run form groups. Ranks of one group are consecutive, but for the stages of
//! a pipeline, which are furthest apart.

use super::World;
use super::group::{Dim, Group, Layout, Mesh};
use crate::{Error, Result};
use burn::tensor::Tensor;
use firebrick_arch::{PipelineStage, TensorShare};
use firebrick_backends::collective::{CollectiveError, Flat, Traffic};
use firebrick_models::{TensorGroup, TensorRanks};
use std::sync::Arc;

const SEQUENCE_KEY: &str = "memory.ulysses_sequence_parallel_size";
const CRITIC_KEY: &str = "critic.ulysses_sequence_parallel_size";
const TENSOR_KEY: &str = "memory.tensor_model_parallel_size";
const PIPELINE_KEY: &str = "memory.pipeline_model_parallel_size";
const SAMPLING_KEY: &str = "rollout.tensor_model_parallel_size";

/// Groups and degrees. All ranks call the methods that form groups together; these fail if the degree does not divide
/// the ranks or excludes another one, or if a rank exits.
impl World {
    /// Ranks that divide the rows of every sequence: rank r is the `r % degree`th of group `r / degree`.
    ///
    /// # Errors
    /// See above.
    pub fn sharing_sequences(self, degree: usize) -> Result<Self> {
        self.check_degree(SEQUENCE_KEY, degree, "groups")?;
        let mut world = self.split(Dim::Sequence, degree, Layout::Consecutive(degree))?;
        world.share_with_critic();
        Ok(world)
    }

    /// Ranks that divide the rows of the critic's sequences, after all other degrees.
    ///
    /// # Errors
    /// See above.
    pub fn sharing_critic_sequences(mut self, degree: usize) -> Result<Self> {
        self.check_degree(CRITIC_KEY, degree, "groups")?;
        let (tensor, stages) = (self.tensor_size(), self.stages());
        if degree > 1 && tensor * stages > 1 {
            return Err(Error::Ranks(format!(
                "{CRITIC_KEY} is {degree}, {TENSOR_KEY} {tensor} and {PIPELINE_KEY} {stages}: ranks shard sequences, \
                 matrices or layers; set two of them to 1"
            )));
        }
        if degree == self.group(Dim::Sequence).size() {
            self.share_with_critic();
            return Ok(self);
        }
        self.split(Dim::CriticSequence, degree, Layout::Consecutive(degree))
    }

    /// Ranks that divide every matrix in sampling: rank r is the `r % degree`th of group `r / degree`.
    ///
    /// # Errors
    /// See above.
    pub fn sampling_together(self, degree: usize) -> Result<Self> {
        self.check_degree(SAMPLING_KEY, degree, "groups")?;
        self.split(Dim::Sampling, degree, Layout::Consecutive(degree))
    }

    /// Ranks that divide every matrix in training: rank r is the `r % degree`th of group `r / degree`.
    ///
    /// # Errors
    /// See above.
    pub fn sharing_matrices(self, degree: usize) -> Result<Self> {
        self.check_degree(TENSOR_KEY, degree, "groups")?;
        let sequence = self.sequence_size();
        if degree > 1 && sequence > 1 {
            return Err(Error::Ranks(format!(
                "{TENSOR_KEY} is {degree} and {SEQUENCE_KEY} is {sequence}: ranks shard matrices or sequences, not \
                 both; set one of them to 1"
            )));
        }
        if degree == 1 {
            return Ok(self);
        }
        let world = self.split(Dim::Tensor, degree, Layout::Consecutive(degree))?;
        world.split(Dim::Replicas, degree, Layout::Strided(degree))
    }

    /// Ranks that divide the layers: with N ranks per stage, rank r has stage `r / N` and data-parallel index `r % N`.
    ///
    /// # Errors
    /// See above.
    pub fn in_stages(self, stages: usize) -> Result<Self> {
        self.check_degree(PIPELINE_KEY, stages, "stages")?;
        let (tensor, sequence) = (self.tensor_size(), self.sequence_size());
        if stages > 1 && sequence * tensor > 1 {
            return Err(Error::Ranks(format!(
                "{PIPELINE_KEY} is {stages}, {TENSOR_KEY} {tensor} and {SEQUENCE_KEY} {sequence}: ranks shard layers, \
                 matrices or sequences; set two of them to 1"
            )));
        }
        if stages == 1 {
            return Ok(self);
        }
        let replicas = self.size() / stages;
        let world = self.split(Dim::Pipeline, stages, Layout::Strided(replicas))?;
        world.split(Dim::Replicas, stages, Layout::Consecutive(replicas))
    }

    /// Gives the critic's sequences the groups of the other models'.
    fn share_with_critic(&mut self) {
        let group = self.groups[Dim::Sequence as usize].clone();
        self.groups[Dim::CriticSequence as usize] = group;
    }

    fn check_degree(&self, key: &str, degree: usize, parts: &str) -> Result<()> {
        let ranks = self.size();
        if degree > 0 && ranks.is_multiple_of(degree) {
            return Ok(());
        }
        Err(Error::Ranks(format!(
            "{key} is {degree}, which does not divide this run's {ranks} ranks into {parts}; start a multiple of {} \
             ranks (docs/guides/multi_gpu.md), or set it to a number that divides {ranks}",
            degree.max(1)
        )))
    }

    fn split(mut self, dim: Dim, degree: usize, layout: Layout) -> Result<Self> {
        let group = (degree > 1).then(|| Mesh::new(&self.all, layout));
        self.groups[dim as usize] = group.transpose()?;
        Ok(self)
    }

    /// This rank's group in a dimension.
    #[must_use]
    pub fn group(&self, dim: Dim) -> Group<'_> {
        Group(self.groups[dim as usize].as_ref())
    }

    /// The ranks that divide the rows of the current model's sequences.
    #[must_use]
    pub fn sequence_group(&self) -> Group<'_> {
        self.group(if self.for_critic { Dim::CriticSequence } else { Dim::Sequence })
    }

    /// The ranks that have the other parts of this rank's model: shards of matrices, or stages.
    #[must_use]
    pub fn model_group(&self) -> Group<'_> {
        self.group(if self.stages() > 1 { Dim::Pipeline } else { Dim::Tensor })
    }

    /// The same ranks, for the critic's sequences.
    #[must_use]
    pub fn of_critic(&self) -> Self {
        Self { for_critic: true, ..self.clone() }
    }

    /// The ranks that have the same part of the model as this one; operations are between these.
    #[must_use]
    pub fn replicas(&self) -> Self {
        Self { through: self.groups[Dim::Replicas as usize].clone(), ..self.clone() }
    }

    /// The key of [`sequence_size`](Self::sequence_size).
    #[must_use]
    pub fn sequence_key(&self) -> &'static str {
        let policy = self.group(Dim::Sequence).size();
        if self.for_critic && self.sequence_size() != policy { CRITIC_KEY } else { SEQUENCE_KEY }
    }

    /// Number of ranks that divide every sequence of the current model; 1 if none do.
    #[must_use]
    pub fn sequence_size(&self) -> usize {
        self.sequence_group().size()
    }

    /// Number of ranks that divide every matrix in training; 1 if none do.
    #[must_use]
    pub fn tensor_size(&self) -> usize {
        self.group(Dim::Tensor).size()
    }

    /// Number of pipeline stages; 1 if each rank has all layers.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.group(Dim::Pipeline).size()
    }

    /// This rank's share of every matrix in training, if ranks divide them.
    #[must_use]
    pub fn tensor_share(&self) -> Option<TensorShare> {
        let group = self.group(Dim::Tensor);
        (group.size() > 1).then(|| TensorShare::new(group.rank(), group.size()))
    }

    /// This rank's pipeline stage, if there are several.
    #[must_use]
    pub fn pipeline_stage(&self) -> Option<PipelineStage> {
        let group = self.group(Dim::Pipeline);
        (group.size() > 1).then(|| PipelineStage::new(group.rank(), group.size()))
    }

    /// Number of groups that divide a batch.
    #[must_use]
    pub fn data_size(&self) -> usize {
        self.size() / (self.sequence_size() * self.tensor_size() * self.stages())
    }

    /// This rank's group among [`data_size`](Self::data_size), from 0.
    #[must_use]
    pub fn data_rank(&self) -> usize {
        self.rank() / (self.sequence_size() * self.tensor_size()) % self.data_size()
    }

    /// Number of ranks that sample together; 1 if each samples alone.
    #[must_use]
    pub fn sampling_size(&self) -> usize {
        self.group(Dim::Sampling).size()
    }

    /// This rank's index among those that it samples with, from 0.
    #[must_use]
    pub fn sampling_rank(&self) -> usize {
        self.rank() % self.sampling_size()
    }

    /// Number of groups that sample.
    #[must_use]
    pub fn sampling_groups(&self) -> usize {
        self.size() / self.sampling_size()
    }

    /// This rank's group among [`sampling_groups`](Self::sampling_groups), from 0.
    #[must_use]
    pub fn sampling_group(&self) -> usize {
        self.rank() / self.sampling_size()
    }

    /// The ranks that this one samples with, as the model's layers need them; `None` if it samples alone.
    #[must_use]
    pub fn tensor_group(&self) -> Option<TensorGroup> {
        let mesh = self.groups[Dim::Sampling as usize].clone()?;
        Some(TensorGroup::new(Arc::new(SamplingRanks { mesh, rank: self.sampling_rank() })))
    }

    /// Messages in training to the ranks that have the other parts of this rank's model, and to its replicas.
    #[must_use]
    pub fn parts_traffic(&self) -> Traffic {
        self.model_group().traffic() + self.group(Dim::Replicas).traffic()
    }

    /// Messages to the ranks that divide sequences, those of the critic included.
    #[must_use]
    pub fn sequence_traffic(&self) -> Traffic {
        let meshes = self.meshes().filter(|(dim, _)| matches!(dim, Dim::Sequence | Dim::CriticSequence));
        meshes.fold(Traffic::default(), |sum, (_, mesh)| sum + mesh.traffic())
    }
}

/// The group of a rank that samples.
#[derive(Debug)]
struct SamplingRanks {
    mesh: Arc<Mesh>,
    rank: usize,
}

impl TensorRanks for SamplingRanks {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.mesh.ranks().size()
    }

    fn all_reduce(&self, values: Tensor<1>) -> Result<Tensor<1>, firebrick_backends::Error> {
        self.mesh.run(|ranks| ranks.all_reduce_tensor(values))
    }

    fn all_gather(&self, values: Tensor<1>) -> Result<Tensor<1>, firebrick_backends::Error> {
        self.mesh.run(|ranks| ranks.all_gather_tensor(values))
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        let gathered = self.mesh.run(|ranks| ranks.all_gather(Flat::Bytes(bytes)))?;
        Ok(gathered.as_bytes().to_vec())
    }
}

#[cfg(test)]
mod tests;
