//! Collectives whose values NCCL moves.

use super::super::flat::shard;
use super::super::group::Staged;
use super::super::header::OperationKind;
use super::super::operation::{Operation, during};
use super::super::{
    Background, Collective, CollectiveError, Element, Failure, Flat, Result, Traffic,
};
use super::card::{Buffer, Card, Place};
use super::communicator::{Communicator, Wait};
use super::library::{self, ID, UniqueId};
use crate::Error;
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Ranks of a group with a GPU each.
#[derive(Debug)]
pub(super) struct NcclRanks {
    /// The same ranks, for everything but values.
    control: Arc<dyn Collective>,
    card: Arc<Card>,
    /// None after it has failed.
    communicator: Mutex<Option<Communicator>>,
}

/// The group that carries messages, where a collective is one.
pub(super) fn staged(ranks: &dyn Collective) -> Option<&Staged> {
    let ranks = ranks as &dyn Any;
    match ranks.downcast_ref::<Background>() {
        Some(queued) => staged(queued.group()),
        None => ranks.downcast_ref(),
    }
}

/// An operation that has buffers on the GPU and that all ranks are in.
struct Running<'a, 'g> {
    op: &'a mut Operation<'g>,
    communicator: &'a Communicator,
    card: &'a Card,
    operation: String,
}

impl Running<'_, '_> {
    fn waiting<T>(&self, work: impl FnOnce(&Communicator, &Wait<'_>) -> Result<T>) -> Result<T> {
        let Staged {
            transport,
            settings,
            ranks,
            own,
            ..
        } = self.op.group;
        let wait = Wait {
            mailbox: transport.mailbox(),
            deadline: self.op.deadline,
            seconds: settings.deadline.as_secs(),
            rank: ranks[*own],
            operation: &self.operation,
        };
        work(self.communicator, &wait)
    }

    /// Where a buffer lies, once what is in it was computed.
    fn place(&self, buffer: &Buffer) -> Result<Place> {
        let places = self
            .card
            .places(&[buffer])
            .map(|mut places| places.remove(0));
        places.or_else(|error| self.waiting(|_, wait| Err(wait.error(on_device(&error)))))
    }

    fn download(&self, buffer: &Buffer, bytes: usize) -> Result<Vec<u8>> {
        let read = self.card.download(buffer, bytes);
        read.or_else(|error| self.waiting(|_, wait| Err(wait.error(on_device(&error)))))
    }
}

fn on_device(error: &Error) -> String {
    format!("its GPU: {error}")
}

impl NcclRanks {
    /// The ranks of a collective that carries messages, on this rank's GPU. All of them come here together.
    pub fn over(control: Arc<dyn Collective>, card: Arc<Card>) -> Result<Self> {
        let communicator = joined(control.as_ref(), &card).inspect_err(|error| {
            if !matches!(error, CollectiveError::Failed(_)) {
                control.abort(&error.to_string());
            }
        })?;
        Ok(Self {
            control,
            card,
            communicator: Mutex::new(Some(communicator)),
        })
    }

    fn control(&self) -> &Staged {
        match staged(self.control.as_ref()) {
            Some(group) => group,
            None => unreachable!("looked at before it was taken"),
        }
    }

    fn communicator(&self) -> MutexGuard<'_, Option<Communicator>> {
        self.communicator
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// An operation on values of which all ranks have as many bytes. First `given` is copied to the GPU and room made for what comes, and
    /// for `sums` bytes that sums need on the way; then headers are exchanged; then `work` moves values, and the first `len` bytes of the
    /// buffer that it gives are the result. What goes wrong on the GPU before the headers goes with them, and the group can continue.
    fn operate(
        &self,
        (kind, own): (OperationKind, &Flat),
        given: Vec<u8>,
        [room, sums, len]: [usize; 3],
        work: impl FnOnce(&Running<'_, '_>, [(&Buffer, u64); 2]) -> Result<Buffer>,
    ) -> Result<Flat> {
        let (element, bytes) = (own.element(), own.as_bytes().len());
        let (given, room) = (self.card.upload(given), self.card.room(room));
        let sums = (sums > 0).then(|| self.card.room(sums));
        let all: Vec<&Buffer> = [&given, &room].into_iter().chain(&sums).collect();
        let places = self.card.places(&all);
        // what was there for them is free for them
        drop(sums);
        let failure = places.as_ref().err().map(|error| match error {
            Error::OutOfMemory(what) => Failure::of_memory(what),
            error => Failure::new(on_device(error)),
        });
        let mut communicator = self.communicator();
        let done = during(self.control(), |op| {
            let headers = op.begin(kind, element, bytes, failure)?;
            let (Ok(places), Some(communicator)) = (&places, &*communicator) else {
                unreachable!(
                    "a failure of this rank is every rank's, and one of NCCL is the end of the group"
                )
            };
            op.state.traffic.count(kind);
            op.state.traffic.bytes[kind as usize] += sent(kind, own, self.size(), self.rank());
            let running = Running {
                operation: headers[op.group.own].to_string(),
                op,
                communicator,
                card: &self.card,
            };
            let result = work(&running, [(&given, places[0].at), (&room, places[1].at)])?;
            let bytes = running.download(&result, len)?;
            Ok(Flat::from_bytes(element, bytes))
        });
        if !matches!(
            done,
            Ok(_) | Err(CollectiveError::Failed(_) | CollectiveError::Values(_))
        ) {
            // what is under way ends here
            if let Some(communicator) = communicator.take() {
                communicator.give_up();
            }
        }
        done
    }

    /// Bytes of a shard, the last ones filled up, and the values in as many shards.
    fn padded(&self, values: &Flat) -> (usize, Vec<u8>) {
        let shard = values.len().div_ceil(self.size()) * values.element().bytes();
        let mut bytes = values.as_bytes().to_vec();
        bytes.resize(shard * self.size(), 0);
        (shard, bytes)
    }
}

/// Most bytes of what stands between the blocks of a shard and their sum: a term and two sums, in the type that they are added in.
fn sum_bytes(block: usize, element: Element) -> usize {
    let wide = element.bytes().max(Element::F32.bytes());
    3 * (block / element.bytes()) * wide
}

/// Bytes that leave a rank for others, padding apart.
fn sent(kind: OperationKind, own: &Flat, ranks: usize, rank: usize) -> u64 {
    let (len, width) = (own.len(), own.element().bytes());
    let shard = shard(len, ranks, rank).len();
    let values = match kind {
        OperationKind::AllGather => len * (ranks - 1),
        OperationKind::ReduceScatter => len - shard,
        OperationKind::AllReduce => len - shard + shard * (ranks - 1),
        _ => len / ranks * (ranks - 1),
    };
    (values * width) as u64
}

/// The id of a group, from its first rank, and the communicator under it.
fn joined(control: &dyn Collective, card: &Card) -> Result<Communicator> {
    let Some(group) = staged(control) else {
        unreachable!("looked at before it was taken")
    };
    let wait = Wait {
        mailbox: group.transport.mailbox(),
        deadline: Instant::now() + group.settings.deadline,
        seconds: group.settings.deadline.as_secs(),
        rank: group.ranks[group.own],
        operation: &Joining,
    };
    let opened = library::open().map_err(|why| wait.error(why));
    let own = match (&opened, control.rank()) {
        (Ok(library), 0) => library.unique_id().map(|id| id.0.to_vec()),
        _ => Ok(Vec::new()),
    };
    // the bytes of an id, or why there is none
    let said = control.exchange(own.unwrap_or_else(String::into_bytes))?;
    let library = opened?;
    let id = <[u8; ID]>::try_from(said[0].as_slice()).map_err(|_| CollectiveError::Nccl {
        rank: group.ranks[0],
        operation: Joining.to_string(),
        message: String::from_utf8_lossy(&said[0]).into_owned(),
    })?;
    let place = (UniqueId(id), control.rank(), control.size());
    Communicator::join(library, &card.context, place, &wait)
}

struct Joining;

impl fmt::Display for Joining {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("joining a group")
    }
}

impl Collective for NcclRanks {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn size(&self) -> usize {
        self.control.size()
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Collective>> {
        let group = self.control.split(color, key)?;
        Ok(Arc::new(Self::over(group, Arc::clone(&self.card))?))
    }

    fn all_gather(&self, own: Flat) -> Result<Flat> {
        let given = own.as_bytes().to_vec();
        let (bytes, all) = (given.len(), given.len() * self.size());
        if bytes == 0 {
            return self.control.all_gather(own);
        }
        let kind = (OperationKind::AllGather, &own);
        self.operate(kind, given, [all, 0, all], |running, [given, room]| {
            running.waiting(|nccl, wait| nccl.all_gather(given.1, room.1, bytes, wait))?;
            Ok(room.0.clone())
        })
    }

    fn reduce_scatter(&self, all: Flat) -> Result<Flat> {
        if all.is_empty() || all.element() == Element::Byte {
            return self.control.reduce_scatter(all);
        }
        let (ranks, element) = (self.size(), all.element());
        let own = shard(all.len(), ranks, self.rank()).len() * element.bytes();
        let (block, given) = self.padded(&all);
        let (kind, room) = ((OperationKind::ReduceScatter, &all), given.len());
        let sums = sum_bytes(block, element);
        self.operate(kind, given, [room, sums, own], |running, [given, room]| {
            running.waiting(|nccl, wait| nccl.all_to_all(given.1, room.1, block, wait))?;
            Ok(running.card.sum(room.0, ranks, element))
        })
    }

    fn all_reduce(&self, own: Flat) -> Result<Flat> {
        if own.is_empty() || own.element() == Element::Byte {
            return self.control.all_reduce(own);
        }
        let (ranks, element) = (self.size(), own.element());
        let len = own.as_bytes().len();
        let (block, given) = self.padded(&own);
        let (kind, room) = ((OperationKind::AllReduce, &own), given.len());
        let sums = sum_bytes(block, element);
        self.operate(kind, given, [room, sums, len], |running, [given, room]| {
            running.waiting(|nccl, wait| nccl.all_to_all(given.1, room.1, block, wait))?;
            let sum = running.card.sum(room.0, ranks, element);
            // what was given has been sent: there is room for all sums
            let from = running.place(&sum)?;
            running.waiting(|nccl, wait| nccl.all_gather(from.at, given.1, block, wait))?;
            Ok(given.0.clone())
        })
    }

    fn all_to_all(&self, blocks: Flat) -> Result<Flat> {
        let ranks = self.size();
        if blocks.is_empty() || !blocks.len().is_multiple_of(ranks) {
            return self.control.all_to_all(blocks);
        }
        let given = blocks.as_bytes().to_vec();
        let (kind, len) = ((OperationKind::AllToAll, &blocks), given.len());
        self.operate(kind, given, [len, 0, len], |running, [given, room]| {
            let block = len / ranks;
            running.waiting(|nccl, wait| nccl.all_to_all(given.1, room.1, block, wait))?;
            Ok(room.0.clone())
        })
    }

    fn send(&self, to: usize, own: Flat) -> Result<()> {
        self.control.send(to, own)
    }

    fn receive(&self, from: usize, len: usize, element: Element) -> Result<Flat> {
        self.control.receive(from, len, element)
    }

    fn exchange(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.control.exchange(own)
    }

    fn agree(&self, failure: Option<Failure>) -> Result<()> {
        self.control.agree(failure)
    }

    fn abort(&self, message: &str) {
        self.control.abort(message);
    }

    fn traffic(&self) -> Traffic {
        self.control.traffic()
    }
}
