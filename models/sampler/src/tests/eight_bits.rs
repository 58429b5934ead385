//! Weights, and keys and values, in 8 bits.

use super::*;

const INT8: Prepack = Prepack { panels: false, quantization: Some(Quantization::Int8) };

#[test]
fn log_probs_in_8_bits_are_near_those_of_the_trained_weights_and_not_the_same() {
    let mut apart = Vec::new();
    for family in ["llama", "gemma2", "mistral"] {
        let schedule = Schedule { family, prepack: INT8, ..crowded(None) };
        let decoder = decoder(family);
        for (sample, request) in run(&schedule).samples.iter().flat_map(|sample| {
            let prompts = requests(&schedule.lengths);
            [(sample.clone(), prompts[sample.request].clone())]
        }) {
            let tokens = [request.tokens.as_slice(), &sample.tokens].concat();
            let rows = scores(&decoder, &tokens, 1.0);
            for (i, (&token, &logp)) in sample.tokens.iter().zip(&sample.logps).enumerate() {
                let row = &rows[request.tokens.len() + i - 1];
                let sum: f64 = row.iter().map(|&z| f64::from(z).exp()).sum();
                apart.push((f64::from(row[token as usize]) - sum.ln() - f64::from(logp)).abs());
            }
        }
    }
    let mean = apart.iter().sum::<f64>() / apart.len() as f64;
    let most = apart.iter().copied().fold(0.0, f64::max);
    assert!(mean > 1e-4 && mean < 0.01 && most < 0.06, "{mean} {most}");
}

#[test]
fn eight_bits_take_a_quarter_and_what_no_kernel_would_read_is_refused() {
    let decoder = decoder("llama");
    let bytes = |prepack| decoder.prepacked(prepack).expect("copies").prepacked_bytes();
    assert_eq!(bytes(Prepack::default()), 0);
    let head = 4 * VOCAB.next_multiple_of(32) * 32;
    let [exact, codes] = [bytes(PANELS) - head, bytes(INT8)];
    assert!(4 * codes > exact && 4 * codes < exact * 5 / 4, "{exact} {codes}");
    let panels = Prepack { panels: true, ..INT8 };
    assert_eq!(bytes(panels), codes + head);
    for unread in [decoder.in_precision(Precision::Bf16), {
        let mut away = decoder.clone();
        away.move_to(Home::Host).expect("weights on the host");
        away
    }] {
        let error = unread.prepacked(INT8).expect_err("no kernel").to_string();
        assert!(error.contains("without quantization"), "{error}");
    }
}

#[test]
fn keys_and_values_in_8_bits_give_the_same_tokens_under_every_schedule() {
    for family in ["llama", "gemma2", "mistral"] {
        let decoder = decoder(family);
        let sampling = SamplingParams { max_new_tokens: 20, ..SamplingParams::default() };
        let requests = requests_after(20, &[5, 9, 30, 12]);
        let whole = SchedulerConfig { kv_cache_dtype: KvCacheDtype::Int8, ..SchedulerConfig::new(64) };
        let chunked = SchedulerConfig { max_num_batched_tokens: 7, ..SchedulerConfig { max_num_seqs: 3, ..whole } };
        let least = chunked.least_cache_bytes(decoder.arch(), 70);
        let short = SchedulerConfig { kv_cache_bytes: Some(least * 3 / 2), ..chunked };
        let run = |limits: &SchedulerConfig| {
            let generator = Generator::new(&decoder, None, &sampling).expect("valid settings");
            generator.run_with(&requests, 3, limits, |_| {}).expect("samples")
        };
        let expected = run(&whole);
        // A number at the boundary of two codes may be rounded to either: how many are, depends on the machine's vector
        // instructions.
        for limits in [chunked, short] {
            let generated = run(&limits);
            let pairs = || generated.samples.iter().zip(&expected.samples);
            let same = pairs().filter(|(a, b)| a.tokens == b.tokens);
            assert!(same.clone().count() >= 11, "{family}: {limits:?}");
            let apart = same.flat_map(|(a, b)| a.logps.iter().zip(&b.logps));
            let apart: Vec<f64> = apart.map(|(a, b)| f64::from((a - b).abs())).collect();
            let mean = apart.iter().sum::<f64>() / apart.len() as f64;
            assert!(mean < 1e-3, "{family}: {mean}");
            assert!(apart.iter().all(|&apart| apart < 0.01), "{family}");
        }
        // and not those of f32, which they are near
        let exact = run(&SchedulerConfig::new(64));
        let first = |g: &Generated| g.samples.iter().map(|s| s.logps[0]).collect::<Vec<_>>();
        let apart: Vec<f32> = first(&exact).iter().zip(first(&expected)).map(|(a, b)| (a - b).abs()).collect();
        let most = apart.iter().copied().fold(0.0, f32::max);
        assert!(most > 1e-6 && most < 0.05, "{family}: {apart:?}");
        let bytes = |g: &Generated| g.stats.cache_bytes as f64;
        // eight dimensions a head: 8 codes of a byte and half of four bytes of scales, where f32 has 32
        assert!((bytes(&expected) / bytes(&exact) - 10.0 / 32.0).abs() < 1e-9);
    }
}
