//! Rates of kernels that are neither large products nor long copies.

use serde::{Deserialize, Serialize};

/// Rates of what decoders are made of, as `firebrick devices --measure` times them on the CPU. Estimates of seconds
/// count operations and bytes and divide by these.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct KernelRates {
    /// Bytes of a product's factors and result, a second: what small products take beside their operations at the rate
    /// of large ones.
    pub product_bandwidth: f64,
    /// Products of few rows with matrices as they are, floating-point operations a second; rows ascend.
    pub few_rows: Vec<RowsRate>,
    /// Those rates with matrices in panels.
    pub panels: Vec<RowsRate>,
    /// Bytes of matrices that are laid out in panels a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packing_bandwidth: Option<f64>,
    /// Products of few rows with an adapter's two matrices, one after the other, floating-point operations a second.
    pub adapter_flops: f64,
    /// Attention of whole sequences, floating-point operations a second, over all pairs of the blocks of queries and
    /// keys that have any: forward, and forward and backward together.
    pub attention_flops: [f64; 2],
    /// Attention of one new token a sequence over a cache, floating-point operations a second.
    pub decode_attention_flops: f64,
    /// Norms, gates and rotary embeddings, bytes read and written a second.
    pub elementwise_bandwidth: f64,
    /// Logits a second of which log-probs are taken, and their gradient, and a token.
    pub logits: LogitRates,
    /// An operation on small tensors that allocates what it gives, seconds.
    pub operation: f64,
}

/// A rate of products of so many rows.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RowsRate {
    /// Rows.
    pub rows: u64,
    /// Floating-point operations a second.
    pub flops: f64,
}

/// Logits a second.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LogitRates {
    /// Of which log-probs and entropies are taken.
    pub scored: f64,
    /// Of which the gradient is taken.
    pub differentiated: f64,
    /// Of which a token is drawn.
    pub drawn: f64,
}

impl KernelRates {
    /// Floating-point operations a second of products of so many rows: between two that were measured on the straight
    /// line of logarithms, beyond them as the nearest.
    pub fn flops_at(measured: &[RowsRate], rows: f64) -> Option<f64> {
        let above = measured.iter().position(|rate| rate.rows as f64 >= rows);
        match above {
            Some(0) => measured.first().map(|rate| rate.flops),
            None => measured.last().map(|rate| rate.flops),
            Some(at) => {
                let [low, high] = [measured[at - 1], measured[at]];
                let [from, to] = [low, high].map(|rate| (rate.rows as f64).ln());
                let share = (rows.ln() - from) / (to - from);
                Some(low.flops.powf(1.0 - share) * high.flops.powf(share))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_between_two_that_were_measured_lies_between_them() {
        let measured = [(1, 1e9), (4, 4e9), (64, 4e10)].map(|(rows, flops)| RowsRate { rows, flops });
        let of = |rows| KernelRates::flops_at(&measured, rows).expect("measured");
        assert!((of(2.0) / 2e9 - 1.0).abs() < 1e-9);
        assert!((of(16.0) / (1.6e20_f64).sqrt() - 1.0).abs() < 1e-9);
        for (rows, nearest) in [(0.5, 1e9), (1.0, 1e9), (64.0, 4e10), (1e6, 4e10)] {
            assert!((of(rows) / nearest - 1.0).abs() < 1e-9, "{rows} rows");
        }
        assert_eq!(KernelRates::flops_at(&[], 1.0), None);
    }
}
