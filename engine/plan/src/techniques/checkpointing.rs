//! Gradient checkpointing (arXiv:1604.06174): segments keep their inputs and run once more in the backward pass.

use super::activation_offload::ActivationOffload;
use crate::estimate::{MemoryUsage, Moment};
use crate::plan::{body, layer};
use crate::technique::prelude::*;
use crate::{ActivationPolicy, Granularity, Order, ParamOffload, Segment, Zero};
use firebrick_spec::Category;

/// Layers of a segment that the planner tries.
const LAYERS: [usize; 8] = [1, 2, 3, 4, 6, 8, 12, 16];

/// Shares of recomputed layers that the planner tries.
const SHARES: [f64; 3] = [0.25, 0.5, 0.75];

pub(crate) struct Checkpointing;

impl Technique for Checkpointing {
    fn about(&self) -> About {
        About {
            keys: &[
                "memory.gradient_checkpointing",
                "memory.checkpoint_every",
                "memory.checkpoint_layers",
                "memory.checkpoint_ratio",
                "memory.recompute_granularity",
            ],
            kind: TechniqueKind::Chosen,
            examples: &[],
        }
    }

    /// Refuses ways of choosing layers that contradict each other.
    fn check(&self, memory: &MemoryConfig) -> Result<()> {
        let chosen = memory.checkpoint_layers.is_some() || memory.checkpoint_ratio.is_some();
        let halves = memory.recompute_granularity == Granularity::Half;
        let several = memory.checkpoint_every != 1;
        require(
            memory.gradient_checkpointing || !chosen && !several,
            "checkpoint_every, checkpoint_layers and checkpoint_ratio select the layers to checkpoint; turn on \
             memory.gradient_checkpointing too",
        )?;
        require(
            memory.gradient_checkpointing || !halves,
            "recompute_granularity: half requires memory.gradient_checkpointing: true",
        )?;
        require(
            !halves || !chosen && !several,
            "recompute_granularity: half splits every layer in two; it cannot be combined with checkpoint_every, \
             checkpoint_layers or checkpoint_ratio",
        )?;
        require(
            memory.checkpoint_layers.is_none() || memory.checkpoint_ratio.is_none(),
            "checkpoint_layers and checkpoint_ratio are two ways to choose layers; give one",
        )?;
        require(
            !chosen || !several,
            "checkpoint_every divides all layers into segments; it cannot be combined with checkpoint_layers or \
             checkpoint_ratio",
        )
    }

    fn check_model(&self, memory: &MemoryConfig, arch: &Arch) -> Result<()> {
        let last = arch.num_layers - 1;
        let unknown = memory.checkpoint_layers.iter().flatten().find(|layer| **layer > last);
        require(
            !memory.gradient_checkpointing || unknown.is_none(),
            format_args!(
                "checkpoint_layers names layer {}; the model has layers 0 to {last}",
                unknown.unwrap_or(&last)
            ),
        )
    }

    fn apply(&self, memory: &MemoryConfig, arch: &Arch, plan: &mut ModelPlan) {
        if !memory.gradient_checkpointing {
            return;
        }
        let weights = plan.segments.first().map_or(Home::Device, |whole| whole.weights);
        plan.segments = match (memory.recompute_granularity, &memory.checkpoint_layers, memory.checkpoint_ratio) {
            (Granularity::Half, ..) => pieces(arch, 1),
            (_, None, None) => pieces(arch, 2 * memory.checkpoint_every),
            (_, None, Some(ratio)) => listed(arch, &spread(arch.num_layers, ratio)),
            (_, Some(layers), _) => listed(arch, layers),
        };
        for segment in &mut plan.segments {
            segment.weights = weights;
        }
    }

    fn kept(&self, memory: &MemoryConfig, request: &Request) -> Vec<MemoryConfig> {
        let layers = request.workload.arch.num_layers;
        let on = MemoryConfig { gradient_checkpointing: true, ..memory.clone() };
        let every = LAYERS.into_iter().filter(|&every| every == 1 || every <= layers / 2);
        let mut settings: Vec<MemoryConfig> =
            every.map(|checkpoint_every| MemoryConfig { checkpoint_every, ..on.clone() }).collect();
        settings.push(MemoryConfig { recompute_granularity: Granularity::Half, ..on.clone() });
        let frees = memory.zero() == Zero::Stage3 && memory.reshard_after_forward;
        // weights that come and go leave no graph behind
        if memory.param_offload != ParamOffload::Streamed && !frees {
            settings.push(memory.clone());
            settings.extend(SHARES.map(|ratio| MemoryConfig { checkpoint_ratio: Some(ratio), ..on.clone() }));
        }
        settings
    }

    fn explain(&self, used: &Candidate, _: &Request) -> Option<&'static str> {
        let what = "segments keep their inputs and are recomputed in the backward pass";
        used.memory.gradient_checkpointing.then_some(what)
    }

    fn hold(&self, at: &Moment<'_>, held: &mut MemoryUsage) {
        *held = held.on_device(Category::KeptInputs, at.row * at.copies * at.inputs[0]);
    }

    fn used_keys(&self, used: &Candidate) -> Vec<&'static str> {
        let chosen = match (used.memory.recompute_granularity, used.memory.checkpoint_ratio) {
            (Granularity::Half, _) => "memory.recompute_granularity",
            (_, Some(_)) => "memory.checkpoint_ratio",
            _ => "memory.checkpoint_every",
        };
        vec!["memory.gradient_checkpointing", chosen]
    }

    fn undo(&self, used: &mut Candidate, _: &Request) {
        let memory = &mut used.memory;
        self.turn_off(memory);
        ActivationOffload.turn_off(memory);
        if memory.param_offload == ParamOffload::Streamed {
            memory.param_offload = ParamOffload::None;
            memory.order = Order::MicroMajor;
        }
        if memory.zero() == Zero::Stage3 {
            // a kept graph holds on to gathered weights
            memory.reshard_after_forward = false;
        }
    }
}

/// Segments of `units` units that keep their inputs.
fn pieces(arch: &Arch, units: usize) -> Vec<Segment> {
    let (body, units) = (body(arch), units.max(1));
    let ends = body.clone().step_by(units).map(|start| start..(start + units).min(body.end));
    ends.map(|units| Segment { units, keep: ActivationPolicy::Input(Home::Device), weights: Home::Device }).collect()
}

/// A segment for each of `layers`, which keeps its input; the layers between them keep their graph.
fn listed(arch: &Arch, layers: &[usize]) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    for index in 0..arch.num_layers {
        let is_listed = layers.contains(&index);
        match segments.last_mut() {
            Some(open) if !is_listed && open.keep == ActivationPolicy::Graph => open.units.end += 2,
            _ => segments.push(Segment {
                units: layer(index),
                keep: if is_listed { ActivationPolicy::Input(Home::Device) } else { ActivationPolicy::Graph },
                weights: Home::Device,
            }),
        }
    }
    segments
}

/// `share` of the layers, spread evenly.
fn spread(layers: usize, share: f64) -> Vec<usize> {
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
