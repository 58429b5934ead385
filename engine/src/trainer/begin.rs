//! What comes before the first step of a run: a warm-up, the models that start from the policy, the first validation.

use super::load::fresh_critic;
use super::{REFERENCE, Trainer};
use crate::Result;
use crate::checkpoint::CriticSource;
use crate::config::Mode;
use crate::metrics::{Event, Phase};
use firebrick_models::checkpoint::{ExportOptions, export};

impl Trainer {
    /// Does all of it, once. A resumed run did it in its first session.
    pub(super) fn begin(&mut self) -> Result<()> {
        if self.started {
            return Ok(());
        }
        self.announce();
        if !self.resumed {
            if self.state.mode == Mode::Rl {
                if let Some(sft) = self.config.warmup.sft.clone() {
                    self.warm_up(&sft)?;
                }
                self.keep_reference()?;
                self.begin_critic()?;
            }
            if self.config.trainer.val_before_train {
                self.validate()?;
            }
            self.recorder.end_line(0)?;
        }
        self.started = true;
        Ok(())
    }

    /// Tells the observer what is about to run.
    fn announce(&mut self) {
        let predicted = self.request.predict(self.plan.clone()).estimate;
        let supervised = self.demonstrations.as_ref();
        let [params, trainable] = self.learner.decoder().whole_params();
        let ready = Event::Ready {
            predicted_peak_bytes: predicted.peak_bytes,
            budget_bytes: self.request.budget,
            device: format!("{} ({})", self.info.device, self.info.name),
            params,
            trainable,
            output: self.recorder.run().path().to_owned(),
            resumed_from: self.state.step,
            filtered: self.data.filtered + supervised.map_or(0, |d| d.filtered),
            validation: self.data.validation.len(),
        };
        self.recorder.event(ready);
    }

    /// Keeps the reference policy with the run, in full precision, so that a resumed run compares with the same one.
    fn keep_reference(&mut self) -> Result<()> {
        if self.reference.is_none() {
            return Ok(());
        }
        self.recovering(Phase::SaveCheckpoint, Self::write_reference)
    }

    fn write_reference(&mut self) -> Result<()> {
        let Some(reference) = &mut self.reference else {
            return Ok(());
        };
        if !reference.is_shared_out() {
            self.learner.model.make_whole()?;
        }
        reference.replace(self.learner.decoder().clone());
        let tokenizer = &self.source.tokenizer;
        let source = self.source.checkpoint.clone().stored_as_f32();
        let run = self.recorder.run();
        let written = self.learner.model.write_whole(|policy| {
            let written = run.publish(REFERENCE, |dir| {
                let options = ExportOptions::default();
                Ok(export(policy, &source, Some(tokenizer), dir, options)?)
            });
            written.map(drop)
        });
        self.world.together(written)
    }

    /// The critic starts from the policy as it is now, where it has no checkpoint of its own. Nothing of it has been
    /// trained yet.
    fn begin_critic(&mut self) -> Result<()> {
        let seed = self.config.trainer.seed;
        let follows = |source: &CriticSource| source.follows_policy();
        if !self.critic_source.as_ref().is_some_and(follows) {
            return Ok(());
        }
        self.recovering(Phase::Values, |t| {
            let parts = (&mut t.critic, &t.critic_source, t.plan.critic());
            if let (Some(critic), Some(source), Some(plan)) = parts {
                let decoder = fresh_critic(source, plan, &t.learner.model, seed)?;
                decoder.check_computed()?;
                critic.model.replace(decoder);
            }
            Ok(())
        })
    }
}
