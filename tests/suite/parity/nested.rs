//! Language models inside models that see images: loaded by themselves, whichever names their files have.

use std::path::{Path, PathBuf};

use firebrick_models::checkpoint::{ExportOptions, export};
use firebrick_models::decoder::Param;
use firebrick_models::{Checkpoint, Decoder};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use serde_json::{Value, json};

use crate::support::{checked, device, folders, is_foreign, read, values};

/// The Hub's names, and those that transformers 5 gives modules.
const STYLES: [[&str; 3]; 2] = [
    ["language_model.model.", "language_model.lm_head.", "vision_tower."],
    ["model.language_model.", "lm_head.", "model.vision_tower."],
];

/// Classes by the fixture that is nested in them.
const CLASSES: [(&str, &str); 2] =
    [("gemma3", "Gemma3ForConditionalGeneration"), ("ministral3", "Mistral3ForConditionalGeneration")];

/// Writes a fixture as the language model of a model that sees images.
fn nest(source: &Path, class: &str, [inner, head, vision]: [&str; 3], dir: &Path) {
    let mut text: Value = read(&source.join("config.json"));
    let own = text.as_object_mut().expect("an object");
    let eos = own.remove("eos_token_id");
    own.remove("architectures");
    let config = json!({
        "architectures": [class], "eos_token_id": eos, "text_config": text, "vision_config": {"hidden_size": 8}
    });
    std::fs::write(dir.join("config.json"), config.to_string()).expect("a config");
    let bytes = std::fs::read(source.join("model.safetensors")).expect("weights");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let named = |name: &str| match name.strip_prefix("model.") {
        Some(rest) => format!("{inner}{rest}"),
        None => name.replace("lm_head.", head),
    };
    let mut all: Vec<(String, TensorView<'_>)> =
        tensors.tensors().into_iter().map(|(name, view)| (named(&name), view)).collect();
    let patch = [0_u8; 8];
    let seen = TensorView::new(Dtype::F32, vec![2], &patch).expect("a tensor");
    all.push((format!("{vision}patch.weight"), seen));
    let file = serialize(all, None).expect("safetensors");
    std::fs::write(dir.join("model.safetensors"), file).expect("a file");
}

/// A model folder by name; others than the project's own may lack it.
fn fixture(name: &str) -> Option<PathBuf> {
    let found = folders("models").into_iter().find(|dir| dir.ends_with(name));
    assert!(found.is_some() || is_foreign(), "no model {name}");
    found
}

fn parameters(decoder: &Decoder) -> Vec<(String, Vec<f64>)> {
    let read = |p: &Param| values(p.upload(decoder.device()));
    let all = decoder.params();
    all.map(|(spec, p)| (spec.name.clone(), read(&p))).collect()
}

#[test]
fn a_language_model_inside_one_that_sees_images_is_loaded_and_exported_by_itself() {
    let mut cases = 0;
    for (name, class) in CLASSES {
        let Some(source) = fixture(name) else {
            continue;
        };
        let flat = Checkpoint::open(&source).expect("the fixture");
        let expected = parameters(&flat.load(&device()).expect("its weights"));
        for style in STYLES {
            let [nested, exported] = [(), ()].map(|()| tempfile::tempdir().expect("a temporary folder"));
            nest(&source, class, style, nested.path());
            let checkpoint = Checkpoint::open(nested.path()).expect("a nested model");
            assert_eq!(checkpoint.arch(), flat.arch(), "{name}, {style:?}");
            assert_eq!(checkpoint.eos_ids(), [511], "{name}, {style:?}");
            let decoder = checkpoint.load(&device()).expect("nested weights");
            assert!(parameters(&decoder) == expected, "{name}, {style:?}");
            let options = ExportOptions::default();
            export(&decoder, &checkpoint, None, exported.path(), options).expect("an export");
            let again = Checkpoint::open(exported.path()).expect("the export");
            let config: Value = read(&exported.path().join("config.json"));
            assert!(config.get("text_config").is_none(), "{config}");
            assert_eq!(again.arch(), flat.arch(), "{name}, {style:?}");
            let again = again.load(&device()).expect("its weights");
            assert!(parameters(&again) == expected, "{name}, {style:?}");
            cases += 1;
        }
    }
    if cases > 0 || !is_foreign() {
        checked("language models inside others", cases);
    }
}

#[test]
fn what_belongs_to_no_part_of_a_nested_model_is_refused() {
    let Some(source) = fixture("gemma3") else {
        return;
    };
    let dir = tempfile::tempdir().expect("a temporary folder");
    let style = ["language_model.model.", "language_model.lm_head.", "audio_tower."];
    nest(&source, "Gemma3ForConditionalGeneration", style, dir.path());
    let checkpoint = Checkpoint::open(dir.path()).expect("headers alone");
    let error = checkpoint.load(&device()).expect_err("an unknown tensor");
    assert!(error.to_string().contains("audio_tower.patch.weight"), "{error}");
}
