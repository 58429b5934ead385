//! Decoding steps on a GPU. What a step reads is uploaded in one buffer. A step of a shape that has come up before is
//! recorded as a graph (a CUDA graph), and later steps of that shape replay it: the host then launches one thing and
//! not every kernel.
//!
//! A graph reads and writes the buffers that it was recorded with: the inputs, which are overwritten before each
//! replay, weights and KV pools, which stay where they are as long as a run lasts, and its output, which is copied
//! after each replay, since the next one may be launched before the host has read the last. Rows are padded to the next
//! size that is captured, with rows of no sequence.

use super::engine_args::MemoryProbe;
use super::sampling_params::SamplingParams;
use burn::tensor::Tensor;
use firebrick_backends::kernels::{self, Graph, StepBuffer, StepInputs, StepShape, Truncation};
use firebrick_models::cache::KvCache;
use firebrick_models::{Decoder, Error, Result};
use std::collections::HashMap;

/// Steps of a shape that run kernel by kernel before one is recorded, which takes as long as some four steps.
const WARMUP_STEPS: usize = 3;

/// The decoding steps of a run.
#[derive(Debug)]
pub(super) struct DecodeSteps {
    /// Numbers of rows that are captured, ascending; none where nothing is.
    sizes: Vec<usize>,
    /// Blocks of a row of block tables at least: see [`StepInputs::new`].
    pub stride: usize,
    shapes: HashMap<StepShape, Progress>,
    /// Steps that were replays.
    pub replays: usize,
}

#[derive(Debug)]
enum Progress {
    /// So many steps have run.
    Seen(usize),
    Recorded(RecordedStep),
}

/// A graph, and what it reads and writes.
#[derive(Debug)]
struct RecordedStep {
    graph: Graph,
    inputs: StepBuffer,
    tokens: Tensor<2>,
}

/// Arguments of a step.
pub(super) struct StepArgs<'s> {
    pub decoder: &'s Decoder,
    pub cache: &'s mut KvCache,
    pub sampling: &'s SamplingParams,
    /// The tokens of the last step, `[rows, 3]`, where the host has not read them.
    pub previous: Option<&'s Tensor<2>>,
    /// Called while logits exist. Recorded steps do not call it: their buffers stay as long as their graph.
    pub memory_probe: MemoryProbe<'s>,
}

impl StepArgs<'_> {
    /// A token for every row, `[rows, 3]`: id, log-prob, and log-prob before truncation.
    fn run(&mut self, step: &StepBuffer) -> Result<Tensor<2>> {
        let logits = self.decoder.decode(step, self.cache);
        self.memory_probe.call();
        let sampling = self.sampling;
        let truncation = Truncation { top_k: sampling.top_k, top_p: sampling.top_p, min_p: sampling.min_p };
        let temperature = sampling.scoring_temperature();
        if !kernels::samples_on_device(&logits) {
            let detail = format!("its kernel does not take logits in {:?}", logits.dtype());
            return Err(Error::Device { doing: "sampling tokens", detail });
        }
        Ok(kernels::draw_rows(&logits, temperature, truncation, step.uniforms.as_ref()))
    }
}

impl DecodeSteps {
    /// Steps of sequences of up to `longest` blocks, of which those of these numbers of rows are captured.
    pub fn new(sizes: &[usize], longest: usize) -> Self {
        let mut sizes = sizes.to_vec();
        sizes.sort_unstable();
        Self {
            // a graph's tables have to be as long as they will ever get
            stride: if sizes.is_empty() { 1 } else { longest },
            sizes,
            shapes: HashMap::new(),
            replays: 0,
        }
    }

    /// Rows of a step, padded to the next captured size; unpadded above the largest one.
    pub fn padded(&self, rows: usize) -> usize {
        let mut sizes = self.sizes.iter().copied();
        sizes.find(|&size| size >= rows).unwrap_or(rows)
    }

    /// Runs a step, or replays it.
    pub fn run(&mut self, mut args: StepArgs<'_>, inputs: &StepInputs) -> Result<Tensor<2>> {
        args.cache.copy_shared_blocks();
        let device = args.decoder.device().clone();
        if !self.sizes.contains(&inputs.rows()) {
            return args.run(&StepBuffer::upload(inputs, args.previous, &device));
        }
        let progress = self.shapes.entry(inputs.shape()).or_insert(Progress::Seen(0));
        let recorded = match progress {
            Progress::Seen(steps) if *steps < WARMUP_STEPS => {
                *steps += 1;
                return args.run(&StepBuffer::upload(inputs, args.previous, &device));
            }
            Progress::Seen(_) => {
                let buffer = StepBuffer::upload(inputs, args.previous, &device);
                args.memory_probe = MemoryProbe::default();
                let captured = Graph::capture(&device, || args.run(&buffer));
                let (graph, tokens) = captured.map_err(|error| failed(&error))?;
                let recorded = RecordedStep { graph, inputs: buffer, tokens: tokens? };
                tracing::debug!("captured a decoding step of {} rows", inputs.rows());
                *progress = Progress::Recorded(recorded);
                let Progress::Recorded(recorded) = progress else { unreachable!("it was just recorded") };
                recorded
            }
            Progress::Recorded(recorded) => {
                recorded.inputs.refresh(inputs, args.previous);
                recorded
            }
        };
        recorded.graph.replay().map_err(|error| failed(&error))?;
        self.replays += 1;
        // the next replay overwrites them
        Ok(kernels::duplicate(&recorded.tokens))
    }
}

fn failed(error: &firebrick_backends::Error) -> Error {
    Error::Device {
        doing: "capturing or replaying a decoding step, which `enforce_eager: true` does without",
        detail: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_padded_to_the_next_size_that_is_captured() {
        let steps = DecodeSteps::new(&[8, 1, 4], 64);
        let padded = [1, 2, 4, 5, 8, 9].map(|rows| steps.padded(rows));
        assert_eq!(padded, [1, 4, 4, 8, 8, 9]);
        assert_eq!(steps.stride, 64);
        let eager = DecodeSteps::new(&[], 64);
        assert_eq!((eager.padded(5), eager.stride), (5, 1));
    }
}
