//! Inputs of a decoding step on a GPU besides weights and cache, in one buffer: token ids, random numbers, rotary
//! angles and block tables are uploaded at once, and each is a part of the buffer that kernels read as a tensor of its
//! own.

use super::operations::{by_device, no_kernel};
use super::paged::{BlockTables, DeviceTables, RotaryAngles};
use super::shapes::int_tensor;
use burn::tensor::{DType, Device, Int, Tensor};
use firebrick_metadata::step::StepInputs;
use std::ops::Range;

/// The inputs of a decoding step on a GPU. Its tensors are parts of one buffer.
#[derive(Clone, Debug)]
pub struct StepBuffer {
    /// Token ids, `[rows]`.
    pub ids: Tensor<1, Int>,
    /// Random numbers, `[rows]`, where tokens are drawn.
    pub uniforms: Option<Tensor<1>>,
    /// Rotary angles of the rows' positions, for every kind of rotary embedding.
    pub angles: Vec<RotaryAngles>,
    /// Factors of the rows' queries, `[rows, 1]`, where not all are one.
    pub query_scale: Option<Tensor<2>>,
    /// Block tables of every group of layers.
    pub tables: Vec<BlockTables>,
    whole: Tensor<1, Int>,
}

impl StepBuffer {
    /// Uploads the inputs of a step. With `previous`, tokens that were sampled, `[rows, 3]` with the id first, the ids
    /// are those.
    ///
    /// # Panics
    /// If the device is the CPU.
    pub fn upload(inputs: &StepInputs, previous: Option<&Tensor<2>>, device: &Device) -> Self {
        let (words, places) = inputs.words();
        let upload = int_tensor(words, device);
        let whole = match previous {
            Some(tokens) => {
                let target = Tensor::empty(upload.dims(), (device, DType::I32));
                load_step(&target, &upload, Some(tokens), inputs.rows());
                target
            }
            None => upload,
        };
        let part = |place: &Range<usize>| words_of(&whole, place);
        let floats = |place: &Range<usize>| floats_of(&whole, place);
        let (tables, angles) = places[3..].split_at(inputs.tables().len());
        let angles = angles.iter().map(|place| RotaryAngles {
            on_cpu: None,
            on_device: Some(floats(place).reshape([inputs.rows(), 1, place.len() / inputs.rows()])),
        });
        let tables = inputs.tables().iter().zip(tables);
        let tables = tables.map(|(table, place)| BlockTables {
            on_device: Some(DeviceTables {
                table: part(place),
                stride: table.stride,
                longest: table.longest,
                most: table.most,
            }),
            on_cpu: None,
        });
        Self {
            ids: part(&places[0]),
            uniforms: inputs.is_drawn().then(|| floats(&places[1])),
            angles: angles.collect(),
            query_scale: inputs.is_scaled().then(|| floats(&places[2]).reshape([inputs.rows(), 1])),
            tables: tables.collect(),
            whole,
        }
    }

    /// Overwrites the buffer with the inputs of another step of the same shape, whoever else holds it: a graph reads it
    /// where it is.
    ///
    /// # Panics
    /// If the shape is another one.
    pub fn refresh(&self, inputs: &StepInputs, previous: Option<&Tensor<2>>) {
        let (words, _) = inputs.words();
        assert_eq!([words.len()], self.whole.dims(), "another shape");
        let device = self.whole.device();
        let upload = int_tensor(words, &device);
        load_step(&self.whole, &upload, previous, inputs.rows());
    }
}

/// Overwrites the words of `target`, whoever else holds it: with `words`, and the first ones with the first number of
/// each row of `tokens`.
fn load_step(target: &Tensor<1, Int>, words: &Tensor<1, Int>, tokens: Option<&Tensor<2>>, rows: usize) {
    by_device!(
        &target.device(),
        cpu => no_kernel("load_step"),
        cube => crate::cube::step::load_step(target, words, tokens, rows),
    );
}

/// A part of a buffer of words, which shares its memory.
fn words_of(whole: &Tensor<1, Int>, place: &Range<usize>) -> Tensor<1, Int> {
    by_device!(&whole.device(), cpu => no_kernel("words_of"), cube => crate::cube::step::words_of(whole, place))
}

/// A part of a buffer of words as floats with their bits.
fn floats_of(whole: &Tensor<1, Int>, place: &Range<usize>) -> Tensor<1> {
    by_device!(&whole.device(), cpu => no_kernel("floats_of"), cube => crate::cube::step::floats_of(whole, place))
}
