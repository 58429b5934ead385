//! Collectives whose values NCCL moves.

use super::super::flat::shard;
use super::super::group::Staged;
use super::super::header::OperationKind;
use super::super::operation::{Operation, during};
use super::super::tensors::TensorResult;
use super::super::{Background, Collective, CollectiveError, Element, Failure, Flat, Look, Result, Traffic};
use super::card::{Buffer, Card, Place, dtype_of};
use super::communicator::{Communicator, Wait};
use super::library::{self, ID, UniqueId};
use super::watched::Watched;
use burn::tensor::Tensor;
use firebrick_device::Error;
use firebrick_spec::Home;
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Ranks of a group with a GPU each.
#[derive(Debug)]
pub(super) struct NcclRanks {
    /// These ranks, for everything but values.
    control: Arc<dyn Collective>,
    card: Arc<Card>,
    /// None after it has failed.
    communicator: Mutex<Option<Communicator>>,
    /// Of this group and those that were split from it or that it was split from.
    watched: Watched,
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
        let Staged { transport, settings, ranks, rank, .. } = self.op.group;
        let wait = Wait {
            mailbox: transport.mailbox(),
            deadline: self.op.deadline,
            seconds: settings.deadline.as_secs(),
            rank: ranks[*rank],
            operation: &self.operation,
        };
        work(self.communicator, &wait)
    }

    /// Address of a buffer, once its content was computed.
    fn place(&self, buffer: &Buffer) -> Result<Place> {
        let places = self.card.places(&[buffer]).map(|mut places| places.remove(0));
        places.or_else(|error| self.waiting(|_, wait| Err(wait.error(on_device(&error)))))
    }

    /// Moves the values of an operation from the first place to the second, which is that of `room`, and gives the
    /// buffer with the result.
    fn moved(
        &self,
        (kind, element): (OperationKind, Element),
        sizes: &Sizes,
        room: &Buffer,
        [from, to]: [u64; 2],
    ) -> Result<Buffer> {
        let block = sizes.block;
        let gather = |from| self.waiting(|nccl, wait| nccl.all_gather(from, to, block, wait));
        if kind == OperationKind::AllGather {
            gather(from)?;
            return Ok(room.clone());
        }
        self.waiting(|nccl, wait| nccl.all_to_all(from, to, block, wait))?;
        if kind == OperationKind::AllToAll {
            return Ok(room.clone());
        }
        let sum = self.card.sum(room, sizes.room / block, element);
        if kind == OperationKind::ReduceScatter {
            return Ok(sum);
        }
        // the sum was computed from what came: there is room for all sums
        gather(self.place(&sum)?.at)?;
        Ok(room.clone())
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
                match staged(control.as_ref()) {
                    Some(group) => group.give_up(error),
                    None => control.abort(&error.to_string()),
                }
            }
        })?;
        Ok(Self { control, card, communicator: Mutex::new(Some(communicator)), watched: Watched::default() })
    }

    fn control(&self) -> &Staged {
        match staged(self.control.as_ref()) {
            Some(group) => group,
            None => unreachable!("looked at before it was taken"),
        }
    }

    fn communicator(&self) -> MutexGuard<'_, Option<Communicator>> {
        self.communicator.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An operation on values of which all ranks have as many. First they are put on the GPU and room is made for what
    /// comes, and for what sums need on the way; then headers are exchanged; then NCCL moves values. What goes wrong on
    /// the GPU before the headers goes with them, and the group can continue.
    fn operate<V: Values>(&self, kind: OperationKind, values: V) -> std::result::Result<V, V::Error> {
        let (element, len) = values.extent();
        let sizes = Sizes::new(kind, element, len, self.size(), self.rank());
        let given = values.on_card(&self.card, sizes.given);
        let room = self.card.room(sizes.room);
        let sums = (sizes.sums > 0).then(|| self.card.room(sizes.sums));
        let buffers: Vec<&Buffer> = [&given, &room].into_iter().chain(&sums).collect();
        let places = self.card.places(&buffers);
        self.watched.look();
        // what was there for them is free for them
        drop(sums);
        let failure = places.as_ref().err().map(|error| match error {
            Error::OutOfMemory(what) => Failure::from_oom(what),
            error => Failure::new(on_device(error)),
        });
        let mut communicator = self.communicator();
        let done = during(self.control(), |op| {
            let headers = op.begin(kind, element, len * element.bytes(), failure)?;
            let (Ok(places), Some(communicator)) = (&places, &*communicator) else {
                unreachable!("a failure of this rank is every rank's, and one of NCCL is the end of the group")
            };
            op.state.traffic.count(kind);
            op.state.traffic.bytes[kind as usize] += sizes.sent as u64;
            let running = Running { operation: headers[op.group.rank].to_string(), op, communicator, card: &self.card };
            let result = running.moved((kind, element), &sizes, &room, [places[0].at, places[1].at])?;
            V::from_card(&running, result, element, sizes.result)
        });
        if !matches!(done, Ok(_) | Err(CollectiveError::Failed(_) | CollectiveError::Values(_))) {
            // what is under way ends here
            if let Some(communicator) = communicator.take() {
                communicator.give_up();
            }
        }
        Ok(done?)
    }

    /// An operation over NCCL, or as the ranks without it do it.
    fn run<V: Values>(
        &self,
        kind: OperationKind,
        values: V,
        otherwise: impl FnOnce(&dyn Collective, V) -> std::result::Result<V, V::Error>,
    ) -> std::result::Result<V, V::Error> {
        if self.is_left(kind, values.extent()) {
            otherwise(self.control.as_ref(), values)
        } else {
            self.operate(kind, values)
        }
    }

    /// Returns true if an operation is left to the ranks without NCCL: one on no values, one that has no sum, or one
    /// that they refuse.
    fn is_left(&self, kind: OperationKind, (element, len): (Element, usize)) -> bool {
        len == 0
            || match kind {
                OperationKind::ReduceScatter | OperationKind::AllReduce => element == Element::Byte,
                OperationKind::AllToAll => !len.is_multiple_of(self.size()),
                _ => false,
            }
    }
}

/// Values that come from somewhere and go back there.
trait Values: Sized {
    /// Errors of moving them.
    type Error: From<CollectiveError>;

    /// Their type, and how many there are.
    fn extent(&self) -> (Element, usize);

    /// On the GPU, with zeros behind them up to so many bytes.
    fn on_card(self, card: &Card, bytes: usize) -> Buffer;

    /// So many values from the GPU.
    fn from_card(running: &Running<'_, '_>, buffer: Buffer, element: Element, len: usize) -> Result<Self>;
}

/// On the host.
impl Values for Flat {
    type Error = CollectiveError;

    fn extent(&self) -> (Element, usize) {
        (self.element(), self.len())
    }

    fn on_card(self, card: &Card, bytes: usize) -> Buffer {
        let mut values = self.as_bytes().to_vec();
        values.resize(bytes, 0);
        card.upload(values)
    }

    fn from_card(running: &Running<'_, '_>, buffer: Buffer, element: Element, len: usize) -> Result<Self> {
        let bytes = running.download(&buffer, len * element.bytes())?;
        Ok(Self::from_bytes(element, bytes))
    }
}

/// On the GPU already.
impl Values for Tensor<1> {
    type Error = Error;

    fn extent(&self) -> (Element, usize) {
        (Element::of(self.dtype()), self.dims()[0])
    }

    fn on_card(self, _card: &Card, bytes: usize) -> Buffer {
        let ([len], dtype) = (self.dims(), self.dtype());
        let padding = bytes / dtype.size() - len;
        if padding == 0 {
            return Buffer::new(self);
        }
        let zeros = Tensor::zeros([padding], (&self.device(), dtype));
        Buffer::new(Tensor::cat(vec![self, zeros], 0))
    }

    fn from_card(running: &Running<'_, '_>, buffer: Buffer, element: Element, len: usize) -> Result<Self> {
        Ok(running.card.tensor(buffer, len, dtype_of(element)))
    }
}

/// Bytes, and values of the result, of an operation.
struct Sizes {
    /// Input of a rank, padded to equal blocks.
    given: usize,
    /// Each rank's part of the input, or of the received.
    block: usize,
    /// Received.
    room: usize,
    /// Temporaries of sums.
    sums: usize,
    /// Values of the result.
    result: usize,
    /// Sent to other ranks, without padding.
    sent: usize,
}

impl Sizes {
    fn new(kind: OperationKind, element: Element, len: usize, ranks: usize, rank: usize) -> Self {
        let width = element.bytes();
        let shard = shard(len, ranks, rank).len();
        let padded = len.div_ceil(ranks) * width;
        let whole = Self {
            given: len * width,
            block: len * width,
            room: len * width * ranks,
            sums: 0,
            result: len * ranks,
            sent: len * width * (ranks - 1),
        };
        let summed = Self {
            given: padded * ranks,
            block: padded,
            room: padded * ranks,
            sums: sum_bytes(padded, element),
            result: shard,
            sent: (len - shard) * width,
        };
        match kind {
            OperationKind::ReduceScatter => summed,
            OperationKind::AllReduce => {
                Self { result: len, sent: (len - shard + shard * (ranks - 1)) * width, ..summed }
            }
            OperationKind::AllToAll => Self {
                block: len / ranks * width,
                room: len * width,
                result: len,
                sent: len / ranks * (ranks - 1) * width,
                ..whole
            },
            _ => whole,
        }
    }
}

/// Most bytes of what stands between the blocks of a shard and their sum: a term and two sums, in the type that they
/// are added in.
fn sum_bytes(block: usize, element: Element) -> usize {
    let wide = element.bytes().max(Element::F32.bytes());
    3 * (block / element.bytes()) * wide
}

/// The id of a group, from its first rank, and the communicator under it.
fn joined(control: &dyn Collective, card: &Card) -> Result<Communicator> {
    let Some(group) = staged(control) else { unreachable!("looked at before it was taken") };
    let wait = Wait {
        mailbox: group.transport.mailbox(),
        deadline: Instant::now() + group.settings.deadline,
        seconds: group.settings.deadline.as_secs(),
        rank: group.ranks[group.rank],
        operation: &Joining,
    };
    let opened = library::open().map_err(|why| wait.error(why));
    let id = match (&opened, control.rank()) {
        (Ok(library), 0) => library.unique_id().map(|id| id.0.to_vec()),
        _ => Ok(Vec::new()),
    };
    // the bytes of an id, or why there is none
    let ids = control.exchange(id.unwrap_or_else(String::into_bytes))?;
    let library = opened?;
    let id = <[u8; ID]>::try_from(ids[0].as_slice()).map_err(|_| CollectiveError::Nccl {
        rank: group.ranks[0],
        operation: Joining.to_string(),
        message: String::from_utf8_lossy(&ids[0]).into_owned(),
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

    fn shares_process(&self) -> bool {
        self.control.shares_process()
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Collective>> {
        let group = self.control.split(color, key)?;
        let split = Self::over(group, Arc::clone(&self.card))?;
        Ok(Arc::new(Self { watched: self.watched.clone(), ..split }))
    }

    fn all_gather(&self, values: Flat) -> Result<Flat> {
        self.run(OperationKind::AllGather, values, Collective::all_gather)
    }

    fn reduce_scatter(&self, values: Flat) -> Result<Flat> {
        self.run(OperationKind::ReduceScatter, values, Collective::reduce_scatter)
    }

    fn all_reduce(&self, values: Flat) -> Result<Flat> {
        self.run(OperationKind::AllReduce, values, Collective::all_reduce)
    }

    fn all_to_all(&self, blocks: Flat) -> Result<Flat> {
        self.run(OperationKind::AllToAll, blocks, Collective::all_to_all)
    }

    fn buffers_home(&self) -> Home {
        Home::Device
    }

    fn watch_buffers(&self, look: Look) {
        self.watched.set(look);
    }

    fn all_gather_tensor(&self, tensor: Tensor<1>) -> TensorResult {
        self.run(OperationKind::AllGather, tensor, Collective::all_gather_tensor)
    }

    fn reduce_scatter_tensor(&self, tensor: Tensor<1>) -> TensorResult {
        self.run(OperationKind::ReduceScatter, tensor, Collective::reduce_scatter_tensor)
    }

    fn all_reduce_tensor(&self, tensor: Tensor<1>) -> TensorResult {
        self.run(OperationKind::AllReduce, tensor, Collective::all_reduce_tensor)
    }

    fn all_to_all_tensor(&self, blocks: Tensor<1>) -> TensorResult {
        self.run(OperationKind::AllToAll, blocks, Collective::all_to_all_tensor)
    }

    fn send(&self, to: usize, values: Flat) -> Result<()> {
        self.control.send(to, values)
    }

    fn receive(&self, from: usize, len: usize, element: Element) -> Result<Flat> {
        self.control.receive(from, len, element)
    }

    fn exchange(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.control.exchange(bytes)
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
