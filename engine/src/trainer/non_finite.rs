//! NaN and infinite numbers of a step: in rewards and columns of rollouts before an update, and the search for the
//! first one when a run ends.

use super::recovery::Recovery;
use super::session::Session;
use crate::Result;
use crate::config::Mode;
use crate::executor::NonFinite;
use crate::learner::Learner;
use crate::metrics::Phase;
use crate::rollout::Rollout;
use crate::sequence::{SampleId, TokenColumns};

/// A number that is NaN or infinite.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct BadNumber {
    /// Its name and value.
    what: String,
    sample: Option<SampleId>,
    /// True for a reward, which leaves the weights good.
    pub is_reward: bool,
}

impl BadNumber {
    /// A number of a whole optimizer step.
    pub fn of_step(name: &str, number: f64) -> Self {
        Self { what: format!("{name} is {number}"), sample: None, is_reward: false }
    }

    /// The number and its sample, with the row of its prompt.
    pub fn text(&self, session: &Session) -> String {
        match self.sample {
            Some(sample) => format!("{} in {}", self.what, place(session, Phase::UpdateActor, sample)),
            None => self.what.clone(),
        }
    }
}

/// A column of token values.
type Column = fn(&TokenColumns<Vec<f64>>) -> &Option<Vec<f64>>;

/// The first NaN or infinite reward, log-prob, value or advantage among the scored tokens of rollouts, in the order in
/// which they are computed: one reward spoils the advantages of its whole group.
pub(super) fn first_non_finite(rollouts: &[Rollout]) -> Option<BadNumber> {
    let bad = |rollout: &Rollout, what: String, is_reward: bool| {
        let sample = Some(SampleId { prompt_index: rollout.prompt_index, sample: rollout.sample });
        BadNumber { what, sample, is_reward }
    };
    let of_reward = rollouts.iter().find_map(|rollout| {
        let reward = rollout.reward.filter(|reward| !reward.is_finite())?;
        // a part that is NaN does not apply
        let part = rollout.reward_parts.iter().find(|(_, value)| value.is_infinite());
        let named = part.map(|(name, value)| format!("reward `{name}` is {value}"));
        Some(bad(rollout, named.unwrap_or_else(|| format!("the reward is {reward}")), true))
    });
    let columns: [(&str, Column); 5] = [
        ("a log-prob of the sampler", |columns| &columns.full_logp),
        ("a log-prob of the policy", |columns| &columns.old_logp),
        ("a log-prob of the reference policy", |columns| &columns.ref_logp),
        ("a value of the critic", |columns| &columns.value),
        ("an advantage", |columns| &columns.advantage),
    ];
    let mut of_tokens = columns.into_iter().flat_map(|(name, of)| {
        rollouts.iter().filter_map(move |rollout| {
            let scored = rollout.scored(of(&rollout.columns).as_deref().unwrap_or_default());
            let number = scored.into_iter().find(|number| !number.is_finite())?;
            Some(bad(rollout, format!("{name} is {number}"), false))
        })
    });
    of_reward.or_else(|| of_tokens.next())
}

/// The first tensor that is not finite, by a search on the model that a phase updates. Every rank searches; the first
/// that finds one counts.
pub(super) fn search(
    run: &mut Recovery,
    phase: Phase,
    find: impl Fn(&Learner) -> Result<Option<NonFinite>>,
) -> Option<String> {
    let found = run.recovering(phase, |run| find(run.models.learner(phase)));
    let text = |found: NonFinite| match found.sample {
        Some(sample) => format!("{} in {}", found.tensor, place(&run.session, phase, sample)),
        None => found.tensor,
    };
    let text = match found {
        Ok(found) => found.map(text),
        Err(error) => {
            tracing::warn!("the search for the first number that is not finite failed: {error}");
            None
        }
    };
    run.session.world.gather::<Option<String>>(&text).ok()?.into_iter().flatten().next()
}

/// A sample, with the row of its prompt where it is known: not of a supervised example.
fn place(session: &Session, phase: Phase, sample: SampleId) -> String {
    let SampleId { prompt_index, sample } = sample;
    let is_drawn = session.mode == Mode::Rl && phase != Phase::WarmUp;
    let prompt = is_drawn.then(|| session.data.prompts.draw(session.config.trainer.seed, prompt_index));
    let row = prompt.and_then(|prompt| prompt.ok()?.row);
    let row = row.map_or_else(String::new, |(split, row)| format!(" ({} row {row})", split.name()));
    format!("draw {prompt_index}{row}, sample {sample}")
}
