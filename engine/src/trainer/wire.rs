//! What ranks exchange of a step's rollouts and of validation, as bytes.

use crate::Result;
use crate::data::Prompt;
use crate::metrics::ProgramStats;
use crate::rollout::Rollout;
use crate::rollout::wire::{read_json, read_rollout, write_json, write_rollout};
use crate::task::{Example, PromptText};
use crate::turns::{Outcome, TurnStats};
use crate::world::codec::{Reader, Writer};
use firebrick_sampler::GenerationStats;
use std::sync::Arc;
use std::time::Duration;

/// Rollouts that a rank sampled and scored in a step, with seconds.
pub(super) struct RankRollouts {
    pub rollouts: Vec<Rollout>,
    pub engine: GenerationStats,
    pub programs: Option<ProgramStats>,
    /// Its prompts with what environments have added, and how their turns fared, where there are any.
    pub played: Option<(Arc<Vec<Prompt>>, TurnStats)>,
    pub seconds: f64,
}

impl RankRollouts {
    pub fn write(&self, to: &mut Writer) {
        to.list(self.rollouts.iter(), write_rollout);
        write_stats(to, &self.engine);
        to.option(self.programs, write_programs);
        to.option(self.played.as_ref(), |w, (prompts, turns)| {
            w.list(prompts.iter(), write_prompt);
            write_turns(w, turns);
        });
        to.float(self.seconds);
    }

    pub fn read(from: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            rollouts: from.list(read_rollout)?,
            engine: read_stats(from)?,
            programs: from.option(read_programs)?,
            played: from.option(|r| Ok((Arc::new(r.list(read_prompt)?), read_turns(r)?)))?,
            seconds: from.float()?,
        })
    }
}

/// Writes what an environment may have added to.
pub(super) fn write_prompt(to: &mut Writer, prompt: &Prompt) {
    match &prompt.example.prompt {
        PromptText::Text(text) => write_json(to, &(Some(text), None::<()>)),
        PromptText::Chat(messages) => write_json(to, &(None::<()>, Some(messages))),
    }
    to.text(&prompt.text);
    to.tokens(&prompt.tokens);
}

/// Reads it; nothing else of the row is there.
pub(super) fn read_prompt(from: &mut Reader<'_>) -> Result<Prompt> {
    let mut example = Example::text("", "");
    example.prompt = match read_json(from)? {
        (Some(text), _) => PromptText::Text(text),
        (None, messages) => PromptText::Chat(Option::unwrap_or_default(messages)),
    };
    Ok(Prompt { example, text: from.text()?, tokens: from.tokens()?, row: None })
}

/// Writes what came of a rollout.
pub(super) fn write_outcome(to: &mut Writer, outcome: &Outcome) {
    // a new field has to be written and read here
    let Outcome { prompt, turns, reward, object, tool_calls, failed_calls, retries, lost, differs_from_template } =
        outcome;
    to.option(prompt.as_deref(), write_prompt);
    write_json(to, turns);
    to.option(*reward, Writer::float);
    write_json(to, object);
    for count in [tool_calls, failed_calls, retries] {
        to.number(*count as u64);
    }
    to.option(lost.as_deref(), Writer::text);
    to.number(u64::from(*differs_from_template));
}

/// Reads it.
pub(super) fn read_outcome(from: &mut Reader<'_>) -> Result<Outcome> {
    Ok(Outcome {
        prompt: from.option(|r| Ok(Arc::new(read_prompt(r)?)))?,
        turns: read_json(from)?,
        reward: from.option(Reader::float)?,
        object: read_json(from)?,
        tool_calls: from.count()?,
        failed_calls: from.count()?,
        retries: from.count()?,
        lost: from.option(Reader::text)?,
        differs_from_template: from.number()? != 0,
    })
}

fn write_turns(to: &mut Writer, stats: &TurnStats) {
    // a new field has to be written and read here
    let TurnStats { rollouts, tool_calls, failed_calls, retries, lost, differ_from_template } = stats;
    for count in [rollouts, tool_calls, failed_calls, retries, lost, differ_from_template] {
        to.number(*count as u64);
    }
}

fn read_turns(from: &mut Reader<'_>) -> Result<TurnStats> {
    Ok(TurnStats {
        rollouts: from.count()?,
        tool_calls: from.count()?,
        failed_calls: from.count()?,
        retries: from.count()?,
        lost: from.count()?,
        differ_from_template: from.count()?,
    })
}

fn write_programs(to: &mut Writer, programs: ProgramStats) {
    // a new field has to be written and read here
    let ProgramStats { wait_seconds, repeated, lost } = programs;
    to.float(wait_seconds);
    to.number(repeated as u64);
    to.number(lost as u64);
}

fn read_programs(from: &mut Reader<'_>) -> Result<ProgramStats> {
    Ok(ProgramStats { wait_seconds: from.float()?, repeated: from.count()?, lost: from.count()? })
}

/// Every field once, in its order: for writing and for reading.
macro_rules! counts {
    ($($field:ident)+) => {
        fn write_stats(to: &mut Writer, stats: &GenerationStats) {
            // a new field has to be listed
            let GenerationStats { $($field,)+ prefill_time, decode_time } = stats;
            $(to.number(*$field as u64);)+
            to.float(prefill_time.as_secs_f64());
            to.float(decode_time.as_secs_f64());
        }

        fn read_stats(from: &mut Reader<'_>) -> Result<GenerationStats> {
            Ok(GenerationStats {
                $($field: from.count()?,)+
                prefill_time: Duration::from_secs_f64(from.float()?),
                decode_time: Duration::from_secs_f64(from.float()?),
            })
        }
    };
}

counts! {
    prefill_tokens recomputed_tokens new_tokens decode_steps graph_replays occupied slots overrun preemptions preempted
    prefix_cache_hits cache_bytes peak_cache_bytes peak_blocks block_slots unused_slots blocks unshared_blocks
}
