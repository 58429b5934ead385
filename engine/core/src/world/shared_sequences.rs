//! What ranks that share sequences (Ulysses, arXiv:2309.14509) do beside those that divide the batch.

use super::World;
use super::mesh::{Mesh, OfRanks};
use crate::{Error, Result};
use burn::tensor::Tensor;
use firebrick_backends::collective::{Collective, OperationKind, Solo, Traffic};
use std::sync::Arc;

/// The key of the critic's own degree.
const CRITIC_KEY: &str = "critic.ulysses_sequence_parallel_size";

impl World {
    /// The same ranks, of which each `degree` consecutive ones share every sequence: rank r is the `r % degree`th of
    /// group `r / degree`. All ranks call it together.
    ///
    /// # Errors
    /// Where the degree does not divide the ranks, or a rank is gone.
    pub fn sharing_sequences(mut self, degree: usize) -> Result<Self> {
        let ranks = self.size();
        if degree == 0 || !ranks.is_multiple_of(degree) {
            return Err(Error::Ranks(format!(
                "memory.ulysses_sequence_parallel_size is {degree}, which does not divide this run's {ranks} ranks into groups; start a \
                 multiple of {} ranks (docs/guides/multi_gpu.md), or set it to a number that divides {ranks}",
                degree.max(1)
            )));
        }
        self.mesh = None;
        if degree > 1 {
            self.mesh = Some(Arc::new(Mesh::new(&self.all, degree)?));
        }
        self.critic_mesh = self.mesh.clone();
        Ok(self)
    }

    /// The same ranks, of which each `degree` consecutive ones share every sequence of the critic's, whatever those do
    /// that share the other models'. All ranks call it together, with all other degrees said.
    ///
    /// # Errors
    /// Where the degree does not divide the ranks, ranks share matrices or layers, or a rank is gone.
    pub fn sharing_critic_sequences(mut self, degree: usize) -> Result<Self> {
        let ranks = self.size();
        if degree == 0 || !ranks.is_multiple_of(degree) {
            return Err(Error::Ranks(format!(
                "{CRITIC_KEY} is {degree}, which does not divide this run's {ranks} ranks into groups; start a multiple of {} ranks \
                 (docs/guides/multi_gpu.md), or set it to a number that divides {ranks}",
                degree.max(1)
            )));
        }
        if degree > 1 && self.tensor_size() * self.stages() > 1 {
            return Err(Error::Ranks(format!(
                "{CRITIC_KEY} is {degree}, memory.tensor_model_parallel_size {} and \
                 memory.pipeline_model_parallel_size {}: ranks shard sequences, matrices or layers; set two of them to \
                 1",
                self.tensor_size(),
                self.stages()
            )));
        }
        if degree == self.sequence_size() {
            self.critic_mesh = self.mesh.clone();
        } else {
            let own = (degree > 1).then(|| Mesh::new(&self.all, degree));
            self.critic_mesh = own.transpose()?.map(Arc::new);
        }
        Ok(self)
    }

    /// The same ranks as they work for the critic.
    #[must_use]
    pub fn of_critic(&self) -> Self {
        Self { for_critic: true, ..self.clone() }
    }

    /// The groups that share sequences, each once.
    pub(super) fn sequence_meshes(&self) -> impl Iterator<Item = &Arc<Mesh>> {
        let own = self.critic_mesh.iter();
        let apart = own.filter(|own| self.mesh.as_ref().is_none_or(|mesh| !Arc::ptr_eq(own, mesh)));
        self.mesh.iter().chain(apart)
    }

    /// The group that shares the sequences of the model at hand.
    fn sequence_mesh(&self) -> Option<&Arc<Mesh>> {
        let mesh = if self.for_critic { &self.critic_mesh } else { &self.mesh };
        mesh.as_ref()
    }

    /// The key that says how many ranks share the sequences of the model at hand.
    #[must_use]
    pub fn sequence_key(&self) -> &'static str {
        let own = self.sequence_mesh().map_or(1, |mesh| mesh.degree());
        let policy = self.mesh.as_ref().map_or(1, |mesh| mesh.degree());
        if self.for_critic && own != policy { CRITIC_KEY } else { "memory.ulysses_sequence_parallel_size" }
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

    /// What each rank that shares this one's sequences has for it, in their order: blocks of equal length, block r for
    /// the rth of them.
    ///
    /// # Errors
    /// Where a rank failed or is gone, or is in another operation.
    pub fn sequence_all_to_all(&self, blocks: Tensor<1>) -> Result<Tensor<1>> {
        self.in_sequence(|group| group.all_to_all_tensor(blocks))
    }

    /// The bytes of each rank that shares this one's sequences, in their order.
    ///
    /// # Errors
    /// Those of [`sequence_all_to_all`](Self::sequence_all_to_all).
    pub fn sequence_exchange(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.in_sequence(|group| group.exchange(own))
    }

    /// What this rank has sent in the operations of the ranks that share its sequences, the critic's too.
    #[must_use]
    pub fn sequence_traffic(&self) -> Traffic {
        let mut sent = Traffic::default();
        for own in self.sequence_meshes().map(|mesh| mesh.traffic()) {
            for kind in 0..OperationKind::COUNT {
                sent.operations[kind] += own.operations[kind];
                sent.bytes[kind] += own.bytes[kind];
            }
        }
        sent
    }

    fn in_sequence<T, E: OfRanks>(&self, work: impl FnOnce(&dyn Collective) -> Result<T, E>) -> Result<T>
    where
        Error: From<E>,
    {
        Ok(match self.sequence_mesh() {
            Some(mesh) => mesh.during(work)?,
            None => work(&Solo)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;
    use firebrick_backends::collective::{Failure, Flat, Settings, Threads};

    fn ranks<T: Send>(size: usize, work: impl Fn(World) -> T + Sync) -> Vec<T> {
        let done = Threads::run(size, Settings::default(), |all| work(World::new(all)));
        done.into_iter().map(|rank| rank.unwrap()).collect()
    }

    #[test]
    fn consecutive_ranks_share_sequences_and_groups_divide_the_batch() {
        let places = ranks(6, |world| {
            let world = world.sharing_sequences(2).unwrap();
            let said = world.sequence_exchange(vec![world.rank() as u8]).unwrap();
            let sent = world.sequence_traffic().operations[OperationKind::Exchange as usize];
            let data = [world.data_rank(), world.data_size()];
            let sequence = [world.sequence_rank(), world.sequence_size()];
            (data, sequence, said.concat(), sent)
        });
        for (rank, (data, sequence, said, sent)) in places.into_iter().enumerate() {
            assert_eq!((data, sequence), ([rank / 2, 3], [rank % 2, 2]));
            let low = (rank / 2 * 2) as u8;
            assert_eq!((said, sent), (vec![low, low + 1], 1));
        }
        let alone = World::default().sharing_sequences(1).unwrap();
        assert_eq!((alone.data_size(), alone.sequence_size()), (1, 1));
    }

    #[test]
    fn ranks_share_the_critics_sequences_in_groups_of_their_own() {
        for (policy, critic) in [(1, 2), (2, 1), (2, 4), (2, 2)] {
            let places = ranks(4, |world| {
                let world = world.sharing_sequences(policy).unwrap();
                let world = world.sharing_critic_sequences(critic).unwrap();
                [world.clone(), world.of_critic()].map(|world| {
                    let said = world.sequence_exchange(vec![world.rank() as u8]).unwrap();
                    let data = [world.data_rank(), world.data_size()];
                    (said.concat(), data, world.sequence_key())
                })
            });
            for (rank, found) in places.into_iter().enumerate() {
                for (degree, (said, data, _)) in [policy, critic].into_iter().zip(&found) {
                    let low = rank / degree * degree;
                    let members: Vec<u8> = (low..low + degree).map(|r| r as u8).collect();
                    assert_eq!(*said, members, "{policy} and {critic}");
                    assert_eq!(*data, [rank / degree, 4 / degree]);
                }
                assert_eq!(found[0].2, "memory.ulysses_sequence_parallel_size");
                assert_eq!(found[1].2 == CRITIC_KEY, policy != critic);
            }
        }
    }

    #[test]
    fn a_critics_degree_that_cannot_be_is_refused_by_its_key() {
        let refused = |world: Result<World>| world.unwrap_err().to_string();
        for degree in [0, 2] {
            let message = refused(World::default().sharing_critic_sequences(degree));
            let own = format!("{CRITIC_KEY} is {degree}");
            assert!(message.contains(&own) && message.contains("1 ranks"), "{message}");
        }
        for message in ranks(2, |world| {
            let world = world.sharing_matrices(2).unwrap();
            refused(world.sharing_critic_sequences(2))
        }) {
            assert!(message.contains("memory.tensor_model_parallel_size 2"), "{message}");
        }
    }

    #[test]
    fn a_degree_that_does_not_divide_the_ranks_is_refused() {
        for (degree, ranks) in [(2, 1), (0, 1)] {
            let refused = World::default().sharing_sequences(degree).unwrap_err();
            let message = refused.to_string();
            let own = format!("memory.ulysses_sequence_parallel_size is {degree}");
            assert!(message.contains(&own), "{message}");
            assert!(message.contains(&format!("{ranks} ranks")), "{message}");
        }
        for message in ranks(3, |world| world.sharing_sequences(2).unwrap_err().to_string()) {
            assert!(message.contains("3 ranks"), "{message}");
            assert!(message.contains("a multiple of 2"), "{message}");
        }
    }

    #[test]
    fn a_failure_of_a_rank_settles_on_all_and_groups_work_again() {
        for failing in 0..4 {
            let found = ranks(4, |world| {
                let world = world.sharing_sequences(2).unwrap();
                // a critic whose ranks are alone, or all of them
                let critic = if failing % 2 == 0 { 4 } else { 1 };
                let world = world.sharing_critic_sequences(critic).unwrap();
                let own = || Flat::F64(vec![world.rank() as f64; 2]);
                let blocks = || Tensor::<1>::from_floats([world.rank() as f32; 2], &Device::flex());
                let told = if world.rank() == failing {
                    world.agree_on_failure(Some(Failure::new("no room")))
                } else {
                    // either an operation of its group was cut short, or that of all is
                    let done = world.sequence_all_to_all(blocks());
                    let done = done.and_then(|_| world.all_reduce(own()));
                    world.agree_on_failure(done.err().map(|e| Failure::new(e.to_string())))
                };
                let anew = world.sequence_all_to_all(blocks()).unwrap();
                let anew: Vec<f32> = anew.into_data().iter().collect();
                let rank = vec![world.rank() as u8];
                let all = world.of_critic().sequence_exchange(rank).unwrap();
                assert_eq!(all.len(), critic);
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
