//! The engine as a run shows it: its limits, its metrics, dynamic sampling.

use super::runs::metrics;
use super::{Bench, refused, succeeded};
use serde_json::Value;

fn samples(bench: &Bench) -> Vec<Value> {
    let text = bench.read("run/samples.jsonl");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// What a run sampled and was paid for: everything but advantages' and log-probs' last digits.
fn completions(bench: &Bench) -> Vec<[Value; 4]> {
    let keys = ["step", "draw", "sample", "completion"];
    samples(bench).iter().map(|s| keys.map(|key| s[key].clone())).collect()
}

#[test]
fn limits_of_the_engine_change_no_token() {
    let plain = Bench::new();
    succeeded(&plain.firebrick("train", &["trainer.steps=1"]));
    for limits in [
        &["rollout.max_num_seqs=3", "rollout.max_num_batched_tokens=4"][..],
        // one block of 16 tokens, 256 bytes a token: a sequence at a time
        &["rollout.kv_cache_memory_bytes=5200"],
        &["rollout.free_cache=false", "rollout.enforce_eager=true"],
    ] {
        let bench = Bench::new();
        succeeded(&bench.firebrick("train", &[&["trainer.steps=1"], limits].concat()));
        assert_eq!(completions(&plain), completions(&bench), "{limits:?}");
    }
}

#[test]
fn sampler_and_trainer_are_compared_wherever_the_old_log_probs_come_from() {
    let differences = |settings: &[&str]| {
        let bench = Bench::new();
        succeeded(&bench.firebrick("train", settings));
        let lines = metrics(&bench, "run");
        let of = |line: &Value| {
            ["mean", "max"].map(|kind| {
                let key = format!("training/rollout_probs_diff_{kind}");
                line[&key].as_f64().unwrap_or_else(|| panic!("{key}: {line}"))
            })
        };
        lines[1..].iter().map(of).collect::<Vec<_>>()
    };
    let found = differences(&["update.old_log_probs=sampler", "rollout.temperature=0.7"]);
    let expected = differences(&["rollout.temperature=0.7"]);
    assert_eq!(found.len(), expected.len());
    for ([mean, max], [other_mean, other_max]) in found.iter().zip(&expected) {
        assert!(mean <= max && *max < 1e-4, "{mean} {max}");
        assert!((mean - other_mean).abs() < 1e-6 && (max - other_max).abs() < 1e-5);
    }
    // of several optimizer steps the first one knows, and its numbers stay its own
    let cut = differences(&["update.old_log_probs=sampler", "update.ppo_epochs=3"]);
    assert!(cut.iter().all(|[mean, max]| mean <= max && *max < 1e-4), "{cut:?}");
}

#[test]
fn exact_log_probs_are_the_trainers_and_limits_of_the_engine_change_no_number() {
    let numbers = |limits: &[&str]| {
        let bench = Bench::new();
        succeeded(&bench.firebrick("train", &[&["rollout.exact=true", "rollout.temperature=0.7"], limits].concat()));
        let of = |line: &Value| {
            assert_eq!(line["training/rollout_probs_diff_max"].as_f64().map(f64::to_bits), Some(0), "{line}");
            assert!(line.get("timing_s/old_log_prob").is_none(), "the sampler's log-probs are the old ones: {line}");
            ["actor/pg_loss", "actor/grad_norm", "actor/entropy"].map(|key| line[key].as_f64().map(f64::to_bits))
        };
        let lines: Vec<_> = metrics(&bench, "run")[1..].iter().map(of).collect();
        assert!(lines.iter().flatten().all(Option::is_some), "{lines:?}");
        (completions(&bench), lines)
    };
    let plain = numbers(&[]);
    for limits in [
        &["rollout.max_num_seqs=3", "rollout.max_num_batched_tokens=4", "rollout.pack_weights=false"][..],
        &["rollout.kv_cache_memory_bytes=5200", "rollout.max_num_seqs=5"],
    ] {
        assert_eq!(plain, numbers(limits), "{limits:?}");
    }
}

/// Scoring and sampling run without autodiff, and updates with it: Burn may compute an operation in another way there.
#[test]
fn the_forward_pass_of_an_update_has_the_samplers_log_probs_in_every_kind_of_layer() {
    let arch = |more: &str| {
        format!(
            "model.arch={{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 3, num_attention_heads: 4, \
             num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64, initializer_range: 0.3, {more}}}"
        )
    };
    for (family, replays) in [
        (
            "model_type: qwen3_moe, num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 16, norm_topk_prob: true",
            true,
        ),
        (
            "model_type: qwen3_moe, num_experts: 8, num_experts_per_tok: 3, moe_intermediate_size: 16, norm_topk_prob: false",
            false,
        ),
        (
            "model_type: gpt_oss, num_local_experts: 4, num_experts_per_tok: 2, sliding_window: 4, \
             layer_types: [sliding_attention, full_attention, sliding_attention]",
            false,
        ),
        (
            "model_type: qwen3_5_text, linear_num_key_heads: 2, linear_num_value_heads: 4, linear_key_head_dim: 8, \
             linear_value_head_dim: 8, layer_types: [linear_attention, full_attention, linear_attention]",
            false,
        ),
        ("model_type: gemma3_text, sliding_window: 4", false),
        ("model_type: gemma2, sliding_window: 4", false),
        ("model_type: qwen2", false),
    ] {
        let bench = Bench::new();
        let replay = format!("rollout.router_replay={replays}");
        let exact = ["rollout.exact=true", "rollout.n=32", "update.ppo_mini_batch_size=null"];
        succeeded(&bench.firebrick("train", &[&[arch(family).as_str(), &replay][..], &exact].concat()));
        for line in &metrics(&bench, "run")[1..] {
            assert_eq!(line["training/rollout_probs_diff_max"].as_f64().map(f64::to_bits), Some(0), "{family}: {line}");
            assert_eq!(line["actor/ppo_kl"].as_f64().map(f64::to_bits), Some(0), "{family}: {line}");
        }
    }
}

#[test]
fn on_policy_nothing_is_corrected_rejected_or_masked_however_tokens_are_truncated() {
    for truncation in ["rollout.top_p=0.5", "rollout.top_k=2", "rollout.min_p=0.5"] {
        let losses = [
            "rollout_is: sequence_truncate",
            "rollout_rs: seq_sum_k1, rollout_rs_threshold: 1.01",
            "off_policy_mask_threshold: 0.001",
        ]
        .map(|correction| {
            let bench = Bench::new();
            let objective = format!("objective={{name: grpo, {correction}}}");
            let more = [truncation, &objective, "rollout.temperature=1.7", "task.partial=true", "trainer.steps=1"];
            succeeded(&bench.firebrick("train", &more));
            let line = metrics(&bench, "run").pop().unwrap();
            let value = |key: &str| line[key].as_f64().unwrap_or_else(|| panic!("{key}: {line}"));
            assert!(value("training/rollout_probs_diff_max") < 1e-6, "{line}");
            if correction.starts_with("rollout_is") {
                for key in ["mean", "max", "min", "eff_sample_size"] {
                    let found = value(&format!("rollout_corr/rollout_is_{key}"));
                    assert!((found - 1.0).abs() < 1e-4, "{truncation}: {key} is {found}");
                }
            } else if correction.starts_with("rollout_rs") {
                assert!(value("rollout_corr/rollout_rs_masked_fraction") < 1e-9, "{truncation}");
            }
            value("actor/pg_loss")
        });
        assert!(losses.iter().all(|loss| (loss - losses[0]).abs() < 1e-5), "{truncation}: {losses:?}");
    }
}

#[test]
fn the_engine_reports_what_it_did() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &["rollout.kv_cache_memory_bytes=8KiB"]));
    for line in &metrics(&bench, "run")[1..] {
        let value = |key: &str| line[key].as_f64().unwrap_or_else(|| panic!("{key}: {line}"));
        let occupancy = value("rollout/slot_occupancy");
        assert!(occupancy > 0.0 && occupancy <= 1.0, "{line}");
        let bytes = value("rollout/peak_cache_bytes");
        assert!(bytes > 0.0 && bytes <= 8192.0, "{line}");
        assert!(value("rollout/preemptions") >= 0.0 && value("rollout/recomputed_tokens") >= 0.0);
        for share in ["rollout/kv_waste", "rollout/kv_shared"] {
            assert!((0.0..1.0).contains(&value(share)), "{share}: {line}");
        }
        assert!(value("rollout/preempted") <= value("rollout/preemptions"), "{line}");
        assert!((value("rollout/num_gen_batches") - 1.0).abs() < 1e-9);
        assert!(value("rollout/dropped_groups").abs() < 1e-9);
        assert!(value("training/rollout_probs_diff_mean") <= value("training/rollout_probs_diff_max"));
    }
    let text = bench.read("run/metrics.jsonl");
    for key in ["rollout/prefill_tokens_per_second", "rollout/decode_tokens_per_second"] {
        assert!(text.lines().last().unwrap().contains(key), "{key}");
    }
    // the account of the cache, in the readings of the phase
    let memory = bench.read("run/memory.jsonl");
    assert!(memory.contains("kv_cache"), "{memory}");
}

#[test]
fn keys_and_values_in_8_bits_sample_from_nearly_the_trained_policy() {
    let differences = |settings: &[&str]| {
        let bench = Bench::new();
        succeeded(&bench.firebrick("train", settings));
        let lines = metrics(&bench, "run");
        let of = |line: &Value| line["training/rollout_probs_diff_mean"].as_f64();
        lines[1..].iter().filter_map(of).fold(0.0, f64::max)
    };
    let (exact, rounded) = (differences(&[]), differences(&["rollout.kv_cache_dtype=int8"]));
    assert!(exact < 1e-6, "{exact}");
    assert!(rounded > exact && rounded < 0.01, "{rounded}");
}

/// With a policy that gets some sums right.
const DYNAMIC: [&str; 4] = [
    "warmup.sft={steps: 60, optim: {lr: 0.01}}",
    "rollout.dynamic_sampling.enable=true",
    "rollout.dynamic_sampling.oversampling=1.5",
    "rollout.dynamic_sampling.max_num_gen_batches=4",
];

#[test]
fn dynamic_sampling_replaces_groups_without_spread_and_keeps_the_size_of_the_batch() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &DYNAMIC));
    let samples = samples(&bench);
    assert_eq!(samples.len(), 3 * 4 * 4);
    let lines = metrics(&bench, "run");
    let mut flat = 0;
    for (group, step) in samples.chunks(4).zip((0..12).map(|g| 1 + g / 4)) {
        assert_eq!(group[0]["step"], step);
        assert!(group.iter().all(|s| s["draw"] == group[0]["draw"]));
        if group.iter().all(|s| s["reward"] == group[0]["reward"]) {
            flat += 1;
            let batches = lines[step]["rollout/num_gen_batches"].as_f64().unwrap();
            assert!((batches - 4.0).abs() < 1e-9, "a flat group before the last batch: {batches}");
        }
    }
    let dropped: f64 = lines[1..].iter().map(|l| l["rollout/dropped_groups"].as_f64().unwrap()).sum();
    assert!(dropped > 0.0, "nothing was dropped");
    assert!(flat < 12, "nothing was replaced");
    let draws: Vec<u64> = samples.iter().map(|s| s["draw"].as_u64().unwrap()).collect();
    assert!(draws.is_sorted(), "{draws:?}");
}

#[test]
fn a_resumed_run_draws_the_prompts_that_come_next() {
    let (whole, cut) = (Bench::new(), Bench::new());
    let args = |steps: &'static str| [&DYNAMIC[..], &[steps, "trainer.save_freq=1"]].concat();
    succeeded(&whole.firebrick("train", &args("trainer.steps=3")));
    succeeded(&cut.firebrick("train", &args("trainer.steps=1")));
    let resume = [&args("trainer.steps=3")[..], &["--resume"]].concat();
    succeeded(&cut.firebrick("train", &resume));
    assert_eq!(samples(&whole), samples(&cut));
}

#[test]
fn what_the_engine_cannot_do_is_refused() {
    for (setting, parts) in [
        ("rollout.enforce_eager=false", &["rollout.enforce_eager", "the CPU launches no kernels"][..]),
        ("rollout.cudagraph_capture_sizes=[1]", &["rollout.cudagraph_capture_sizes", "the CPU"]),
        ("rollout.cudagraph_capture_sizes=[0]", &["rollout.cudagraph_capture_sizes", "has 0"]),
        ("rollout.cudagraph_capture_sizes=[100000]", &["100000", "rollout.max_num_seqs"]),
        ("rollout.cudagraph_capture_sizes=[]", &["rollout.enforce_eager: true"]),
        ("rollout.max_num_batched_tokens=8", &["rollout.max_num_batched_tokens", "rollout.max_num_seqs"]),
        ("rollout.max_model_len=6", &["rollout.max_model_len", "rollout.prompt_length"]),
        ("rollout.kv_cache_memory_bytes=1KiB", &["KV cache", "4096"]),
        ("rollout.kv_cache_dtype=fp8", &["kv_cache_dtype", "auto", "int8"]),
        ("rollout.gpu_memory_utilization=1.5", &["rollout.gpu_memory_utilization", "1.5"]),
        ("rollout.dynamic_sampling={enable: true, max_num_gen_batches: 0}", &["max_num_gen_batches"]),
        ("rollout.dynamic_sampling={enable: true, oversampling: 0.5}", &["oversampling"]),
        ("rollout={exact: true, quantization: int8}", &["rollout.exact", "rollout.quantization"]),
        ("rollout={exact: true, kv_cache_dtype: int8}", &["rollout.exact", "rollout.kv_cache_dtype"]),
        ("rollout={exact: true, precision: bf16}", &["rollout.exact", "rollout.precision"]),
        ("rollout.dynamic_sampling={enable: true, metric: taste}", &["taste", "score"]),
    ] {
        refused(&Bench::new().firebrick("train", &[setting]), parts);
    }
    let half = |setting: &str| Bench::new().firebrick("train", &[setting, "precision=bf16"]);
    refused(&half("rollout.exact=true"), &["rollout.exact", "needs f32 on the CPU, or a GPU"]);
    refused(&half("rollout={exact: true, pack_weights: true}"), &["rollout.exact", "rollout.pack_weights"]);
}
