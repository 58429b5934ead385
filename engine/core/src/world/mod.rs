//! The ranks of a run: the same program on every rank, with the same state on the host.
//!
//! Every rank computes the same advantages, normalisers and cut of a batch, since it has all judged rollouts; only the
//! work of devices is divided. What has to be divided is dealt out by its expected cost ([`deal`]) without a message,
//! and what comes of it is exchanged as bytes ([`message`]).

pub mod deal;
mod groups;
mod mesh;

use crate::message;
use crate::{Error, Result};
use burn::tensor::Tensor;
use firebrick_backends::collective::{self, Collective, CollectiveError, Element, Failure, Flat, Solo, Traffic};
use firebrick_plan::{Partition, Zero};
use firebrick_spec::Home;
use mesh::{Mesh, OfRanks, SharedModel};
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
    /// Whether these ranks work for the critic.
    for_critic: bool,
    /// The ranks that sample together, where they do.
    sampling: Option<Arc<Mesh>>,
    /// The ranks that share matrices in training, and those that have the same share, where they do.
    matrices: Option<SharedModel>,
    /// The ranks that have the other stages, and those that have the same one, where layers are divided.
    stages: Option<SharedModel>,
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
    #[must_use]
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
    #[must_use]
    pub fn rank(&self) -> usize {
        let group = self.through.as_ref();
        group.map_or_else(|| self.all.rank(), |mesh| mesh.place())
    }

    /// How many ranks there are.
    #[must_use]
    pub fn size(&self) -> usize {
        let group = self.through.as_ref();
        group.map_or_else(|| self.all.size(), |mesh| mesh.degree())
    }

    /// Whether this is the only rank.
    #[must_use]
    pub fn is_solo(&self) -> bool {
        self.size() == 1
    }

    /// Whether this rank writes the run's files: rank 0 does.
    #[must_use]
    pub fn writes(&self) -> bool {
        self.rank() == 0
    }

    /// An operation of these ranks.
    fn operation<T, E: OfRanks>(&self, work: impl FnOnce(&dyn Collective) -> Result<T, E>) -> Result<T>
    where
        Error: From<E>,
    {
        if let Some(group) = &self.through {
            return Ok(group.during(work)?);
        }
        let done = work(self.all.as_ref());
        if let Some(error) = done.as_ref().err().and_then(OfRanks::failed_rank) {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            *known = Some(error.clone());
        }
        Ok(done?)
    }

    /// Where the buffers of operations on tensors lie.
    #[must_use]
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
    pub fn all_gather_tensor(&self, own: Tensor<1>) -> Result<Tensor<1>> {
        self.operation(|ranks| ranks.all_gather_tensor(own))
    }

    /// The sum of a tensor's values over all ranks, in their order.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce), and of copies.
    pub fn all_reduce_tensor(&self, own: Tensor<1>) -> Result<Tensor<1>> {
        self.operation(|ranks| ranks.all_reduce_tensor(own))
    }

    /// This rank's shard of the sum of a tensor's values over all ranks, in their order.
    ///
    /// # Errors
    /// Those of [`reduce_scatter`](Self::reduce_scatter), and of copies.
    pub fn reduce_scatter_tensor(&self, own: Tensor<1>) -> Result<Tensor<1>> {
        self.operation(|ranks| ranks.reduce_scatter_tensor(own))
    }

    /// What each rank has for this one, in their order: blocks of equal length, block r for the rth of them.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce), and of copies.
    pub fn all_to_all_tensor(&self, blocks: Tensor<1>) -> Result<Tensor<1>> {
        self.operation(|ranks| ranks.all_to_all_tensor(blocks))
    }

    /// Sends values to another rank, and does not wait for it.
    ///
    /// # Errors
    /// Where there is no such rank, or the message cannot be handed over.
    pub fn send(&self, rank: usize, own: Flat) -> Result<()> {
        self.operation(|ranks| ranks.send(rank, own))
    }

    /// Values that another rank sends.
    ///
    /// # Errors
    /// Where a rank failed or is gone, or sends another length or type.
    pub fn receive(&self, rank: usize, len: usize, element: Element) -> Result<Flat> {
        self.operation(|ranks| ranks.receive(rank, len, element))
    }

    /// Every rank's bytes, by rank.
    ///
    /// # Errors
    /// Where a rank failed or is gone, or is in another operation.
    pub fn exchange(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.operation(|ranks| ranks.exchange(own))
    }

    /// Every rank's value, by rank.
    ///
    /// # Errors
    /// `Error::Device` where another rank fails or is gone; `Error::Ranks` where it runs another build.
    pub fn gather<T: DeserializeOwned>(&self, own: &(impl Serialize + ?Sized)) -> Result<Vec<T>> {
        let all = self.exchange(message::encode(own)?)?;
        all.iter().map(|bytes| message::decode(bytes)).collect()
    }

    /// The sum of values over the ranks, in their order.
    ///
    /// # Errors
    /// `Error::Device` where another rank fails or is gone.
    pub fn all_reduce(&self, own: Flat) -> Result<Flat> {
        self.operation(|ranks| ranks.all_reduce(own))
    }

    /// This rank's [`shard`](firebrick_backends::collective::shard) of the sum of values over the ranks, in their
    /// order.
    ///
    /// # Errors
    /// `Error::Device` where another rank fails or is gone.
    pub fn reduce_scatter(&self, all: Flat) -> Result<Flat> {
        self.operation(|ranks| ranks.reduce_scatter(all))
    }

    /// Every rank's values one behind the other. All give as many.
    ///
    /// # Errors
    /// `Error::Device` where another rank fails or is gone.
    pub fn all_gather(&self, own: Flat) -> Result<Flat> {
        self.operation(|ranks| ranks.all_gather(own))
    }

    /// The same without waiting, at a place of the program that all ranks come to: it is under way while this rank
    /// computes.
    #[must_use]
    pub fn start_all_gather(&self, own: Flat) -> Gathering {
        let group = self.through.as_ref();
        let ranks = group.map_or_else(|| Arc::clone(&self.all), |mesh| mesh.ranks());
        Gathering { values: ranks.start_all_gather(own), world: self.clone() }
    }

    /// What this rank has sent in operations of these ranks so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        let group = self.through.as_ref();
        group.map_or_else(|| self.all.traffic(), |mesh| mesh.traffic())
    }

    /// This rank among those that share out state, or one that has all.
    #[must_use]
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
                let own = failure.filter(|_| !overtaken);
                let message = own.as_ref().map(|failure| failure.message.clone());
                let settled = self.all.agree(own);
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

    /// The same for work that all ranks do: its own error on the rank that failed, the other's elsewhere. Memory that
    /// ran out on one rank ran out on all.
    ///
    /// # Errors
    /// Its own, or `Error::Device` with another rank's.
    pub fn together<T>(&self, done: Result<T>) -> Result<T> {
        let told = |error: &Error| match error.out_of_memory() {
            Some(what) => Failure::of_memory(&what),
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
    pub fn give_up(&self, error: &Error) {
        let message = error.to_string();
        let agreed = self.agreed.lock().unwrap_or_else(PoisonError::into_inner);
        if !matches!(error, Error::OfMain { .. }) && agreed.as_ref() != Some(&message) {
            self.all.abort(&message);
        }
    }

    /// Rank 0's value; those of the others are dropped.
    ///
    /// # Errors
    /// `Error::Device` where another rank fails or is gone; `Error::Ranks` where rank 0 runs another build.
    pub fn of_main<T: Serialize + DeserializeOwned>(&self, own: T) -> Result<T> {
        if self.is_solo() { Ok(own) } else { self.sent_by_main(|| own) }
    }

    /// What only rank 0 does, for all: its value, or its error with the same message on every rank.
    ///
    /// # Errors
    /// That of `work`, of several ranks as `Error::OfMain`; those of [`of_main`](Self::of_main).
    pub fn on_main<T: Serialize + DeserializeOwned>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.is_solo() {
            return work();
        }
        let done: Result<T, (String, bool)> =
            self.sent_by_main(|| work().map_err(|error| (error.to_string(), error.is_user_error())))?;
        done.map_err(|(message, users)| Error::OfMain { message, users })
    }

    /// The value that rank 0 makes.
    fn sent_by_main<T: Serialize + DeserializeOwned>(&self, make: impl FnOnce() -> T) -> Result<T> {
        let own = if self.writes() { message::encode(&make())? } else { Vec::new() };
        message::decode(&self.exchange(own)?[0])
    }

    /// Refuses ranks that are not alike: `what` they have, as bytes that have to be equal. The same error on every
    /// rank.
    ///
    /// # Errors
    /// `Error::Ranks` with the first rank that differs from rank 0; `Error::Device` where one fails or is gone.
    pub fn same(&self, what: &str, advice: &str, own: &[u8]) -> Result<()> {
        if self.is_solo() {
            return Ok(());
        }
        let mut hasher = DefaultHasher::new();
        hasher.write(own);
        let all = self.exchange(hasher.finish().to_le_bytes().to_vec())?;
        match all.iter().position(|other| *other != all[0]) {
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
        let done = Threads::run(size, Settings::default(), |all| work(World::new(all)));
        done.into_iter().map(|rank| rank.unwrap()).collect()
    }

    #[test]
    fn ranks_that_are_not_alike_are_told_apart_on_every_rank() {
        let errors = ranks(3, |world| {
            let own = [1_u8, 1, 2][world.rank()];
            let alike = world.same("the plan", "", &[7]);
            (alike.is_ok(), world.same("the plan", "make it anew", &[own]).unwrap_err().to_string())
        });
        for (alike, message) in errors {
            assert!(alike);
            assert!(message.contains("the plan of rank 2 is not that of rank 0; make it anew"), "{message}");
        }
    }

    #[test]
    fn an_error_of_one_rank_is_every_ranks() {
        let found = ranks(2, |world| {
            let own = match world.rank() {
                0 => Ok(()),
                _ => Err(Error::Config("a wrong key".into())),
            };
            let error = world.together(own).unwrap_err();
            assert!(error.is_user_error());
            error.to_string()
        });
        assert_eq!(found, ["rank 1 failed: config: a wrong key", "config: a wrong key"]);
    }

    #[test]
    fn what_rank_0_does_for_all_comes_to_the_same_bytes_or_the_same_message_on_every_rank() {
        let found = ranks(3, |world| {
            let done = world.on_main(|| Ok(vec![7, world.rank() as u8])).unwrap();
            let failed =
                [Error::Config("a wrong key".into()), Error::Phase { phase: "p", step: 1, detail: "d".into() }]
                    .map(|error| world.on_main::<()>(|| Err(error)).unwrap_err());
            // the ranks can continue
            let after = world.of_main(vec![5]).unwrap();
            (done, failed.map(|error| (error.to_string(), error.is_user_error())), after)
        });
        for (done, [users, other], after) in found {
            assert_eq!(done, [7, 0]);
            assert_eq!(users, ("config: a wrong key".to_owned(), true));
            assert_eq!(other, ("the p phase failed at step 1: d".to_owned(), false));
            assert_eq!(after, [5]);
        }
    }

    #[test]
    fn a_failure_that_ended_an_operation_is_not_told_twice() {
        let found = ranks(2, |world| {
            let settled = match world.rank() {
                0 => {
                    // the other rank does not come here
                    let summed = world.all_reduce(Flat::F32(vec![1.0]));
                    world.agree_on_failure(summed.err().map(|e| Failure::new(e.to_string())))
                }
                _ => world.agree_on_failure(Some(Failure::new("no room"))),
            };
            (settled.unwrap_err().to_string(), world.of_main(vec![world.rank() as u8 + 5]).unwrap())
        });
        for (message, said) in found {
            assert_eq!(message, "rank 1 failed: no room");
            assert_eq!(said, [5]);
        }
    }
}
