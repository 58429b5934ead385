//! Prefix caching: full blocks are found by their tokens and all tokens before them.
//!
//! The key of a block is its tokens and the content of the block before it, both exact: nothing depends on a hash not
//! colliding. A tail is a block that is not full, at whose end the states of linear attention are kept.

use super::block_pool::ContentId;
use firebrick_spec::BLOCK_SIZE;
use std::collections::HashMap;

type Key = (ContentId, [u32; BLOCK_SIZE]);

/// Stands for no token at the end of a tail: ids are below the size of a vocabulary.
const NO_TOKEN: u32 = u32::MAX;

/// The contents that some pool keeps.
#[derive(Debug, Default)]
pub(super) struct PrefixIndex {
    contents: HashMap<Key, ContentId>,
    /// The key of a content, and how many pools keep it.
    kept: HashMap<ContentId, (Key, usize)>,
    made: u64,
}

impl PrefixIndex {
    /// The content before the first block.
    pub const ROOT: ContentId = ContentId(0);

    /// The content of a block with these tokens after `before`, a tail where they are fewer than a block's, if some
    /// pool keeps it.
    pub fn find(&self, before: ContentId, tokens: &[u32]) -> Option<ContentId> {
        self.contents.get(&key(before, tokens)).copied()
    }

    /// [`Self::find`], or a new content.
    pub fn find_or_add(&mut self, before: ContentId, tokens: &[u32]) -> ContentId {
        let key = key(before, tokens);
        if let Some(&known) = self.contents.get(&key) {
            return known;
        }
        self.made += 1;
        let content = ContentId(self.made);
        self.contents.insert(key, content);
        self.kept.insert(content, (key, 0));
        content
    }

    /// A pool keeps a content.
    pub fn keep(&mut self, content: ContentId) {
        if let Some((_, pools)) = self.kept.get_mut(&content) {
            *pools += 1;
        }
    }

    /// Removes a content that no pool keeps.
    pub fn drop_unkept(&mut self, content: ContentId) {
        if let Some((key, 0)) = self.kept.get(&content) {
            self.contents.remove(key);
            self.kept.remove(&content);
        }
    }

    /// A pool has forgotten a content; whether it was the last that kept it.
    pub fn forget(&mut self, content: ContentId) -> bool {
        let Some((_, pools)) = self.kept.get_mut(&content) else {
            return false;
        };
        *pools -= 1;
        self.drop_unkept(content);
        !self.is_kept(content)
    }

    /// True if some pool keeps a content.
    pub fn is_kept(&self, content: ContentId) -> bool {
        self.kept.contains_key(&content)
    }

    /// True if a content is a tail.
    pub fn is_tail(&self, content: ContentId) -> bool {
        self.kept.get(&content).is_some_and(|((_, tokens), _)| tokens[BLOCK_SIZE - 1] == NO_TOKEN)
    }
}

fn key(before: ContentId, tokens: &[u32]) -> Key {
    let mut block = [NO_TOKEN; BLOCK_SIZE];
    block[..tokens.len()].copy_from_slice(tokens);
    (before, block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_found_by_its_tokens_and_all_before_them() {
        let mut index = PrefixIndex::default();
        let (a, b) = ([1; BLOCK_SIZE], [2; BLOCK_SIZE]);
        let first = index.find_or_add(PrefixIndex::ROOT, &a);
        let second = index.find_or_add(first, &b);
        assert_ne!(first, second);
        assert_eq!(index.find(first, &b), Some(second));
        assert_eq!(index.find(PrefixIndex::ROOT, &b), None);
        index.keep(second);
        index.keep(second);
        index.forget(second);
        assert_eq!(index.find(first, &b), Some(second), "another pool keeps it");
        index.forget(second);
        assert_eq!(index.find(first, &b), None);
    }

    #[test]
    fn a_tail_is_found_by_all_of_its_tokens_and_no_others() {
        let mut index = PrefixIndex::default();
        let tokens = [3; BLOCK_SIZE];
        let tail = index.find_or_add(PrefixIndex::ROOT, &tokens[..5]);
        index.keep(tail);
        let full = index.find_or_add(PrefixIndex::ROOT, &tokens);
        index.keep(full);
        assert!(index.is_tail(tail) && !index.is_tail(full));
        let find = |count: usize| index.find(PrefixIndex::ROOT, &tokens[..count]);
        assert_eq!([4, 5, 6].map(find), [None, Some(tail), None]);
        assert!(index.forget(tail) && !index.is_kept(tail) && index.is_kept(full));
    }
}
