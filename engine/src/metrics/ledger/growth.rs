//! A trend test on what is in use at the end of each step: a leak is a line, not a ratio.

use std::collections::BTreeMap;

/// Steps that are not looked at: caches and kernels settle in them.
const SETTLING: usize = 5;

/// Fewest steps that make a trend.
const FEWEST: usize = 40;

/// Standard errors that the slope must lie above zero.
const CERTAINTY: f64 = 8.0;

/// Growth over the window below this share of what is in use, or below this many bytes, is no leak worth a word.
const SHARE: f64 = 0.02;
const LEAST: f64 = 1024.0 * 1024.0;

/// Bytes in use that grow with the steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Leak {
    /// The account that grows most, or `unaccounted`.
    pub category: String,
    /// Bytes a step.
    pub bytes_per_step: f64,
    /// Steps that the trend was seen over.
    pub steps: usize,
}

/// Readings at the ends of steps, as the sums that a line through them needs: what looks for growth must not grow.
#[derive(Debug, Default)]
pub struct Growth {
    total: Line,
    owned: BTreeMap<String, Line>,
    settling: usize,
    told: bool,
}

impl Growth {
    /// Adds a step's reading, and what of it each account holds. Reports a leak once.
    pub fn add(&mut self, in_use: f64, owned: Vec<(String, f64)>) -> Option<Leak> {
        if self.settling < SETTLING {
            self.settling += 1;
            return None;
        }
        let step = self.total.steps;
        self.total.add(step, in_use);
        for (name, bytes) in owned {
            self.owned.entry(name).or_default().add(step, bytes);
        }
        let steps = self.total.steps;
        if self.told || steps < FEWEST || !steps.is_multiple_of(10) {
            return None;
        }
        let trend = self.total.trend(steps);
        let least = (SHARE * trend.mean).max(LEAST);
        if trend.slope * (steps as f64) < least || trend.slope < CERTAINTY * trend.error {
            return None;
        }
        self.told = true;
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

/// Sums of a series, counted from its first value so that they keep their digits. A step without a value counts as
/// zero.
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
    /// Change a step.
    slope: f64,
    /// Standard error of the slope.
    error: f64,
    /// Mean of the values.
    mean: f64,
}

impl Line {
    fn add(&mut self, step: usize, value: f64) {
        // an account that appears late was empty before: its values count from zero
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

    /// What a run reports in `steps` steps, given the bytes of each.
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
