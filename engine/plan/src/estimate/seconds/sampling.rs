//! Seconds of sampling where the device's kernels were measured: how many sequences are left in each decoding step.

use crate::estimate::{Context, Work, Workload};
use firebrick_spec::KernelRates;

/// Sequences that are sampled at a time, and how many waves of them there are.
pub(crate) fn sampled_rows(ctx: &Context<'_>, group: u64) -> (u64, f64) {
    let prompts = ctx.parallel.sequences(ctx.workload.prompts).max(1);
    let rows = (ctx.plan.rollout.max_num_seqs as u64).clamp(1, prompts * group);
    // slots are taken again as they come free, so the last wave need not be full
    (rows, (prompts * group) as f64 / rows as f64)
}

/// So many completions of every prompt, where the device's kernels were measured.
pub(crate) fn measured_sampling(ctx: &Context<'_>, group: u64, rates: &KernelRates) -> f64 {
    let (rows, waves) = sampled_rows(ctx, group);
    let sequences = waves * rows as f64;
    let [prompt, mean] = ctx.mean_lengths();
    let prompts = sequences / group as f64;
    let prefill = Work { tokens: prompts * prompt, micros: waves.ceil(), length: prompt, scored: sequences };
    let packing = rates.packing_bandwidth;
    let copies = ctx.copies as f64 / packing.unwrap_or(ctx.profile.memory_bandwidth / 2.0);
    // slots are taken again as they come free; the last sequences end by themselves
    let last = LastWave::new(ctx.workload, mean, sequences);
    let position = if last.decay.is_some() { mean } else { mean / 2.0 };
    let taken_again = (waves - 1.0).max(0.0) * mean;
    let decoded = last.steps().map(|(steps, at, left)| {
        let live = (left * rows as f64).max(1.0);
        steps * ctx.decoded(rates, live, prompt + at)
    });
    ctx.body_forward(rates, prefill)
        + ctx.head_forward(rates, prefill, rows as usize)
        + taken_again * ctx.decoded(rates, rows as f64, prompt + position)
        + decoded.sum::<f64>()
        + copies
}

/// Pieces of the last wave's steps in which as many sequences are counted as in the middle.
const PIECES: usize = 16;

/// The decoding steps of sequences that nobody follows.
struct LastWave {
    /// Steps until the last has ended.
    longest: f64,
    /// Steps in which all but one of e end, where lengths differ.
    decay: Option<f64>,
}

impl LastWave {
    /// The wave of `sequences` sequences with `mean` tokens on average: of equal lengths or, if measured lengths are
    /// known, of exponentially distributed lengths up to the limit.
    fn new(workload: &Workload, mean: f64, sequences: f64) -> Self {
        // the first token comes with the prompt
        let (most, decoded) = (workload.response_length as f64 - 1.0, mean - 1.0);
        let longest = (mean * (1.0 + sequences.ln()) - 1.0).min(most);
        if workload.mean_lengths.is_none() || decoded <= 0.0 || longest <= decoded {
            return Self { longest: decoded.max(0.0), decay: None };
        }
        // what lengths that are cut at the longest have on average grows with the decay
        let [mut low, mut high] = [decoded / 2.0, decoded];
        let average = |decay: f64| decay * (1.0 - (-longest / decay).exp());
        while average(high) < decoded && high < 1e6 * decoded {
            high *= 2.0;
        }
        for _ in 0..40 {
            let middle = f64::midpoint(low, high);
            if average(middle) < decoded {
                low = middle;
            } else {
                high = middle;
            }
        }
        Self { longest, decay: Some(high) }
    }

    /// Steps, where they are in a completion, and the share of all sequences that are left then.
    fn steps(&self) -> impl Iterator<Item = (f64, f64, f64)> {
        let (each, decay) = (self.longest / PIECES as f64, self.decay);
        (0..PIECES).map(move |piece| {
            let at = (piece as f64 + 0.5) * each;
            let left = decay.map_or(1.0, |decay| (-at / decay).exp());
            (each, at, left)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::rules::public;

    #[test]
    fn steps_of_the_last_wave_make_as_many_tokens_as_its_sequences_have() {
        let tokens = |mean: f64, most: u64, sequences: f64| {
            let mut workload = Workload::grpo(public("Qwen2.5-0.5B").expect("known"), [16, most], 4, 4);
            workload.mean_lengths = Some([16.0, mean]);
            let last = LastWave::new(&workload, mean, sequences);
            assert!(last.longest <= most as f64 - 1.0);
            last.steps().map(|(steps, _, left)| steps * left).sum::<f64>() / (mean - 1.0)
        };
        for (mean, most, all) in
            [(64.0, 256, 64.0), (250.0, 2048, 256.0), (60.0, 64, 8.0), (3.0, 64, 100.0), (64.0, 64, 16.0)]
        {
            let share = tokens(mean, most, all);
            assert!((share - 1.0).abs() < 0.05, "{mean} of {most}: {share}");
        }
        // a first token comes with the prompt
        let mut one = Workload::grpo(public("Qwen2.5-0.5B").expect("known"), [16, 1], 4, 4);
        one.mean_lengths = Some([16.0, 1.0]);
        let steps: f64 = LastWave::new(&one, 1.0, 16.0).steps().map(|(n, ..)| n).sum();
        assert!(steps < 1e-9, "{steps}");
    }
}
