//! A run on several ranks: what is refused, and what the ranks compare.

use super::Trainer;
use super::checks::START_ALIKE;
use super::setup::{Opened, PlannedRun};
use crate::config::RunConfig;
use crate::metrics::{Control, Metrics, StepReport, is_of_a_machine, metrics};
use crate::{Error, Result};
use firebrick_backends::DeviceSpec;
use firebrick_core::message;

impl Opened {
    /// Refuses, before anything is loaded, what several ranks do not do, and ranks that do not do the same.
    pub fn check_ranks(&self, planned: &PlannedRun) -> Result<()> {
        let world = &self.world;
        if world.is_solo() {
            return Ok(());
        }
        let refuse = |what: String| Err(Error::Ranks(what));
        if planned.plan.models.values().any(|model| model.optimizer.in_backward) {
            return refuse(
                "memory.step_in_backward updates a unit before other ranks have its gradient; set it to false, or start one rank".into(),
            );
        }
        let plan = serde_json::to_vec(&planned.plan).unwrap_or_default();
        world.same("the memory plan", START_ALIKE, &plan)?;
        world.same("the configuration", START_ALIKE, self.compared().to_yaml()?.as_bytes())
    }

    /// What has to be the same on every rank.
    fn compared(&self) -> RunConfig {
        let mut config = RunConfig {
            // a number of its own on every rank
            device: DeviceSpec::Auto,
            ..self.config.clone()
        };
        // a rank that exceeds its own tells the others
        config.memory.limit = None;
        config
    }
}

impl Trainer {
    /// The control that rank 0's observer returns, on all ranks.
    pub(super) fn poll_observer(&mut self) -> Result<Control> {
        const ALL: [Control; 4] = [Control::Continue, Control::Pause, Control::Save, Control::Stop];
        let own = self.recorder.control();
        if self.world.is_solo() {
            return Ok(own);
        }
        let said = self.world.of_main(own as u8)?;
        Ok(ALL[usize::from(said).min(ALL.len() - 1)])
    }

    /// Refuses to continue where what a step trained on, or a metric of it, is not the same on every rank, times and
    /// memory apart: ranks that have drifted apart train different models. The cut into micro-batches follows from the
    /// sequences and the plan.
    pub(super) fn compare(&self, report: &StepReport) -> Result<()> {
        if self.world.is_solo() {
            return Ok(());
        }
        let mut own: Metrics = metrics(report);
        own.retain(|name, _| !is_of_a_machine(name));
        let trained = report.rollout.iter().flat_map(|sampled| &sampled.rollouts);
        let trained = trained.map(|r| (r.prompt_index, r.sample, &r.prompt, &r.completion, r.reward));
        let bytes = message::encode(&(&own, trained.collect::<Vec<_>>()))?;
        let advice =
            "the ranks have drifted apart; resume from the last checkpoint, and report it with the configuration";
        let same = self.world.same("a sequence or a metric of the step", advice, &bytes);
        let Err(Error::Ranks(message)) = same else {
            return same;
        };
        // every rank is here
        let all = self.world.gather::<Metrics>(&own)?;
        let other = all.iter().enumerate().find_map(|(rank, metrics)| {
            let pairs = all[0].iter().zip(metrics);
            let mut different = pairs.filter(|(a, b)| a.0 != b.0 || a.1.to_bits() != b.1.to_bits());
            different.next().map(|(a, b)| format!("{} is {} on rank 0 and {} is {} on rank {rank}", a.0, a.1, b.0, b.1))
        });
        Err(Error::Phase {
            phase: "comparison of ranks",
            step: report.step,
            detail: format!("{message} ({})", other.unwrap_or_else(|| "their sequences differ".into())),
        })
    }
}
