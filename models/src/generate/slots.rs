//! Sequences that are being decoded, one row of the cache each.

use super::prefill::PrefilledGroup;
use super::sequence::Sequence;
use crate::arch::Arch;
use crate::cache::KvCache;
use burn::tensor::Device;

/// Columns that a cache gets at a time, ahead of their use. To make room copies what is alive once; decoding reads it once for
/// every column.
const STEP: usize = 64;

/// Room for sequences, and the sequences in it.
#[derive(Debug)]
pub(super) struct Slots {
    cache: Option<KvCache>,
    /// By row. An ended sequence leaves a hole until another takes its row or the last one moves into it.
    rows: Vec<Option<Sequence>>,
    room: Room,
}

/// How much room there may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Most sequences.
    pub rows: usize,
    /// Most tokens of all caches, rows times columns.
    pub cells: usize,
    /// Most tokens of a completion.
    pub new_tokens: usize,
}

impl Room {
    /// Rows and columns of a cache for at least `least` and at most `most` sequences whose longest has `used` tokens, beside
    /// `other` cells: columns to spare, if they can be had, then rows to spare.
    fn shape(
        &self,
        rows: [usize; 2],
        used: usize,
        spare: usize,
        other: usize,
    ) -> Option<(usize, usize)> {
        let [least, most] = rows;
        let cells = self.cells.saturating_sub(other);
        [spare, spare / 4, 1].into_iter().find_map(|spare| {
            let capacity = used + spare.max(1);
            let rows = (cells / capacity).min(most);
            (rows >= least).then_some((rows, capacity))
        })
    }
}

/// What else there is while a cache is laid out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Around {
    /// Cells that other caches take.
    pub cells: usize,
    /// Sequences that wait for a slot.
    pub waiting: usize,
}

impl Slots {
    pub fn new(room: Room) -> Self {
        Self {
            cache: None,
            rows: Vec::new(),
            room,
        }
    }

    /// Sequences in a slot.
    pub fn live(&self) -> usize {
        self.rows.iter().flatten().count()
    }

    /// Rows of a forward, holes among them.
    pub fn rows(&self) -> &[Option<Sequence>] {
        &self.rows
    }

    pub fn rows_mut(&mut self) -> &mut [Option<Sequence>] {
        &mut self.rows
    }

    /// Cells allocated.
    pub fn cells(&self) -> usize {
        self.cache.as_ref().map_or(0, KvCache::cells)
    }

    pub fn cache_mut(&mut self) -> Option<&mut KvCache> {
        self.cache.as_mut()
    }

    /// Gives the cache back; nothing must be in it.
    pub fn release(&mut self) {
        debug_assert_eq!(self.live(), 0, "a sequence would be lost");
        self.rows.clear();
        self.cache = None;
    }

    /// Makes sure that a sequence of `len` tokens can enter, of which the longest that will enter soon has `longest`.
    /// False where there is no room for it now.
    pub fn make_room(
        &mut self,
        arch: &Arch,
        device: &Device,
        len: usize,
        longest: usize,
        around: Around,
    ) -> bool {
        let live = self.live();
        if live == 0 {
            self.rows.clear();
            match &mut self.cache {
                Some(cache) if cache.capacity() > longest.max(len) => {
                    cache.clear(longest.max(len));
                }
                other => *other = None,
            }
        }
        if let Some(cache) = &self.cache {
            let free = self.rows.len() > live || cache.rows() > live;
            if free && len <= cache.used() {
                return true;
            }
        }
        let window = self.longest();
        let spare = self.spare(around.waiting);
        let rows = [
            live + 1,
            self.room.rows.min(live + around.waiting).max(live + 1),
        ];
        let fit = |used| {
            self.room
                .shape(rows, used, spare, around.cells)
                .map(|s| (used, s))
        };
        // what enters later may be longer; where there is room for it too, nothing has to move then
        let found = fit(window.max(len).max(longest)).or_else(|| fit(window.max(len)));
        let Some((used, shape)) = found else {
            return false;
        };
        self.lay_out(arch, device, used, shape);
        true
    }

    /// Whether so many more sequences, of up to `len` tokens each, could enter beside `other` cells, and go on for a while.
    pub fn could_take(&self, more: usize, len: usize, other: usize) -> bool {
        let ahead = (STEP.min(self.room.new_tokens) / 4).max(1);
        let rows = (self.live() + more).min(self.room.rows);
        let cells = rows * (self.longest().max(len) + ahead);
        cells.saturating_add(other) <= self.room.cells
    }

    /// Gives cells back that are only to spare, where others need them.
    pub fn make_way(&mut self, arch: &Arch, device: &Device, around: Around) {
        if self.cells().saturating_add(around.cells) <= self.room.cells {
            return;
        }
        let (live, used) = (self.live(), self.longest());
        if live == 0 {
            self.release();
            return;
        }
        let spare = self.spare(around.waiting);
        let rows = [live, self.room.rows];
        if let Some(shape) = self.room.shape(rows, used, spare, around.cells) {
            self.lay_out(arch, device, used, shape);
        }
    }

    /// Whether there is a column to write.
    pub fn has_column(&self) -> bool {
        self.cache.as_ref().is_some_and(|c| c.used() < c.capacity())
    }

    /// Makes sure that there is a column to write. False where the cache may not grow so far.
    pub fn make_column(&mut self, arch: &Arch, device: &Device, around: Around) -> bool {
        if self.has_column() {
            return true;
        }
        let (live, used) = (self.live(), self.longest());
        let rows = [live, self.room.rows.min(live + around.waiting).max(live)];
        match self
            .room
            .shape(rows, used, self.spare(around.waiting), around.cells)
        {
            Some(shape) => {
                self.lay_out(arch, device, used, shape);
                true
            }
            None => false,
        }
    }

    /// Columns ahead of use: no more than will be used where nothing else enters.
    fn spare(&self, waiting: usize) -> usize {
        let left = |s: &Sequence| self.room.new_tokens.saturating_sub(s.sample.tokens.len());
        let most = match waiting {
            0 => self.rows.iter().flatten().map(left).max().unwrap_or(1),
            _ => self.room.new_tokens,
        };
        STEP.min(most)
    }

    /// Tokens of the longest sequence.
    fn longest(&self) -> usize {
        let Some(cache) = &self.cache else { return 0 };
        let starts = cache.starts().iter().zip(&self.rows);
        let live = starts.filter(|(_, row)| row.is_some());
        live.map(|(start, _)| cache.used() - start)
            .max()
            .unwrap_or(0)
    }

    /// Moves what lives to a cache of this shape, the longest first.
    fn lay_out(
        &mut self,
        arch: &Arch,
        device: &Device,
        used: usize,
        (rows, capacity): (usize, usize),
    ) {
        let starts = self.cache.as_ref().map_or(&[][..], KvCache::starts);
        let mut order: Vec<usize> = (0..self.rows.len())
            .filter(|&r| self.rows[r].is_some())
            .collect();
        order.sort_by_key(|&row| starts[row]);
        match &mut self.cache {
            Some(cache) if !order.is_empty() => cache.lay_out(&order, rows, used, capacity),
            old => {
                // gone before the new one comes
                *old = None;
                let mut cache = KvCache::empty(arch, rows, capacity, device);
                cache.clear(used);
                *old = Some(cache);
            }
        }
        self.rows = order.into_iter().map(|row| self.rows[row].take()).collect();
    }

    /// Copies sequences of a prefilled group into neighbouring free rows, at most `most`.
    pub fn admit(&mut self, group: &mut PrefilledGroup, most: usize) {
        let Some(cache) = &mut self.cache else { return };
        let hole = self.rows.iter().position(Option::is_none);
        let first = hole.unwrap_or(self.rows.len());
        let free =
            |row: usize| row < cache.rows() && self.rows.get(row).is_none_or(Option::is_none);
        let count = (first..)
            .take_while(|&row| free(row))
            .take(most.min(group.members.len()))
            .count();
        cache.adopt(first..first + count, &group.cache, group.row);
        for row in first..first + count {
            let sequence = group.members.pop_front();
            if row < self.rows.len() {
                self.rows[row] = sequence;
            } else {
                self.rows.push(sequence);
            }
        }
    }

    /// Whether holes should be closed by moving the last rows. A quarter of the rows may be holes where the number of rows should not change often.
    pub fn should_compact(&self, lazy: bool) -> bool {
        let (live, rows) = (self.live(), self.rows.len());
        if lazy {
            live * 4 <= rows * 3
        } else {
            live < rows
        }
    }

    /// Closes holes where [`Self::should_compact`] says so: the last sequences move into them.
    pub fn compact(&mut self, lazy: bool) {
        if !self.should_compact(lazy) {
            return;
        }
        let Some(cache) = &mut self.cache else { return };
        for row in (0..self.rows.len()).rev() {
            if self.rows[row].is_none() {
                cache.drop_row(row);
                self.rows.swap_remove(row);
            }
        }
    }

    /// Removes the youngest sequence, which is preempted.
    pub fn preempt(&mut self) -> Option<Sequence> {
        let rows = self.rows.iter_mut().filter(|row| row.is_some());
        rows.max_by_key(|row| row.as_ref().map(Sequence::arrival))?
            .take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_budget_gives_up_spare_columns_before_rows_that_are_needed() {
        let room = |cells| Room {
            rows: 8,
            cells,
            new_tokens: 64,
        };
        assert_eq!(room(usize::MAX).shape([2, 8], 36, 64, 0), Some((8, 100)));
        assert_eq!(room(420).shape([2, 8], 36, 64, 0), Some((4, 100)));
        assert_eq!(room(420).shape([6, 8], 36, 64, 0), Some((8, 52)));
        assert_eq!(room(420).shape([6, 8], 36, 64, 150), Some((7, 37)));
        assert_eq!(room(420).shape([6, 8], 36, 64, 300), None);
    }
}
