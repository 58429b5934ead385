//! Sequences that are being decoded, one row of the forward pass each.

use super::sequence::Sequence;
use firebrick_models::cache::{BlockTable, KvCache};

/// Blocks that stay free when a sequence enters while `running` run, so that it does not preempt others at once: they
/// need as many in four tokens.
pub(super) fn reserve(running: usize) -> usize {
    running.div_ceil(4)
}

/// A sequence and its blocks.
#[derive(Debug)]
pub(super) struct Row {
    pub sequence: Sequence,
    pub table: BlockTable,
}

/// The rows of a decoding step. An ended sequence leaves a hole until another takes its row or the last one moves into
/// it.
#[derive(Debug, Default)]
pub(super) struct Running {
    /// The rows, holes among them.
    pub rows: Vec<Option<Row>>,
}

impl Running {
    /// Number of sequences.
    pub fn live(&self) -> usize {
        self.rows.iter().flatten().count()
    }

    /// The blocks of each row.
    pub fn tables(&self) -> Vec<Option<&BlockTable>> {
        self.rows.iter().map(|row| row.as_ref().map(|row| &row.table)).collect()
    }

    /// True if the cache has a block for each sequence that needs one for its next token.
    pub fn could_append(&self, cache: &KvCache) -> bool {
        cache.could_append(self.rows.iter().flatten().map(|row| &row.table), 1)
    }

    /// Takes the first hole, or a new row.
    pub fn admit(&mut self, row: Row) {
        match self.rows.iter_mut().find(|row| row.is_none()) {
            Some(hole) => *hole = Some(row),
            None => self.rows.push(Some(row)),
        }
    }

    /// True if holes should be closed. A quarter of the rows may be holes where the number of rows should not change
    /// often.
    pub fn should_compact(&self, lazy: bool) -> bool {
        let (live, rows) = (self.live(), self.rows.len());
        if lazy { live * 4 <= rows * 3 } else { live < rows }
    }

    /// Closes holes where [`Self::should_compact`] says so: the last sequences move into them.
    pub fn compact(&mut self, lazy: bool) {
        if !self.should_compact(lazy) {
            return;
        }
        for row in (0..self.rows.len()).rev() {
            if self.rows[row].is_none() {
                self.rows.swap_remove(row);
            }
        }
    }

    /// Removes the youngest sequence, which is preempted.
    pub fn preempt(&mut self) -> Option<Row> {
        let rows = self.rows.iter_mut().filter(|row| row.is_some());
        rows.max_by_key(|row| row.as_ref().map(|row| row.sequence.arrival()))?.take()
    }
}
