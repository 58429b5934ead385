//! `ReMax`'s baseline: one greedy completion a prompt, judged like the others and not trained on.

use super::Trainer;
use crate::Result;
use crate::dataset::Prompt;
use crate::evaluate::{Place, checked};
use crate::rollout::Rollout;
use crate::task::Completion;
use firebrick_models::generate::{Finish, Generator, Request};
use firebrick_models::random::DrawKey;

impl Trainer {
    /// Samples a greedy completion of every prompt and notes its reward with the prompt's rollouts.
    pub(super) fn greedy_baselines(
        &self,
        prompts: &[Prompt],
        rollouts: &mut [Rollout],
    ) -> Result<()> {
        let sampling = self.config.rollout.greedy(self.source.stop_ids.clone());
        let key = DrawKey {
            seed: self.config.trainer.seed,
            step: self.state.step as u32 + 1,
            draw: 0,
            sample: 0,
        };
        let requests: Vec<Request> = prompts
            .iter()
            .map(|prompt| Request {
                tokens: prompt.tokens.clone(),
                key,
            })
            .collect();
        let (decoder, tokenizer) = (self.learner.decoder(), &self.source.tokenizer);
        let generator = Generator::new(decoder, Some(tokenizer), &sampling)?;
        let limits = self.engine_limits()?;
        let generated = generator.run_with(&requests, 1, &limits, |_| {})?;
        for sample in generated.samples {
            let (prompt, draw) = (
                &prompts[sample.request],
                self.state.draws + sample.request as u64,
            );
            let text = tokenizer.decode(&sample.tokens, true)?;
            let completion = Completion {
                text: &text,
                tokens: &sample.tokens,
                finished: sample.finish == Finish::Stop,
                max_tokens: sampling.max_new_tokens,
            };
            let judged = self.data.task().reward(&prompt.example, &completion);
            let place = Place {
                step: self.state.step + 1,
                draw,
                sample: sample.sample,
            };
            let reward = checked(judged, prompt, &text, place)?.total;
            for rollout in rollouts.iter_mut().filter(|r| r.draw == draw) {
                rollout.baseline = Some(reward);
            }
        }
        Ok(())
    }
}
