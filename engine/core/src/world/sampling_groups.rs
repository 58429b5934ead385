//! Groups of ranks that sample together, each with its share of every matrix (Shoeybi et al., 2019, arXiv:1909.08053;
//! verl's `rollout.tensor_model_parallel_size`). They have nothing to do with the groups that share sequences in
//! training.

use super::World;
use super::mesh::Mesh;
use crate::{Error, Result};
use burn::tensor::Tensor;
use firebrick_backends::collective::{CollectiveError, Flat, Traffic};
use firebrick_models::{TensorGroup, TensorRanks};
use std::sync::Arc;

impl World {
    /// The same ranks, of which each `degree` consecutive ones sample together: rank r is the `r % degree`th of group
    /// `r / degree`. All ranks call it together.
    ///
    /// # Errors
    /// Where the degree does not divide the ranks, or a rank is gone.
    pub fn sampling_together(mut self, degree: usize) -> Result<Self> {
        let ranks = self.size();
        if degree == 0 || !ranks.is_multiple_of(degree) {
            return Err(Error::Ranks(format!(
                "rollout.tensor_model_parallel_size is {degree}, which does not divide this run's {ranks} ranks into groups; start a \
                 multiple of {} ranks (docs/guides/multi_gpu.md), or set it to a number that divides {ranks}",
                degree.max(1)
            )));
        }
        self.sampling = None;
        if degree > 1 {
            self.sampling = Some(Arc::new(Mesh::new(&self.all, degree)?));
        }
        Ok(self)
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
        let mesh = self.sampling.as_ref()?;
        Some(TensorGroup::new(Arc::new(SamplingRanks { mesh: Arc::clone(mesh), rank: self.sampling_rank() })))
    }

    /// What this rank has sent to those that it samples with.
    #[must_use]
    pub fn sampling_traffic(&self) -> Traffic {
        let mesh = self.sampling.as_ref();
        mesh.map_or_else(Traffic::default, |mesh| mesh.traffic())
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
        self.mesh.degree()
    }

    fn all_reduce(&self, own: Tensor<1>) -> Result<Tensor<1>, firebrick_backends::Error> {
        self.mesh.during(|group| group.all_reduce_tensor(own))
    }

    fn all_gather(&self, own: Tensor<1>) -> Result<Tensor<1>, firebrick_backends::Error> {
        self.mesh.during(|group| group.all_gather_tensor(own))
    }

    fn all_gather_bytes(&self, own: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        let all = self.mesh.during(|group| group.all_gather(Flat::Bytes(own)))?;
        Ok(all.as_bytes().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;
    use firebrick_backends::collective::{Failure, Settings, Threads};

    fn ranks<T: Send>(size: usize, work: impl Fn(World) -> T + Sync) -> Vec<T> {
        let done = Threads::run(size, Settings::default(), |all| work(World::new(all)));
        done.into_iter().map(|rank| rank.unwrap()).collect()
    }

    #[test]
    fn consecutive_ranks_sample_together_whoever_shares_sequences() {
        let places = ranks(8, |world| {
            let world = world.sharing_sequences(2).unwrap();
            let world = world.sampling_together(4).unwrap();
            let group = [world.sampling_group(), world.sampling_groups()];
            (group, [world.sampling_rank(), world.sampling_size()], world.sequence_size())
        });
        for (rank, place) in places.into_iter().enumerate() {
            assert_eq!(place, ([rank / 4, 2], [rank % 4, 4], 2));
        }
        let alone = World::default().sampling_together(1).unwrap();
        assert!(alone.tensor_group().is_none());
        let refused = World::default().sampling_together(2).unwrap_err().to_string();
        assert!(refused.contains("this run's 1 ranks"), "{refused}");
    }

    #[test]
    fn a_failure_in_a_group_settles_on_all_ranks_and_groups_work_again() {
        for failing in 0..4 {
            let found = ranks(4, |world| {
                let world = world.sampling_together(2).unwrap();
                let group = || SamplingRanks {
                    mesh: Arc::clone(world.sampling.as_ref().unwrap()),
                    rank: world.sampling_rank(),
                };
                let own = || Tensor::<1>::from_floats([world.rank() as f32], &Device::flex());
                let told = if world.rank() == failing {
                    world.agree_on_failure(Some(Failure::new("no room")))
                } else {
                    let done = group().all_reduce(own());
                    world.agree_on_failure(done.err().map(|e| Failure::new(e.to_string())))
                };
                let anew: Vec<f32> = group().all_gather(own()).unwrap().into_data().iter().collect();
                (told.unwrap_err().to_string(), anew)
            });
            for (rank, (told, anew)) in found.into_iter().enumerate() {
                assert_eq!(told, format!("rank {failing} failed: no room"));
                let low = (rank / 2 * 2) as f32;
                assert_eq!(anew, [low, low + 1.0]);
            }
        }
    }
}
