//! Ranks that share every matrix sample what one rank samples: the draws of the whole model's plain forward, under
//! every schedule.

use super::*;
use firebrick_backends::collective::{Collective, CollectiveError, Flat, OperationKind, Settings, Threads, Traffic};
use firebrick_models::adapter::LoraConfig;
use firebrick_models::unit::TargetModule;
use firebrick_models::{TensorGroup, TensorRanks};
use std::sync::Arc;

/// Threads as a group.
#[derive(Debug)]
struct Ranks(Arc<dyn Collective>);

impl TensorRanks for Ranks {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn all_reduce(&self, values: Tensor<1>) -> Result<Tensor<1>, firebrick_backends::Error> {
        self.0.all_reduce_tensor(values)
    }

    fn all_gather(&self, values: Tensor<1>) -> Result<Tensor<1>, firebrick_backends::Error> {
        self.0.all_gather_tensor(values)
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        let gathered = self.0.all_gather(Flat::Bytes(bytes))?;
        Ok(gathered.as_bytes().to_vec())
    }
}

/// This rank's share of a model.
fn share(decoder: &Decoder, rank: &Arc<dyn Collective>) -> Result<Decoder, Error> {
    let group = TensorGroup::new(Arc::new(Ranks(Arc::clone(rank))));
    let whole = |unit: usize| {
        let range = decoder.units()[unit].range.clone();
        Ok::<_, Error>(range.map(|index| decoder.param(index)).collect())
    };
    decoder.sampling_shard(&group, decoder.arch().precision, whole)
}

/// Results of a schedule on `size` ranks, and their messages.
fn on_ranks(decoder: &Decoder, schedule: &Schedule, size: usize) -> Vec<(Result<Generated, Error>, Traffic, usize)> {
    let requests = requests_after(schedule.system, &schedule.lengths);
    let done = Threads::run(size, Settings::default(), |rank| {
        let shard = share(decoder, &rank).expect("a share");
        let mut limits = schedule.limits;
        let generator = Generator::new(&shard, None, &schedule.sampling).expect("valid settings");
        let generator = generator.prepack(schedule.prepack);
        limits.kv_cache_bytes = schedule.budget.map(|share| {
            let longest = requests.iter().map(|r| r.tokens.len()).max().unwrap_or(0);
            let longest = longest + schedule.sampling.max_new_tokens;
            (limits.least_cache_bytes(shard.arch(), longest) as f64 * share) as usize
        });
        let done = generator.run_with(&requests, schedule.n, &limits, |_| {});
        (done, rank.traffic(), shard.bytes_in(Home::Device))
    });
    done.into_iter().map(|rank| rank.expect("no panic")).collect()
}

fn samples(generated: &Generated) -> Vec<(Vec<u32>, Vec<u32>)> {
    let bits = |s: &Sample| s.logps.iter().map(|logp| logp.to_bits()).collect();
    generated.samples.iter().map(|s| (s.tokens.clone(), bits(s))).collect()
}

/// Checks a schedule on `size` ranks; returns the first rank's run, and the number of tokens that differ from their
/// draws.
fn checked_on(decoder: &Decoder, schedule: &Schedule, size: usize) -> (Generated, usize) {
    let requests = requests_after(schedule.system, &schedule.lengths);
    let mut ranks = on_ranks(decoder, schedule, size).into_iter().map(|(done, ..)| done.expect("samples"));
    let first = ranks.next().expect("a rank");
    assert_eq!(first.samples.len(), requests.len() * schedule.n);
    for other in ranks {
        assert_eq!(samples(&other), samples(&first), "the same on all ranks");
    }
    let samples = first.samples.iter();
    let others = samples.map(|sample| {
        let request = &requests[sample.request];
        check(decoder, request, &schedule.sampling, &schedule.limits, sample)
    });
    let others = others.sum();
    (first, others)
}

const DENSE: [&str; 9] =
    ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3", "olmo3", "ministral3"];

#[test]
fn ranks_that_share_matrices_sample_the_draws_of_the_whole_model() {
    let counts = std::cell::Cell::new((0, 0));
    let config = ProptestConfig { cases: 40, ..ProptestConfig::default() };
    let groups = (schedule(), 0..DENSE.len(), prop_oneof![Just(2_usize), Just(4)]);
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let outcome = runner.run(&groups, |(mut schedule, family, size)| {
        schedule.family = DENSE[family];
        schedule.prepack.quantization = None;
        let decoder = decoder(schedule.family);
        let (generated, others) = checked_on(&decoder, &schedule, size);
        let drawn: usize = generated.samples.iter().map(|s| s.tokens.len()).sum();
        let (draws, differing) = counts.get();
        counts.set((draws + drawn, differing + others));
        Ok(())
    });
    outcome.expect("every schedule holds");
    let (draws, differing) = counts.get();
    assert!(draws > 1000, "only {draws} tokens");
    assert!(differing * 1000 <= draws, "{differing} of {draws} tokens are not their draws");
}

#[test]
fn every_dense_family_and_its_adapters_are_shared_by_two_and_by_four_ranks() {
    for family in DENSE {
        let plain = decoder(family);
        let lora = LoraConfig { rank: 3, target_modules: TargetModule::all(), ..LoraConfig::default() };
        let mut adapted = plain.with_fresh_adapters(lora, 2).unwrap();
        // B matrices that are not zero
        adapted
            .update(|index, spec, param| match param {
                Param::Device(w) if spec.slot.is_adapter() => {
                    let values = (0..spec.numel()).map(|i| ((i * 37 + index) % 11) as f32 / 40.0);
                    let values: Vec<f32> = values.map(|v| v - 0.125).collect();
                    let w = Tensor::from_data(TensorData::new(values, w.dims()), &w.device());
                    Ok::<_, Error>(Param::Device(w))
                }
                other => Ok(other),
            })
            .expect("adapters");
        for model in [&plain, &adapted] {
            for size in [2, 4] {
                let schedule =
                    Schedule { family, lengths: vec![5, 19, 3], system: 20, prepack: PANELS, ..crowded(None) };
                let (generated, others) = checked_on(model, &schedule, size);
                let drawn: usize = generated.samples.iter().map(|s| s.tokens.len()).sum();
                assert!(drawn >= 300 && others <= 1, "{family}: {others} of {drawn}");
                assert!(generated.stats.prefix_cache_hits > 0, "{family}");
            }
        }
    }
}

#[test]
fn a_rank_has_its_part_of_weights_and_cache_and_preempts_when_that_is_full() {
    let decoder = decoder("llama");
    let schedule = crowded(None);
    let alone = run(&schedule).stats;
    for (size, keys) in [(2, 2), (4, 2)] {
        for (done, _, bytes) in on_ranks(&decoder, &schedule, size) {
            let stats = done.expect("samples").stats;
            assert_eq!(stats.cache_bytes, alone.cache_bytes / keys, "{size} ranks");
            // norms, rows of no token, and key heads that several have are more than a part
            let part = decoder.bytes_in(Home::Device) / size;
            assert!(bytes > part && bytes < part + part / 3, "{bytes} of {part}");
        }
        let (short, others) = checked_on(&decoder, &crowded(Some(1.5)), size);
        assert!(short.stats.preemptions > 0 && others <= 1, "{:?}", short.stats);
    }
}

#[test]
fn keys_and_values_in_8_bits_are_shared_too() {
    let decoder = decoder("llama");
    let schedule = Schedule {
        limits: SchedulerConfig { kv_cache_dtype: KvCacheDtype::Int8, ..SchedulerConfig::new(8) },
        ..crowded(None)
    };
    let alone = {
        let requests = requests_after(schedule.system, &schedule.lengths);
        let generator = Generator::new(&decoder, None, &schedule.sampling).expect("settings");
        generator.run_with(&requests, schedule.n, &schedule.limits, |_| {}).expect("samples")
    };
    for (done, ..) in on_ranks(&decoder, &schedule, 2) {
        let done = done.expect("samples");
        assert_eq!(done.stats.cache_bytes, alone.stats.cache_bytes / 2);
        // a scale belongs to a head, which one rank has: keys and values are rounded as on one rank
        let same = done.samples.iter().zip(&alone.samples).filter(|(a, b)| a.tokens == b.tokens).count();
        assert!(same + 1 >= alone.samples.len(), "{same} are the same");
    }
}

#[test]
fn a_forward_pass_sends_two_sums_a_layer_one_for_the_embedding_and_gathers_the_logits() {
    for (family, sums) in [("llama", 5), ("olmo3", 7)] {
        let schedule = Schedule { lengths: vec![4; 4], n: 2, ..crowded(None) };
        for (done, sent, _) in on_ranks(&decoder(family), &schedule, 2) {
            let steps = done.expect("samples").stats.decode_steps as u64;
            assert_eq!(steps, 39, "40 tokens, the first of which comes with the prompts");
            let passes = steps + 1;
            assert_eq!(sent.operations[OperationKind::AllReduce as usize], sums * passes);
            // and the fingerprint of all tokens
            assert_eq!(sent.operations[OperationKind::AllGather as usize], passes + 1);
        }
    }
}

/// Errors of ranks whose requests differ as `differ` makes them.
fn diverging(differ: impl Fn(usize, &mut GenerationRequest) + Sync) -> Vec<Error> {
    let decoder = decoder("llama");
    let sampling = SamplingParams { max_new_tokens: 12, ..SamplingParams::default() };
    let errors = Threads::run(2, Settings::default(), |rank| {
        let shard = share(&decoder, &rank).expect("a share");
        let mut prompts = requests(&[4, 7]);
        for request in &mut prompts {
            differ(rank.rank(), request);
        }
        let generator = Generator::new(&shard, None, &sampling).expect("settings");
        generator.run_with(&prompts, 2, &SchedulerConfig::new(4), |_| {}).map(drop).expect_err("ranks that differ")
    });
    errors.into_iter().map(|rank| rank.expect("no panic")).collect()
}

#[test]
fn ranks_that_sample_other_tokens_end_with_an_error() {
    let other_draws = |rank: usize, request: &mut GenerationRequest| request.key.seed += rank as u64;
    for error in diverging(other_draws) {
        assert!(matches!(error, Error::Diverged { rank: 1 }), "{error}");
        assert!(!error.is_user_error() && error.to_string().contains("rollout.tensor_model"));
    }
    // one token, after which nothing is gathered any more
    let last_draw = |rank: usize, request: &mut GenerationRequest| {
        request.key.seed += rank as u64;
        request.max_new_tokens = Some(1);
    };
    for error in diverging(last_draw) {
        assert!(matches!(error, Error::Diverged { rank: 1 }), "{error}");
    }
    // another number of rows
    let other_length = |rank: usize, request: &mut GenerationRequest| {
        request.tokens.resize(request.tokens.len() + rank, 1);
    };
    for error in diverging(other_length) {
        let message = error.to_string();
        assert!(message.contains("the ranks disagree"), "{message}");
    }
}

#[test]
fn a_rank_that_gives_up_ends_the_sampling_of_the_others() {
    let decoder = decoder("llama");
    let sampling = SamplingParams::default();
    let errors = Threads::run(2, Settings::default(), |rank| {
        let shard = share(&decoder, &rank).expect("a share");
        if rank.rank() == 1 {
            rank.abort("no more");
            return String::new();
        }
        let done = Generator::new(&shard, None, &sampling).expect("settings").run(&requests(&[4]), 2, 4);
        done.map(drop).expect_err("the other is gone").to_string()
    });
    let message = errors[0].as_ref().expect("no panic");
    assert!(message.contains("rank 1 is gone: no more"), "{message}");
}

#[test]
fn models_that_ranks_cannot_share_are_refused_by_name() {
    for (family, part) in [("qwen3_5_text", "gated DeltaNet"), ("llama", "divides 4")] {
        let decoder = decoder(family);
        let size = if family == "llama" { 3 } else { 2 };
        for outcome in
            Threads::run(size, Settings::default(), |rank| share(&decoder, &rank).expect_err("refused").to_string())
        {
            let message = outcome.expect("no panic");
            assert!(message.contains(part), "{message}");
        }
    }
}
