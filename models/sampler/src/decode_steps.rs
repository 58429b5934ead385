//! Decoding steps on a GPU. What a step reads is uploaded in one buffer. A step of a shape that has come up before is
//! recorded as a graph (a CUDA graph), and later steps of that shape replay it: the host then launches one thing and
//! not every kernel.
//!
//! A graph reads and writes the buffers that it was recorded with: the inputs, which are overwritten before each
//! replay, weights and KV pools, which stay where they are as long as a run lasts, and its output, which is copied
//! after each replay, since the next one may be launched before the host has read the last. Rows are padded to the next
//! size that is captured, with rows of no sequence. The graphs of the shapes that came up last are kept.

use super::engine_args::MemoryProbe;
use super::sampler::scored;
use super::sampling_params::SamplingParams;
use burn::tensor::Tensor;
use firebrick_backends::MAX_GRAPHS;
use firebrick_backends::kernels::{self, Graph, StepBuffer, StepInputs, StepShape, Truncation};
use firebrick_models::cache::KvCache;
use firebrick_models::{Decoder, Error, Result};
use std::collections::HashSet;

/// The decoding steps of a run.
#[derive(Debug)]
pub(super) struct DecodeSteps {
    /// Numbers of rows that are captured, ascending; none where nothing is.
    sizes: Vec<usize>,
    /// Blocks of a row of block tables at least: see [`StepInputs::new`].
    pub stride: usize,
    graphs: RecentGraphs<StepShape, RecordedStep>,
    /// Steps that were replays.
    pub replays: usize,
}

/// Graphs of the shapes that came up last, at most [`MAX_GRAPHS`], in the order in which they did.
#[derive(Debug)]
struct RecentGraphs<S, G> {
    graphs: Vec<(S, G)>,
    /// Shapes without a graph of which a step has run. One whose graph was dropped is not among them.
    seen: HashSet<S>,
}

/// Course of a step.
#[derive(Debug, PartialEq, Eq)]
enum Course<'g, G> {
    /// It runs kernel by kernel: the first of its shape compiles and tunes kernels, and there may be no other.
    Eager,
    /// It is recorded.
    Record,
    /// It is a replay.
    Replay(&'g mut G),
}

impl<S: Clone + Eq + std::hash::Hash, G> RecentGraphs<S, G> {
    /// The course of the next step, of a shape. Where it is to be recorded, there is room for its graph.
    fn next(&mut self, shape: &S) -> Course<'_, G> {
        if let Some(at) = self.graphs.iter().position(|(other, _)| other == shape) {
            self.graphs[at..].rotate_left(1);
            let (_, graph) = self.graphs.last_mut().expect("it was found");
            return Course::Replay(graph);
        }
        if self.seen.insert(shape.clone()) {
            return Course::Eager;
        }
        if self.graphs.len() == MAX_GRAPHS {
            self.graphs.remove(0);
        }
        Course::Record
    }

    /// Keeps the graph of a shape.
    fn keep(&mut self, shape: S, graph: G) -> &mut G {
        self.seen.remove(&shape);
        self.graphs.push((shape, graph));
        let (_, graph) = self.graphs.last_mut().expect("it was pushed");
        graph
    }
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
        let tokens = kernels::draw_rows(&logits, temperature, truncation, step.uniforms.as_ref());
        Ok(if self.decoder.is_exact() { scored(tokens, &logits, sampling) } else { tokens })
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
            graphs: RecentGraphs { graphs: Vec::new(), seen: HashSet::new() },
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
        let shape = inputs.shape();
        let recorded = match self.graphs.next(&shape) {
            Course::Eager => return args.run(&StepBuffer::upload(inputs, args.previous, &device)),
            Course::Record => {
                let buffer = StepBuffer::upload(inputs, args.previous, &device);
                args.memory_probe = MemoryProbe::default();
                let captured = Graph::capture(&device, || args.run(&buffer));
                let (graph, tokens) = captured.map_err(|error| failed(&error))?;
                tracing::debug!("captured a decoding step of {} rows", inputs.rows());
                self.graphs.keep(shape, RecordedStep { graph, inputs: buffer, tokens: tokens? })
            }
            Course::Replay(recorded) => {
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
    fn a_shape_is_captured_when_it_comes_up_again_and_the_graphs_of_the_last_shapes_are_kept() {
        let mut graphs = RecentGraphs { graphs: Vec::new(), seen: HashSet::new() };
        for shape in 0..MAX_GRAPHS {
            assert_eq!(graphs.next(&shape), Course::Eager);
            assert_eq!(graphs.next(&shape), Course::Record);
            graphs.keep(shape, shape * 10);
        }
        assert_eq!(graphs.next(&0), Course::Replay(&mut 0));
        let new = MAX_GRAPHS;
        assert_eq!(graphs.next(&new), Course::Eager);
        assert_eq!(graphs.next(&new), Course::Record);
        graphs.keep(new, new * 10);
        assert_eq!(graphs.graphs.len(), MAX_GRAPHS);
        assert_eq!(graphs.next(&0), Course::Replay(&mut 0));
        // the one that came up the longest ago begins again
        assert_eq!(graphs.next(&1), Course::Eager);
        assert_eq!(graphs.next(&2), Course::Replay(&mut 20));
    }

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
