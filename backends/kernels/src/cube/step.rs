//! The inputs of a decoding step in one buffer, and tensors that are parts of it.

use super::prelude::*;
use burn::tensor::{Int, Shape};
use burn_cubecl::kernel::copy_contiguous;
use std::ops::Range;

/// Bytes of a word.
const WORD: usize = 4;

/// A part of a buffer of words, as a tensor of a type of as many bytes.
fn part(whole: &CubeTensor, place: &Range<usize>, dtype: DType) -> CubeTensor {
    let length = whole.shape().num_elements();
    let handle =
        whole.handle.clone().offset_start((place.start * WORD) as u64).offset_end(((length - place.end) * WORD) as u64);
    CubeTensor::new_contiguous(whole.client.clone(), whole.device.clone(), Shape::new([place.len()]), handle, dtype)
}

/// Words of a buffer.
pub(crate) fn words_of(whole: &Tensor<1, Int>, place: &Range<usize>) -> Tensor<1, Int> {
    Tensor::from_primitive::<Cube>(part(&integers(whole), place, DType::I32))
}

/// Floats whose bits are words of a buffer.
pub(crate) fn floats_of(whole: &Tensor<1, Int>, place: &Range<usize>) -> Tensor<1> {
    Tensor::from_primitive::<Cube>(part(&integers(whole), place, DType::F32))
}

/// See [`crate::duplicate`].
pub(crate) fn duplicate(tensor: &Tensor<2>) -> Tensor<2> {
    Cube::tensor(copy_contiguous(Cube::primitive(tensor.clone())))
}

/// Overwrites the words of a buffer, whoever else holds it. With `tokens`, `[rows, width]`, the first of each row is
/// the word of that row.
pub(crate) fn load_step(target: &Tensor<1, Int>, words: &Tensor<1, Int>, tokens: Option<&Tensor<2>>, rows: usize) {
    let [target, words] = [target, words].map(integers);
    let length = words.shape().num_elements();
    let (taken, width) = tokens.map_or((0, 1), |tokens| (rows, tokens.dims()[1]));
    // without tokens nothing of the floats is read
    let tokens = tokens.map_or_else(|| part(&words, &(0..rows), DType::F32), |tokens| detached(tokens.clone()));
    launch!(load, Grid::elements([&target], length), [words, tokens, &target], length, taken, width);
}

/// A unit has a word.
#[cube(launch, address_type = "dynamic")]
fn load(words: &[i32], tokens: &[f32], target: &mut [i32], length: usize, taken: usize, width: usize) {
    let i = ABSOLUTE_POS;
    if i < length {
        let mut word = words[i];
        if i < taken {
            word = i32::cast_from(tokens[i * width]);
        }
        target[i] = word;
    }
}
