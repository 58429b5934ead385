//! Inputs of a decoding step on a GPU besides weights and cache, on the host.

use crate::paged::TableWords;
use crate::sequence_blocks::SharedBlocks;
use std::ops::Range;

/// Parts begin at multiples of so many words: a GPU binds a buffer from multiples of 256 bytes on.
const ALIGNED: usize = 64;

/// Inputs of a step's rows that follow from their positions, on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct StepRotary {
    /// Cosines and then sines of each row's rotary angles, `[rows, dim]`, for every kind of rotary embedding that
    /// layers have.
    pub angles: Vec<Vec<f32>>,
    /// Factors of the rows' queries, where not all are one.
    pub query_scale: Option<Vec<f32>>,
}

/// The inputs of one decoding step, on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct StepInputs {
    rows: usize,
    ids: Vec<i32>,
    uniforms: Option<Vec<f32>>,
    rotary: StepRotary,
    tables: Vec<TableWords>,
}

/// Parameters of the kernels that a step launches: steps of one shape can be replays of one graph.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StepShape {
    rows: usize,
    drawn: bool,
    /// True if queries are multiplied by factors.
    scaled: bool,
    /// Stride and rounded longest length of every table.
    tables: Vec<[usize; 2]>,
}

impl StepInputs {
    /// The inputs of `ids.len()` rows: the token that each runs, the number that its next token is drawn by (none where
    /// the likeliest is taken), what each row takes from its position, and the sequences of every group of layers. A
    /// row of a table has at least `stride` blocks.
    ///
    /// # Panics
    /// If the lengths disagree.
    pub fn new(
        ids: Vec<i32>,
        uniforms: Option<Vec<f32>>,
        rotary: StepRotary,
        groups: &[Vec<SharedBlocks>],
        stride: usize,
    ) -> Self {
        let rows = ids.len();
        let whole = |angles: &Vec<f32>| angles.len().is_multiple_of(rows);
        assert!(rows > 0 && rotary.angles.iter().all(whole), "angles");
        let scale = rotary.query_scale.as_ref();
        assert!(scale.is_none_or(|s| s.len() == rows), "factors of queries");
        assert!(uniforms.as_ref().is_none_or(|u| u.len() == rows), "draws");
        let table = |group: &Vec<SharedBlocks>| TableWords::new(group, rows, stride);
        Self { rows, ids, uniforms, rotary, tables: groups.iter().map(table).collect() }
    }

    /// Rows of the step.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// See [`StepShape`].
    pub fn shape(&self) -> StepShape {
        let table = |table: &TableWords| [table.stride, table.longest];
        StepShape {
            rows: self.rows,
            drawn: self.is_drawn(),
            scaled: self.is_scaled(),
            tables: self.tables.iter().map(table).collect(),
        }
    }

    /// Returns true if tokens are drawn.
    pub fn is_drawn(&self) -> bool {
        self.uniforms.is_some()
    }

    /// Returns true if queries are multiplied by factors.
    pub fn is_scaled(&self) -> bool {
        self.rotary.query_scale.is_some()
    }

    /// Block tables of every group of layers.
    pub fn tables(&self) -> &[TableWords] {
        &self.tables
    }

    /// All parts in one, and where each is: ids, random numbers, factors of queries, the tables, and every kind of
    /// angles.
    pub fn words(&self) -> (Vec<i32>, Vec<Range<usize>>) {
        let bits = |x: &f32| x.to_bits() as i32;
        let uniforms = self.uniforms.iter().flatten().map(bits).collect();
        let scale = self.rotary.query_scale.iter().flatten().map(bits).collect();
        let tables = self.tables.iter().map(|table| table.words.clone());
        let angles = self.rotary.angles.iter();
        let angles = angles.map(|kind| kind.iter().map(bits).collect());
        let parts: Vec<Vec<i32>> =
            [self.ids.clone(), uniforms, scale].into_iter().chain(tables).chain(angles).collect();
        let (mut words, mut places) = (Vec::new(), Vec::new());
        for part in parts {
            words.resize(words.len().next_multiple_of(ALIGNED), 0);
            places.push(words.len()..words.len() + part.len());
            words.extend(part);
        }
        (words, places)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequence_blocks::SequenceBlocks;

    fn inputs(tokens: usize) -> StepInputs {
        let member = SequenceBlocks { row: 1, blocks: (0..tokens.div_ceil(16) as u32).collect(), tokens };
        let group = vec![SharedBlocks { first: 0, blocks: Vec::new(), members: vec![member] }];
        let rotary = StepRotary { angles: vec![vec![1.0; 8], vec![0.0; 8]], query_scale: None };
        StepInputs::new(vec![5, 7], Some(vec![0.25, 0.5]), rotary, &[group], 4)
    }

    #[test]
    fn every_part_of_a_step_begins_where_a_gpu_can_bind_it() {
        let (words, places) = inputs(20).words();
        assert!(places.iter().all(|place| place.start % ALIGNED == 0));
        assert_eq!(words[places[0].clone()], [5, 7]);
        assert_eq!(words[places[1].clone()], [0.25, 0.5].map(|x: f32| x.to_bits() as i32));
        // row 1 has 20 tokens in blocks 0 and 1; the rows are 1, 0; row 0 is the second of them
        let table = [0, 20, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0];
        assert_eq!(words[places[3].clone()], table);
    }

    #[test]
    fn steps_of_long_sequences_have_one_shape_until_their_length_doubles() {
        let shape = |tokens| {
            let mut inputs = inputs(tokens);
            // as long as tables get
            inputs.tables[0].stride = 256;
            inputs.shape()
        };
        assert_eq!(shape(1), shape(1023));
        assert_ne!(shape(1023), shape(1024));
        assert_eq!(shape(1024), shape(2047));
        assert_ne!(shape(2047), shape(2048));
    }
}
