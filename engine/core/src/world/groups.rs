//! Groups of ranks, and what they divide: every sequence (Ulysses, arXiv:2309.14509), every matrix, in training or while
//! they sample (Shoeybi et al., 2019, arXiv:1909.08053), or the layers of a model in stages (Huang et al., 2019,
//! arXiv:1811.06965). Groups of one kind divide the batch, and ranks with the same part of a model share out its state.

use super::World;
use super::mesh::{Mesh, SharedModel};
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
    /// The same ranks, of which each `degree` consecutive ones share every sequence: rank r is the `r % degree`th of
    /// group `r / degree`. All ranks call it together.
    ///
    /// # Errors
    /// Where the degree does not divide the ranks, or a rank is gone.
    pub fn sharing_sequences(mut self, degree: usize) -> Result<Self> {
        self.check_degree(SEQUENCES, degree, "groups")?;
        self.sequences = self.consecutive(degree)?;
        self.critic_sequences = self.sequences.clone();
        Ok(self)
    }

    /// The same ranks, of which each `degree` consecutive ones share every sequence of the critic's, whatever those do
    /// that share the other models'. All ranks call it together, with all other degrees said.
    ///
    /// # Errors
    /// Where the degree does not divide the ranks, ranks share matrices or layers, or a rank is gone.
    pub fn sharing_critic_sequences(mut self, degree: usize) -> Result<Self> {
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

    /// The same ranks, of which each `degree` consecutive ones share every matrix: rank r is the `r % degree`th of
    /// group `r / degree`. All ranks call it together.
    ///
    /// # Errors
    /// Where the degree does not divide the ranks, ranks share sequences, or a rank is gone.
    pub fn sharing_matrices(mut self, degree: usize) -> Result<Self> {
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
            self.matrices = Some(SharedModel { group, replicas: Arc::new(Mesh::across(&self.all, degree)?) });
        }
        Ok(self)
    }

    /// The same ranks with the layers of models in so many stages: with N ranks a stage, rank r has stage `r / N`, and
    /// is the `r % N`th of its data-parallel ranks. All ranks call it together.
    ///
    /// # Errors
    /// Where the stages do not divide the ranks, ranks share sequences or matrices, or a rank is gone.
    pub fn in_stages(mut self, stages: usize) -> Result<Self> {
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
            self.stages = Some(SharedModel {
                group: Arc::new(Mesh::across(&self.all, each)?),
                replicas: Arc::new(Mesh::new(&self.all, each)?),
            });
        }
        Ok(self)
    }

    /// The same ranks, of which each `degree` consecutive ones sample together, whoever shares what in training: rank r
    /// is the `r % degree`th of group `r / degree`. All ranks call it together.
    ///
    /// # Errors
    /// Where the degree does not divide the ranks, or a rank is gone.
    pub fn sampling_together(mut self, degree: usize) -> Result<Self> {
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

    /// Groups of so many consecutive ranks, on all ranks together; none where each is alone.
    fn consecutive(&self, degree: usize) -> Result<Option<Arc<Mesh>>> {
        let mesh = (degree > 1).then(|| Mesh::new(&self.all, degree)).transpose()?;
        Ok(mesh.map(Arc::new))
    }

    /// The same ranks as they work for the critic.
    #[must_use]
    pub fn of_critic(&self) -> Self {
        Self { for_critic: true, ..self.clone() }
    }

    /// The ranks that share this one's sequences of the model at hand. Their operations are among themselves, as those
    /// of the other groups are.
    #[must_use]
    pub fn sequence_ranks(&self) -> Self {
        self.among(self.sequence_mesh())
    }

    /// The ranks that share this one's matrices.
    #[must_use]
    pub fn tensor_ranks(&self) -> Self {
        self.among(self.matrices.as_ref().map(|own| &own.group))
    }

    /// The ranks that have the other parts of this one's model: shares of matrices, or stages, by their number.
    #[must_use]
    pub fn part_ranks(&self) -> Self {
        self.among(self.parts().map(|own| &own.group))
    }

    /// The ranks that have the same weights as this one: those of its place in every group that shares matrices, those
    /// of its stage, or all.
    #[must_use]
    pub fn replicas(&self) -> Self {
        Self { through: self.parts().map(|own| Arc::clone(&own.replicas)), ..self.clone() }
    }

    /// The ranks of a group; this one alone where there is none.
    fn among(&self, mesh: Option<&Arc<Mesh>>) -> Self {
        let mesh = mesh.map_or_else(|| Arc::new(Mesh::alone()), Arc::clone);
        Self { through: Some(mesh), ..self.clone() }
    }

    /// The groups of a rank that has a part of the model.
    fn parts(&self) -> Option<&SharedModel> {
        self.matrices.as_ref().or(self.stages.as_ref())
    }

    /// The group that shares the sequences of the model at hand.
    fn sequence_mesh(&self) -> Option<&Arc<Mesh>> {
        let mesh = if self.for_critic { &self.critic_sequences } else { &self.sequences };
        mesh.as_ref()
    }

    /// The groups that share sequences, each once.
    fn sequence_meshes(&self) -> impl Iterator<Item = &Arc<Mesh>> {
        let own = self.critic_sequences.iter();
        let apart = own.filter(|own| self.sequences.as_ref().is_none_or(|mesh| !Arc::ptr_eq(own, mesh)));
        self.sequences.iter().chain(apart)
    }

    /// All groups, each once.
    pub(super) fn meshes(&self) -> impl Iterator<Item = &Arc<Mesh>> {
        let shares = self.matrices.iter().chain(&self.stages);
        let shares = shares.flat_map(|own| [&own.group, &own.replicas]);
        self.sequence_meshes().chain(&self.sampling).chain(shares)
    }

    /// The key that says how many ranks share the sequences of the model at hand.
    #[must_use]
    pub fn sequence_key(&self) -> &'static str {
        let policy = self.sequences.as_ref().map_or(1, |mesh| mesh.degree());
        if self.for_critic && self.sequence_size() != policy { CRITIC_SEQUENCES } else { SEQUENCES }
    }

    /// How many ranks share every sequence; 1 where none do.
    #[must_use]
    pub fn sequence_size(&self) -> usize {
        self.sequence_mesh().map_or(1, |mesh| mesh.degree())
    }

    /// This rank among those that share its sequences, from 0.
    #[must_use]
    pub fn sequence_rank(&self) -> usize {
        self.rank() % self.sequence_size()
    }

    /// How many groups of ranks divide a batch.
    #[must_use]
    pub fn data_size(&self) -> usize {
        self.size() / (self.sequence_size() * self.tensor_size() * self.stages())
    }

    /// The group of this rank, from 0.
    #[must_use]
    pub fn data_rank(&self) -> usize {
        self.rank() / (self.sequence_size() * self.tensor_size()) % self.data_size()
    }

    /// How many ranks share every matrix; 1 where none do.
    #[must_use]
    pub fn tensor_size(&self) -> usize {
        self.matrices.as_ref().map_or(1, |own| own.group.degree())
    }

    /// This rank's share of every matrix, where ranks share them.
    #[must_use]
    pub fn tensor_share(&self) -> Option<TensorShare> {
        let degree = self.matrices.as_ref()?.group.degree();
        Some(TensorShare::new(self.all.rank() % degree, degree))
    }

    /// How many stages models have; 1 where each rank has all layers.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.stages.as_ref().map_or(1, |own| own.group.degree())
    }

    /// This rank's stage, where there are several.
    #[must_use]
    pub fn pipeline_stage(&self) -> Option<PipelineStage> {
        let own = self.stages.as_ref()?;
        Some(PipelineStage::new(own.group.place(), own.group.degree()))
    }

    /// How many ranks sample together; 1 where each does by itself.
    #[must_use]
    pub fn sampling_size(&self) -> usize {
        self.sampling.as_ref().map_or(1, |mesh| mesh.degree())
    }

    /// This rank among those that it samples with, from 0.
    #[must_use]
    pub fn sampling_rank(&self) -> usize {
        self.rank() % self.sampling_size()
    }

    /// How many groups sample.
    #[must_use]
    pub fn sampling_groups(&self) -> usize {
        self.size() / self.sampling_size()
    }

    /// The group of this rank, from 0.
    #[must_use]
    pub fn sampling_group(&self) -> usize {
        self.rank() / self.sampling_size()
    }

    /// The messages of the ranks that this one samples with, where there are any.
    #[must_use]
    pub fn tensor_group(&self) -> Option<TensorGroup> {
        let mesh = Arc::clone(self.sampling.as_ref()?);
        Some(TensorGroup::new(mesh))
    }

    /// What this rank has sent to those that it samples with.
    #[must_use]
    pub fn sampling_traffic(&self) -> Traffic {
        sent(&self.sampling)
    }

    /// What this rank has sent in the operations of the ranks that share its sequences, the critic's too.
    #[must_use]
    pub fn sequence_traffic(&self) -> Traffic {
        sent(self.sequence_meshes())
    }

    /// What this rank has sent in training to those that have the other parts of its model, shares of matrices or
    /// stages, and to those that have the same part.
    #[must_use]
    pub fn parts_traffic(&self) -> Traffic {
        sent(self.parts().into_iter().flat_map(|own| [&own.group, &own.replicas]))
    }
}

/// What this rank has sent in operations of groups.
fn sent<'m>(groups: impl IntoIterator<Item = &'m Arc<Mesh>>) -> Traffic {
    groups.into_iter().map(|mesh| mesh.traffic()).fold(Traffic::default(), std::ops::Add::add)
}

#[cfg(test)]
mod tests;
