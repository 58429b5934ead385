//! Which blocks of a pool are free, referenced, or kept for their content (vLLM's block pool): numbers alone, no
//! tensors.

use std::collections::{BTreeSet, HashMap};

/// The number of a block in its pool.
pub(super) type BlockId = u32;

/// Content of a block: its tokens, or the first of them, after all tokens before them. Equal ids have equal keys and
/// values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ContentId(pub u64);

/// The blocks of one group of layers.
#[derive(Debug)]
pub(super) struct BlockPool {
    /// References of each block.
    references: Vec<u32>,
    /// Blocks without references and without content to be kept.
    free: BTreeSet<BlockId>,
    /// Contents of each block by which other sequences may find it: all its tokens, and its beginnings at some times
    /// before, each with the number of its tokens.
    contents: Vec<Vec<(ContentId, usize)>>,
    by_content: HashMap<ContentId, BlockId>,
    /// Blocks without references whose content is kept until they are needed, with the time of their release.
    evictable: BTreeSet<(u64, BlockId)>,
    released: Vec<u64>,
    clock: u64,
    /// Blocks before this one were used at some time. On the CPU, those from it on take no memory yet.
    used_before: BlockId,
    /// True if kept contents stay as long as there are blocks that were never used.
    keeps_contents: bool,
}

impl BlockPool {
    pub fn new(blocks: usize) -> Self {
        Self {
            used_before: 0,
            keeps_contents: false,
            references: vec![0; blocks],
            free: (0..blocks as BlockId).collect(),
            contents: vec![Vec::new(); blocks],
            by_content: HashMap::new(),
            evictable: BTreeSet::new(),
            released: vec![0; blocks],
            clock: 0,
        }
    }

    /// Sets whether blocks that were never used are allocated before contents are forgotten.
    pub fn keep_contents(&mut self, keep: bool) {
        self.keeps_contents = keep;
    }

    /// Adds free blocks, so that there are `blocks`.
    pub fn grow(&mut self, blocks: usize) {
        self.free.extend(self.len() as BlockId..blocks as BlockId);
        self.references.resize(blocks, 0);
        self.contents.resize(blocks, Vec::new());
        self.released.resize(blocks, 0);
    }

    /// All blocks.
    pub fn len(&self) -> usize {
        self.references.len()
    }

    /// Blocks that can be allocated.
    pub fn available(&self) -> usize {
        self.free.len() + self.evictable.len()
    }

    /// Blocks with references.
    pub fn used(&self) -> usize {
        self.len() - self.available()
    }

    /// References of a block.
    pub fn references(&self, block: BlockId) -> u32 {
        self.references[block as usize]
    }

    /// A block with one reference, if there is any: the one after `last` if that is free, since neighbours are read as
    /// one range of memory, then one that was used before, since others may take more memory. Also the contents that
    /// were forgotten for it.
    pub fn allocate(&mut self, last: Option<BlockId>) -> Option<(BlockId, Vec<ContentId>)> {
        let next = last.map(|block| block + 1);
        let next = next.filter(|&next| next < self.used_before && self.free.contains(&next));
        let free = next.or_else(|| self.free.first().copied());
        let evict = free.is_none_or(|block| block >= self.used_before && !self.keeps_contents);
        let oldest = self.evictable.first().filter(|_| evict);
        let (block, contents) = match (oldest, free) {
            (Some(&oldest), _) => {
                self.evictable.remove(&oldest);
                let contents = std::mem::take(&mut self.contents[oldest.1 as usize]);
                (oldest.1, self.unlist(contents))
            }
            (None, Some(block)) => {
                self.free.remove(&block);
                (block, Vec::new())
            }
            (None, None) => return None,
        };
        self.used_before = self.used_before.max(block + 1);
        self.references[block as usize] = 1;
        Some((block, contents))
    }

    /// Contents that no block has any more.
    fn unlist(&mut self, contents: Vec<(ContentId, usize)>) -> Vec<ContentId> {
        let gone = contents.into_iter().map(|(content, _)| content);
        gone.inspect(|content| {
            self.by_content.remove(content);
        })
        .collect()
    }

    /// Adds a reference.
    pub fn share(&mut self, block: BlockId) {
        let at = block as usize;
        if self.references[at] == 0 {
            self.evictable.remove(&(self.released[at], block));
        }
        self.references[at] += 1;
    }

    /// Takes a reference away.
    pub fn release(&mut self, block: BlockId) {
        let at = block as usize;
        self.references[at] -= 1;
        if self.references[at] > 0 {
            return;
        }
        if self.contents[at].is_empty() {
            self.free.insert(block);
        } else {
            self.clock += 1;
            self.released[at] = self.clock;
            self.evictable.insert((self.clock, block));
        }
    }

    /// Keeps the content of a referenced block, its first `tokens` tokens, for others, beside others that it is kept
    /// for. False where a block has it already.
    pub fn keep(&mut self, block: BlockId, content: ContentId, tokens: usize) -> bool {
        if self.by_content.contains_key(&content) {
            return false;
        }
        self.contents[block as usize].push((content, tokens));
        self.by_content.insert(content, block);
        true
    }

    /// Forgets one content. False where no block has it.
    pub fn forget(&mut self, content: ContentId) -> bool {
        let Some(block) = self.by_content.remove(&content) else {
            return false;
        };
        let at = block as usize;
        self.contents[at].retain(|(kept, _)| *kept != content);
        if self.contents[at].is_empty() && self.references[at] == 0 {
            self.evictable.remove(&(self.released[at], block));
            self.free.insert(block);
        }
        true
    }

    /// True if a block is kept for more than its first `tokens` tokens: a write after them would change what others
    /// find.
    pub fn keeps_beyond(&self, block: BlockId, tokens: usize) -> bool {
        let mut contents = self.contents[block as usize].iter();
        contents.any(|&(_, kept)| kept > tokens)
    }

    /// Forgets the contents of a referenced block that have more than `tokens` tokens, and tells which they were.
    pub fn forget_beyond(&mut self, block: BlockId, tokens: usize) -> Vec<ContentId> {
        let contents = std::mem::take(&mut self.contents[block as usize]);
        let (longer, kept) = contents.into_iter().partition(|&(_, kept)| kept > tokens);
        self.contents[block as usize] = kept;
        self.unlist(longer)
    }

    /// The block that holds a content.
    pub fn find(&self, content: ContentId) -> Option<BlockId> {
        self.by_content.get(&content).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_allocated_and_blocks_come_back() {
        let mut pool = BlockPool::new(4);
        let take = |pool: &mut BlockPool, last| pool.allocate(last).map(|(block, _)| block);
        assert_eq!(take(&mut pool, None), Some(0));
        assert_eq!(take(&mut pool, None), Some(1));
        assert_eq!(take(&mut pool, Some(0)), Some(2));
        assert_eq!(take(&mut pool, Some(2)), Some(3));
        assert_eq!((take(&mut pool, None), pool.used()), (None, 4));
        pool.release(1);
        assert_eq!((pool.available(), take(&mut pool, Some(3))), (1, Some(1)));
    }

    #[test]
    fn contents_are_forgotten_before_blocks_that_were_never_used_are_taken() {
        for (keep, expected) in [(false, 0), (true, 1)] {
            let mut pool = BlockPool::new(4);
            pool.keep_contents(keep);
            let (block, _) = pool.allocate(None).expect("a free block");
            assert!(pool.keep(block, ContentId(7), 16));
            pool.release(block);
            let (block, forgotten) = pool.allocate(None).expect("a block");
            assert_eq!((block, forgotten.is_empty()), (expected, keep));
        }
    }

    #[test]
    fn a_content_stays_until_its_block_is_needed_and_the_oldest_goes_first() {
        let mut pool = BlockPool::new(3);
        for content in [7, 8] {
            let (block, _) = pool.allocate(None).expect("a free block");
            assert!(pool.keep(block, ContentId(content), 16));
        }
        let (plain, _) = pool.allocate(None).expect("a free block");
        assert!(!pool.keep(plain, ContentId(7), 16), "another block has it");
        for block in [1, 0, plain] {
            pool.release(block);
        }
        assert_eq!((pool.used(), pool.find(ContentId(8))), (0, Some(1)));
        // a block without content first, then the one released first
        assert_eq!(pool.allocate(None), Some((plain, Vec::new())));
        assert_eq!(pool.allocate(None), Some((1, vec![ContentId(8)])));
        assert_eq!(pool.find(ContentId(8)), None);
        // found again, it is no longer to be evicted
        let block = pool.find(ContentId(7)).expect("kept");
        pool.share(block);
        assert_eq!((pool.references(block), pool.allocate(None)), (1, None));
    }

    #[test]
    fn what_a_block_is_kept_for_beyond_some_tokens_is_forgotten_alone() {
        let mut pool = BlockPool::new(2);
        let (block, _) = pool.allocate(None).expect("a free block");
        for (content, tokens) in [(7, 4), (8, 5), (9, 16)] {
            assert!(pool.keep(block, ContentId(content), tokens));
        }
        assert!(pool.keeps_beyond(block, 15) && !pool.keeps_beyond(block, 16));
        assert_eq!(pool.forget_beyond(block, 4), [ContentId(8), ContentId(9)]);
        assert!(!pool.keeps_beyond(block, 4));
        let blocks = [7, 8, 9].map(|content| pool.find(ContentId(content)));
        assert_eq!(blocks, [Some(block), None, None]);
    }

    #[test]
    fn a_block_is_free_once_each_of_its_contents_is_forgotten() {
        let mut pool = BlockPool::new(2);
        let (block, _) = pool.allocate(None).expect("a free block");
        assert!(pool.keep(block, ContentId(7), 16) && pool.keep(block, ContentId(8), 16));
        assert_eq!(pool.find(ContentId(7)), pool.find(ContentId(8)));
        pool.release(block);
        assert!(pool.forget(ContentId(7)) && !pool.forget(ContentId(7)));
        assert_eq!(pool.find(ContentId(8)), Some(block), "still kept");
        assert!(pool.forget(ContentId(8)));
        // nothing is left to be forgotten for it
        assert_eq!(pool.allocate(None), Some((block, Vec::new())));
        // of a block that is in use both are forgotten when it is needed after its release
        assert!(pool.keep(block, ContentId(9), 16) && pool.keep(block, ContentId(10), 16));
        pool.release(block);
        let (other, _) = pool.allocate(None).expect("a block");
        assert_eq!(other, block, "it was used before");
        assert_eq!(pool.find(ContentId(9)).or(pool.find(ContentId(10))), None);
    }
}
