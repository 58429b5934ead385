//! Activation policies: how a chain of units is divided into segments, and what each keeps.

use crate::{ActivationPolicy, MemoryConfig, ModelPlan, OptimizerOffload, OptimizerPlan, Segment};
use firebrick_arch::Arch;
use firebrick_arch::PipelineStage;
use firebrick_spec::Home;
use std::ops::Range;

/// Units between embedding and head: two halves a layer.
pub(crate) fn body(arch: &Arch) -> Range<usize> {
    1..1 + 2 * arch.num_layers
}

/// Those of a stage.
pub(crate) fn body_of(arch: &Arch, stage: PipelineStage) -> Range<usize> {
    let layers = stage.layers(arch.num_layers);
    1 + 2 * layers.start..1 + 2 * layers.end
}

/// Units of a layer.
fn layer(index: usize) -> Range<usize> {
    1 + 2 * index..3 + 2 * index
}

impl ModelPlan {
    /// One segment that keeps its graph: the fastest, and the yardstick of every other plan.
    #[must_use]
    pub fn plain(arch: &Arch, config: &MemoryConfig) -> Self {
        Self::new(config, pieces(body(arch), 2 * arch.num_layers, ActivationPolicy::Graph))
    }

    /// Segments of `blocks` layers that keep their inputs.
    #[must_use]
    pub fn checkpoint_every(arch: &Arch, config: &MemoryConfig, blocks: usize) -> Self {
        let keep = ActivationPolicy::Input(Home::Device);
        Self::new(config, pieces(body(arch), 2 * blocks, keep))
    }

    /// A segment for every attention and every MLP half, each keeping its input.
    #[must_use]
    pub fn checkpoint_halves(arch: &Arch, config: &MemoryConfig) -> Self {
        Self::new(config, pieces(body(arch), 1, ActivationPolicy::Input(Home::Device)))
    }

    /// The listed layers keep their inputs, each a segment of its own; the layers between them keep their graph.
    #[must_use]
    pub fn checkpoint_layers(arch: &Arch, config: &MemoryConfig, layers: &[usize]) -> Self {
        let mut segments: Vec<Segment> = Vec::new();
        for index in 0..arch.num_layers {
            let listed = layers.contains(&index);
            match segments.last_mut() {
                Some(open) if !listed && open.keep == ActivationPolicy::Graph => {
                    open.units.end += 2;
                }
                _ => segments.push(Segment {
                    units: layer(index),
                    keep: if listed { ActivationPolicy::Input(Home::Device) } else { ActivationPolicy::Graph },
                    weights: Home::Device,
                }),
            }
        }
        Self::new(config, segments)
    }

    fn new(config: &MemoryConfig, segments: Vec<Segment>) -> Self {
        Self {
            segments,
            ends: Home::Device,
            idle: Home::Device,
            grads: Home::Device,
            optimizer: optimizer_plan(config),
            zero: config.zero(),
            reshard_after_forward: config.reshard_after_forward,
            order: config.order,
            head_rows: config.head_rows,
            attention_rows: config.attention_rows,
            layout: config.packing.layout(),
            train_tokens: config.train_tokens,
            score_tokens: config.score_tokens,
            micro_batch_size: config.micro_batch_size,
            prefetch: config.prefetch,
            offload_group: config.activation_offload_group,
        }
    }

    /// Kept inputs go to the host.
    #[must_use]
    pub fn offload_inputs(mut self) -> Self {
        for segment in &mut self.segments {
            if let ActivationPolicy::Input(home) = &mut segment.keep {
                *home = Home::Host;
            }
        }
        self
    }

    /// Weights live on the host and visit the device segment by segment. A tied embedding stays: both ends use it.
    #[must_use]
    pub fn stream_weights(mut self, arch: &Arch) -> Self {
        for segment in &mut self.segments {
            segment.weights = Home::Host;
        }
        if !arch.tied {
            self.ends = Home::Host;
        }
        self
    }
}

fn optimizer_plan(config: &MemoryConfig) -> OptimizerPlan {
    OptimizerPlan {
        home: match config.optimizer_offload {
            OptimizerOffload::Cpu => Home::Host,
            _ => Home::Device,
        },
        offload_fraction: config.offload_fraction,
        idle: match config.optimizer_offload {
            OptimizerOffload::Idle => Home::Host,
            _ => Home::Device,
        },
        moments: config.moments,
        in_backward: config.step_in_backward,
    }
}

fn pieces(body: Range<usize>, units: usize, keep: ActivationPolicy) -> Vec<Segment> {
    let units = units.max(1);
    body.clone()
        .step_by(units)
        .map(|start| Segment { units: start..(start + units).min(body.end), keep, weights: Home::Device })
        .collect()
}

/// `share` of the layers, spread evenly.
pub(crate) fn spread(layers: usize, share: f64) -> Vec<usize> {
    let count = (share * layers as f64).round() as usize;
    (0..count).map(|i| i * layers / count.max(1)).collect()
}

#[cfg(test)]
mod tests {
    use super::spread;

    #[test]
    fn a_ratio_spreads_its_layers_evenly() {
        assert_eq!(spread(8, 0.5), [0, 2, 4, 6]);
        assert_eq!(spread(6, 1.0), [0, 1, 2, 3, 4, 5]);
        assert_eq!(spread(6, 0.0), [0_usize; 0]);
        assert_eq!(spread(5, 0.4), [0, 2]);
    }
}
