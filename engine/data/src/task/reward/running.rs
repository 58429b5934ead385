//! Running mean and standard deviation of a reward's values (Welford's recurrence).

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Added to the standard deviation.
const EPS: f64 = 1e-8;

/// Running statistics of the rewards that training normalizes, by name.
pub type RewardStats = BTreeMap<String, RunningStats>;

/// Running statistics of a reward: part of the trainer's state, so that a resumed run continues with the same numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct RunningStats {
    /// Values so far.
    pub count: u64,
    /// Their mean.
    pub mean: f64,
    /// Sum of their squared distances from it.
    pub squares: f64,
}

impl RunningStats {
    /// Adds a value.
    pub fn add(&mut self, value: f64) {
        self.count += 1;
        let delta = value - self.mean;
        self.mean += delta / self.count as f64;
        self.squares += delta * (value - self.mean);
    }

    /// Standard deviation, Bessel-corrected; 1 of a single value.
    pub fn std(&self) -> f64 {
        if self.count < 2 {
            return 1.0;
        }
        (self.squares / (self.count - 1) as f64).sqrt()
    }

    /// `(value − mean) / (std + 1e-8)`.
    pub fn normalize(&self, value: f64) -> f64 {
        (value - self.mean) / (self.std() + EPS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn statistics_are_those_of_all_values(values in prop::collection::vec(-1e3..1e3f64, 2..60)) {
            let mut running = RunningStats::default();
            for &value in &values {
                running.add(value);
            }
            let n = values.len() as f64;
            let mean = values.iter().sum::<f64>() / n;
            let var = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0);
            prop_assert!((running.mean - mean).abs() < 1e-9);
            prop_assert!((running.std() - var.sqrt()).abs() < 1e-9);
        }
    }

    #[test]
    fn equal_values_are_worth_nothing() {
        let mut running = RunningStats::default();
        for _ in 0..5 {
            running.add(3.0);
        }
        assert!(running.normalize(3.0).abs() < 1e-12);
    }
}
