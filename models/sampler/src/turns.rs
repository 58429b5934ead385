//! Several turns: what a sequence continues with after the model has ended a turn of it.
//!
//! Tokens are only ever appended to a sequence, and none is encoded a second time. A turn's keys and values stay in the
//! cache while it waits, as long as the pools have room
//! ([`SchedulerConfig::keep_completions`](super::SchedulerConfig::keep_completions)), so that the next one is prefilled
//! from its new tokens on. A draw depends on the sequence and the position in it alone: neither the time that an answer
//! takes nor a second try changes a token.

use super::request::Sample;

/// Continuation of a sequence after a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// The completion is whole.
    End,
    /// There is no room for more: the completion ends at its length limit.
    Cut,
    /// These tokens, which the model did not sample, then another turn. They leave room for at least one token of it.
    Append(Vec<u32>),
    /// The completion begins again after its prompt.
    Restart,
    /// The answer comes later, by [`Turns::awaited`].
    Wait,
}

/// Answers turns. A turn ends with a stop token, a stop string, or the length limit.
pub trait Turns {
    /// Answers the last turn of `sample`, to which `room` more tokens may be added.
    fn turn(&mut self, sample: &Sample, room: usize) -> Next;

    /// Answers turns that wait, by request and sample; called when all other sequences have ended or wait too. Never
    /// [`Next::Wait`].
    fn awaited(&mut self) -> Vec<((usize, usize), Next)> {
        Vec::new()
    }
}

/// Completions of one turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct OneTurn;

impl Turns for OneTurn {
    fn turn(&mut self, _: &Sample, _: usize) -> Next {
        Next::End
    }
}
