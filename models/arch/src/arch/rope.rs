//! Rotary position embedding (Su et al., 2021, arXiv:2104.09864) as data: frequencies, and how they are stretched
//! beyond the context of training.

use std::f64::consts::TAU;

/// Scaling of rotary frequencies beyond the trained context (transformers' `rope_type`).
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// As trained.
    Default,
    /// Every frequency divided by `factor`.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// NTK-aware: the base grows with the longest position of the forward once that exceeds `original`.
    Dynamic {
        /// Growth of the base.
        factor: f64,
        /// Context length of training.
        original: usize,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a blend between.
    Llama3 {
        /// Divisor of long wavelengths.
        factor: f64,
        /// Wavelengths above `original / low` are divided.
        low: f64,
        /// Wavelengths below `original / high` are kept.
        high: f64,
        /// Context length of training.
        original: usize,
    },
    /// `YaRN` (Peng et al., 2023, arXiv:2309.00071).
    Yarn(Yarn),
}

/// `YaRN`: frequencies that turn often are kept, those that turn seldom are divided by `factor`, with a linear ramp
/// over the dimensions between them; cosines and sines are multiplied by `attention_factor`.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// Divisor of the frequencies that turn seldom.
    pub factor: f64,
    /// The ramp begins at the dimension that turns this often within `original` tokens.
    pub beta_fast: f64,
    /// The ramp ends at the dimension that turns this often.
    pub beta_slow: f64,
    /// True if the ramp begins and ends at whole dimensions.
    pub truncate: bool,
    /// Factor of cosines and sines.
    pub attention_factor: f64,
    /// Context length of training.
    pub original: usize,
}

impl Yarn {
    /// `attention_factor` where a config names none: `0.1 m ln(factor) + 1` with m = 1, or the quotient of two such
    /// numbers with m = `mscale` and m = `mscale_all_dim`.
    pub fn default_attention_factor(factor: f64, mscales: Option<[f64; 2]>) -> f64 {
        let factor_of = |mscale: f64| {
            if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
        };
        match mscales {
            Some([mscale, all_dim]) => factor_of(mscale) / factor_of(all_dim),
            None => factor_of(1.0),
        }
    }

    /// The frequencies `plain` of heads of `2 · plain.len()` dimensions with this base, stretched.
    fn stretched(&self, theta: f64, plain: &[f64]) -> Vec<f64> {
        let dim = 2.0 * plain.len() as f64;
        let turning = |turns: f64| dim * (self.original as f64 / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (low, high) = (turning(self.beta_fast), turning(self.beta_slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
        if (high - low).abs() < f64::EPSILON {
            high += 0.001;
        }
        let pairs = plain.iter().enumerate();
        let stretched = pairs.map(|(i, &w)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            w / self.factor * ramp + w * (1.0 - ramp)
        });
        stretched.collect()
    }
}

/// Rotary position embedding, rotate-half form.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Stretching.
    pub scaling: RopeScaling,
}

impl Rope {
    /// Rotation angle per position of each pair of dimensions of heads of `head_dim`. `longest` is the number of
    /// positions of the forward pass, which only dynamic scaling uses (as transformers does).
    pub fn frequencies(&self, head_dim: usize, longest: usize) -> Vec<f64> {
        let dim = head_dim as f64;
        let base = |theta: f64| -> Vec<f64> { (0..head_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / dim)).collect() };
        let plain = base(self.theta);
        match &self.scaling {
            RopeScaling::Default => plain,
            RopeScaling::Linear { factor } => plain.into_iter().map(|w| w / factor).collect(),
            &RopeScaling::Dynamic { factor, original } => {
                if longest <= original {
                    return plain;
                }
                let growth = factor * longest as f64 / original as f64 - (factor - 1.0);
                base(self.theta * growth.powf(dim / (dim - 2.0)))
            }
            &RopeScaling::Llama3 { factor, low, high, original } => plain
                .into_iter()
                .map(|w| {
                    let wavelength = TAU / w;
                    let turns = original as f64 / wavelength;
                    if turns < low {
                        w / factor
                    } else if turns > high {
                        w
                    } else {
                        let blend = (turns - low) / (high - low);
                        (1.0 - blend) * w / factor + blend * w
                    }
                })
                .collect(),
            RopeScaling::Yarn(yarn) => yarn.stretched(self.theta, &plain),
        }
    }

    /// Factor of cosines and sines.
    pub fn attention_factor(&self) -> f64 {
        match &self.scaling {
            RopeScaling::Yarn(yarn) => yarn.attention_factor,
            _ => 1.0,
        }
    }
}

/// Queries at position p are multiplied by `1 + beta · ln(1 + ⌊p / original⌋)` (`llama_4_scaling_beta`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryScaling {
    /// Growth.
    pub beta: f64,
    /// Context length of training: queries before it are as they are.
    pub original: usize,
}

impl QueryScaling {
    /// The factor of a query at this position.
    pub fn factor(self, position: u32) -> f64 {
        let contexts = position as usize / self.original;
        1.0 + self.beta * (contexts as f64).ln_1p()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yarn(truncate: bool) -> Rope {
        let scaling = RopeScaling::Yarn(Yarn {
            factor: 16.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate,
            attention_factor: 1.0,
            original: 16_384,
        });
        Rope { theta: 1e6, scaling }
    }

    #[test]
    fn yarn_keeps_fast_frequencies_and_divides_slow_ones() {
        let plain = Rope { theta: 1e6, scaling: RopeScaling::Default };
        for truncate in [true, false] {
            let (plain, stretched) = (plain.frequencies(128, 1), yarn(truncate).frequencies(128, 1));
            // 16,384 / (32 · 2 π) and 16,384 / 2 π of theta^(2 i / 128): pairs 20.4 and 36.4
            for (i, (w, plain)) in stretched.iter().zip(plain).enumerate() {
                let expected = match i {
                    ..=20 => w / plain - 1.0,
                    37.. => w * 16.0 / plain - 1.0,
                    // strictly between
                    _ => f64::from(u8::from(*w >= plain || *w <= plain / 16.0)),
                };
                assert!(expected.abs() < 1e-12, "{i}: {w} of {plain}");
            }
        }
    }

    #[test]
    fn a_ramp_that_is_not_truncated_begins_between_two_dimensions() {
        let [whole, between] = [true, false].map(|truncate| yarn(truncate).frequencies(128, 1));
        assert_ne!(whole[25].to_bits(), between[25].to_bits());
    }

    #[test]
    fn the_attention_factor_of_a_config_without_one_follows_from_its_scales() {
        let factor = Yarn::default_attention_factor;
        assert!((factor(8.0, None) - 1.207_944_154_167_983_6).abs() < 1e-15);
        assert!((factor(16.0, Some([1.0, 1.0])) - 1.0).abs() < 1e-15);
        assert!((factor(0.5, None) - 1.0).abs() < 1e-15);
    }

    #[test]
    fn queries_grow_from_the_end_of_the_trained_context_on() {
        let scaling = QueryScaling { beta: 0.1, original: 8 };
        assert_eq!([0, 7].map(|p| scaling.factor(p).to_bits()), [1f64.to_bits(); 2]);
        assert!((scaling.factor(8) - (1.0 + 0.1 * 2f64.ln())).abs() < 1e-15);
        assert!((scaling.factor(31) - (1.0 + 0.1 * 4f64.ln())).abs() < 1e-15);
    }
}
