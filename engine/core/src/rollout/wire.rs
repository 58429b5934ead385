//! Completions and rollouts as ranks exchange them.

use super::{Rerouted, Rollout};
use crate::sequence::TokenColumns;
use crate::world::codec::{Reader, Writer};
use crate::{Error, Result};
use firebrick_models::routing::Routes;
use firebrick_sampler::{FinishReason, Sample};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::ops::Range;
use std::sync::Arc;

fn write_finish(to: &mut Writer, finish: FinishReason) {
    to.number(match finish {
        FinishReason::Stop => 0,
        FinishReason::Length => 1,
    });
}

fn read_finish(from: &mut Reader<'_>) -> Result<FinishReason> {
    Ok(match from.number()? {
        0 => FinishReason::Stop,
        _ => FinishReason::Length,
    })
}

fn write_ranges(to: &mut Writer, ranges: &[Range<usize>]) {
    to.list(ranges.iter(), |w, range| {
        w.number(range.start as u64);
        w.number(range.end as u64);
    });
}

fn read_ranges(from: &mut Reader<'_>) -> Result<Vec<Range<usize>>> {
    from.list(|r| Ok(r.count()?..r.count()?))
}

/// Writes a value without NaN, as JSON.
pub fn write_json(to: &mut Writer, value: &impl Serialize) {
    // texts, whole numbers and finite ones: nothing that JSON has not
    to.text(&serde_json::to_string(value).unwrap_or_default());
}

/// Reads one.
///
/// # Errors
/// `Error::Ranks` for what is not that type, or too few bytes.
pub fn read_json<T: DeserializeOwned>(from: &mut Reader<'_>) -> Result<T> {
    let text = from.text()?;
    serde_json::from_str(&text).map_err(|e| {
        Error::Ranks(format!("the rollout data of another rank cannot be read ({e}): run the same build on every rank"))
    })
}

fn read_routes(from: &mut Reader<'_>) -> Result<Option<Arc<Routes>>> {
    from.option(|r| Ok(Arc::new(r.routes()?)))
}

/// Writes a completion.
pub fn write_sample(to: &mut Writer, sample: &Sample) {
    let Sample { request, sample, tokens, logps, full_logps, inserted, finish, routes } = sample;
    to.number(*request as u64);
    to.number(*sample as u64);
    to.tokens(tokens);
    to.singles(logps);
    to.singles(full_logps);
    write_ranges(to, inserted);
    write_finish(to, *finish);
    to.option(routes.as_deref(), Writer::routes);
}

/// Reads a completion.
///
/// # Errors
/// `Error::Ranks` for too few bytes, or what is no completion.
pub fn read_sample(from: &mut Reader<'_>) -> Result<Sample> {
    Ok(Sample {
        request: from.count()?,
        sample: from.count()?,
        tokens: from.tokens()?,
        logps: from.singles()?,
        full_logps: from.singles()?,
        inserted: read_ranges(from)?,
        finish: read_finish(from)?,
        routes: read_routes(from)?,
    })
}

/// Writes a rollout.
pub fn write_rollout(to: &mut Writer, rollout: &Rollout) {
    // a new field has to be written and read here
    let Rollout {
        prompt_index,
        sample,
        prompt,
        prompt_text,
        completion,
        inserted,
        turns,
        text,
        columns,
        finish,
        routes,
        rerouted,
        policy_version,
        reward,
        reward_parts,
        reward_weights,
        reward_extra,
        reward_error,
        readings,
        baseline,
        mask,
        penalized_reward,
    } = rollout;
    to.number(*prompt_index);
    to.number(*sample as u64);
    to.tokens(prompt);
    to.option(prompt_text.as_deref(), Writer::text);
    to.tokens(completion);
    write_ranges(to, inserted);
    write_json(to, turns);
    to.text(text);
    to.list(columns.columns().into_iter(), |w, column| {
        w.option(column, |w, values| w.floats(values));
    });
    write_finish(to, *finish);
    to.option(routes.as_deref(), Writer::routes);
    to.option(*rerouted, |w, own| {
        w.number(own.tokens as u64);
        w.number(own.others as u64);
    });
    to.number(*policy_version);
    to.option(*reward, Writer::float);
    to.list(reward_parts.iter(), |w, (name, value)| {
        w.text(name);
        w.float(*value);
    });
    to.floats(reward_weights);
    write_json(to, reward_extra);
    to.option(reward_error.as_deref(), Writer::text);
    write_json(to, readings);
    to.option(*baseline, Writer::float);
    to.list(mask.iter(), |w, &kept| w.number(u64::from(kept)));
    to.float(*penalized_reward);
}

/// Reads a rollout.
///
/// # Errors
/// `Error::Ranks` for too few bytes, or what is no rollout.
pub fn read_rollout(from: &mut Reader<'_>) -> Result<Rollout> {
    Ok(Rollout {
        prompt_index: from.number()?,
        sample: from.count()?,
        prompt: from.tokens()?,
        prompt_text: from.option(Reader::text)?,
        completion: from.tokens()?,
        inserted: read_ranges(from)?,
        turns: read_json(from)?,
        text: from.text()?,
        columns: TokenColumns::from_columns(from.list(|r| r.option(Reader::floats))?),
        finish: read_finish(from)?,
        routes: read_routes(from)?,
        rerouted: from.option(|r| Ok(Rerouted { tokens: r.count()?, others: r.count()? }))?,
        policy_version: from.number()?,
        reward: from.option(Reader::float)?,
        reward_parts: from.list(|r| Ok((r.text()?, r.float()?)))?,
        reward_weights: from.floats()?,
        reward_extra: read_json(from)?,
        reward_error: from.option(Reader::text)?,
        readings: read_json(from)?,
        baseline: from.option(Reader::float)?,
        mask: from.list(|r| Ok(r.number()? != 0))?,
        penalized_reward: from.float()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick_data::task::Reading;
    use firebrick_models::tokenizer::Message;
    use serde_json::json;

    #[test]
    fn a_rollout_arrives_as_it_was_sent() {
        let extra = json!({"judge/why": "short", "judge/score": 0.1});
        let rollout = Rollout {
            prompt_index: 7,
            sample: 3,
            prompt: vec![1, 2],
            prompt_text: Some("a prompt".into()),
            completion: vec![3, u32::MAX],
            inserted: std::iter::once(1..2).collect(),
            turns: vec![Message::new("tool", "5")],
            text: "ähnlich\n".into(),
            columns: TokenColumns {
                sampler_logp: Some(vec![-0.1, f64::NEG_INFINITY]),
                value_weight: Some(vec![0.25, 0.75]),
                ..TokenColumns::default()
            },
            finish: FinishReason::Length,
            routes: Some(Arc::new(Routes::from_rows(&[&[0, 7], &[3, 1]]))),
            rerouted: Some(Rerouted { tokens: 4, others: 1 }),
            policy_version: 4,
            reward: Some(0.1 + 0.2),
            reward_parts: vec![("exact".into(), 1.0), ("absent".into(), f64::NAN)],
            reward_weights: vec![1.0, 0.5],
            reward_extra: extra.as_object().unwrap().clone(),
            reward_error: Some("no answer".into()),
            readings: vec![Reading { reward: "exact".into(), parsed: None, gold: Some("5".into()), undecided: None }],
            baseline: Some(-0.0),
            mask: vec![true, false],
            penalized_reward: 0.3,
        };
        let mut to = Writer::default();
        write_rollout(&mut to, &rollout);
        let bytes = to.into_bytes();
        let found = read_rollout(&mut Reader::new(&bytes)).unwrap();
        // NaN is printed like every other value
        assert_eq!(format!("{found:?}"), format!("{rollout:?}"));
    }
}
