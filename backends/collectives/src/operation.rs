//! One operation of a group: headers first, then blocks between pairs of ranks.

use super::flat::sum_in_order;
use super::group::{Staged, State};
use super::header::{Header, OperationKind};
use super::mailbox::{Ended, Message};
use super::parcel::Parcel;
use super::{CollectiveError, Element, Failure, Flat, Result, shard};
use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

/// Bytes of the widest value: frames are cut between values of any type.
const MAX_VALUE_BYTES: usize = 8;

/// Runs an operation, which no other thread of this rank may interrupt. What breaks the group ends it for all.
pub(super) fn during<T>(group: &Staged, work: impl FnOnce(&mut Operation<'_>) -> Result<T>) -> Result<T> {
    let mut state = group.state.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(broken) = &state.broken {
        return Err(broken.clone());
    }
    let deadline = Instant::now() + group.settings.deadline;
    let done = work(&mut Operation { group, state: &mut state, deadline });
    if let Err(error @ CollectiveError::Failed(_)) = &done
        && state.overtaken
    {
        // messages of the operation that was cut short may lie about: the group that it was split from continues, this
        // one does not
        state.broken = Some(error.clone());
    }
    if let Err(error) = &done
        && !matches!(error, CollectiveError::Failed(_) | CollectiveError::Values(_))
    {
        state.broken = Some(error.clone());
        group.give_up(error);
    }
    done
}

/// An operation that has begun and not ended.
pub(super) struct Operation<'a> {
    pub group: &'a Staged,
    pub state: &'a mut State,
    pub deadline: Instant,
}

impl Operation<'_> {
    /// The other ranks, beginning behind this one, so that not all send to the same one first.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.group.rank, self.group.ranks.len());
        (1..size).map(move |step| (rank + step) % size)
    }

    pub fn post_header(&self, to: usize, header: &Header) -> Result<()> {
        let message = match header.failure {
            None => Message::InGroup(header.encode().into()),
            Some(_) => Message::Failure(header.encode()),
        };
        self.post(to, message)
    }

    fn post(&self, to: usize, message: Message) -> Result<()> {
        let Staged { transport, ranks, channel, .. } = self.group;
        transport.post(ranks[to], *channel, message)
    }

    fn take(&mut self, from: usize, during: &Header) -> Result<Parcel> {
        let Staged { transport, ranks, channel, parent, settings, .. } = self.group;
        let mailbox = transport.mailbox();
        let ended = match mailbox.take(*channel, ranks[from], *parent, self.deadline, during) {
            Ok(taken) => return Ok(taken),
            Err(ended) => ended,
        };
        Err(match ended {
            Ended::Lost(rank, message) => CollectiveError::Lost { rank, message },
            Ended::Failed(failure) => {
                self.state.overtaken = true;
                CollectiveError::Failed(vec![failure])
            }
            Ended::TimedOut => CollectiveError::Deadline {
                rank: ranks[self.group.rank],
                other: ranks[from],
                seconds: settings.deadline.as_secs(),
                operation: during.to_string(),
            },
        })
    }

    pub fn take_header(&mut self, from: usize, during: &Header) -> Result<Header> {
        match self.state.early.remove(&from) {
            Some(early) => Ok(early),
            None => {
                let bytes = self.take(from, during)?;
                Header::decode(&bytes, self.group.ranks[from])
            }
        }
    }

    /// Exchanges headers. Gives all ranks' where they are in the same operation and none has failed.
    pub fn begin(
        &mut self,
        kind: OperationKind,
        element: Element,
        bytes: usize,
        failure: Option<Failure>,
    ) -> Result<Vec<Header>> {
        let header = Header {
            kind,
            element,
            sequence: self.state.sequence,
            bytes: bytes as u64,
            failure: failure.map(|failure| Failure { rank: self.group.ranks[self.group.rank], ..failure }),
        };
        self.state.sequence += 1;
        let Staged { transport, channel, .. } = self.group;
        let mailbox = transport.mailbox();
        if let Some(failure) = &header.failure {
            mailbox.fail(*channel, header.sequence, failure.clone());
        }
        for to in self.others() {
            self.post_header(to, &header)?;
        }
        let mut headers = vec![header.clone(); self.group.ranks.len()];
        for from in self.others() {
            headers[from] = self.take_header(from, &header)?;
        }
        // a rank that has failed itself, or was told of a failure elsewhere, may come here ahead of values that were
        // sent to it
        if headers.iter().any(|header| header.failure.is_some()) || mailbox.has_failed(*channel, header.sequence) {
            // what a rank sent before it learnt of the failure is no longer wanted
            for from in self.others() {
                while headers[from].kind == OperationKind::Send {
                    self.take_frames(from, headers[from].bytes as usize, &header)?;
                    headers[from] = self.take_header(from, &header)?;
                }
            }
        }
        let failures: Vec<Failure> = headers.iter().filter_map(|header| header.failure.clone()).collect();
        if !failures.is_empty() {
            return Err(CollectiveError::Failed(failures));
        }
        if let Some(other) = headers.iter().position(|header| !headers[0].agrees(header)) {
            let ranks = &self.group.ranks;
            return Err(mismatch((ranks[0], &headers[0]), (ranks[other], &headers[other])));
        }
        Ok(headers)
    }

    /// Sends some bytes of values, which stay as they are until all have arrived.
    pub fn send_frames(
        &mut self,
        to: usize,
        kind: OperationKind,
        values: &Arc<Flat>,
        bytes: Range<usize>,
    ) -> Result<()> {
        self.state.traffic.bytes[kind as usize] += bytes.len() as u64;
        // whole values
        let frame = (self.group.settings.frame / MAX_VALUE_BYTES * MAX_VALUE_BYTES).max(MAX_VALUE_BYTES);
        let ends = bytes.clone().step_by(frame).skip(1).chain([bytes.end]);
        bytes.clone().step_by(frame).zip(ends).try_for_each(|(start, end)| {
            let part = Parcel::Part(Arc::clone(values), start..end);
            self.post(to, Message::InGroup(part))
        })
    }

    /// Takes the frames of a rank, one after the other.
    pub fn each_frame(&mut self, from: usize, len: usize, during: &Header, mut with: impl FnMut(Parcel)) -> Result<()> {
        let mut taken = 0;
        while taken < len {
            let frame = self.take(from, during)?;
            taken += frame.len();
            if taken > len {
                return Err(CollectiveError::Transport(format!(
                    "rank {} sent {taken} bytes in {during}, {len} were announced",
                    self.group.ranks[from]
                )));
            }
            with(frame);
        }
        Ok(())
    }

    /// All bytes of a rank.
    pub fn take_frames(&mut self, from: usize, len: usize, during: &Header) -> Result<Parcel> {
        let mut parcel: Option<Parcel> = None;
        self.each_frame(from, len, during, |frame| {
            parcel = Some(match parcel.take() {
                None => frame,
                Some(Parcel::Own(mut bytes)) => {
                    bytes.extend_from_slice(&frame);
                    Parcel::Own(bytes)
                }
                Some(part) => [&*part, &*frame].concat().into(),
            });
        })?;
        Ok(parcel.unwrap_or_else(|| Vec::new().into()))
    }

    /// Sends every other rank its part of some values: those that `place` says.
    fn give(&mut self, kind: OperationKind, values: &Arc<Flat>, place: impl Fn(usize) -> Range<usize>) -> Result<()> {
        self.others().try_for_each(|to| self.send_frames(to, kind, values, values.place(place(to))))
    }

    /// Gives every rank these bytes and takes those of every rank, of these lengths.
    pub fn exchange(&mut self, during: &Header, given: Vec<u8>, lengths: &[usize]) -> Result<Vec<Vec<u8>>> {
        let (rank, len) = (self.group.rank, given.len());
        let given = Arc::new(Flat::Bytes(given));
        self.give(during.kind, &given, |_| 0..len)?;
        (0..self.group.ranks.len())
            .map(|from| {
                Ok(if from == rank {
                    given.as_bytes().to_vec()
                } else {
                    match self.take_frames(from, lengths[from], during)? {
                        Parcel::Own(bytes) => bytes,
                        part @ Parcel::Part(..) => part.to_vec(),
                    }
                })
            })
            .collect()
    }

    /// Gives every rank the values that `place` says, and takes so many of each rank into a row, in which those of all
    /// follow each other.
    pub fn fill(
        &mut self,
        during: &Header,
        given: &Arc<Flat>,
        place: impl Fn(usize) -> Range<usize>,
        lengths: &[usize],
    ) -> Result<Flat> {
        self.give(during.kind, given, &place)?;
        let (rank, width) = (self.group.rank, given.element().bytes());
        let mut row = Flat::with_capacity(given.element(), lengths.iter().sum());
        for (from, len) in lengths.iter().enumerate() {
            if from == rank {
                row.extend(given.part(place(rank)));
            } else {
                self.each_frame(from, len * width, during, |frame| row.extend(&frame))?;
            }
        }
        Ok(row)
    }

    /// This rank's shard of the sum.
    pub fn reduce(&mut self, during: &Header, values: &Arc<Flat>) -> Result<Flat> {
        let (size, this) = (self.group.ranks.len(), self.group.rank);
        let place = |rank| shard(values.len(), size, rank);
        self.give(during.kind, values, place)?;
        let given = values.part(place(this));
        let mut taken = Vec::with_capacity(size);
        for from in 0..size {
            taken.push(if from == this { Vec::new().into() } else { self.take_frames(from, given.len(), during)? });
        }
        let mut blocks: Vec<&[u8]> = taken.iter().map(|block| &**block).collect();
        blocks[this] = given;
        sum_in_order(values.element(), &blocks)
    }
}

/// The error of two ranks in different operations.
pub(super) fn mismatch((rank, ours): (usize, &Header), (other, theirs): (usize, &Header)) -> CollectiveError {
    CollectiveError::Mismatch { rank, ours: ours.to_string(), other, theirs: theirs.to_string() }
}
