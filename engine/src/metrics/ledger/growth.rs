//! Trend test on the bytes in use at the end of each step: a leak is a line, not a ratio.

use std::collections::BTreeMap;

/// First steps, which are skipped: caches and kernels settle in them.
const SETTLING_STEPS: usize = 5;

/// Minimum steps of a trend.
const MIN_STEPS: usize = 40;

/// Minimum slope of a leak, in standard errors.
const MIN_STANDARD_ERRORS: f64 = 8.0;

/// Minimum growth of a leak over all steps, as a fraction of the bytes in use.
const MIN_FRACTION: f64 = 0.02;

/// Minimum growth of a leak over all steps, in bytes.
const MIN_BYTES: f64 = 1024.0 * 1024.0;

/// Bytes in use that grow with the steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Leak {
    /// The account that grows most, or `unaccounted`.
    pub category: String,
    /// Bytes per step.
    pub bytes_per_step: f64,
    /// Steps of the trend.
    pub steps: usize,
}

/// Readings at the ends of steps, as the sums of a linear fit, so that it does not grow itself.
#[derive(Debug, Default)]
pub struct Growth {
    total: Line,
    owned: BTreeMap<String, Line>,
    settling: usize,
    reported: bool,
}

impl Growth {
    /// Adds a step's reading, and the bytes of each account. Reports a leak once.
    pub fn add(&mut self, in_use: f64, owned: Vec<(String, f64)>) -> Option<Leak> {
        if self.settling < SETTLING_STEPS {
            self.settling += 1;
            return None;
        }
        let step = self.total.steps;
        self.total.add(step, in_use);
        for (name, bytes) in owned {
            self.owned.entry(name).or_default().add(step, bytes);
        }
        let steps = self.total.steps;
        if self.reported || steps < MIN_STEPS || !steps.is_multiple_of(10) {
            return None;
        }
        let trend = self.total.trend(steps);
        let least = (MIN_FRACTION * trend.mean).max(MIN_BYTES);
        if trend.slope * (steps as f64) < least || trend.slope < MIN_STANDARD_ERRORS * trend.error {
            return None;
        }
        self.reported = true;
        let mut rest = trend.slope;
        let mut most = ("unaccounted".to_owned(), 0.0);
        for (name, line) in &self.owned {
            let slope = line.trend(steps).slope;
            rest -= slope;
            if slope > most.1 {
                most = (name.clone(), slope);
            }
        }
        if rest > most.1 {
            most = ("unaccounted".to_owned(), rest);
        }
        Some(Leak { category: most.0, bytes_per_step: trend.slope, steps })
    }
}

/// Sums of a series, relative to its first value for precision. A step without a value counts as zero.
#[derive(Debug, Default)]
struct Line {
    steps: usize,
    first: Option<f64>,
    y: f64,
    ty: f64,
    yy: f64,
}

/// A least-squares line.
#[derive(Clone, Copy, Debug)]
struct Trend {
    /// Change per step.
    slope: f64,
    /// Standard error of the slope.
    error: f64,
    /// Mean of the values.
    mean: f64,
}

impl Line {
    fn add(&mut self, step: usize, value: f64) {
        // an account that appears late was empty before, so its values count from zero
        let from = *self.first.get_or_insert(if step == 0 { value } else { 0.0 });
        let y = value - from;
        self.steps = step + 1;
        self.y += y;
        self.ty += step as f64 * y;
        self.yy += y * y;
    }

    /// The line through the values at steps 0 to `steps` − 1.
    fn trend(&self, steps: usize) -> Trend {
        let n = steps as f64;
        let mean_t = (n - 1.0) / 2.0;
        let tt = n * (n * n - 1.0) / 12.0;
        let mean = self.y / n;
        let slope = (self.ty - mean_t * self.y) / tt;
        let rest = (self.yy - n * mean * mean - slope * slope * tt).max(0.0);
        Trend { slope, error: (rest / (n - 2.0).max(1.0) / tt).sqrt(), mean: mean + self.first.unwrap_or(0.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick_models::random::Stream;

    const MIB: f64 = 1024.0 * 1024.0;

    /// Report of a run of `steps` steps, given the bytes of each.
    fn run(steps: usize, bytes: impl Fn(usize, f64) -> (f64, f64)) -> Option<Leak> {
        let (mut growth, mut noise) = (Growth::default(), Stream::new(3, 0));
        (0..steps).find_map(|t| {
            let (total, cache) = bytes(t, f64::from(noise.normal()));
            growth.add(total, vec![("kv_cache".into(), cache)])
        })
    }

    #[test]
    fn noise_is_no_leak() {
        assert_eq!(run(600, |_, noise| (100.0 * MIB + 3.0 * MIB * noise, MIB)), None);
    }

    #[test]
    fn a_step_up_at_the_start_is_no_leak() {
        assert_eq!(run(300, |t, _| (if t < 4 { 10.0 } else { 100.0 } * MIB, MIB)), None);
    }

    #[test]
    fn growth_is_named_by_the_account_that_grows() {
        let leak = run(300, |t, noise| {
            let cache = MIB * (1.0 + 0.2 * t as f64);
            (100.0 * MIB + cache + 0.5 * MIB * noise, cache)
        })
        .expect("a leak");
        assert_eq!(leak.category, "kv_cache");
        assert!((leak.bytes_per_step / (0.2 * MIB) - 1.0).abs() < 0.2, "{leak:?}");
    }

    #[test]
    fn growth_that_no_account_knows_of_is_unaccounted() {
        let leak = run(300, |t, _| (MIB * (100.0 + 0.2 * t as f64), MIB)).expect("a leak");
        assert_eq!(leak.category, "unaccounted");
    }
}
