//! Checkpoints as a frozen base in few bits: quantised as they are read, or by bitsandbytes before.

use crate::support::model::{Model, scored_rows};
use crate::support::{assert_all_close, checked, device, fixtures, read};
use firebrick_models::adapter::LoraConfig;
use firebrick_models::checkpoint::{ExportOptions, StoredDtype, export};
use firebrick_models::unit::ParamSpec;
use firebrick_models::{BaseFormat, Checkpoint, Decoder};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(Deserialize)]
struct Golden {
    /// FNV-1a of the bits of the numbers that bitsandbytes widens each matrix to.
    checkpoint: BTreeMap<String, String>,
}

/// `llama-gqa`, quantised by bitsandbytes.
fn folder() -> PathBuf {
    fixtures().join("quantized/llama-nf4")
}

fn fnv(values: &[f32]) -> String {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes());
    let hash =
        bytes.fold(0xcbf2_9ce4_8422_2325, |state: u64, byte| (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}")
}

fn values(decoder: &Decoder) -> BTreeMap<String, Vec<f32>> {
    let own = decoder.params().map(|(spec, value)| {
        let values = value.download().expect("values").to_f32();
        (spec.name.clone(), values)
    });
    own.collect()
}

fn load(dir: &Path, base: Option<BaseFormat>) -> Result<Decoder, firebrick_models::Error> {
    Checkpoint::open(dir)?.with_base(base).load(&device())
}

#[test]
fn what_bitsandbytes_has_quantised_is_read_without_another_rounding() {
    let golden: Golden = read(&fixtures().join("quantized/base.json"));
    let found = values(&load(&folder(), Some(BaseFormat::Nf4)).expect("a base"));
    let source = load(&fixtures().join("models/llama-gqa"), None).expect("the source");
    // bitsandbytes 0.50.2 on a CPU takes the scales of other blocks where a row is no whole number of blocks, as in
    // down_proj of 160 columns: there it is 0.28 from the source and not 0.04
    let whole_blocks = |name: &str| !name.contains("down_proj");
    for (name, own) in &values(&source) {
        match golden.checkpoint.get(name) {
            Some(hash) if whole_blocks(name) => assert_eq!(&fnv(&found[name]), hash, "{name}"),
            Some(_) => {}
            None => assert_eq!(&found[name], own, "{name}"),
        }
    }
    // both are as near to the source, whoever has quantised it
    let read = load(&fixtures().join("models/llama-gqa"), Some(BaseFormat::Nf4)).expect("a base");
    for base in [values(&read), found] {
        for (name, own) in &values(&source) {
            let pairs = base[name].iter().zip(own);
            let worst = pairs.map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
            let largest = own.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            // half of nf4's widest gap, and what a scale in 8 bits is off
            assert!(worst < 0.18 * largest, "{name}: {worst} of {largest}");
        }
    }
    checked("matrices of bitsandbytes", golden.checkpoint.len());
}

#[test]
fn a_base_is_quantised_as_it_is_read_as_a_whole_model_would_be() {
    for name in [
        "llama-gqa",
        "qwen2-tied",
        "qwen3-sharded",
        "llama-bf16",
        "qwen3_5",
        "qwen3-moe",
        "qwen3_5-moe",
        "gpt-oss",
        "gpt-oss-mxfp4",
    ] {
        let dir = fixtures().join("models").join(name);
        let whole = load(&dir, None).expect("a model");
        for format in BaseFormat::ALL {
            let read = load(&dir, Some(format)).expect("a base");
            let other = whole.with_quantized_base(format).expect("a base");
            assert_eq!(values(&read), values(&other), "{name}, {format}");
            assert_eq!(values(&read), values(&read.with_widened_base()), "{name}, {format}");
            let in_few_bits = |spec: &&ParamSpec| spec.slot.is_linear() || spec.slot.is_expert();
            let mut matrices = read.specs().filter(in_few_bits).peekable();
            assert!(matrices.peek().is_some(), "{name}");
            assert!(matrices.all(|spec| !spec.trainable), "{name}");
            let bytes = |decoder: &Decoder| decoder.specs().map(|s| s.bytes(read.arch())).sum();
            let held: usize = bytes(&read);
            assert_eq!(read.bytes_in(firebrick_backends::accounts::Home::Device), held);
        }
    }
}

#[test]
fn adapters_merge_into_what_the_base_is_widened_to() {
    let checkpoint = Checkpoint::open(&folder()).expect("a folder");
    let checkpoint = checkpoint.with_base(Some(BaseFormat::Nf4));
    let base = checkpoint.load(&device()).expect("a base");
    let adapted = base.with_fresh_adapters(LoraConfig::default(), 1).expect("adapters");
    let dir = tempfile::tempdir().expect("a folder");
    export(&adapted, &checkpoint, None, dir.path(), ExportOptions::default()).expect("an export");
    let config: Value = read(&dir.path().join("config.json"));
    assert!(config.get("quantization_config").is_none(), "{config}");
    let merged = Checkpoint::open(dir.path()).expect("a folder");
    let projection = "model.layers.0.self_attn.q_proj.weight";
    assert_eq!(merged.stored_dtype(projection), StoredDtype::F32);
    let merged = merged.load(&device()).expect("a model");
    // fresh adapters add nothing
    assert_eq!(values(&merged), values(&base));
    let mut model = Model::load(&fixtures().join("models/llama-gqa"));
    let rows = scored_rows(&model.golden("forward.safetensors"));
    let mut score = |decoder| {
        model.decoder = decoder;
        let scores = model.score(&model.plain(1024), 1.0, &rows);
        let all = scores.logp.iter().flatten();
        all.map(|&v| f64::from(v)).collect::<Vec<_>>()
    };
    let (merged, beside) = (score(merged), score(adapted));
    assert_all_close("log-probs", &merged, &beside, 1e-5);
}

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// The folder with other tensors.
fn altered(change: impl FnOnce(&mut Tensors)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    let from = folder();
    std::fs::copy(from.join("config.json"), dir.path().join("config.json")).expect("a copy");
    let bytes = std::fs::read(from.join("model.safetensors")).expect("weights");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let own = file.iter().map(|(name, view)| {
        let parts = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
        (name.to_owned(), parts)
    });
    let mut tensors: Tensors = own.collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        let view = TensorView::new(*dtype, shape.clone(), data).expect("a tensor");
        (name.clone(), view)
    });
    let path = dir.path().join("model.safetensors");
    safetensors::serialize_to_file(views, None, &path).expect("a file");
    dir
}

const WEIGHT: &str = "model.layers.0.mlp.up_proj.weight";
const STATE: &str = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4";

/// Changes what a matrix's state says.
fn state(tensors: &mut Tensors, changes: Value) {
    let (_, shape, text) = tensors.get_mut(STATE).expect("a state");
    let mut state: Value = serde_json::from_slice(text).expect("JSON");
    if let (Value::Object(state), Value::Object(changes)) = (&mut state, changes) {
        for (key, value) in changes {
            match value {
                Value::Null => state.remove(&key),
                value => state.insert(key, value),
            };
        }
    }
    *text = state.to_string().into_bytes();
    *shape = vec![text.len()];
}

fn renamed(tensors: &mut Tensors, from: &str, to: &str) {
    let own = tensors.remove(from).expect("a tensor");
    tensors.insert(to.to_owned(), own);
}

type Change<'a> = Box<dyn FnOnce(&mut Tensors) + 'a>;

#[test]
fn other_formats_of_bitsandbytes_are_refused_with_the_reason() {
    let fp4 = STATE.replace("nf4", "fp4");
    let cases: [(Change<'_>, &str); 13] = [
        (Box::new(|t| renamed(t, STATE, &fp4)), "is in fp4"),
        (Box::new(|t| state(t, json!({"quant_type": "fp4"}))), "is in fp4"),
        (Box::new(|t| state(t, json!({"blocksize": 128}))), "has blocks of 128"),
        (Box::new(|t| state(t, json!({"nested_blocksize": null}))), "has scales that are not quantized"),
        (Box::new(|t| state(t, json!({"nested_blocksize": 512}))), "in groups of 512 of type float32"),
        (Box::new(|t| state(t, json!({"shape": [64, 160]}))), "has shape [64, 160]"),
        (Box::new(|t| state(t, json!({"dtype": null}))), "has an invalid .quant_state"),
        (
            Box::new(|t| drop(t.remove(&format!("{WEIGHT}.nested_absmax")))),
            "has no model.layers.0.mlp.up_proj.weight.nested_absmax next to it",
        ),
        (
            Box::new(|t| t.get_mut(&format!("{WEIGHT}.quant_map")).unwrap().2[3] ^= 1),
            "has a .quant_map that is not nf4's",
        ),
        (
            Box::new(|t| {
                let (_, shape, data) = t.get_mut(WEIGHT).unwrap();
                data.pop();
                *shape = vec![data.len(), 1];
            }),
            "does not fit its shape: weight has 5119 elements",
        ),
        (
            Box::new(|t| {
                let (dtype, shape, data) = t.get_mut(WEIGHT).unwrap();
                (*dtype, *shape) = (Dtype::BF16, vec![data.len() / 2, 1]);
            }),
            "codes of type BF16, expected U8",
        ),
        (
            Box::new(|t| {
                t.remove(STATE);
                renamed(t, &format!("{WEIGHT}.quant_map"), "model.layers.0.mlp.up_proj.SCB");
            }),
            "is in 8 bits",
        ),
        (
            Box::new(|t| {
                t.retain(|name, _| !name.starts_with(WEIGHT));
                let zeros = (Dtype::F32, vec![160, 64], vec![0; 4 * 160 * 64]);
                t.insert(WEIGHT.to_owned(), zeros);
            }),
            "is not quantized, but other matrices of the checkpoint are",
        ),
    ];
    let count = cases.len();
    for (change, part) in cases {
        let dir = altered(change);
        let refused = load(dir.path(), Some(BaseFormat::Nf4)).expect_err(part).to_string();
        assert!(refused.contains(part), "{part:?} is not in: {refused}");
        assert!(refused.contains(WEIGHT), "{refused}");
    }
    checked("quantised checkpoints refused", count);
    for base in [None, Some(BaseFormat::Int8)] {
        let refused = load(&folder(), base).expect_err("no base").to_string();
        assert!(refused.contains("set model.lora.base to nf4"), "{refused}");
    }
}

#[test]
fn a_quantised_checkpoint_that_is_cut_off_is_refused() {
    let dir = altered(|_| {});
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).expect("weights");
    std::fs::write(&path, &bytes[..bytes.len() - 1]).expect("a file");
    let refused = load(dir.path(), Some(BaseFormat::Nf4)).expect_err("cut off").to_string();
    assert!(refused.contains("is truncated"), "{refused}");
}
