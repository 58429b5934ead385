//! Sequences that wait for prefill.

use super::request::GenerationRequest;
use super::sequence::{Sequence, SequenceGroup};
use std::collections::BTreeMap;

/// Preempted sequences, then prompts that have not been prefilled.
#[derive(Debug)]
pub(super) struct WaitingQueue<'a> {
    pub requests: &'a [GenerationRequest],
    /// Samples of each prompt.
    n: usize,
    next: usize,
    returned: BTreeMap<(usize, usize), SequenceGroup>,
}

impl<'a> WaitingQueue<'a> {
    pub fn new(requests: &'a [GenerationRequest], n: usize) -> Self {
        let next = if n == 0 { requests.len() } else { 0 };
        Self { requests, n, next, returned: BTreeMap::new() }
    }

    pub fn is_empty(&self) -> bool {
        self.returned.is_empty() && self.next == self.requests.len()
    }

    /// Number of sequences that wait.
    pub fn sequences(&self) -> usize {
        let returned: usize = self.returned.values().map(|group| group.members.len()).sum();
        returned + (self.requests.len() - self.next) * self.n
    }

    /// Tokens of the next group.
    pub fn front(&self) -> Option<usize> {
        match self.returned.values().next() {
            Some(group) => Some(group.tokens.len()),
            None => self.requests.get(self.next).map(|r| r.tokens.len()),
        }
    }

    pub fn pop(&mut self) -> Option<SequenceGroup> {
        if let Some((_, group)) = self.returned.pop_first() {
            return Some(group);
        }
        let request = self.next;
        let tokens = self.requests.get(request)?.tokens.clone();
        self.next += 1;
        let member = |sample| Sequence::new(self.requests, request, sample);
        Some(SequenceGroup { tokens, members: (0..self.n).map(member).collect(), recomputed: false })
    }

    /// A preempted sequence waits again, with the tokens it has sampled.
    pub fn put_back(&mut self, sequence: Sequence) {
        self.wait(sequence, true);
    }

    /// A sequence waits for its next turn.
    pub fn push_continued(&mut self, sequence: Sequence) {
        self.wait(sequence, false);
    }

    fn wait(&mut self, sequence: Sequence, recomputed: bool) {
        let prompt = &self.requests[sequence.sample.request].tokens;
        let tokens = [prompt.as_slice(), &sequence.sample.tokens].concat();
        self.insert(SequenceGroup { tokens, members: vec![sequence], recomputed });
    }

    /// Sequences that have not been decoded wait again, for the prefill of their common prompt.
    pub fn put_back_together(&mut self, tokens: Vec<u32>, mut members: Vec<Sequence>) {
        let prompt = self.requests[members[0].sample.request].tokens.len();
        if tokens.len() > prompt {
            return members.into_iter().for_each(|m| self.put_back(m));
        }
        members.iter_mut().for_each(Sequence::restart);
        self.insert(SequenceGroup { tokens, members, recomputed: true });
    }

    fn insert(&mut self, group: SequenceGroup) {
        let before = self.returned.insert(group.members[0].arrival(), group);
        assert!(before.is_none(), "a sequence waits once");
    }
}
