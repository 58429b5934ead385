//! The routes of cached tokens: they lie in the slots that keys and values have, so that whoever shares a block shares
//! its routes.

use super::{BLOCK_SIZE, BlockTable, KvCache};
use crate::arch::Arch;
use crate::routing::Routes;
use firebrick_arch::kv_cache::KvCacheGroup;
use std::ops::Range;

impl KvCache {
    /// Routes of all slots of the group of layers without a window; `None` for models without experts, and for those
    /// with windows on all layers, whose blocks do not stay.
    pub(super) fn route_slots(arch: &Arch, groups: &[KvCacheGroup], blocks: &[usize]) -> Option<Routes> {
        let whole = groups.iter().position(|group| group.window.is_none())?;
        let width = Some(arch.route_width()).filter(|&width| width > 0)?;
        Some(Routes::unknown(blocks[whole] * BLOCK_SIZE, width))
    }

    /// Bytes on the host of the table of routes.
    pub fn route_bytes(&self) -> usize {
        self.routes.as_ref().map(Routes::choices).map_or(0, size_of_val)
    }

    /// The slots of tokens' routes.
    pub(super) fn slots_of(&self, table: &BlockTable, tokens: Range<usize>) -> Vec<u32> {
        table.groups[self.widest_index()].slots(tokens).collect()
    }

    /// Keeps the routes of a forward pass: `slots` has one for every row that is in a sequence.
    pub(crate) fn write_routes(&mut self, slots: &[Option<u32>], rows: &Routes) {
        let Some(routes) = &mut self.routes else {
            return;
        };
        for (row, slot) in slots.iter().enumerate() {
            if let Some(slot) = *slot {
                routes.set_row(slot as usize, rows.row(row));
            }
        }
    }

    /// The routes of a sequence's first tokens, as many as have run.
    pub fn routes_of(&self, table: &BlockTable, tokens: usize) -> Option<Routes> {
        let kept = self.routes.as_ref()?;
        let mut routes = Routes::unknown(tokens, kept.width());
        for (token, slot) in self.slots_of(table, 0..tokens).into_iter().enumerate() {
            routes.set_row(token, kept.row(slot as usize));
        }
        Some(routes)
    }
}
