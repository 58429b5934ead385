//! `ReMax`'s baseline: one greedy completion a prompt, rewarded like the others and not trained on.

use super::Trainer;
use super::evaluate::answers;
use super::gather::{PromptShard, all_samples};
use crate::Result;
use crate::data::Prompt;
use crate::metrics::Phase;
use crate::reward::CompletionId;
use crate::rollout::Rollout;
use firebrick_models::random::DrawKey;
use firebrick_sampler::{GenerationRequest, Generator, Sample};

impl Trainer {
    /// A greedy completion of every prompt.
    pub(super) fn greedy_baselines(&self, prompts: &[Prompt]) -> Result<Vec<Sample>> {
        let sampling = self.config.rollout.greedy(self.source.ends.ids.clone());
        let key =
            DrawKey { seed: self.config.trainer.seed, step: self.state.step as u32 + 1, prompt_index: 0, sample: 0 };
        let requests: Vec<GenerationRequest> = prompts
            .iter()
            .map(|prompt| GenerationRequest { tokens: prompt.tokens.clone(), key, max_new_tokens: None })
            .collect();
        let sampler = self.own_sampler()?;
        let tokenizer = &self.source.tokenizer;
        let generator = Generator::new(&sampler.decoder, Some(tokenizer), &sampling)?;
        let limits = self.engine_limits()?;
        let lengths = prompts.iter().map(|prompt| prompt.tokens.len());
        let dealt = PromptShard::new(&self.world, lengths, self.config.rollout.response_length);
        let own = generator.run_with(&requests[dealt.sampled.clone()], 1, &limits, |_| {})?;
        all_samples(&self.world, &dealt, own.samples)
    }

    /// Notes the rewards of greedy completions with their prompts' rollouts.
    pub(super) fn reward_baselines(
        &mut self,
        prompts: &[Prompt],
        samples: &[Sample],
        rollouts: &mut [Rollout],
    ) -> Result<()> {
        let (step, first) = (self.state.step + 1, self.state.draws);
        let sampling = self.config.rollout.greedy(self.source.ends.ids.clone());
        let first = CompletionId { step, prompt_index: first, sample: 0 };
        let answers = answers(prompts, samples, None, first, (&self.source.tokenizer, &sampling))?;
        let (now, longest) = (self.progress(), self.config.rollout.response_length);
        let rewards = self.recovering(Phase::RewardBaseline, |t| {
            t.reward_manager.score(t.data.task(), &answers, longest, now, Some(&t.state.rewards))
        })?;
        for (answer, reward) in answers.iter().zip(rewards) {
            let prompt_index = answer.id.prompt_index;
            for rollout in rollouts.iter_mut().filter(|r| r.prompt_index == prompt_index) {
                rollout.baseline = reward.value();
                // without what it is compared with, the group is left out
                rollout.reward_error.clone_from(&reward.lost);
            }
        }
        Ok(())
    }
}
