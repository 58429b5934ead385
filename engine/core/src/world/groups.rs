//! Groups of ranks: they shard sequences (Ulysses, arXiv:2309.14509), matrices in training or sampling (Shoeybi et al.,
//! 2019, arXiv:1909.08053), or layers in pipeline stages (Huang et al., 2019, arXiv:1811.06965). Groups of one kind
//! divide the batch, and ranks with the same part of a model shard its state with `ZeRO`.

use super::World;
use super::mesh::{Mesh, ModelGroups};
use crate::{Error, Result};
use firebrick_arch::{PipelineStage, TensorShare};
use firebrick_backends::collective::Traffic;
use firebrick_models::TensorGroup;
use std::sync::Arc;

const SEQUENCES: &str = "memory.ulysses_sequence_parallel_size";
const CRITIC_SEQUENCES: &str = "critic.ulysses_sequence_parallel_size";
const MATRICES: &str = "memory.tensor_model_parallel_size";
const STAGES: &str = "memory.pipeline_model_parallel_size";
const SAMPLING: &str = "rollout.tensor_model_parallel_size";

impl World {
    /// Splits sequences over groups of `degree` consecutive ranks: rank r is number `r % degree` of group
    /// `r / degree`. A collective call, as the other `with_…`.
    ///
    /// # Errors
    /// If the degree does not divide the ranks, or a rank is gone.
    pub fn with_sequence_parallel(mut self, degree: usize) -> Result<Self> {
        self.check_degree(SEQUENCES, degree, "groups")?;
        self.sequences = self.consecutive(degree)?;
        self.critic_sequences = self.sequences.clone();
        Ok(self)
    }

    /// Splits the critic's sequences over groups of another size. Called after the methods of the other degrees.
    ///
    /// # Errors
    /// If the degree does not divide the ranks, ranks share matrices or layers, or a rank is gone.
    pub fn with_critic_sequence_parallel(mut self, degree: usize) -> Result<Self> {
        self.check_degree(CRITIC_SEQUENCES, degree, "groups")?;
        let (tensor, stages) = (self.tensor_size(), self.stages());
        if degree > 1 && tensor * stages > 1 {
            return Err(Error::Ranks(format!(
                "{CRITIC_SEQUENCES} is {degree}, {MATRICES} {tensor} and {STAGES} {stages}: ranks shard sequences, \
                 matrices or layers; set two of them to 1"
            )));
        }
        let same = degree == self.sequence_size();
        self.critic_sequences = if same { self.sequences.clone() } else { self.consecutive(degree)? };
        Ok(self)
    }

    /// Shards matrices over groups of `degree` consecutive ranks: rank r is number `r % degree` of group
    /// `r / degree`.
    ///
    /// # Errors
    /// If the degree does not divide the ranks, ranks share sequences, or a rank is gone.
    pub fn with_tensor_parallel(mut self, degree: usize) -> Result<Self> {
        self.check_degree(MATRICES, degree, "groups")?;
        let sequences = self.sequence_size();
        if degree > 1 && sequences > 1 {
            return Err(Error::Ranks(format!(
                "{MATRICES} is {degree} and {SEQUENCES} is {sequences}: ranks shard matrices or sequences, not both; set \
                 one of them to 1"
            )));
        }
        self.matrices = None;
        if let Some(group) = self.consecutive(degree)? {
            self.matrices = Some(ModelGroups { group, replicas: Arc::new(Mesh::across(&self.all, degree)?) });
        }
        Ok(self)
    }

    /// Splits layers into pipeline stages: with N ranks per stage, rank r has stage `r / N`, and is number `r % N` of
    /// its data-parallel ranks.
    ///
    /// # Errors
    /// If the stages do not divide the ranks, ranks share sequences or matrices, or a rank is gone.
    pub fn with_pipeline_stages(mut self, stages: usize) -> Result<Self> {
        self.check_degree(STAGES, stages, "stages")?;
        let (tensor, sequences) = (self.tensor_size(), self.sequence_size());
        if stages > 1 && sequences * tensor > 1 {
            return Err(Error::Ranks(format!(
                "{STAGES} is {stages}, {MATRICES} {tensor} and {SEQUENCES} {sequences}: ranks shard layers, matrices or \
                 sequences; set two of them to 1"
            )));
        }
        self.stages = None;
        if stages > 1 {
            let each = self.size() / stages;
            self.stages = Some(ModelGroups {
                group: Arc::new(Mesh::across(&self.all, each)?),
                replicas: Arc::new(Mesh::new(&self.all, each)?),
            });
        }
        Ok(self)
    }

    /// Shards matrices in sampling over groups of `degree` consecutive ranks, independently of training.
    ///
    /// # Errors
    /// If the degree does not divide the ranks, or a rank is gone.
    pub fn with_rollout_tensor_parallel(mut self, degree: usize) -> Result<Self> {
        self.check_degree(SAMPLING, degree, "groups")?;
        self.sampling = self.consecutive(degree)?;
        Ok(self)
    }

    /// Refuses a degree that does not divide the ranks.
    fn check_degree(&self, key: &str, degree: usize, parts: &str) -> Result<()> {
        let ranks = self.size();
        if degree > 0 && ranks.is_multiple_of(degree) {
            return Ok(());
        }
        Err(Error::Ranks(format!(
            "{key} is {degree}, which does not divide this run's {ranks} ranks into {parts}; start a multiple of {} ranks \
             (docs/guides/multi_gpu.md), or set it to a number that divides {ranks}",
            degree.max(1)
        )))
    }

    /// Groups of `degree` consecutive ranks, on all ranks together; `None` if each is alone.
    fn consecutive(&self, degree: usize) -> Result<Option<Arc<Mesh>>> {
        let mesh = (degree > 1).then(|| Mesh::new(&self.all, degree)).transpose()?;
        Ok(mesh.map(Arc::new))
    }

    /// The ranks with the critic's groups.
    #[must_use]
    pub fn for_critic(&self) -> Self {
        Self { for_critic: true, ..self.clone() }
    }

    /// This rank's sequence-parallel group. Operations are within the group, as for other groups.
    #[must_use]
    pub fn sequence_ranks(&self) -> Self {
        self.among(self.sequence_mesh())
    }

    /// This rank's tensor-parallel group in training.
    #[must_use]
    pub fn tensor_ranks(&self) -> Self {
        self.among(self.matrices.as_ref().map(|groups| &groups.group))
    }

    /// Ranks with the other parts of this one's model: shards of matrices, or stages, by their number.
    #[must_use]
    pub fn part_ranks(&self) -> Self {
        self.among(self.parts().map(|groups| &groups.group))
    }

    /// Ranks with the same weights as this one: of its place in every tensor-parallel group, of its stage, or all.
    #[must_use]
    pub fn replicas(&self) -> Self {
        Self { through: self.parts().map(|groups| Arc::clone(&groups.replicas)), ..self.clone() }
    }

    /// The ranks of a group; this one alone if there is none.
    fn among(&self, mesh: Option<&Arc<Mesh>>) -> Self {
        let mesh = mesh.map_or_else(|| Arc::new(Mesh::alone()), Arc::clone);
        Self { through: Some(mesh), ..self.clone() }
    }

    /// The groups of a rank that has a part of the model.
    fn parts(&self) -> Option<&ModelGroups> {
        self.matrices.as_ref().or(self.stages.as_ref())
    }

    /// The group that shares the sequences of the model at hand.
    fn sequence_mesh(&self) -> Option<&Arc<Mesh>> {
        let mesh = if self.for_critic { &self.critic_sequences } else { &self.sequences };
        mesh.as_ref()
    }

    /// The groups that share sequences, each once.
    fn sequence_meshes(&self) -> impl Iterator<Item = &Arc<Mesh>> {
        let critic = self.critic_sequences.iter();
        let apart = critic.filter(|critic| self.sequences.as_ref().is_none_or(|mesh| !Arc::ptr_eq(critic, mesh)));
        self.sequences.iter().chain(apart)
    }

    /// All groups, each once.
    pub(super) fn meshes(&self) -> impl Iterator<Item = &Arc<Mesh>> {
        let shares = self.matrices.iter().chain(&self.stages).flat_map(|groups| [&groups.group, &groups.replicas]);
        self.sequence_meshes().chain(&self.sampling).chain(shares)
    }

    /// Configuration key of the sequence-parallel degree.
    pub fn sequence_key(&self) -> &'static str {
        let policy = self.sequences.as_ref().map_or(1, |mesh| mesh.degree());
        if self.for_critic && self.sequence_size() != policy { CRITIC_SEQUENCES } else { SEQUENCES }
    }

    /// Sequence-parallel degree.
    pub fn sequence_size(&self) -> usize {
        self.sequence_mesh().map_or(1, |mesh| mesh.degree())
    }

    /// This rank in its sequence-parallel group, from 0.
    pub fn sequence_rank(&self) -> usize {
        self.rank() % self.sequence_size()
    }

    /// Data-parallel degree.
    pub fn data_size(&self) -> usize {
        self.size() / (self.sequence_size() * self.tensor_size() * self.stages())
    }

    /// The group of this rank, from 0.
    pub fn data_rank(&self) -> usize {
        self.rank() / (self.sequence_size() * self.tensor_size()) % self.data_size()
    }

    /// Tensor-parallel degree of training.
    pub fn tensor_size(&self) -> usize {
        self.matrices.as_ref().map_or(1, |groups| groups.group.degree())
    }

    /// This rank's shard of every matrix, with tensor parallelism.
    pub fn tensor_share(&self) -> Option<TensorShare> {
        let degree = self.matrices.as_ref()?.group.degree();
        Some(TensorShare::new(self.all.rank() % degree, degree))
    }

    /// Number of pipeline stages.
    pub fn stages(&self) -> usize {
        self.stages.as_ref().map_or(1, |groups| groups.group.degree())
    }

    /// This rank's stage, if there are several.
    pub fn pipeline_stage(&self) -> Option<PipelineStage> {
        let groups = self.stages.as_ref()?;
        Some(PipelineStage::new(groups.group.place(), groups.group.degree()))
    }

    /// Tensor-parallel degree of sampling.
    pub fn sampling_size(&self) -> usize {
        self.sampling.as_ref().map_or(1, |mesh| mesh.degree())
    }

    /// This rank in its sampling group, from 0.
    pub fn sampling_rank(&self) -> usize {
        self.rank() % self.sampling_size()
    }

    /// Number of sampling groups.
    pub fn sampling_groups(&self) -> usize {
        self.size() / self.sampling_size()
    }

    /// The group of this rank, from 0.
    pub fn sampling_group(&self) -> usize {
        self.rank() / self.sampling_size()
    }

    /// Collectives of this rank's sampling group, if there is one.
    pub fn tensor_group(&self) -> Option<TensorGroup> {
        let mesh = Arc::clone(self.sampling.as_ref()?);
        Some(TensorGroup::new(mesh))
    }

    /// Traffic of this rank in its sampling group.
    pub fn sampling_traffic(&self) -> Traffic {
        sent(&self.sampling)
    }

    /// Traffic of this rank in its sequence-parallel groups, the critic's included.
    pub fn sequence_traffic(&self) -> Traffic {
        sent(self.sequence_meshes())
    }

    /// Traffic of this rank in training to the ranks that have other parts of its model, shards of matrices or stages,
    /// and to those that have the same part.
    pub fn parts_traffic(&self) -> Traffic {
        sent(self.parts().into_iter().flat_map(|groups| [&groups.group, &groups.replicas]))
    }
}

/// Traffic of this rank in some groups.
fn sent<'m>(groups: impl IntoIterator<Item = &'m Arc<Mesh>>) -> Traffic {
    groups.into_iter().map(|mesh| mesh.traffic()).fold(Traffic::default(), std::ops::Add::add)
}

#[cfg(test)]
mod tests;
