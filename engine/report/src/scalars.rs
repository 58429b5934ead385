//! `metrics.jsonl` as columns.

use super::lines::{self, Met};
use super::numbers::Number;
use firebrick_engine::Result;
use firebrick_engine::metrics::GLOBAL_STEP;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// Every metric of every step.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Scalars {
    /// Steps, ascending; 0 is the validation before the first.
    pub steps: Vec<u64>,
    /// One number for each step by metric; none where a step has not that metric.
    pub columns: BTreeMap<String, Vec<Number>>,
}

impl Scalars {
    /// Reads a run's `metrics.jsonl`. Of two lines of one step the later holds.
    ///
    /// # Errors
    /// `Error::Io` where the file is there and cannot be read.
    pub fn read(path: &Path) -> Result<(Self, Met)> {
        let mut rows: BTreeMap<u64, Map<String, Value>> = BTreeMap::new();
        let met = lines::read(path, |mut row: Map<String, Value>, _| {
            let step = row.remove(GLOBAL_STEP).as_ref().and_then(Value::as_u64);
            step.is_some_and(|step| {
                rows.insert(step, row);
                true
            })
        })?;
        let mut scalars = Self::default();
        let count = rows.len();
        for (at, (step, row)) in rows.into_iter().enumerate() {
            scalars.steps.push(step);
            for (name, value) in row {
                let column = scalars.columns.entry(name);
                let column = column.or_insert_with(|| vec![Number::default(); count]);
                column[at] = value.as_f64().into();
            }
        }
        Ok((scalars, met))
    }
}
