//! Inputs that a decoding step on a GPU reads of the cache's tables, uploaded with its other inputs.

use super::{BlockTable, KvCache};
use crate::arch::Arch;
use crate::rope::RotaryEmbeddings;
use firebrick_backends::kernels::StepInputs;

impl KvCache {
    /// The inputs of a step that runs the last token of each sequence, `ids`; see [`StepInputs::new`]. A row without a
    /// sequence gets zeros, and writes nothing.
    pub fn step_inputs(
        &self,
        arch: &Arch,
        tables: &[Option<&BlockTable>],
        ids: Vec<i32>,
        uniforms: Option<Vec<f32>>,
        stride: usize,
    ) -> StepInputs {
        let position = |table: Option<&BlockTable>| table.map_or(0, |t| t.tokens - 1) as u32;
        let positions: Vec<u32> = tables.iter().copied().map(position).collect();
        let rotary = RotaryEmbeddings::on_host(arch, &positions);
        let groups = self.groups.iter().enumerate().map(|(index, group)| group.shared_blocks(index, tables));
        let groups: Vec<_> = groups.collect();
        StepInputs::new(ids, uniforms, rotary, &groups, stride)
    }
}
