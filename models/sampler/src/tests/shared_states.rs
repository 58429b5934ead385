//! States of linear attention that sequences share, and memory of those that are kept.

use super::*;

fn linear(schedule: Schedule) -> Schedule {
    Schedule { family: "qwen3_5_text", ..schedule }
}

fn tokens(generated: &Generated) -> Vec<Vec<u32>> {
    generated.samples.iter().map(|s| s.tokens.clone()).collect()
}

#[test]
fn states_are_copied_for_a_group_and_found_or_made_again_after_a_preemption() {
    let plenty = run(&linear(crowded(None)));
    let short = run(&linear(crowded(Some(1.5))));
    assert_eq!(plenty.stats.preemptions, 0);
    assert!(short.stats.preemptions > 0 && short.stats.recomputed_tokens > 0);
    // prompts of less than a block have nothing in common; what was preempted begins after its prompt again
    assert_eq!(plenty.stats.prefix_cache_hits, 0);
    assert!(short.stats.prefix_cache_hits > 0, "{:?}", short.stats);
    assert_eq!(tokens(&plenty), tokens(&short));
}

#[test]
fn prompts_that_begin_alike_run_what_they_have_in_common_once() {
    for slots in [8, 24] {
        let alike = linear(Schedule {
            system: 50,
            lengths: vec![5, 9, 3, 12, 7, 4, 8, 6],
            limits: SchedulerConfig::new(slots),
            ..crowded(None)
        });
        // every token is compared with its draw after a forward pass without a cache
        let stats = run(&alike).stats;
        assert_eq!(stats.prefix_cache_hits, 7 * 48, "{stats:?}");
        assert_eq!(stats.prefill_tokens, 8 * 50 + 54 - 7 * 48);
        assert!(stats.kv_shared() > 0.5, "{stats:?}");
    }
}

#[test]
fn prompts_that_part_at_several_places_begin_at_the_last_one_that_was_seen() {
    // pairs of prompts with 64 tokens in common, all of them with 32
    let token = |i: usize, salt: usize| ((i * 7919 + salt * 104_729) % VOCAB) as u32;
    let prompt = |pair: usize, index: usize| -> Vec<u32> {
        let parts = [(0..32, 0), (32..64, 1 + pair), (64..70, 10 + index)];
        let tokens = parts.into_iter().flat_map(|(range, salt)| range.map(move |i| token(i, salt)));
        tokens.collect()
    };
    let decoder = decoder("qwen3_5_text");
    let sampling = SamplingParams { max_new_tokens: 12, ..SamplingParams::default() };
    let prompts = (0..6).map(|i| GenerationRequest { tokens: prompt(i / 2, i), ..requests(&[1]).remove(0) });
    let prompts: Vec<GenerationRequest> = prompts.collect();
    for batched in [16, 100, 2048] {
        let limits = SchedulerConfig { max_num_batched_tokens: batched, ..SchedulerConfig::new(6) };
        let generator = Generator::new(&decoder, None, &sampling).expect("valid settings");
        let run = || generator.run_with(&prompts, 1, &limits, |_| {});
        let first = run().expect("samples");
        for sample in &first.samples {
            let request = &prompts[sample.request];
            check(&decoder, request, &sampling, &limits, sample);
        }
        // together the second prompt of each pair begins after 64 tokens; one at a time, each finds where it parts from
        // those before it
        let hits = first.stats.prefix_cache_hits;
        let expected = if batched < 2 * 70 { 3 * 32 } else { 3 * 64 };
        assert_eq!(hits, expected, "{batched}");
        let run_tokens = first.stats.prefill_tokens + hits;
        assert_eq!(run_tokens, 6 * 70);
        // the same prompts again: slots for eight sequences, of which six are decoded, keep the states of two pairs at
        // least
        let again = run().expect("samples");
        assert_eq!(tokens(&again), tokens(&first));
        let hits = again.stats.prefix_cache_hits;
        let least = if batched < 2 * 70 { expected + 1 } else { 5 * 64 };
        assert!((least..=6 * 64).contains(&hits), "{hits}, {batched}");
    }
}

#[test]
fn a_later_conversation_begins_after_the_last_token_of_the_one_before_that_was_run() {
    let decoder = decoder("qwen3_5_text");
    let sampling = SamplingParams { max_new_tokens: 30, ..SamplingParams::default() };
    for ahead in [false, true] {
        let limits = SchedulerConfig {
            max_model_len: Some(120),
            keep_completions: true,
            async_scheduling: Some(ahead),
            ..SchedulerConfig::new(4)
        };
        let generator = Generator::new(&decoder, None, &sampling).expect("valid settings");
        let first = requests(&[20, 7]);
        let run = |requests: &[GenerationRequest]| generator.run_with(requests, 1, &limits, |_| {}).expect("samples");
        let turn = run(&first);
        let second: Vec<GenerationRequest> = first
            .iter()
            .zip(&turn.samples)
            .map(|(request, sample)| GenerationRequest {
                tokens: [&request.tokens[..], &sample.tokens, &[1, 2, 3]].concat(),
                ..request.clone()
            })
            .collect();
        let later = run(&second);
        // of 50 and 37 tokens all but the last, which was sampled and not run
        assert_eq!(later.stats.prefix_cache_hits, 49 + 36, "{ahead}");
        assert_eq!(later.stats.prefill_tokens, 2 * 4);
        for sample in &later.samples {
            let request = &second[sample.request];
            check(&decoder, request, &sampling, &limits, sample);
        }
    }
}

#[test]
fn the_account_holds_the_slots_that_an_estimate_counts() {
    let decoder = decoder("qwen3_5_text");
    let sampling = SamplingParams { max_new_tokens: 10, ..SamplingParams::default() };
    for (running, n) in [(4, 2), (9, 8), (64, 1)] {
        let accounts = Accounts::new();
        let generator = Generator::new(&decoder, None, &sampling).expect("valid settings").with_accounts(&accounts);
        let limits = SchedulerConfig::new(running);
        let prompts = requests_after(40, &[4; 20]);
        let stats = generator.run_with(&prompts, n, &limits, |_| {}).expect("samples").stats;
        assert!(stats.prefix_cache_hits > 0);
        let blocks = limits.blocks(decoder.arch(), 20 * n, 54).expect("no limit");
        let demand = limits.kv_cache_demand(decoder.arch(), 20 * n, 54);
        let slots = state_slots(running.min(20 * n)) * state_bytes(decoder.arch());
        let bytes = demand.bytes(decoder.arch(), &blocks) + slots as u64;
        let balance = accounts.balance(Category::KvCache, Home::Device);
        assert_eq!((balance.bytes, balance.peak_bytes), (bytes, bytes));
        assert_eq!(stats.cache_bytes as u64, bytes);
        drop(generator);
        assert_eq!(accounts.balance(Category::KvCache, Home::Device).bytes, 0);
    }
}

#[test]
fn no_states_are_found_after_the_weights_have_changed() {
    let sampling = SamplingParams { max_new_tokens: 20, ..SamplingParams::default() };
    let limits = SchedulerConfig { keep_completions: true, ..SchedulerConfig::new(4) };
    let prompts = requests_after(40, &[5, 9]);
    let mut decoder = decoder("qwen3_5_text");
    let mut hits = Vec::new();
    for _ in 0..2 {
        let generator = Generator::new(&decoder, None, &sampling).expect("valid settings");
        for _ in 0..2 {
            let generated = generator.run_with(&prompts, 2, &limits, |_| {}).expect("samples");
            for sample in &generated.samples {
                let request = &prompts[sample.request];
                check(&decoder, request, &sampling, &limits, sample);
            }
            hits.push(generated.stats.prefix_cache_hits);
        }
        // a generator borrows its weights: it has to go before they change
        drop(generator);
        decoder
            .update(|_, _, param| match param {
                Param::Device(w) => Ok::<_, Error>(Param::Device(w * 1.1)),
                other @ Param::Host(_) => Ok(other),
            })
            .expect("other weights");
    }
    // one prompt finds what it has in common with the other, then both do
    assert_eq!(hits, [32, 64, 32, 64]);
}

#[test]
fn greedy_tokens_are_the_same_whatever_is_shared() {
    let greedy = |lengths: &[usize], slots: usize, budget: Option<f64>| Schedule {
        system: 70,
        lengths: lengths.to_vec(),
        sampling: SamplingParams { max_new_tokens: 24, temperature: 0.0, ..SamplingParams::default() },
        limits: SchedulerConfig { max_num_batched_tokens: 48, ..SchedulerConfig::new(slots) },
        ..linear(crowded(budget))
    };
    let lengths = [5, 21, 3, 12, 17, 4];
    let shared = run(&greedy(&lengths, 6, None));
    // one prompt at a time: the second one finds where it parts from the first, those after it begin there
    assert_eq!(shared.stats.prefix_cache_hits, 4 * 64);
    let crowded = run(&greedy(&lengths, 6, Some(1.2)));
    assert!(crowded.stats.preemptions > 0);
    assert_eq!(tokens(&crowded), tokens(&shared));
}
