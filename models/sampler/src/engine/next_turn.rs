//! Continuation of a sequence after a turn.

use super::Engine;
use crate::request::{FinishReason, check_ids};
use crate::sequence::Sequence;
use crate::turns::Next;
use firebrick_models::{Error, Result};

impl Engine<'_> {
    /// Does what is said to come after a sequence's turn.
    pub(super) fn continue_sequence(&mut self, mut sequence: Sequence, next: Next) -> Result<()> {
        match next {
            Next::End => (self.ended)(sequence.sample),
            Next::Cut => {
                sequence.sample.finish = FinishReason::Length;
                (self.ended)(sequence.sample);
            }
            Next::Wait => self.parked.push(sequence),
            Next::Restart => {
                sequence.restart();
                self.waiting.push_continued(sequence);
            }
            Next::Append(tokens) => {
                let (more, most) = (tokens.len(), self.max_new_tokens(&sequence));
                let length = sequence.sample.tokens.len() + more;
                if more == 0 || length >= most {
                    return Err(Error::Sampling(format!(
                        "an answer of {more} tokens makes a completion of {length}, which may have {most}: an answer has at least \
                         one token and leaves room for one after it"
                    )));
                }
                check_ids(&tokens, self.args.decoder.arch().vocab_size)?;
                sequence.insert(&tokens);
                self.waiting.push_continued(sequence);
            }
        }
        Ok(())
    }

    /// Goes on with the sequences whose turns were waited for.
    pub(super) fn take_awaited(&mut self) -> Result<()> {
        let mut awaited = self.turns.awaited();
        // whatever the order of the answers, the sequences enter in theirs
        awaited.sort_by_key(|(arrival, _)| *arrival);
        let waiting = self.parked.len();
        for (arrival, next) in awaited {
            let at = self.parked.iter().position(|s| s.arrival() == arrival);
            let Some(sequence) = at.map(|at| self.parked.swap_remove(at)) else {
                return Err(Error::Sampling(format!(
                    "sample {} of prompt {} was answered and does not wait for it",
                    arrival.1, arrival.0
                )));
            };
            self.continue_sequence(sequence, next)?;
        }
        if self.parked.len() == waiting {
            return Err(Error::Sampling(format!(
                "{waiting} sequences wait for an answer to their turns, and there is none"
            )));
        }
        Ok(())
    }
}
