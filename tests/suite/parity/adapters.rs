//! An adapter against PEFT: logits, log-probs, loss and gradients beside its base model, and what follows from them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use firebrick_backends::accounts::Home;
use firebrick_engine::batch::MicroBatch;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::plan::Layout;
use firebrick_engine::sequence::Sequence;
use firebrick_models::Decoder;
use firebrick_models::adapter::LoraConfig;
use firebrick_models::checkpoint::{load_adapter, save_adapter};
use firebrick_models::decoder::Param;
use firebrick_models::random::DrawKey;
use firebrick_models::unit::TargetModule;
use firebrick_sampler::{GenerationRequest, Generator, SamplingParams};
use serde::Deserialize;

use crate::support::golden::Golden;
use crate::support::model::{Model, nll_rows, scored_rows};
use crate::support::{assert_all_close, assert_close, assert_gradient, checked, fixtures, read, values};

/// Logits, log-probs and losses: absolute up to one, relative above.
const SCORES: f64 = 1e-4;
/// Gradient tensors: relative L2.
const GRADIENTS: f64 = 1e-4;

const FORWARD: &str = "forward.safetensors";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "every field is named, so that a new one is seen")]
struct Manifest {
    format: String,
    model: String,
    loss: f64,
    note: String,
    tolerances: Tolerances,
    versions: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tolerances {
    /// The difference that torch sees.
    merged_vs_unmerged_logits: f64,
}

fn folder() -> PathBuf {
    fixtures().join("train/lora")
}

/// The base model with the adapter beside it, and the goldens.
fn adapted() -> (Model, Manifest, Golden) {
    let manifest: Manifest = read(&fixtures().join("train/lora.json"));
    assert_eq!(manifest.format, "lora-golden/1");
    let mut model = Model::load(&fixtures().join("models").join(&manifest.model));
    model.decoder = load_adapter(&model.decoder, &folder()).expect("an adapter");
    let golden = Golden::open(&folder().join("golden.safetensors"));
    (model, manifest, golden)
}

/// Logits of the base model's golden rows, padding included.
fn logits(model: &Model, decoder: &Decoder) -> Vec<f64> {
    let rows = scored_rows(&model.golden(FORWARD));
    let own: Vec<&Sequence> = rows.iter().collect();
    let micro = MicroBatch::new(decoder.arch(), &own, Layout::Padded, 0, decoder.device());
    values(decoder.head().logits(decoder.hidden(micro.ids, &micro.ctx)))
}

#[test]
fn logits_and_log_probs_beside_an_adapter() {
    let (model, _, golden) = adapted();
    let (shape, expected) = golden.shaped("logits");
    let [_, width, vocab] = shape[..] else { panic!("logits of shape {shape:?}") };
    let found = logits(&model, &model.decoder);
    let rows = scored_rows(&model.golden(FORWARD));
    let scores = model.score(&model.plain(7), 1.0, &rows);
    let logprobs = golden.float_rows("logprobs");
    for (i, row) in rows.iter().enumerate() {
        let n = row.tokens.len();
        let real = i * width * vocab..(i * width + n) * vocab;
        let label = format!("row {i}");
        assert_all_close(&label, &found[real.clone()], &expected[real], SCORES);
        let logp: Vec<f64> = scores.logp[i].iter().map(|&v| f64::from(v)).collect();
        assert_all_close(&label, &logp[..n - 1], &logprobs[i][..n - 1], SCORES);
    }
    checked("rows beside an adapter", rows.len());
}

#[test]
fn loss_and_gradients_of_an_adapter_and_of_nothing_else() {
    let (model, manifest, golden) = adapted();
    let stored = |name: &str| name.strip_prefix("grad.").map(str::to_owned);
    let expected: Vec<String> = golden.names().iter().filter_map(|n| stored(n)).collect();
    let rows = nll_rows(&model.golden(FORWARD));
    for plan in [model.plain(1024), model.plain(7), model.checkpointed(1024, 1)] {
        let (sums, found) = model.backward(&plan, 1.0, &Nll, &[rows.iter().collect()]);
        assert_close("loss", sums.loss, manifest.loss, SCORES);
        assert!(found.keys().eq(&expected), "{:?}", found.keys());
        for (name, found) in &found {
            let expected = golden.floats(&format!("grad.{name}"));
            assert_gradient(name, found, &expected, GRADIENTS);
        }
    }
    checked("gradient tensors of an adapter", expected.len());
}

#[test]
fn a_merged_model_gives_the_logits_of_the_adapted_one() {
    let (model, manifest, _) = adapted();
    let merged = model.decoder.merged();
    assert!(merged.lora().is_none());
    let tolerance = 10.0 * manifest.tolerances.merged_vs_unmerged_logits;
    let merged = logits(&model, &merged);
    // the same from the host, a parameter at a time
    let mut away = model.decoder.clone();
    away.move_to(Home::Host).expect("moving");
    assert_eq!(logits(&model, &away.merged()), merged);
    let base = logits(&model, &away.adapters_off());
    assert_eq!(logits(&model, &away.without_adapters()), base);
    let bypassed = logits(&model, &model.decoder);
    assert_all_close("logits", &merged, &bypassed, tolerance);
    checked("logits of a merged model", merged.len());
}

#[test]
fn without_its_adapter_and_with_a_fresh_one_a_model_is_its_base_bit_for_bit() {
    let (model, manifest, _) = adapted();
    let base = Model::load(&fixtures().join("models").join(&manifest.model));
    let expected = logits(&base, &base.decoder);
    assert_ne!(logits(&model, &model.decoder), expected);
    assert_eq!(logits(&model, &model.decoder.adapters_off()), expected);
    let without = model.decoder.without_adapters();
    assert_eq!(logits(&model, &without), expected);
    assert!(without.specs().eq(base.decoder.specs()));
    let fresh = base.decoder.with_fresh_adapters(LoraConfig::default(), 11).expect("adapters");
    assert_eq!(logits(&model, &fresh), expected);
    checked("models without what an adapter adds", 2);
}

#[test]
fn an_adapter_that_is_saved_and_loaded_is_the_same_bit_for_bit() {
    let (model, manifest, _) = adapted();
    let base = model.decoder.without_adapters();
    let fresh = LoraConfig {
        rank: 3,
        alpha: 4.5,
        use_rslora: true,
        dropout: 0.05,
        target_modules: vec![TargetModule::K, TargetModule::O, TargetModule::Up],
    };
    let all = [
        model.decoder.clone(),
        base.with_fresh_adapters(fresh, 5).expect("adapters"),
        base.with_fresh_adapters(LoraConfig::default(), 5).expect("adapters"),
    ];
    for decoder in &all {
        let dir = tempfile::tempdir().expect("a folder");
        save_adapter(decoder, &manifest.model, dir.path()).expect("saving");
        let again = load_adapter(&base, dir.path()).expect("loading");
        assert_eq!(again.lora(), decoder.lora());
        for ((spec, value), (other, again)) in decoder.params().zip(again.params()) {
            assert_eq!(spec, other);
            let values = |param: Param| param.download().expect("values").to_f64();
            assert_eq!(values(value), values(again), "{}", spec.name);
        }
    }
    checked("adapters saved and loaded", all.len());
}

#[test]
fn the_sampler_and_the_trainer_agree_beside_an_adapter() {
    let (model, _, _) = adapted();
    let rows = scored_rows(&model.golden(FORWARD));
    let sampling = SamplingParams { max_new_tokens: 8, ..SamplingParams::default() };
    let requests: Vec<GenerationRequest> = (0..)
        .zip(&rows)
        .map(|(prompt_index, row)| GenerationRequest {
            tokens: row.tokens[..4].to_vec(),
            key: DrawKey { seed: 3, step: 1, prompt_index, sample: 0 },
            max_new_tokens: None,
        })
        .collect();
    let samples = Generator::new(&model.decoder, None, &sampling)
        .and_then(|generator| generator.run(&requests, 2, 16))
        .expect("samples");
    for sample in &samples {
        let prompt = &requests[sample.request].tokens;
        let row = Sequence::completion(prompt, &sample.tokens);
        let scores = model.score(&model.plain(1024), 1.0, &[row]);
        for (found, expected) in sample.full_logps.iter().zip(&scores.logp[0]) {
            assert_close("log-prob", f64::from(*found), f64::from(*expected), SCORES);
        }
    }
    checked("samples beside an adapter", samples.len());
}

#[test]
fn all_linear_adapters_of_gpt_oss_are_those_of_attention_and_come_back_from_pefts_files() {
    let mut model = Model::load(&fixtures().join("models/gpt-oss"));
    let base = model.decoder.clone();
    let lora = LoraConfig::default().in_arch(base.arch());
    let attention = [TargetModule::Q, TargetModule::K, TargetModule::V, TargetModule::O];
    assert_eq!(lora.target_modules, attention, "all-linear");
    model.decoder = base.with_fresh_adapters(lora, 7).expect("adapters");
    let dir = tempfile::tempdir().expect("a temporary folder");
    save_adapter(&model.decoder, "gpt-oss", dir.path()).expect("an adapter");
    let file = Golden::open(&dir.path().join("adapter_model.safetensors"));
    // A and B of four modules in three layers
    let names = file.names();
    assert_eq!(names.len(), 2 * 4 * 3);
    let known = "base_model.model.model.layers.2.self_attn.o_proj.lora_B.weight";
    assert!(names.iter().any(|name| name == known), "{names:?}");
    let rows = scored_rows(&model.golden(FORWARD));
    let beside = model.score(&model.plain(64), 1.0, &rows);
    let rows_of_loss = nll_rows(&model.golden(FORWARD));
    let whole = [rows_of_loss.iter().collect()];
    let (_, gradients) = model.backward(&model.plain(64), 1.0, &Nll, &whole);
    assert!(gradients.keys().eq(&names), "{:?}", gradients.keys());
    model.decoder = load_adapter(&base, dir.path()).expect("the adapter");
    let again = model.score(&model.plain(64), 1.0, &rows);
    assert!(beside.logp == again.logp, "loaded again");
    model.decoder = model.decoder.merged();
    let merged = model.score(&model.plain(64), 1.0, &rows);
    for (found, expected) in merged.logp.iter().zip(&beside.logp) {
        let [found, expected] = [found, expected].map(|all| all.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
        assert_all_close("merged", &found, &expected, SCORES);
    }
}
