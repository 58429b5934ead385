//! Checkpoints whose experts are in MXFP4: what is read of them, and what is written again.

use std::path::PathBuf;

use firebrick_engine::sequence::Sequence;
use firebrick_models::checkpoint::{ExportOptions, export};
use firebrick_models::{BaseFormat, Checkpoint, Decoder};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use serde_json::Value;

use crate::support::golden::Golden;
use crate::support::model::{Model, by_tensor, scored_rows};
use crate::support::{checked, device, folders, is_foreign, read, values};

/// Folders whose config says so.
fn models() -> Vec<PathBuf> {
    let all = folders("models").into_iter();
    let found: Vec<PathBuf> = all
        .filter(|dir| {
            let config: Value = read(&dir.join("config.json"));
            config["quantization_config"]["quant_method"] == "mxfp4"
        })
        .collect();
    assert!(!found.is_empty() || is_foreign(), "no model in MXFP4");
    found
}

/// The tensors of a decoder in a checkpoint's order.
fn tensors(decoder: &Decoder) -> Vec<(String, Vec<f64>)> {
    let all = decoder.params();
    all.flat_map(|(spec, param)| by_tensor(spec, &values(param.upload(decoder.device())))).collect()
}

#[test]
fn experts_in_mxfp4_are_what_transformers_widens_them_to_to_the_bit() {
    let mut numbers = 0;
    for dir in models() {
        let source = Checkpoint::open(&dir).expect("a fixture");
        assert_eq!(source.eos_ids(), [511, 508], "all stop tokens");
        let decoder = source.load(&device()).expect("its weights");
        let found = tensors(&decoder);
        let golden = Golden::open(&dir.join("golden/dequantised.safetensors"));
        for name in golden.names() {
            let own = found.iter().find(|(found, _)| *found == name);
            let (_, own) = own.unwrap_or_else(|| panic!("{name} is no tensor of the model"));
            let expected = golden.floats(&name);
            assert_eq!(own.len(), expected.len(), "{name}");
            let bits = |all: &[f64]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(bits(own) == bits(&expected), "{name}: other numbers");
            numbers += own.len();
        }
    }
    if !is_foreign() {
        checked("numbers in MXFP4", numbers);
    }
}

#[test]
fn a_model_in_mxfp4_is_written_as_plain_numbers_and_loads_as_the_same_model() {
    let mut cases = 0;
    for dir in models() {
        let source = Checkpoint::open(&dir).expect("a fixture");
        let decoder = source.load(&device()).expect("its weights");
        let out = tempfile::tempdir().expect("a temporary folder");
        let options = ExportOptions::default();
        export(&decoder, &source, None, out.path(), options).expect("an export");
        let config: Value = read(&out.path().join("config.json"));
        assert!(config.get("quantization_config").is_none(), "{config}");
        let bytes = std::fs::read(out.path().join("model.safetensors")).expect("weights");
        let file = SafeTensors::deserialize(&bytes).expect("safetensors");
        for (name, view) in file.tensors() {
            assert_eq!(view.dtype(), Dtype::BF16, "{name}");
        }
        let name = "model.layers.0.mlp.experts.gate_up_proj";
        let golden = Golden::open(&dir.join("golden/dequantised.safetensors"));
        let shape = file.tensor(name).expect("plain experts").shape().to_vec();
        assert_eq!(shape, golden.shaped(name).0, "as transformers has them");
        let again = Checkpoint::open(out.path()).expect("the export");
        let again = again.load(&device()).expect("its weights");
        assert!(tensors(&again) == tensors(&decoder), "other numbers");
        // the same numbers are the same scores
        let mut model = Model::load(&dir);
        let rows: Vec<Sequence> = scored_rows(&model.golden("forward.safetensors"));
        let before = model.score(&model.plain(64), 1.0, &rows);
        model.decoder = again;
        let after = model.score(&model.plain(64), 1.0, &rows);
        assert!(before.logp == after.logp, "{}", model.name);
        cases += 1;
    }
    if !is_foreign() {
        checked("models in MXFP4 exported", cases);
    }
}

#[test]
fn a_base_in_few_bits_has_codes_of_what_mxfp4_is_widened_to() {
    for dir in models() {
        for base in BaseFormat::ALL {
            let checkpoint = Checkpoint::open(&dir).expect("a fixture");
            let wide = checkpoint.load(&device()).expect("its weights");
            let expected = wide.with_quantized_base(base).expect("a base");
            let read = checkpoint.with_base(Some(base)).load(&device());
            let read = read.expect("a base");
            assert!(tensors(&read) == tensors(&expected), "{base}: other numbers");
            assert!(tensors(&read) != tensors(&wide), "{base}: rounded again");
        }
    }
}

#[test]
fn blocks_without_their_scales_are_named() {
    let Some(source) = models().into_iter().next() else {
        return;
    };
    let dir = tempfile::tempdir().expect("a temporary folder");
    std::fs::copy(source.join("config.json"), dir.path().join("config.json")).expect("a config");
    let bytes = std::fs::read(source.join("model.safetensors")).expect("weights");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let scales = "model.layers.1.mlp.experts.down_proj_scales";
    let kept = file.tensors().into_iter().filter(|(name, _)| name != scales);
    let kept: Vec<(String, TensorView<'_>)> = kept.collect();
    let file = serialize(kept, None).expect("safetensors");
    std::fs::write(dir.path().join("model.safetensors"), file).expect("a file");
    let checkpoint = Checkpoint::open(dir.path()).expect("headers alone");
    let error = checkpoint.load(&device()).expect_err("no scales");
    assert!(error.to_string().contains(scales), "{error}");
}
