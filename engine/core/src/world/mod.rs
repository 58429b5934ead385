//! The ranks of a run: the same program on every rank, with the same host state.
//!
//! Every rank computes the same advantages, normalisers and cut of a batch, since it has all scored rollouts; only the
//! work of devices is divided. Work is divided by its expected cost ([`deal`]) without a message, and results are
//! exchanged as bytes ([`message`]).

pub mod deal;
mod groups;
mod mesh;

use crate::{Error, Result, message};
use burn::tensor::Tensor;
use firebrick_backends::collective::{self, Collective, CollectiveError, Element, Failure, Flat, Solo, Traffic};
use firebrick_plan::{Partition, Zero};
use firebrick_spec::Home;
use mesh::{Mesh, ModelGroups, RankFailure};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::hash::{DefaultHasher, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

/// The ranks of a run, or one rank alone. Clones are the same world.
#[derive(Clone, Debug)]
pub struct World {
    all: Arc<dyn Collective>,
    /// A failure that every rank knows of and nobody has answered yet.
    known: Arc<Mutex<Option<CollectiveError>>>,
    /// This rank's message of the last failure that all ranks agreed on.
    agreed: Arc<Mutex<Option<String>>>,
    /// The ranks that share sequences, where they do.
    sequences: Option<Arc<Mesh>>,
    /// Those that share the critic's: the same, or groups of another size.
    critic_sequences: Option<Arc<Mesh>>,
    /// True if these ranks work for the critic.
    for_critic: bool,
    /// The ranks that sample together, where they do.
    sampling: Option<Arc<Mesh>>,
    /// The ranks that share matrices in training, and those that have the same share, where they do.
    matrices: Option<ModelGroups>,
    /// The ranks that have the other stages, and those that have the same one, where layers are divided.
    stages: Option<ModelGroups>,
    /// The group whose ranks these are, where it is not all of them.
    through: Option<Arc<Mesh>>,
}

/// Values that the ranks of a world gather.
#[derive(Debug)]
pub struct Gathering {
    values: collective::Gathering,
    world: World,
}

impl Gathering {
    /// Every rank's values one behind the other, once they are there.
    ///
    /// # Errors
    /// `Error::Device` where another rank fails or is gone.
    pub fn wait(self) -> Result<Flat> {
        let values = self.values;
        self.world.operation(|_| values.wait())
    }
}

impl Default for World {
    fn default() -> Self {
        Self::new(Arc::new(Solo))
    }
}

impl World {
    /// The ranks of a collective.
    pub fn new(all: Arc<dyn Collective>) -> Self {
        Self {
            all,
            known: Arc::default(),
            agreed: Arc::default(),
            sequences: None,
            critic_sequences: None,
            for_critic: false,
            sampling: None,
            matrices: None,
            stages: None,
            through: None,
        }
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.through.as_ref().map_or_else(|| self.all.rank(), |mesh| mesh.place())
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.through.as_ref().map_or_else(|| self.all.size(), |mesh| mesh.degree())
    }

    /// True if this is the only rank.
    pub fn is_solo(&self) -> bool {
        self.size() == 1
    }

    /// True if other ranks are threads of this process.
    pub fn shares_process(&self) -> bool {
        self.all.size() > 1 && self.all.shares_process()
    }

    /// True if this rank writes the run's files: rank 0 does.
    pub fn writes(&self) -> bool {
        self.rank() == 0
    }

    /// An operation of these ranks.
    fn operation<T, E: RankFailure>(&self, work: impl FnOnce(&dyn Collective) -> Result<T, E>) -> Result<T>
    where
        Error: From<E>,
    {
        if let Some(group) = &self.through {
            return Ok(group.during(work)?);
        }
        let done = work(self.all.as_ref());
        if let Some(error) = done.as_ref().err().and_then(RankFailure::failed_rank) {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            *known = Some(error.clone());
        }
        Ok(done?)
    }

    /// Location of the buffers of operations on tensors.
    pub fn buffers_home(&self) -> Home {
        self.all.buffers_home()
    }

    /// From now on `look` is called whenever an operation has all its buffers on the device, where it has any there.
    pub fn watch_buffers(&self, look: impl Fn() + Send + Sync + 'static) {
        self.all.watch_buffers(Arc::new(look));
    }

    /// A tensor's values on every rank one behind the other, in their order.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce), and of copies.
    pub fn all_gather_tensor(&self, part: Tensor<1>) -> Result<Tensor<1>> {
        self.operation(|ranks| ranks.all_gather_tensor(part))
    }

    /// The sum of a tensor's values over all ranks, in their order.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce), and of copies.
    pub fn all_reduce_tensor(&self, part: Tensor<1>) -> Result<Tensor<1>> {
        self.operation(|ranks| ranks.all_reduce_tensor(part))
    }

    /// This rank's shard of the sum of a tensor's values over all ranks, in their order.
    ///
    /// # Errors
    /// Those of [`reduce_scatter`](Self::reduce_scatter), and of copies.
    pub fn reduce_scatter_tensor(&self, part: Tensor<1>) -> Result<Tensor<1>> {
        self.operation(|ranks| ranks.reduce_scatter_tensor(part))
    }

    /// The block of each rank for this one, in their order: `blocks` has equal lengths, block r for rank r.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce), and of copies.
    pub fn all_to_all_tensor(&self, blocks: Tensor<1>) -> Result<Tensor<1>> {
        self.operation(|ranks| ranks.all_to_all_tensor(blocks))
    }

    /// Sends values to another rank, and does not wait for it.
    ///
    /// # Errors
    /// If there is no such rank, or the message cannot be handed over.
    pub fn send(&self, rank: usize, values: Flat) -> Result<()> {
        self.operation(|ranks| ranks.send(rank, values))
    }

    /// Values that another rank sends.
    ///
    /// # Errors
    /// If a rank failed or is gone, or sends another length or type.
    pub fn receive(&self, rank: usize, len: usize, element: Element) -> Result<Flat> {
        self.operation(|ranks| ranks.receive(rank, len, element))
    }

    /// Every rank's bytes, by rank.
    ///
    /// # Errors
    /// If a rank failed or is gone, or is in another operation.
    pub fn exchange(&self, message: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.operation(|ranks| ranks.exchange(message))
    }

    /// Every rank's value, by rank.
    ///
    /// # Errors
    /// `Error::Device` where another rank fails or is gone; `Error::Ranks` where it runs another build.
    pub fn gather<T: DeserializeOwned>(&self, value: &(impl Serialize + ?Sized)) -> Result<Vec<T>> {
        self.exchange(message::encode(value)?)?.iter().map(|bytes| message::decode(bytes)).collect()
    }

    /// The sum of values over the ranks, in their order.
    ///
    /// # Errors
    /// `Error::Device` where another rank fails or is gone.
    pub fn all_reduce(&self, values: Flat) -> Result<Flat> {
        self.operation(|ranks| ranks.all_reduce(values))
    }

    /// This rank's [`shard`](firebrick_backends::collective::shard) of the sum of values over the ranks, in their
    /// order.
    ///
    /// # Errors
    /// `Error::Device` where another rank fails or is gone.
    pub fn reduce_scatter(&self, values: Flat) -> Result<Flat> {
        self.operation(|ranks| ranks.reduce_scatter(values))
    }

    /// Every rank's values one behind the other. All give as many.
    ///
    /// # Errors
    /// `Error::Device` where another rank fails or is gone.
    pub fn all_gather(&self, values: Flat) -> Result<Flat> {
        self.operation(|ranks| ranks.all_gather(values))
    }

    /// Starts an [`all_gather`](Self::all_gather) on all ranks without waiting: it runs while this rank computes.
    pub fn start_all_gather(&self, values: Flat) -> Gathering {
        let ranks = self.through.as_ref().map_or_else(|| Arc::clone(&self.all), |mesh| mesh.ranks());
        Gathering { values: ranks.start_all_gather(values), world: self.clone() }
    }

    /// Traffic of this rank in operations of these ranks so far.
    pub fn traffic(&self) -> Traffic {
        self.through.as_ref().map_or_else(|| self.all.traffic(), |mesh| mesh.traffic())
    }

    /// This rank among those that shard state, or one that has all.
    pub fn partition(&self, zero: Zero) -> Partition {
        match zero {
            Zero::Off => Partition::WHOLE,
            Zero::Stage1 | Zero::Stage2 | Zero::Stage3 => Partition::new(self.size(), self.rank()),
        }
    }

    /// Ends a part of the run in which a rank may fail on its own: tells all whether this one did. Gives an error where
    /// one has, the same on every rank; one that ended an operation on the way was told already.
    ///
    /// # Errors
    /// `CollectiveError::Failed` where a rank failed; the others where one is gone or in another operation.
    pub fn agree_on_failure(&self, failure: Option<Failure>) -> Result<(), CollectiveError> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).take();
        let overtaken = self.meshes().any(|mesh| mesh.take_overtaken());
        let settled = match known {
            Some(known) => Err(known),
            // the failure that cut an operation short is another rank's, which tells all
            None => {
                let failure = failure.filter(|_| !overtaken);
                let message = failure.as_ref().map(|failure| failure.message.clone());
                let settled = self.all.agree(failure);
                let agreed = settled.as_ref().err().filter(|error| matches!(error, CollectiveError::Failed(_)));
                let agreed = agreed.map(|error| message.unwrap_or_else(|| error.to_string()));
                *self.agreed.lock().unwrap_or_else(PoisonError::into_inner) = agreed;
                settled
            }
        };
        if let Err(CollectiveError::Failed(_)) = &settled {
            self.meshes().try_for_each(|mesh| mesh.renew(&self.all))?;
        }
        settled
    }

    /// Agrees on the result of work that all ranks do: its error on the rank that failed, that rank's error elsewhere.
    /// Memory that ran out on one rank ran out on all.
    ///
    /// # Errors
    /// Its own, or `Error::Device` with another rank's.
    pub fn agree<T>(&self, done: Result<T>) -> Result<T> {
        let told = |error: &Error| match error.out_of_memory() {
            Some(what) => Failure::from_oom(&what),
            None => Failure { users: error.is_user_error(), ..Failure::new(error.to_string()) },
        };
        let failure = done.as_ref().err().map(told);
        match (self.agree_on_failure(failure), done) {
            (Ok(()), done) | (Err(_), done @ Err(_)) => done,
            (Err(error), Ok(_)) => Err(error.into()),
        }
    }

    /// Sends an error that ends the run to all ranks. No message for an error that all ranks know: they may still be
    /// reading the first one.
    pub fn abort(&self, error: &Error) {
        let message = error.to_string();
        let agreed = self.agreed.lock().unwrap_or_else(PoisonError::into_inner);
        if !matches!(error, Error::MainRank { .. }) && agreed.as_ref() != Some(&message) {
            self.all.abort(&message);
        }
    }

    /// Broadcasts rank 0's value; the values of others are dropped.
    ///
    /// # Errors
    /// `Error::Device` where another rank fails or is gone; `Error::Ranks` where rank 0 runs another build.
    pub fn broadcast<T: Serialize + DeserializeOwned>(&self, value: T) -> Result<T> {
        if self.is_solo() { Ok(value) } else { self.broadcast_with(|| value) }
    }

    /// Runs `work` on rank 0 only: its value, or its error with the same message on every rank.
    ///
    /// # Errors
    /// That of `work`, of several ranks as `Error::MainRank`; those of [`broadcast`](Self::broadcast).
    pub fn run_on_main<T: Serialize + DeserializeOwned>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.is_solo() {
            return work();
        }
        let done: Result<T, (String, bool)> =
            self.broadcast_with(|| work().map_err(|error| (error.to_string(), error.is_user_error())))?;
        done.map_err(|(message, users)| Error::MainRank { message, users })
    }

    /// The value that rank 0 makes.
    fn broadcast_with<T: Serialize + DeserializeOwned>(&self, make: impl FnOnce() -> T) -> Result<T> {
        let message = if self.writes() { message::encode(&make())? } else { Vec::new() };
        message::decode(&self.exchange(message)?[0])
    }

    /// Refuses ranks that are not alike: `what` they have, as bytes that have to be equal. The same error on every
    /// rank.
    ///
    /// # Errors
    /// `Error::Ranks` with the first rank that differs from rank 0; `Error::Device` where one fails or is gone.
    pub fn same(&self, what: &str, advice: &str, state: &[u8]) -> Result<()> {
        if self.is_solo() {
            return Ok(());
        }
        let mut hasher = DefaultHasher::new();
        hasher.write(state);
        let hashes = self.exchange(hasher.finish().to_le_bytes().to_vec())?;
        match hashes.iter().position(|other| *other != hashes[0]) {
            None => Ok(()),
            Some(rank) => Err(Error::Ranks(format!("{what} of rank {rank} is not that of rank 0; {advice}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick_backends::collective::{Settings, Threads};

    fn ranks<T: Send>(size: usize, work: impl Fn(World) -> T + Sync) -> Vec<T> {
        let done = Threads::run(size, Settings::default(), |ranks| work(World::new(ranks)));
        done.into_iter().map(|rank| rank.unwrap()).collect()
    }

    #[test]
    fn ranks_that_are_threads_share_a_process_and_a_single_rank_shares_it_with_none() {
        assert!(!World::default().shares_process());
        for (size, shares) in [(1, false), (2, true)] {
            let ranks = Threads::world(size, Settings::default());
            assert!(ranks.into_iter().all(|rank| World::new(rank).shares_process() == shares));
        }
    }

    #[test]
    fn ranks_that_are_not_alike_are_told_apart_on_every_rank() {
        let errors = ranks(3, |world| {
            let state = [1_u8, 1, 2][world.rank()];
            let alike = world.same("the plan", "", &[7]);
            (alike.is_ok(), world.same("the plan", "make it anew", &[state]).unwrap_err().to_string())
        });
        for (alike, message) in errors {
            assert!(alike);
            assert!(message.contains("the plan of rank 2 is not that of rank 0; make it anew"), "{message}");
        }
    }

    #[test]
    fn an_error_of_one_rank_is_every_ranks() {
        let errors = ranks(2, |world| {
            let result = match world.rank() {
                0 => Ok(()),
                _ => Err(Error::Config("a wrong key".into())),
            };
            let error = world.agree(result).unwrap_err();
            assert!(error.is_user_error());
            error.to_string()
        });
        assert_eq!(errors, ["rank 1 failed: config: a wrong key", "config: a wrong key"]);
    }

    #[test]
    fn what_rank_0_does_for_all_comes_to_the_same_bytes_or_the_same_message_on_every_rank() {
        let outcomes = ranks(3, |world| {
            let done = world.run_on_main(|| Ok(vec![7, world.rank() as u8])).unwrap();
            let failed =
                [Error::Config("a wrong key".into()), Error::Phase { phase: "p", step: 1, detail: "d".into() }]
                    .map(|error| world.run_on_main::<()>(|| Err(error)).unwrap_err());
            // the ranks can continue
            let after = world.broadcast(vec![5]).unwrap();
            (done, failed.map(|error| (error.to_string(), error.is_user_error())), after)
        });
        for (done, [users, other], after) in outcomes {
            assert_eq!(done, [7, 0]);
            assert_eq!(users, ("config: a wrong key".to_owned(), true));
            assert_eq!(other, ("the p phase failed at step 1: d".to_owned(), false));
            assert_eq!(after, [5]);
        }
    }

    #[test]
    fn a_failure_that_ended_an_operation_is_not_told_twice() {
        let outcomes = ranks(2, |world| {
            let settled = match world.rank() {
                0 => {
                    // the other rank does not come here
                    let summed = world.all_reduce(Flat::F32(vec![1.0]));
                    world.agree_on_failure(summed.err().map(|e| Failure::new(e.to_string())))
                }
                _ => world.agree_on_failure(Some(Failure::new("no room"))),
            };
            (settled.unwrap_err().to_string(), world.broadcast(vec![world.rank() as u8 + 5]).unwrap())
        });
        for (message, received) in outcomes {
            assert_eq!(message, "rank 1 failed: no room");
            assert_eq!(received, [5]);
        }
    }
}
