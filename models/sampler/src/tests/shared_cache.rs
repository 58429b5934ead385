//! Blocks that sequences share in the cache, and memory of the cache.

use super::*;

#[test]
fn the_account_holds_what_the_cache_takes_and_gives_it_back() {
    let decoder = decoder("llama");
    let sampling = SamplingParams { max_new_tokens: 10, ..SamplingParams::default() };
    let accounts = Accounts::new();
    let generator =
        Generator::new(&decoder, None, &sampling).expect("valid settings").with_accounts(&accounts).prepack(PANELS);
    let generated = generator.run_with(&requests(&[4, 7]), 2, &SchedulerConfig::new(4), |_| {}).expect("samples");
    let balance = accounts.balance(Category::KvCache, Home::Device);
    assert_eq!(balance.peak_bytes, generated.stats.cache_bytes as u64);
    assert!(generated.stats.peak_cache_bytes <= generated.stats.cache_bytes);
    drop(generator);
    let balance = accounts.balance(Category::KvCache, Home::Device);
    assert_eq!(balance.bytes, 0);
    // and what copies of the matrices take
    let copies = accounts.balance(Category::Parameters, Home::Device);
    assert_eq!(copies.peak_bytes, decoder.prepacked(PANELS).expect("panels").prepacked_bytes() as u64);
    assert!(copies.peak_bytes > 0 && copies.bytes == 0);
}

#[test]
fn prompts_that_begin_alike_share_blocks_and_draw_the_same_tokens() {
    let alike = Schedule { system: 50, lengths: vec![5, 9, 3, 12, 7, 4, 8, 6], ..crowded(None) };
    let stats = run(&alike).stats;
    // the first prompt runs all of them, the seven others find three full blocks of 50 tokens
    assert_eq!(stats.prefix_cache_hits, 7 * 48, "{stats:?}");
    assert_eq!(stats.prefill_tokens, 8 * 50 + 54 - 7 * 48);
    assert!(stats.kv_shared() > 0.5, "{stats:?}");
}

#[test]
fn the_next_turn_of_a_conversation_is_prefilled_from_its_new_tokens_on() {
    let decoder = decoder("llama");
    let sampling = SamplingParams { max_new_tokens: 30, ..SamplingParams::default() };
    let limits = SchedulerConfig { max_model_len: Some(120), keep_completions: true, ..SchedulerConfig::new(4) };
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
    let forgetful = Generator::new(&decoder, None, &sampling).expect("valid settings");
    let hits = [&first, &second].map(|requests| {
        let limits = SchedulerConfig { keep_completions: false, ..limits };
        forgetful.run_with(requests, 1, &limits, |_| {}).expect("samples").stats.prefix_cache_hits
    });
    assert_eq!(hits, [0, 16], "full blocks of the first prompts alone");
    // of 50 and 37 tokens, the last one of which is not in the cache, three blocks and two
    assert_eq!(later.stats.prefix_cache_hits, 48 + 32);
    for sample in &later.samples {
        let request = &second[sample.request];
        check(&decoder, request, &sampling, &limits, sample);
    }
}

#[test]
fn two_thousand_sequences_pass_through_pools_of_one_size() {
    let decoder = decoder("llama");
    let sampling = SamplingParams { max_new_tokens: 40, stop_ids: (0..6).collect(), ..SamplingParams::default() };
    let accounts = Accounts::new();
    let generator = Generator::new(&decoder, None, &sampling).expect("valid settings").with_accounts(&accounts);
    let lengths: Vec<usize> = (0..256).map(|i| 1 + i * 7 % 24).collect();
    let limits = SchedulerConfig::new(256);
    let stats = generator.run_with(&requests(&lengths), 8, &limits, |_| {}).expect("samples").stats;
    let blocks = limits.blocks(decoder.arch(), 2048, 64).expect("no limit");
    let bytes = limits.kv_cache_demand(decoder.arch(), 2048, 64).bytes(decoder.arch(), &blocks);
    let balance = accounts.balance(Category::KvCache, Home::Device);
    assert_eq!((balance.bytes, balance.peak_bytes), (bytes, bytes));
    assert_eq!((stats.cache_bytes as u64, stats.preemptions), (bytes, 0));
    assert!(stats.peak_blocks <= blocks[0] && stats.occupancy() > 0.6, "{stats:?}");
}

#[test]
fn a_cache_too_small_for_one_sequence_is_refused_with_the_smallest_that_would_do() {
    let decoder = decoder("llama");
    let sampling = SamplingParams { max_new_tokens: 10, ..SamplingParams::default() };
    let limits = SchedulerConfig { kv_cache_bytes: Some(1000), ..SchedulerConfig::new(4) };
    let generator = Generator::new(&decoder, None, &sampling).expect("valid settings");
    let error = generator.run_with(&requests(&[4]), 1, &limits, |_| {}).expect_err("too small");
    let least = limits.least_cache_bytes(decoder.arch(), 14);
    assert!(error.to_string().contains(&least.to_string()), "{error}");
}
