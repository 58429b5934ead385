//! Ranks that share every matrix in training (Shoeybi et al., 2019, arXiv:1909.08053), and the ranks that have the same
//! share: those sum gradients, and share out state.

use super::World;
use super::mesh::{Mesh, SharedModel};
use crate::{Error, Result};
use burn::tensor::Tensor;
use firebrick_arch::TensorShare;
use firebrick_backends::collective::{Flat, Traffic};
use std::sync::Arc;

impl World {
    /// The same ranks, of which each `degree` consecutive ones share every matrix: rank r is the `r % degree`th of
    /// group `r / degree`. All ranks call it together.
    ///
    /// # Errors
    /// Where the degree does not divide the ranks, or a rank is gone.
    pub fn sharing_matrices(mut self, degree: usize) -> Result<Self> {
        let ranks = self.size();
        if degree == 0 || !ranks.is_multiple_of(degree) {
            return Err(Error::Ranks(format!(
                "memory.tensor_model_parallel_size is {degree}, which does not divide this run's {ranks} ranks into groups; start a \
                 multiple of {} ranks (docs/guides/multi_gpu.md), or set it to a number that divides {ranks}",
                degree.max(1)
            )));
        }
        if degree > 1 && self.sequence_size() > 1 {
            return Err(Error::Ranks(format!(
                "memory.tensor_model_parallel_size is {degree} and memory.ulysses_sequence_parallel_size is {}: ranks \
                 shard matrices or sequences, not both; set one of them to 1",
                self.sequence_size()
            )));
        }
        self.matrices = None;
        if degree > 1 {
            self.matrices = Some(SharedModel {
                group: Arc::new(Mesh::new(&self.all, degree)?),
                replicas: Arc::new(Mesh::across(&self.all, degree)?),
            });
        }
        Ok(self)
    }

    /// How many ranks share every matrix; 1 where none do.
    #[must_use]
    pub fn tensor_size(&self) -> usize {
        self.matrices.as_ref().map_or(1, |own| own.group.degree())
    }

    /// This rank among those that share its matrices, from 0.
    #[must_use]
    pub fn tensor_rank(&self) -> usize {
        self.rank() % self.tensor_size()
    }

    /// This rank's share of every matrix, where ranks share them.
    #[must_use]
    pub fn tensor_share(&self) -> Option<TensorShare> {
        let own = self.matrices.as_ref()?;
        let degree = own.group.degree();
        Some(TensorShare::new(self.all.rank() % degree, degree))
    }

    /// The ranks that have the same weights as this one: those of its place in every group that shares matrices, those
    /// of its stage, or all. Their operations are among themselves.
    #[must_use]
    pub fn replicas(&self) -> Self {
        Self { through: self.parts().map(|own| Arc::clone(&own.replicas)), ..self.clone() }
    }

    /// The sum of values over the ranks that share this one's matrices, in their order.
    ///
    /// # Errors
    /// Where a rank failed or is gone, or is in another operation.
    pub fn tensor_all_reduce(&self, own: Flat) -> Result<Flat> {
        match &self.matrices {
            Some(all) => Ok(all.group.during(|group| group.all_reduce(own))?),
            None => Ok(own),
        }
    }

    /// The sum of a tensor's values over the ranks that share this one's matrices, in their order.
    ///
    /// # Errors
    /// Those of [`tensor_all_reduce`](Self::tensor_all_reduce), and of copies.
    pub fn tensor_sum(&self, own: Tensor<1>) -> Result<Tensor<1>> {
        match &self.matrices {
            Some(all) => Ok(all.group.during(|group| group.all_reduce_tensor(own))?),
            None => Ok(own),
        }
    }

    /// The values of a tensor of each rank that shares this one's matrices, one behind the other. All give as many.
    ///
    /// # Errors
    /// Those of [`tensor_sum`](Self::tensor_sum).
    pub fn tensor_gather(&self, own: Tensor<1>) -> Result<Tensor<1>> {
        match &self.matrices {
            Some(all) => Ok(all.group.during(|group| group.all_gather_tensor(own))?),
            None => Ok(own),
        }
    }

    /// The groups of a rank that has a part of the model.
    pub(super) fn parts(&self) -> Option<&SharedModel> {
        self.matrices.as_ref().or(self.stages.as_ref())
    }

    /// The bytes of each rank that shares this one's matrices, in their order.
    ///
    /// # Errors
    /// Those of [`tensor_all_reduce`](Self::tensor_all_reduce).
    pub fn tensor_exchange(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        match &self.matrices {
            Some(all) => Ok(all.group.during(|group| group.exchange(own))?),
            None => Ok(vec![own]),
        }
    }

    /// The bytes of each rank that has another part of this one's model, shares of matrices or stages, in their order.
    ///
    /// # Errors
    /// Those of [`tensor_all_reduce`](Self::tensor_all_reduce).
    pub fn exchange_parts(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        match self.parts() {
            Some(all) => Ok(all.group.during(|group| group.exchange(own))?),
            None => Ok(vec![own]),
        }
    }

    /// What this rank has sent to those that share its matrices.
    #[must_use]
    pub fn tensor_traffic(&self) -> Traffic {
        let own = self.matrices.as_ref();
        own.map_or_else(Traffic::default, |own| own.group.traffic())
    }

    /// What this rank has sent in training to those that have the other parts of its model, shares of matrices or
    /// stages, and to those that have the same part.
    #[must_use]
    pub fn parts_traffic(&self) -> Traffic {
        self.parts().map_or_else(Traffic::default, SharedModel::traffic)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick_backends::collective::{Failure, Settings, Threads};
    use firebrick_plan::Zero;

    fn ranks<T: Send>(size: usize, work: impl Fn(World) -> T + Sync) -> Vec<T> {
        let done = Threads::run(size, Settings::default(), |all| work(World::new(all)));
        done.into_iter().map(|rank| rank.unwrap()).collect()
    }

    fn shared(world: World) -> World {
        world.sharing_matrices(2).unwrap()
    }

    #[test]
    fn consecutive_ranks_share_matrices_and_those_of_one_place_have_the_same() {
        let places = ranks(6, |world| {
            let world = shared(world);
            let own = || vec![world.rank() as u8];
            let same = world.replicas();
            let partition = same.partition(Zero::Stage1);
            (
                [world.tensor_rank(), world.tensor_size()],
                [world.data_rank(), world.data_size()],
                world.tensor_exchange(own()).unwrap().concat(),
                same.exchange(own()).unwrap().concat(),
                [same.rank(), same.size(), partition.ranks()],
            )
        });
        for (rank, (tensor, data, group, same, place)) in places.into_iter().enumerate() {
            assert_eq!((tensor, data), ([rank % 2, 2], [rank / 2, 3]));
            let low = (rank / 2 * 2) as u8;
            assert_eq!(group, [low, low + 1]);
            let first = (rank % 2) as u8;
            assert_eq!(same, [first, first + 2, first + 4]);
            assert_eq!(place, [rank / 2, 3, 3]);
        }
        let alone = World::default().sharing_matrices(1).unwrap();
        assert!(alone.tensor_share().is_none() && alone.replicas().is_solo());
        let refused = World::default().sharing_matrices(2).unwrap_err();
        assert!(refused.to_string().contains("this run's 1 ranks"));
    }

    #[test]
    fn a_rank_that_waits_for_one_that_was_told_of_a_failure_is_told_too() {
        let found = ranks(4, |world| {
            let world = shared(world);
            let own = || Flat::F64(vec![world.rank() as f64]);
            let told = match world.rank() {
                0 => world.agree_on_failure(Some(Failure::new("no room"))),
                // its group's sum is cut short, and the others wait for it among those of its place
                1 => {
                    let done = world.tensor_all_reduce(own());
                    world.agree_on_failure(done.err().map(|e| Failure::new(e.to_string())))
                }
                _ => {
                    let done = world.replicas().all_reduce(own());
                    world.agree_on_failure(done.err().map(|e| Failure::new(e.to_string())))
                }
            };
            told.unwrap_err().to_string()
        });
        assert!(found.iter().all(|told| told == "rank 0 failed: no room"));
    }

    #[test]
    fn a_failure_in_either_group_settles_on_all_ranks_and_groups_work_again() {
        for (failing, across) in [(0, false), (3, false), (1, true), (2, true)] {
            let found = ranks(4, |world| {
                let world = shared(world);
                let own = || Flat::F64(vec![world.rank() as f64]);
                let sum = |world: &World| {
                    if across { world.replicas().all_reduce(own()) } else { world.tensor_all_reduce(own()) }
                };
                let told = if world.rank() == failing {
                    world.agree_on_failure(Some(Failure::new("no room")))
                } else {
                    let done = sum(&world);
                    world.agree_on_failure(done.err().map(|e| Failure::new(e.to_string())))
                };
                (told.unwrap_err().to_string(), sum(&world).unwrap())
            });
            for (rank, (told, sum)) in found.into_iter().enumerate() {
                assert_eq!(told, format!("rank {failing} failed: no room"));
                let pair = if across { rank % 2 * 2 + 2 } else { rank / 2 * 4 + 1 };
                assert_eq!(sum, Flat::F64(vec![pair as f64]));
            }
        }
    }
}
