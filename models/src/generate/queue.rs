//! What waits for its keys and values.

use super::{Finish, Request, Sample};
use crate::random::DrawKey;
use std::collections::BTreeMap;

/// A completion in the making.
#[derive(Debug)]
pub(super) struct Sequence {
    pub sample: Sample,
    pub key: DrawKey,
}

impl Sequence {
    fn new(requests: &[Request], request: usize, sample: usize) -> Self {
        let key = requests[request].key;
        Self {
            sample: Sample {
                request,
                sample,
                tokens: Vec::new(),
                logps: Vec::new(),
                full_logps: Vec::new(),
                finish: Finish::Length,
            },
            key: DrawKey {
                sample: key.sample + sample as u32,
                ..key
            },
        }
    }

    /// Names it; the smaller, the older.
    pub fn age(&self) -> (usize, usize) {
        (self.sample.request, self.sample.sample)
    }

    /// Forgets what was drawn: it will be drawn again, the same.
    fn restart(&mut self) {
        self.sample.tokens.clear();
        self.sample.logps.clear();
        self.sample.full_logps.clear();
    }
}

/// Tokens to be run, and the sequences that go on from there.
#[derive(Debug)]
pub(super) struct Job {
    /// A prompt, and for a sequence that lost its place what it has drawn.
    pub tokens: Vec<u32>,
    /// All samples of the prompt, or the one that lost its place.
    pub members: Vec<Sequence>,
    /// Whether all this was computed before.
    pub again: bool,
}

/// Prompts that have not been run, and sequences that lost their place, which come first.
#[derive(Debug)]
pub(super) struct Queue<'a> {
    requests: &'a [Request],
    /// Samples a prompt.
    n: usize,
    next: usize,
    returned: BTreeMap<(usize, usize), Job>,
}

impl<'a> Queue<'a> {
    pub fn new(requests: &'a [Request], n: usize) -> Self {
        let next = if n == 0 { requests.len() } else { 0 };
        Self {
            requests,
            n,
            next,
            returned: BTreeMap::new(),
        }
    }

    pub fn requests(&self) -> &'a [Request] {
        self.requests
    }

    pub fn is_empty(&self) -> bool {
        self.returned.is_empty() && self.next == self.requests.len()
    }

    /// Sequences that wait.
    pub fn waiting(&self) -> usize {
        let returned: usize = self.returned.values().map(|job| job.members.len()).sum();
        returned + (self.requests.len() - self.next) * self.n
    }

    /// Tokens of the job that comes next.
    pub fn front(&self) -> Option<usize> {
        match self.returned.values().next() {
            Some(job) => Some(job.tokens.len()),
            None => self.requests.get(self.next).map(|r| r.tokens.len()),
        }
    }

    /// Tokens of the longest of the jobs that hold the next `members` sequences.
    pub fn longest(&self, members: usize) -> usize {
        let returned = self.returned.values().map(|job| job.tokens.len());
        let jobs = members.div_ceil(self.n.max(1));
        let fresh = self.requests[self.next..].iter().map(|r| r.tokens.len());
        returned.chain(fresh).take(jobs).max().unwrap_or(0)
    }

    pub fn pop(&mut self) -> Option<Job> {
        if let Some((_, job)) = self.returned.pop_first() {
            return Some(job);
        }
        let request = self.next;
        let tokens = self.requests.get(request)?.tokens.clone();
        self.next += 1;
        let member = |sample| Sequence::new(self.requests, request, sample);
        Some(Job {
            tokens,
            members: (0..self.n).map(member).collect(),
            again: false,
        })
    }

    /// A sequence that lost its place waits, with what it has drawn.
    pub fn put_back(&mut self, sequence: Sequence) {
        let prompt = &self.requests[sequence.sample.request].tokens;
        let tokens = [prompt.as_slice(), &sequence.sample.tokens].concat();
        self.insert(Job {
            tokens,
            members: vec![sequence],
            again: true,
        });
    }

    /// Sequences that had not begun to decode wait for their common prompt again.
    pub fn put_back_together(&mut self, tokens: Vec<u32>, mut members: Vec<Sequence>) {
        let prompt = self.requests[members[0].sample.request].tokens.len();
        if tokens.len() > prompt {
            return members.into_iter().for_each(|m| self.put_back(m));
        }
        members.iter_mut().for_each(Sequence::restart);
        self.insert(Job {
            tokens,
            members,
            again: true,
        });
    }

    fn insert(&mut self, job: Job) {
        let before = self.returned.insert(job.members[0].age(), job);
        assert!(before.is_none(), "a sequence that waits twice");
    }
}
