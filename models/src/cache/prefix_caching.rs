//! Prefix caching: blocks that a new sequence shares with earlier ones, and blocks kept for later ones.

use super::block_pool::ContentId;
use super::prefix_index::PrefixIndex;
use super::{BLOCK_SIZE, BlockTable, KvCache};

/// A beginning that is kept: its blocks, the last of which may be a tail.
struct CachedPrefix {
    tokens: usize,
    contents: Vec<ContentId>,
}

impl KvCache {
    /// A table for a sequence that begins with `tokens`. It shares the blocks that are kept of the same tokens, but
    /// never all of `tokens`: the last one has to be run for the token after it. With linear attention it begins where
    /// states are kept too.
    pub fn begin(&mut self, tokens: &[u32]) -> BlockTable {
        let mut table = BlockTable::new(self.groups.len());
        let CachedPrefix { tokens, contents } = self.longest_cached_prefix(tokens);
        let whole = tokens / BLOCK_SIZE;
        for (group, table_group) in self.groups.iter_mut().zip(&mut table.groups) {
            table_group.first = group.first_visible(tokens).min(contents.len());
            // a tail is its own as soon as it writes to it
            table_group.shared = whole;
            for &content in &contents[table_group.first..] {
                let block = group.pool.find(content).unwrap_or_else(|| unreachable!("looked up before"));
                group.pool.share(block);
                table_group.blocks.push(block);
            }
        }
        table.tokens = tokens;
        let last = contents[..whole].last().copied();
        table.known = (whole, last.unwrap_or(PrefixIndex::ROOT));
        table.state = self.resume_states(contents.last().copied());
        table
    }

    /// Tokens that a sequence would [begin](Self::begin) with.
    pub fn found_tokens(&self, tokens: &[u32]) -> usize {
        self.longest_cached_prefix(tokens).tokens
    }

    /// Tokens that it would begin with if there were states at the end of every block.
    pub fn kept_tokens(&self, tokens: &[u32]) -> usize {
        let contents = self.kept_blocks(tokens);
        let counts = (0..=contents.len()).rev();
        let mut lengths = counts.map(|count| (&contents[..count], count * BLOCK_SIZE));
        let longest = lengths.find(|(contents, tokens)| self.keeps(contents, *tokens));
        longest.map_or(0, |(_, tokens)| tokens)
    }

    /// The contents of the whole blocks of tokens, the last token left out, as far as they are kept.
    fn kept_blocks(&self, tokens: &[u32]) -> Vec<ContentId> {
        let before_last = &tokens[..tokens.len().saturating_sub(1)];
        let blocks = before_last.chunks_exact(BLOCK_SIZE);
        let contents = blocks.scan(PrefixIndex::ROOT, |before, block| {
            *before = self.prefixes.find(*before, block)?;
            Some(*before)
        });
        contents.collect()
    }

    fn longest_cached_prefix(&self, tokens: &[u32]) -> CachedPrefix {
        let mut contents = self.kept_blocks(tokens);
        let before_last = &tokens[..tokens.len().saturating_sub(1)];
        loop {
            let whole = contents.len() * BLOCK_SIZE;
            if let Some((tail, more)) = self.kept_tail(&contents, &before_last[whole..]) {
                contents.push(tail);
                let tokens = whole + more;
                return CachedPrefix { tokens, contents };
            }
            let resumes = |last: &ContentId| {
                let slots = self.slots.as_ref();
                slots.is_none_or(|slots| slots.has(*last)) && self.keeps(&contents, whole)
            };
            if contents.last().is_none_or(resumes) {
                let tokens = whole;
                return CachedPrefix { tokens, contents };
            }
            contents.pop();
        }
    }

    /// The longest tail after some blocks with states at its end, and its tokens.
    fn kept_tail(&self, before: &[ContentId], tokens: &[u32]) -> Option<(ContentId, usize)> {
        let slots = self.slots.as_ref()?;
        let last = before.last().copied().unwrap_or(PrefixIndex::ROOT);
        let lengths = (1..BLOCK_SIZE.min(tokens.len() + 1)).rev();
        let mut tails = lengths.filter_map(|n| Some((self.prefixes.find(last, &tokens[..n])?, n)));
        tails.find(|&(tail, n)| {
            let contents = [before, &[tail]].concat();
            slots.has(tail) && self.keeps(&contents, before.len() * BLOCK_SIZE + n)
        })
    }

    /// True if all blocks with these contents that the token after `tokens` tokens sees are kept.
    fn keeps(&self, contents: &[ContentId], tokens: usize) -> bool {
        let mut groups = self.groups.iter();
        groups.all(|group| group.keeps(contents, tokens))
    }

    /// Keeps the full blocks of a sequence for others that begin with the same tokens. `tokens` are those whose keys
    /// and values are written, or will be by the next forward pass.
    pub fn keep_prefix(&mut self, table: &mut BlockTable, tokens: &[u32]) {
        let full = tokens.len().min(table.tokens) / BLOCK_SIZE;
        while table.known.0 < full {
            let (index, before) = table.known;
            let content = self.prefixes.find_or_add(before, &tokens[index * BLOCK_SIZE..][..BLOCK_SIZE]);
            for (group, table_group) in self.groups.iter_mut().zip(&table.groups) {
                if index >= table_group.first && group.pool.keep(table_group.block(index), content, BLOCK_SIZE) {
                    self.prefixes.keep(content);
                }
            }
            self.prefixes.drop_unkept(content);
            table.known = (index + 1, content);
        }
    }
}
