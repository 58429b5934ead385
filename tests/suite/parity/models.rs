//! Logits, log-probs, entropies, gradients and greedy continuations of every model folder against transformers.

use burn::tensor::Tensor;
use firebrick_engine::batch::MicroBatch;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::plan::Layout;
use firebrick_engine::sequence::Sequence;
use firebrick_models::KvCacheDtype;
use firebrick_models::attention::{Grouping, SequenceLayout};
use firebrick_models::cache::{BlockTable, Chunk, KvCache};
use firebrick_models::forward_context::ForwardContext;
use firebrick_models::random::DrawKey;
use firebrick_sampler::{FinishReason, GenerationRequest, Generator, SamplingParams};

use crate::support::golden::Golden;
use crate::support::model::{GreedySample, Model, nll_rows, scored_rows, unpadded};
use crate::support::{assert_all_close, assert_close, assert_gradient, checked, folders, values};

const FORWARD: &str = "forward.safetensors";

/// Tensors that a test of this file reads, log-probs at a temperature apart.
const KNOWN: [&str; 12] = [
    "attention_mask_left",
    "attention_mask_right",
    "entropy_left",
    "entropy_right",
    "entropy_single_row",
    "input_ids_left",
    "input_ids_right",
    "logits_right",
    "logprobs_left",
    "logprobs_right",
    "logprobs_single_row",
    "position_ids_left",
];

/// Followed by the temperature without its point: `07` is 0.7.
const AT_TEMPERATURE: &str = "logprobs_right_t";

fn models() -> impl Iterator<Item = (Model, Golden)> {
    folders("models").into_iter().map(|dir| {
        let model = Model::load(&dir);
        let golden = model.golden(FORWARD);
        (model, golden)
    })
}

#[test]
fn every_stored_tensor_is_one_that_is_compared() {
    let mut tensors = 0;
    for (model, golden) in models() {
        for name in golden.names() {
            let known = KNOWN.contains(&name.as_str()) || temperature(&name).is_some();
            assert!(known, "{}: unknown tensor {name}", model.name);
            tensors += 1;
        }
    }
    checked("tensors of model folders known", tensors);
}

#[test]
fn logits_of_a_batch_padded_on_the_right_or_packed() {
    let rows = models().map(|(model, golden)| hold_logits(&model, &golden));
    checked("rows of logits", rows.sum());
}

/// Compares the logits of the rows in both layouts, and says of how many.
pub(crate) fn hold_logits(model: &Model, golden: &Golden) -> usize {
    let mut rows = 0;
    let (shape, expected) = golden.shaped("logits_right");
    let [_, width, vocab] = shape[..] else { panic!("{}: logits of shape {shape:?}", model.name) };
    let sequences = scored_rows(golden);
    let own: Vec<&Sequence> = sequences.iter().collect();
    for layout in [Layout::Padded, Layout::Packed] {
        let (arch, device) = (model.decoder.arch(), model.decoder.device());
        let micro = MicroBatch::new(arch, &own, layout, 0, device);
        let hidden = model.decoder.hidden(micro.ids, &micro.ctx);
        let found = values(model.decoder.head().logits(hidden));
        let mut start = 0;
        for (i, sequence) in sequences.iter().enumerate() {
            let length = sequence.tokens.len() * vocab;
            let found = &found[start..start + length];
            let expected = &expected[i * width * vocab..][..length];
            let label = format!("{}, {layout:?}: logits of row {i}", model.name);
            assert_all_close(&label, found, expected, model.tolerance());
            start += match layout {
                Layout::Padded => width * vocab,
                Layout::Packed | Layout::SharedPrefix => length,
            };
            rows += 1;
        }
    }
    rows
}

#[test]
fn log_probs_and_entropies_of_a_right_padded_batch_at_every_stored_temperature() {
    let mut rows = 0;
    for (model, golden) in models() {
        let sequences = scored_rows(&golden);
        let mut at = vec![("logprobs_right".to_owned(), 1.0)];
        at.extend(golden.names().into_iter().filter_map(|name| {
            let temperature = temperature(&name)?;
            Some((name, temperature))
        }));
        for (name, temperature) in at {
            for head_rows in [1024, 7] {
                let scores = model.score(&model.plain(head_rows), temperature, &sequences);
                let label = |i: usize| format!("{}: {name} of row {i}", model.name);
                for (i, expected) in golden.float_rows(&name).iter().enumerate() {
                    let last = sequences[i].tokens.len() - 1;
                    let found = wide(&scores.logp[i][..last]);
                    assert_all_close(&label(i), &found, &expected[..last], model.tolerance());
                    rows += 1;
                }
                if name == "logprobs_right" {
                    for (i, expected) in golden.float_rows("entropy_right").iter().enumerate() {
                        let found = wide(&scores.entropy[i]);
                        let label = format!("{}: entropy of row {i}", model.name);
                        assert_all_close(&label, &found, &expected[..found.len()], model.tolerance());
                    }
                }
            }
        }
    }
    checked("rows of log-probs and entropies, right-padded", rows);
}

#[test]
fn log_probs_and_entropies_of_a_row_alone() {
    let mut rows = 0;
    for (model, golden) in models() {
        // a row alone gives what the batch gave, unless the folder stores that it does not
        let stored = golden.names().iter().any(|n| n == "logprobs_single_row");
        let [logp, entropy] =
            if stored { ["logprobs_single_row", "entropy_single_row"] } else { ["logprobs_right", "entropy_right"] };
        let (logp, entropy) = (golden.float_rows(logp), golden.float_rows(entropy));
        for (i, sequence) in scored_rows(&golden).iter().enumerate() {
            let alone = std::slice::from_ref(sequence);
            let scores = model.score(&model.plain(1024), 1.0, alone);
            let label = format!("{}: row {i} alone", model.name);
            let n = sequence.tokens.len();
            assert_all_close(&label, &wide(&scores.logp[0][..n - 1]), &logp[i][..n - 1], model.tolerance());
            assert_all_close(&label, &wide(&scores.entropy[0]), &entropy[i][..n], model.tolerance());
            rows += 1;
        }
    }
    checked("rows alone", rows);
}

#[test]
fn log_probs_and_entropies_of_a_left_padded_batch() {
    let rows = models().map(|(model, golden)| hold_left_padded(&model, &golden));
    checked("rows of log-probs and entropies, left-padded", rows.sum());
}

/// Compares the scores of the left-padded rows in one forward, and says of how many.
pub(crate) fn hold_left_padded(model: &Model, golden: &Golden) -> usize {
    let batch = LeftPadded::new(golden);
    let hidden = batch.in_one_forward(model);
    batch.check(model, golden, hidden, "one forward")
}

#[test]
fn log_probs_and_entropies_through_the_cache() {
    let local = models().filter(|(model, _)| model.manifest.is_local());
    let rows = local.map(|(model, golden)| hold_through_the_cache(&model, &golden));
    checked("rows of log-probs and entropies through the cache", rows.sum());
}

/// Compares the scores of rows whose prompts are prefilled in chunks and whose other tokens are decoded, and says of
/// how many.
pub(crate) fn hold_through_the_cache(model: &Model, golden: &Golden) -> usize {
    let batch = LeftPadded::new(golden);
    let prefills = [1, batch.width / 3, batch.width - 1].into_iter();
    let rows = prefills.map(|prefill| {
        let hidden = batch.through_the_cache(model, prefill.max(1));
        batch.check(model, golden, hidden, &format!("prefill of {prefill}"))
    });
    rows.sum()
}

#[test]
fn loss_and_gradients_of_the_mean_nll() {
    let (mut tensors, mut losses) = (0, 0);
    for (model, golden) in models() {
        let Some(expected_loss) = model.manifest.loss else {
            continue;
        };
        let rows = nll_rows(&golden);
        for (plan, plan_name) in [
            (model.plain(1024), "plain"),
            (model.plain(7), "small head chunks"),
            (model.checkpointed(1024, 1), "every layer checkpointed"),
        ] {
            let label = format!("{}, {plan_name}", model.name);
            let whole = vec![rows.iter().collect()];
            let (sums, found) = model.backward(&plan, 1.0, &Nll, &whole);
            assert_close(&format!("{label}: loss"), sums.loss, expected_loss, model.tolerance());
            losses += 1;
            if let Some(norm) = model.manifest.grad_norm {
                let found = found.values().flatten().map(|g| g * g).sum::<f64>().sqrt();
                assert_close(&format!("{label}: gradient norm"), found, norm, model.tolerance());
            }
            let Some(gradients) = model.golden_gradients() else {
                continue;
            };
            assert!(found.keys().eq(&gradients.names()), "{label}: other parameters");
            for (name, found) in &found {
                let expected = gradients.floats(name);
                assert_gradient(&format!("{label}: {name}"), found, &expected, model.tolerance());
                tensors += 1;
            }
        }
    }
    checked("losses of model folders", losses);
    checked("gradient tensors", tensors);
}

#[test]
fn greedy_continuations_alone_and_in_a_left_padded_batch() {
    let mut samples = 0;
    for (model, _) in models() {
        let Some(greedy) = &model.manifest.greedy else {
            continue;
        };
        assert!(greedy.eos_ignored, "{}: eos ends continuations", model.name);
        let sampling =
            SamplingParams { temperature: 0.0, max_new_tokens: greedy.max_new_tokens, ..SamplingParams::default() };
        let all: Vec<&GreedySample> = greedy.samples.iter().collect();
        for sample in &all {
            samples += check_greedy(&model, &sampling, &[*sample], &[true]);
        }
        let same = &greedy.left_padded_batch_gives_same;
        samples += check_greedy(&model, &sampling, &all, same);
    }
    checked("greedy continuations", samples);
}

/// Continues prompts together and compares those that should come out the same.
fn check_greedy(model: &Model, sampling: &SamplingParams, samples: &[&GreedySample], same: &[bool]) -> usize {
    let requests: Vec<GenerationRequest> = samples
        .iter()
        .map(|sample| GenerationRequest {
            tokens: sample.prompt_ids.clone(),
            key: DrawKey { seed: 0, step: 0, prompt_index: 0, sample: 0 },
            max_new_tokens: None,
        })
        .collect();
    let found = Generator::new(&model.decoder, None, sampling)
        .and_then(|generator| generator.run(&requests, 1, samples.len()))
        .unwrap_or_else(|error| panic!("{}: {error}", model.name));
    let mut cases = 0;
    for (i, (found, expected)) in found.iter().zip(samples).enumerate() {
        if same[i] {
            let label = format!("{}: continuation {i} of {}", model.name, samples.len());
            assert_eq!(found.tokens, expected.new_ids, "{label}");
            assert_eq!(found.finish, FinishReason::Length, "{label}");
            assert_all_close(&label, &wide(&found.logps), &expected.logprobs, model.tolerance());
            cases += 1;
        }
    }
    cases
}

/// The golden rows padded on the left.
struct LeftPadded {
    ids: Vec<Vec<i64>>,
    rows: Vec<Vec<u32>>,
    starts: Vec<usize>,
    width: usize,
}

impl LeftPadded {
    fn new(golden: &Golden) -> Self {
        let ids = golden.int_rows("input_ids_left");
        let rows = unpadded(&ids, &golden.int_rows("attention_mask_left"));
        let width = ids[0].len();
        let starts: Vec<usize> = rows.iter().map(|row| width - row.len()).collect();
        for (positions, &start) in golden.int_rows("position_ids_left").iter().zip(&starts) {
            let ours = (0..width).map(|column| column.saturating_sub(start) as i64);
            assert!(ours.eq(positions.iter().copied()), "{positions:?}");
        }
        Self { ids, rows, starts, width }
    }

    /// Hidden states by one forward over the rows without their padding, which is zeros.
    fn in_one_forward(&self, model: &Model) -> Tensor<2> {
        let (decoder, device) = (&model.decoder, model.decoder.device());
        let lengths: Vec<usize> = self.rows.iter().map(Vec::len).collect();
        let layout = SequenceLayout::packed(&lengths, Grouping { waste: 0.5, queries: 0 }, device);
        let ctx = ForwardContext::whole(decoder.arch(), layout, 0, device);
        let ids: Vec<i64> = self.rows.iter().flatten().map(|&id| i64::from(id)).collect();
        let hidden = decoder.hidden(model.ids(&ids), &ctx);
        let mut end = 0;
        let rows = lengths.iter().map(|&length| {
            end += length;
            vec![hidden.clone().narrow(0, end - length, length)]
        });
        self.padded(model, rows.collect())
    }

    /// Parts of the hidden states of each row behind zeros for its padding.
    fn padded(&self, model: &Model, rows: Vec<Vec<Tensor<2>>>) -> Tensor<2> {
        let (width, device) = (model.decoder.arch().hidden_size, model.decoder.device());
        let dtype = rows[0][0].dtype();
        let whole = rows.into_iter().zip(&self.starts).flat_map(|(parts, &start)| {
            let padding = Tensor::<2>::zeros([start, width], (device, dtype));
            std::iter::once(padding).filter(|t| t.dims()[0] > 0).chain(parts)
        });
        Tensor::cat(whole.collect(), 0)
    }

    /// Hidden states by way of the cache: two chunks of every row, `prefill` tokens each, then a token at a time.
    /// Padding is zeros.
    fn through_the_cache(&self, model: &Model, prefill: usize) -> Tensor<2> {
        let (decoder, device) = (&model.decoder, model.decoder.device());
        let arch = decoder.arch();
        let blocks = vec![64; KvCache::groups(arch)];
        let mut cache = KvCache::new(arch, &blocks, KvCacheDtype::Auto, device);
        let mut tables: Vec<BlockTable> = self.rows.iter().map(|_| cache.begin(&[])).collect();
        let mut found: Vec<Vec<Tensor<2>>> = vec![Vec::new(); self.rows.len()];
        loop {
            let first = tables[0].tokens() < 2 * prefill;
            let most = if first { prefill } else { 1 };
            let more = |row: usize, table: &BlockTable| most.min(self.rows[row].len() - table.tokens());
            let counts: Vec<usize> = (0..).zip(&tables).map(|(row, table)| more(row, table)).collect();
            if counts.iter().all(|&count| count == 0) {
                break;
            }
            for (table, &count) in tables.iter_mut().zip(&counts) {
                assert!(cache.append(table, count));
            }
            let taken = tables.iter().zip(&counts).filter(|(_, count)| **count > 0);
            let chunk = |(table, count): (_, &usize)| {
                let table: &BlockTable = table;
                let end = table.tokens();
                let tokens = end - count..end;
                Chunk { table, tokens }
            };
            let chunks: Vec<Chunk<'_>> = taken.map(chunk).collect();
            let of_row = |(row, table): (usize, &BlockTable)| {
                let end = table.tokens();
                self.rows[row][end - counts[row]..end].to_vec()
            };
            let (metadata, ids) = if first {
                let ids = tables.iter().enumerate().flat_map(of_row).collect::<Vec<u32>>();
                (cache.prefill(arch, &chunks), ids)
            } else {
                let live = |(table, &count): (_, &usize)| (count > 0).then_some(table);
                let rows: Vec<Option<&BlockTable>> = tables.iter().zip(&counts).map(live).collect();
                let id = |own: (usize, &BlockTable)| of_row(own).first().copied().unwrap_or(0);
                let ids = tables.iter().enumerate().map(id).collect();
                (cache.decode(arch, &rows), ids)
            };
            let ids: Vec<i64> = ids.into_iter().map(i64::from).collect();
            let hidden = decoder.hidden_cached(model.ids(&ids), &metadata, &mut cache);
            let mut at = 0;
            for (row, &count) in counts.iter().enumerate() {
                if count > 0 {
                    found[row].push(hidden.clone().narrow(0, at, count));
                }
                at += if first { count } else { 1 };
            }
        }
        self.padded(model, found)
    }

    /// Compares the scores of hidden rows, and says of how many sequences.
    fn check(&self, model: &Model, golden: &Golden, hidden: Tensor<2>, how: &str) -> usize {
        let next = |row: &Vec<i64>| [&row[1..], &[0]].concat();
        let targets: Vec<i64> = self.ids.iter().flat_map(next).collect();
        let scores = model.decoder.head().score(hidden, model.ids(&targets), 1.0);
        let (logp, entropy) = (values(scores.logp), values(scores.entropy));
        let expected_logp = golden.float_rows("logprobs_left");
        let expected_entropy = golden.float_rows("entropy_left");
        for (i, &start) in self.starts.iter().enumerate() {
            let label = format!("{}: {how}, row {i}", model.name);
            let (from, end) = (i * self.width + start, (i + 1) * self.width);
            assert_all_close(&label, &logp[from..end - 1], &expected_logp[i][start..], model.tolerance());
            assert_all_close(&label, &entropy[from..end], &expected_entropy[i][start..], model.tolerance());
        }
        self.rows.len()
    }
}

/// The temperature of a tensor of log-probs at one.
fn temperature(name: &str) -> Option<f64> {
    let digits = name.strip_prefix(AT_TEMPERATURE)?;
    let (whole, rest) = digits.split_at_checked(1)?;
    format!("{whole}.{rest}").parse().ok()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| f64::from(v)).collect()
}
