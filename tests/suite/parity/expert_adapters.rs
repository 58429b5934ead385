//! Adapters of experts against PEFT: of experts that are modules of their own, and beside parameters of all experts of
//! a layer.

use std::path::PathBuf;

use firebrick_engine::objective::sft::Nll;
use firebrick_models::adapter::LoraConfig;
use firebrick_models::checkpoint::{ExportOptions, export, load_adapter, save_adapter};
use firebrick_models::decoder::Param;
use firebrick_models::random::DrawKey;
use firebrick_models::unit::TargetModule;
use firebrick_models::{Arch, Checkpoint};
use firebrick_sampler::{GenerationRequest, Generator, SamplingParams};
use serde_json::Value;

use firebrick_engine::sequence::Sequence;

use crate::support::golden::Golden;
use crate::support::model::{Model, nll_rows, scored_rows};
use crate::support::{assert_all_close, assert_close, assert_gradient, checked, device, fixtures, read};

/// Log-probs and losses: absolute up to one, relative above. Linear attention has three times as much, as without
/// adapters.
const SCORES: f64 = 1e-4;
/// Gradient tensors: relative L2, of those of linear attention's models three times as much.
const GRADIENTS: f64 = 1e-4;

const FORWARD: &str = "forward.safetensors";

const CASES: [&str; 5] = ["qwen3-moe", "qwen3_5-moe", "qwen3_5-moe-gate-up", "gpt-oss", "gpt-oss-down"];

fn folder(case: &str) -> PathBuf {
    fixtures().join("train/expert_adapters").join(case)
}

/// The base of a case's adapter, and the same with the adapter.
fn load(case: &str) -> (Model, Model) {
    let config: Value = read(&folder(case).join("adapter_config.json"));
    let base = config["base_model_name_or_path"].as_str().expect("a name");
    let dir = fixtures().join("models").join(base);
    let (base, mut adapted) = (Model::load(&dir), Model::load(&dir));
    let loaded = load_adapter(&base.decoder, &folder(case));
    adapted.decoder = loaded.unwrap_or_else(|error| panic!("{case}: {error}"));
    (base, adapted)
}

/// Three times as much for models with linear attention.
fn wider(model: &Model, tolerance: f64) -> f64 {
    match model.decoder.arch().delta_net {
        Some(_) => 3.0 * tolerance,
        None => tolerance,
    }
}

fn logps(model: &Model) -> Vec<Vec<f64>> {
    let rows = scored_rows(&model.golden(FORWARD));
    let scores = model.score(&model.plain(64), 1.0, &rows).logp;
    let row = |logp: Vec<f32>| logp.into_iter().map(f64::from).collect();
    scores.into_iter().map(row).collect()
}

#[test]
fn log_probs_loss_and_gradients_beside_adapters_of_experts_are_those_of_peft() {
    let mut tensors = 0;
    for case in CASES {
        let (_, model) = load(case);
        let golden = Golden::open(&folder(case).join("golden.safetensors"));
        let expected = golden.float_rows("logprobs");
        let tolerance = wider(&model, SCORES);
        for (i, (found, expected)) in logps(&model).iter().zip(&expected).enumerate() {
            let n = found.len() - 1;
            let label = format!("{case}, row {i}");
            assert_all_close(&label, &found[..n], &expected[..n], tolerance);
        }
        let rows = nll_rows(&model.golden(FORWARD));
        let names = golden.names();
        let names: Vec<&str> = names.iter().filter_map(|n| n.strip_prefix("grad.")).collect();
        for plan in [model.plain(1024), model.checkpointed(7, 1)] {
            let (sums, found) = model.backward(&plan, 1.0, &Nll, &[rows.iter().collect()]);
            assert_close(case, sums.loss, golden.floats("loss")[0], tolerance);
            assert!(found.keys().eq(&names), "{case}: {:?}", found.keys());
            for (name, found) in &found {
                let expected = golden.floats(&format!("grad.{name}"));
                let label = format!("{case}: {name}");
                assert_gradient(&label, found, &expected, wider(&model, GRADIENTS));
            }
        }
        tensors += names.len();
    }
    checked("gradient tensors of adapters of experts", tensors);
}

#[test]
fn what_is_saved_are_pefts_files_to_the_bit() {
    for case in CASES {
        let (base, model) = load(case);
        let dir = tempfile::tempdir().expect("a folder");
        save_adapter(&model.decoder, &base.name, dir.path()).expect("saving");
        let [found, expected] = [dir.path(), &folder(case)].map(|dir| {
            let config: Value = read(&dir.join("adapter_config.json"));
            (config, Golden::open(&dir.join("adapter_model.safetensors")))
        });
        assert_eq!(found.1.names(), expected.1.names(), "{case}");
        for name in expected.1.names() {
            assert_eq!(found.1.shaped(&name), expected.1.shaped(&name), "{case}: {name}");
        }
        let sorted = |config: &Value, key: &str| {
            let list = config[key].as_array().cloned().unwrap_or_default();
            let mut names: Vec<String> = list.iter().map(ToString::to_string).collect();
            names.sort();
            names
        };
        for key in ["target_modules", "target_parameters"] {
            assert_eq!(sorted(&found.0, key), sorted(&expected.0, key), "{case}: {key}");
        }
        for key in ["r", "lora_alpha", "use_rslora", "lora_dropout"] {
            assert_eq!(found.0[key].as_f64(), expected.0[key].as_f64(), "{case}: {key}");
        }
    }
    checked("adapters of experts saved again", CASES.len());
}

#[test]
fn an_adapter_whose_inputs_are_dropped_is_saved_without_dropout_and_comes_back() {
    for name in ["qwen3-moe", "gpt-oss"] {
        let base = Model::load(&fixtures().join("models").join(name)).decoder;
        let mut targets = TargetModule::all();
        targets.extend([TargetModule::ExpertGateUp, TargetModule::ExpertDown]);
        let lora = LoraConfig { rank: 3, dropout: 0.1, target_modules: targets, ..LoraConfig::default() };
        let fresh = base.with_fresh_adapters(lora, 4).expect("adapters");
        let dir = tempfile::tempdir().expect("a folder");
        save_adapter(&fresh, name, dir.path()).expect("saving");
        let again = load_adapter(&base, dir.path()).expect("loading");
        let lora = again.lora().expect("adapters");
        assert!(lora.dropout == 0.0 && lora.has_experts(), "{lora:?}");
        for ((spec, value), (other, again)) in fresh.params().zip(again.params()) {
            assert_eq!(spec, other);
            let values = |param: Param| param.download().expect("values").to_f64();
            let (value, again) = (values(value), values(again));
            assert_eq!(value, again, "{}", spec.name);
        }
    }
    checked("fresh adapters of experts", 2);
}

#[test]
fn a_merged_export_gives_the_log_probs_of_the_adapters_and_without_them_there_is_the_base() {
    for case in CASES {
        let (base, model) = load(case);
        let beside = logps(&model);
        let plain = logps(&base);
        assert_ne!(beside, plain, "{case}");
        let mut off = Model::load(&base.dir);
        off.decoder = model.decoder.adapters_off();
        assert_eq!(logps(&off), plain, "{case}");
        let source = Checkpoint::open(&base.dir).expect("the base");
        let dir = tempfile::tempdir().expect("a folder");
        let options = ExportOptions::default();
        export(&model.decoder, &source, None, dir.path(), options).expect("an export");
        let mut merged = Model::load(&base.dir);
        merged.decoder =
            Checkpoint::open(dir.path()).and_then(|checkpoint| checkpoint.load(&device())).expect("the export");
        assert!(merged.decoder.lora().is_none());
        for (found, expected) in logps(&merged).iter().zip(&beside) {
            assert_all_close(case, found, expected, wider(&model, SCORES));
        }
    }
    checked("merged models with experts", CASES.len());
}

#[test]
fn the_sampler_and_the_trainer_agree_beside_adapters_of_experts() {
    let sampling = SamplingParams { max_new_tokens: 8, ..SamplingParams::default() };
    let mut tokens = 0;
    for case in CASES {
        let (_, model) = load(case);
        let rows = scored_rows(&model.golden(FORWARD));
        let request = |(prompt_index, row): (u32, &Sequence)| GenerationRequest {
            tokens: row.tokens[..4].to_vec(),
            key: DrawKey { seed: 3, step: 1, prompt_index, sample: 0 },
            max_new_tokens: None,
        };
        let requests: Vec<GenerationRequest> = (0..).zip(&rows).map(request).collect();
        let samples = Generator::new(&model.decoder, None, &sampling)
            .and_then(|generator| generator.run(&requests, 2, 16))
            .expect("samples");
        for sample in &samples {
            let prompt = &requests[sample.request].tokens;
            let row = Sequence::completion(prompt, &sample.tokens);
            let scores = model.score(&model.plain(1024), 1.0, &[row]);
            let pairs = sample.full_logps.iter().zip(&scores.logp[0]);
            for (found, expected) in pairs {
                let tolerance = wider(&model, SCORES);
                assert_close(case, f64::from(*found), f64::from(*expected), tolerance);
                tokens += 1;
            }
        }
    }
    checked("tokens sampled beside adapters of experts", tokens);
}

fn arch(name: &str) -> Arch {
    let dir = fixtures().join("models").join(name);
    Checkpoint::open(&dir).expect("a model").arch().clone()
}

#[test]
fn all_linear_takes_experts_that_are_modules_and_parameters_are_asked_for_by_name() {
    let lora = LoraConfig::default();
    let qwen3 = lora.clone().in_arch(&arch("qwen3-moe"));
    let modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    assert_eq!(qwen3.modules(&arch("qwen3-moe")), modules);
    assert!(qwen3.has_experts());
    for name in ["gpt-oss", "qwen3_5-moe"] {
        let arch = arch(name);
        assert!(!lora.clone().in_arch(&arch).has_experts(), "{name}");
        let parameters = ["mlp.experts.gate_up_proj", "down_proj"];
        let targets = TargetModule::parse_parameters(&parameters).expect("parameters");
        LoraConfig::check_parameters(&targets, &arch).expect("parameters of experts");
        let own = LoraConfig { target_modules: targets, ..LoraConfig::default() };
        let own = own.in_arch(&arch);
        assert!(own.modules(&arch).is_empty());
        let named = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"];
        assert_eq!(own.parameters(&arch), named);
    }
}

#[test]
fn modules_and_parameters_that_a_model_lacks_are_refused_with_what_it_has() {
    let modules = TargetModule::parse(&["up_proj"]).expect("a module");
    LoraConfig::check_names(&modules, &arch("qwen3-moe")).expect("a module of experts");
    let message = LoraConfig::check_names(&modules, &arch("gpt-oss")).expect_err("no such module");
    for part in [
        "(gpt_oss) has up_proj",
        "q_proj, k_proj, v_proj, o_proj",
        "mlp.experts.gate_up_proj, mlp.experts.down_proj (target_parameters)",
    ] {
        assert!(message.contains(part), "{message}");
    }
    let parameters = TargetModule::parse_parameters(&["experts.down_proj"]).expect("a parameter");
    for (name, part) in
        [("qwen3-moe", "list gate_proj, up_proj, down_proj in target_modules"), ("qwen2-tied", "has no experts")]
    {
        let refused = LoraConfig::check_parameters(&parameters, &arch(name));
        let message = refused.expect_err(name);
        assert!(message.contains(part), "{message}");
    }
    let message = TargetModule::parse_parameters(&["mlp.gate.weight"]).expect_err("a router");
    assert!(message.contains("mlp.experts.gate_up_proj"), "{message}");
}
