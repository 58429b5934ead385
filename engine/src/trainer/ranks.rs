//! What the ranks of a run compare and decide together between two steps.

use super::Trainer;
use crate::metrics::{Control, Metrics, StepReport, is_of_a_machine, metrics};
use crate::{Error, Result};
use firebrick_core::message;

impl Trainer {
    /// The control that rank 0's observer returns, on all ranks.
    pub(super) fn poll_observer(&mut self) -> Result<Control> {
        const ALL: [Control; 4] = [Control::Continue, Control::Pause, Control::Save, Control::Stop];
        let own = self.recovery.telemetry.recorder.control();
        if self.session.world.is_solo() {
            return Ok(own);
        }
        let said = self.session.world.of_main(own as u8)?;
        Ok(ALL[usize::from(said).min(ALL.len() - 1)])
    }

    /// Refuses to continue where what a step trained on, or a metric of it, is not the same on every rank, times and
    /// memory apart: ranks that have drifted apart train different models. The cut into micro-batches follows from the
    /// sequences and the plan.
    pub(super) fn compare(&self, report: &StepReport) -> Result<()> {
        if self.session.world.is_solo() {
            return Ok(());
        }
        let mut own: Metrics = metrics(report);
        own.retain(|name, _| !is_of_a_machine(name));
        let trained = report.rollout.iter().flat_map(|sampled| &sampled.rollouts);
        let trained = trained.map(|r| (r.prompt_index, r.sample, &r.prompt, &r.completion, r.reward));
        let bytes = message::encode(&(&own, trained.collect::<Vec<_>>()))?;
        let advice =
            "the ranks have drifted apart; resume from the last checkpoint, and report it with the configuration";
        let same = self.session.world.same("a sequence or a metric of the step", advice, &bytes);
        let Err(Error::Ranks(message)) = same else {
            return same;
        };
        // every rank is here
        let all = self.session.world.gather::<Metrics>(&own)?;
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
