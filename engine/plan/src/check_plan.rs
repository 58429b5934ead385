//! What a plan must hold to be executed, whoever made it.

use crate::segmentation::body;
use crate::{ActivationPolicy, Error, ModelPlan, Result, Zero};
use firebrick_arch::Arch;
use firebrick_spec::Home;

impl ModelPlan {
    /// Refuses a plan that does not cover the model, or that no schedule could execute.
    ///
    /// # Errors
    /// `Error::Plan` with the first thing that is wrong: segments that leave units out, streamed or resharded weights
    /// under a kept graph, a size of 0.
    pub fn check(&self, arch: &Arch) -> Result<()> {
        let bad = |what: String| Err(Error::Plan(what));
        let mut next = body(arch).start;
        for segment in &self.segments {
            if segment.units.start != next || segment.units.is_empty() {
                return bad(format!(
                    "segments should follow each other from unit {next} on, and one covers units {:?}",
                    segment.units
                ));
            }
            next = segment.units.end;
            if segment.keep == ActivationPolicy::Graph && segment.weights == Home::Host {
                return bad(format!(
                    "the segment of units {:?} keeps its graph, which holds on to its weights: they cannot be streamed",
                    segment.units
                ));
            }
            let kept = segment.keep == ActivationPolicy::Graph && self.zero == Zero::Stage3;
            if kept && self.reshard_after_forward {
                return bad(format!(
                    "the segment of units {:?} keeps its graph, which holds on to its weights: gathered ones cannot be freed after the \
                     forward pass, so set `reshard_after_forward` to false or recompute all layers",
                    segment.units
                ));
            }
        }
        if next != body(arch).end {
            return bad(format!("segments end at unit {next}; the model's layers end at unit {}", body(arch).end));
        }
        if arch.tied && self.ends == Home::Host {
            return bad(
                "embedding and head share one matrix here, which stays on the device: `ends` should be device".into()
            );
        }
        let sizes = [
            ("head_rows", self.head_rows),
            ("train_tokens", self.train_tokens),
            ("score_tokens", self.score_tokens),
            ("offload_group", self.offload_group),
        ];
        match sizes.iter().find(|(_, n)| *n == 0) {
            Some((key, _)) => bad(format!("{key} should be at least 1")),
            None => Ok(()),
        }
    }
}
