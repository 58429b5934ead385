//! Whitening: mean 0 and variance 1 over the scored tokens of a step (verl's `masked_whiten`).

/// Added to the variance before its root is taken (verl).
const WHITEN_EPS: f64 = 1e-8;

/// The mean and Bessel-corrected variance of a set of values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Whitening {
    mean: f64,
    variance: f64,
}

impl Whitening {
    /// The statistics of these values. The variance of fewer than two is 0.
    pub fn of(scored: impl Iterator<Item = f64> + Clone) -> Self {
        let n = scored.clone().count() as f64;
        let mean = scored.clone().sum::<f64>() / n.max(1.0);
        let squares: f64 = scored.map(|x| (x - mean).powi(2)).sum();
        Self { mean, variance: squares / (n - 1.0).max(1.0) }
    }

    /// (x − mean) / √(variance + 1e-8).
    pub fn apply(self, x: f64) -> f64 {
        (x - self.mean) / (self.variance + WHITEN_EPS).sqrt()
    }

    /// The mean.
    pub fn mean(self) -> f64 {
        self.mean
    }

    /// The Bessel-corrected variance.
    pub fn variance(self) -> f64 {
        self.variance
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whitened_values_have_mean_zero_and_variance_one() {
        let values = [3.0, -1.0, 0.5, 8.0, 2.0];
        let by = Whitening::of(values.iter().copied());
        let white = values.map(|x| by.apply(x));
        let again = Whitening::of(white.iter().copied());
        assert!(again.mean().abs() < 1e-12 && (again.variance() - 1.0).abs() < 1e-6);
        let alone = Whitening::of(std::iter::once(4.0));
        assert!(alone.apply(4.0).abs() < 1e-12, "one value deviates from nothing");
    }
}
