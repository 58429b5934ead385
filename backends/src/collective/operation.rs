//! One operation of a group: headers first, then blocks between pairs of ranks.

use super::flat::sum_in_order;
use super::group::{Staged, State};
use super::header::{Header, OperationKind};
use super::mailbox::{Ended, Message};
use super::{CollectiveError, Element, Failure, Flat, Result, shard};
use std::sync::PoisonError;
use std::time::Instant;

/// Runs an operation, which no other thread of this rank may interrupt. What breaks the group ends it for all.
pub(super) fn during<T>(
    group: &Staged,
    work: impl FnOnce(&mut Operation<'_>) -> Result<T>,
) -> Result<T> {
    let mut state = group.state.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(broken) = &state.broken {
        return Err(broken.clone());
    }
    let deadline = Instant::now() + group.settings.deadline;
    let done = work(&mut Operation {
        group,
        state: &mut state,
        deadline,
    });
    if let Err(error @ CollectiveError::Failed(_)) = &done
        && state.overtaken
    {
        // messages of the operation that was cut short may lie about: the group that it was split from continues, this one does not
        state.broken = Some(error.clone());
    }
    if let Err(error) = &done
        && !matches!(
            error,
            CollectiveError::Failed(_) | CollectiveError::Values(_)
        )
    {
        state.broken = Some(error.clone());
        group.transport.abort(&error.to_string());
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
        let (own, size) = (self.group.own, self.group.ranks.len());
        (1..size).map(move |step| (own + step) % size)
    }

    pub fn post_header(&self, to: usize, header: &Header) -> Result<()> {
        let message = match header.failure {
            None => Message::InGroup(header.encode()),
            Some(_) => Message::Failure(header.encode()),
        };
        self.post(to, message)
    }

    fn post(&self, to: usize, message: Message) -> Result<()> {
        let Staged {
            transport,
            ranks,
            channel,
            ..
        } = self.group;
        transport.post(ranks[to], *channel, message)
    }

    fn take(&mut self, from: usize, during: &Header) -> Result<Vec<u8>> {
        let Staged {
            transport,
            ranks,
            channel,
            parent,
            settings,
            ..
        } = self.group;
        let mailbox = transport.mailbox();
        let ended = match mailbox.take(*channel, ranks[from], *parent, self.deadline) {
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
                rank: ranks[self.group.own],
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
        let own = Header {
            kind,
            element,
            sequence: self.state.sequence,
            bytes: bytes as u64,
            failure: failure.map(|failure| Failure {
                rank: self.group.ranks[self.group.own],
                ..failure
            }),
        };
        self.state.sequence += 1;
        let Staged {
            transport, channel, ..
        } = self.group;
        let mailbox = transport.mailbox();
        if let Some(failure) = &own.failure {
            mailbox.fail(*channel, own.sequence, failure.clone());
        }
        for to in self.others() {
            self.post_header(to, &own)?;
        }
        let mut headers = vec![own.clone(); self.group.ranks.len()];
        for from in self.others() {
            headers[from] = self.take_header(from, &own)?;
        }
        // a rank that has failed itself, or was told of a failure elsewhere, may come here ahead of values that were sent to it
        if headers.iter().any(|header| header.failure.is_some())
            || mailbox.has_failed(*channel, own.sequence)
        {
            // what a rank sent before it learnt of the failure is no longer wanted
            for from in self.others() {
                while headers[from].kind == OperationKind::Send {
                    self.take_frames(from, headers[from].bytes as usize, &own)?;
                    headers[from] = self.take_header(from, &own)?;
                }
            }
        }
        let failures: Vec<Failure> = headers
            .iter()
            .filter_map(|header| header.failure.clone())
            .collect();
        if !failures.is_empty() {
            return Err(CollectiveError::Failed(failures));
        }
        if let Some(other) = headers.iter().position(|header| !headers[0].agrees(header)) {
            let ranks = &self.group.ranks;
            return Err(mismatch(
                (ranks[0], &headers[0]),
                (ranks[other], &headers[other]),
            ));
        }
        Ok(headers)
    }

    pub fn send_frames(&mut self, to: usize, kind: OperationKind, bytes: &[u8]) -> Result<()> {
        self.state.traffic.bytes[kind as usize] += bytes.len() as u64;
        bytes
            .chunks(self.group.settings.frame)
            .try_for_each(|frame| self.post(to, Message::InGroup(frame.to_vec())))
    }

    pub fn take_frames(&mut self, from: usize, len: usize, during: &Header) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        while all.len() < len {
            let frame = self.take(from, during)?;
            if all.is_empty() {
                all = frame;
            } else {
                all.extend(frame);
            }
        }
        if all.len() > len {
            return Err(self.too_long(from, all.len(), len, during));
        }
        Ok(all)
    }

    /// Takes the frames of a rank into a place that is as long as what it announced.
    fn take_into(&mut self, from: usize, place: &mut [u8], during: &Header) -> Result<()> {
        let (len, mut filled) = (place.len(), 0);
        while filled < len {
            let frame = self.take(from, during)?;
            let end = filled + frame.len();
            let Some(part) = place.get_mut(filled..end) else {
                return Err(self.too_long(from, end, len, during));
            };
            part.copy_from_slice(&frame);
            filled = end;
        }
        Ok(())
    }

    fn too_long(
        &self,
        from: usize,
        sent: usize,
        announced: usize,
        during: &Header,
    ) -> CollectiveError {
        CollectiveError::Transport(format!(
            "rank {} sent {sent} bytes in {during}, {announced} were announced",
            self.group.ranks[from]
        ))
    }

    /// Sends every other rank its block.
    fn give(&mut self, kind: OperationKind, given: &[&[u8]]) -> Result<()> {
        self.others()
            .try_for_each(|to| self.send_frames(to, kind, given[to]))
    }

    /// Gives every rank its block and takes a block of every rank, of these lengths in bytes.
    pub fn blocks(
        &mut self,
        during: &Header,
        given: &[&[u8]],
        lengths: &[usize],
    ) -> Result<Vec<Vec<u8>>> {
        self.give(during.kind, given)?;
        let own = self.group.own;
        (0..self.group.ranks.len())
            .map(|from| {
                if from == own {
                    Ok(given[own].to_vec())
                } else {
                    self.take_frames(from, lengths[from], during)
                }
            })
            .collect()
    }

    /// The same into a row in which the blocks of all ranks follow each other.
    pub fn fill(
        &mut self,
        during: &Header,
        given: &[&[u8]],
        row: &mut Flat,
        lengths: &[usize],
    ) -> Result<()> {
        self.give(during.kind, given)?;
        let own = self.group.own;
        let mut rest = row.as_bytes_mut();
        for (from, &len) in lengths.iter().enumerate() {
            let (block, behind) = rest.split_at_mut(len);
            if from == own {
                block.copy_from_slice(given[own]);
            } else {
                self.take_into(from, block, during)?;
            }
            rest = behind;
        }
        Ok(())
    }

    /// This rank's shard of the sum.
    pub fn reduce(&mut self, during: &Header, all: &Flat) -> Result<Flat> {
        let (size, own) = (self.group.ranks.len(), self.group.own);
        let given: Vec<&[u8]> = (0..size)
            .map(|rank| all.part(shard(all.len(), size, rank)))
            .collect();
        self.give(during.kind, &given)?;
        let mut taken = vec![Vec::new(); size];
        for from in (0..size).filter(|&from| from != own) {
            taken[from] = self.take_frames(from, given[own].len(), during)?;
        }
        let mut blocks: Vec<&[u8]> = taken.iter().map(Vec::as_slice).collect();
        blocks[own] = given[own];
        sum_in_order(all.element(), &blocks)
    }

    /// Every rank's values, of these lengths in bytes, put together.
    pub fn gather(&mut self, during: &Header, own: &Flat, lengths: &[usize]) -> Result<Flat> {
        let given = vec![own.as_bytes(); self.group.ranks.len()];
        let bytes: usize = lengths.iter().sum();
        let mut all = Flat::zeros(own.element(), bytes / own.element().bytes());
        self.fill(during, &given, &mut all, lengths)?;
        Ok(all)
    }
}

/// The error of two ranks in different operations.
pub(super) fn mismatch(
    (rank, own): (usize, &Header),
    (other, theirs): (usize, &Header),
) -> CollectiveError {
    CollectiveError::Mismatch {
        rank,
        own: own.to_string(),
        other,
        theirs: theirs.to_string(),
    }
}
