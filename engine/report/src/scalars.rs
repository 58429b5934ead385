//! Metrics by step.

use super::lines::{self, ReadResult};
use super::numbers::Number;
use firebrick_engine::Result;
use firebrick_engine::metrics::GLOBAL_STEP;
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::path::Path;

/// Most points of a thinned curve.
const MAX_POINTS: usize = 2048;

/// Newest points of a thinned curve that are never dropped.
const KEPT_POINTS: usize = 64;

/// Values of metrics by step. Serialized as steps and columns: a number for each step by metric, null if a step does
/// not have that metric.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scalars {
    /// Steps, ascending; 0 is the validation before the first.
    steps: Vec<u64>,
    /// Points of a step and a value, by metric; NaN for invalid numbers.
    curves: BTreeMap<String, Vec<(f64, f64)>>,
}

impl Scalars {
    /// Reads a run's `metrics.jsonl`. The later of two lines of a step applies.
    ///
    /// # Errors
    /// `Error::Io` if the file exists but cannot be read.
    pub fn read(path: &Path) -> Result<(Self, ReadResult)> {
        let mut rows: BTreeMap<u64, Map<String, Value>> = BTreeMap::new();
        let result = lines::read(path, |mut row: Map<String, Value>, _| {
            let step = row.remove(GLOBAL_STEP).as_ref().and_then(Value::as_u64);
            step.map(|step| rows.insert(step, row)).is_some()
        })?;
        let mut scalars = Self::default();
        for (step, row) in rows {
            scalars.add(step, row.into_iter().map(|(name, value)| (name, value.as_f64().unwrap_or(f64::NAN))));
        }
        Ok((scalars, result))
    }

    /// Adds values of the newest step. Existing values of the step are replaced.
    pub fn add(&mut self, step: u64, values: impl IntoIterator<Item = (String, f64)>) {
        if self.steps.last() != Some(&step) {
            self.steps.push(step);
        }
        for (name, value) in values {
            let curve = self.curves.entry(name).or_default();
            match curve.last_mut() {
                Some(last) if last.0 >= step as f64 => last.1 = value,
                _ => curve.push((step as f64, value)),
            }
        }
    }

    /// Drops every second older point of long curves.
    pub fn bound(&mut self) {
        for curve in self.curves.values_mut().filter(|curve| curve.len() > MAX_POINTS) {
            let (older, mut at) = (curve.len() - KEPT_POINTS, 0);
            curve.retain(|_| {
                at += 1;
                at > older || at % 2 == 0
            });
        }
    }

    /// The points of a metric, or, for a name with a final `/`, of the first metric below it.
    pub fn curve(&self, name: &str) -> &[(f64, f64)] {
        let mut from = self.curves.range::<str, _>((Bound::Included(name), Bound::Unbounded));
        let first = from.next().filter(|(key, _)| *key == name || name.ends_with('/') && key.starts_with(name));
        first.map_or(&[], |(_, curve)| curve)
    }

    /// The value of a metric in the newest step that has it, unless that is before `step`.
    pub fn since(&self, step: u64, name: &str) -> Option<f64> {
        self.curve(name).last().filter(|last| last.0 >= step as f64).map(|last| last.1)
    }
}

impl Serialize for Scalars {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let column = |curve: &[(f64, f64)]| -> Vec<Number> {
            let mut points = curve.iter().peekable();
            let value = |&step: &u64| points.next_if(|point| point.0 <= step as f64).map(|point| point.1).into();
            self.steps.iter().map(value).collect()
        };
        let columns: BTreeMap<&str, _> =
            self.curves.iter().map(|(name, curve)| (name.as_str(), column(curve))).collect();
        let mut scalars = serializer.serialize_struct("Scalars", 2)?;
        scalars.serialize_field("steps", &self.steps)?;
        scalars.serialize_field("columns", &columns)?;
        scalars.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_has_a_number_or_null_for_each_step() {
        let mut scalars = Scalars::default();
        scalars.add(1, [("a".to_owned(), 0.5), ("b/c".to_owned(), f64::NAN)]);
        scalars.add(3, [("a".to_owned(), 1.0)]);
        scalars.add(3, [("a".to_owned(), 2.0), ("b/d".to_owned(), 4.0)]);
        let json = serde_json::to_value(&scalars).unwrap();
        let columns = serde_json::json!({"a": [0.5, 2], "b/c": [null, null], "b/d": [null, 4]});
        assert_eq!(json, serde_json::json!({"steps": [1, 3], "columns": columns}));
        assert_eq!((scalars.since(3, "a"), scalars.since(3, "b/c"), scalars.since(0, "b")), (Some(2.0), None, None));
        assert!(scalars.curve("b/")[0].1.is_nan());
    }

    #[test]
    fn a_bounded_curve_keeps_its_newest_points() {
        let mut scalars = Scalars::default();
        for step in 0..10_000 {
            scalars.add(step, [("a".to_owned(), 0.0)]);
            scalars.bound();
        }
        let curve = scalars.curve("a");
        assert!((MAX_POINTS / 2..=MAX_POINTS).contains(&curve.len()), "{}", curve.len());
        assert!(curve.windows(2).all(|pair| pair[0].0 < pair[1].0));
        let newest = curve[curve.len() - KEPT_POINTS..].iter().map(|point| point.0 as u64);
        assert!(newest.eq(10_000 - KEPT_POINTS as u64..10_000));
    }
}
