//! Checkpoints as people publish them: heads, names, tokens and numbers that are not those of the model by itself.

use std::path::Path;

use firebrick_engine::checkpoint::check_ends;
use firebrick_models::checkpoint::{ExportOptions, export};
use firebrick_models::decoder::Param;
use firebrick_models::{Checkpoint, Decoder, Tokenizer};
use safetensors::tensor::Dtype;
use safetensors::{SafeTensors, serialize};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{device, folders, read, values};

/// A tensor: its name, element type, shape and bytes.
type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// A copy of a fixture whose config and tensors are changed; none of other fixtures than the project's.
fn changed(name: &str, config: impl Fn(&mut Value), tensors: impl Fn(&mut Vec<Tensor>)) -> Option<TempDir> {
    let source = folders("models").into_iter().find(|dir| dir.ends_with(name))?;
    let dir = tempfile::tempdir().expect("a temporary folder");
    for file in std::fs::read_dir(&source).expect("the fixture") {
        let file = file.expect("an entry");
        if file.path().is_file() {
            std::fs::copy(file.path(), dir.path().join(file.file_name())).expect("copied");
        }
    }
    edit(&dir.path().join("config.json"), config);
    let weights = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&weights).expect("weights");
    let own = SafeTensors::deserialize(&bytes).expect("safetensors");
    let of = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        (name, view.dtype(), view.shape().to_vec(), view.data().to_vec())
    };
    let mut all: Vec<Tensor> = own.tensors().into_iter().map(of).collect();
    tensors(&mut all);
    let views = all.iter().map(|(name, dtype, shape, data)| {
        (name.as_str(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).expect("a tensor"))
    });
    std::fs::write(weights, serialize(views, None).expect("safetensors")).expect("written");
    Some(dir)
}

fn edit(path: &Path, change: impl Fn(&mut Value)) {
    let mut value: Value = read(path);
    change(&mut value);
    std::fs::write(path, value.to_string()).expect("written");
}

fn open(dir: &Path) -> (Checkpoint, Decoder) {
    let checkpoint = Checkpoint::open(dir).expect("a checkpoint");
    let decoder = checkpoint.load(&device()).expect("its weights");
    (checkpoint, decoder)
}

fn parameters(decoder: &Decoder) -> Vec<(String, Vec<f64>)> {
    let read = |p: &Param| values(p.upload(decoder.device()));
    decoder.params().map(|(spec, p)| (spec.name.clone(), read(&p))).collect()
}

fn copy_of_embedding(all: &mut Vec<Tensor>) {
    let (_, dtype, shape, data) = all.iter().find(|own| own.0 == EMBEDDING).expect("an embedding").clone();
    all.retain(|own| own.0 != HEAD);
    all.push((HEAD.to_owned(), dtype, shape, data));
}

fn head(all: &mut [Tensor]) -> &mut Tensor {
    all.iter_mut().find(|own| own.0 == HEAD).expect("a head")
}

/// transformers 5 compares both, warns, and takes the file's.
#[test]
fn a_head_that_differs_from_the_embedding_it_is_tied_to_is_used_and_written() {
    let tie = |config: &mut Value| config["tie_word_embeddings"] = true.into();
    let Some(dir) = changed("llama-gqa", tie, |_| ()) else { return };
    let untied = changed("llama-gqa", |_| (), |_| ()).expect("the same fixture");
    let (checkpoint, decoder) = open(dir.path());
    assert!(!checkpoint.arch().tied && !Checkpoint::architecture(dir.path()).expect("a config").tied);
    assert!(parameters(&decoder) == parameters(&open(untied.path()).1));
    let exported = tempfile::tempdir().expect("a temporary folder");
    export(&decoder, &checkpoint, None, exported.path(), ExportOptions::default()).expect("an export");
    let config: Value = read(&exported.path().join("config.json"));
    assert_eq!(config["tie_word_embeddings"], false);
    assert!(parameters(&open(exported.path()).1) == parameters(&decoder));
}

#[test]
fn a_copy_of_the_embedding_as_a_head_stays_tied_whichever_of_the_two_is_there() {
    for name in ["qwen2-tied", "llama-bf16"] {
        let Some(plain) = changed(name, |_| (), |_| ()) else { continue };
        let expected = parameters(&open(plain.path()).1);
        let without = |all: &mut Vec<Tensor>| {
            copy_of_embedding(all);
            all.retain(|own| own.0 != EMBEDDING);
        };
        let wide = |all: &mut Vec<Tensor>| {
            copy_of_embedding(all);
            let own = head(all);
            if own.1 == Dtype::BF16 {
                own.1 = Dtype::F32;
                // bfloat16 is the upper half of f32
                own.3 = own.3.chunks_exact(2).flat_map(|b| [0, 0, b[0], b[1]]).collect();
            }
        };
        for (how, change) in
            [("copy", &copy_of_embedding as &dyn Fn(&mut Vec<Tensor>)), ("only the head", &without), ("wider", &wide)]
        {
            let dir = changed(name, |_| (), change).expect("the same fixture");
            let (checkpoint, decoder) = open(dir.path());
            assert!(checkpoint.arch().tied, "{name}, {how}");
            assert!(parameters(&decoder) == expected, "{name}, {how}");
        }
    }
}

#[test]
fn names_with_other_prefixes_load_as_the_same_model() {
    let Some(plain) = changed("llama-gqa", |_| (), |_| ()) else { return };
    let expected = parameters(&open(plain.path()).1);
    let body = |name: &str| name.strip_prefix("model.").map(str::to_owned);
    for (prefix, whole) in [
        ("", ""),
        ("base_model.model.model.", "base_model.model."),
        ("module.model.", "module."),
        ("language_model.", ""),
    ] {
        let rename = |all: &mut Vec<Tensor>| {
            for own in all.iter_mut() {
                own.0 = body(&own.0).map_or_else(|| format!("{whole}{}", own.0), |rest| format!("{prefix}{rest}"));
            }
        };
        let dir = changed("llama-gqa", |_| (), rename).expect("the same fixture");
        assert!(parameters(&open(dir.path()).1) == expected, "{prefix:?}");
    }
}

#[test]
fn two_tensors_for_one_parameter_are_refused_unless_they_are_equal() {
    let twice = |all: &mut Vec<Tensor>| {
        let (_, dtype, shape, data) = head(all).clone();
        for own in all.iter_mut() {
            own.0 = format!("module.{}", own.0);
        }
        all.push((HEAD.to_owned(), dtype, shape, data));
    };
    let Some(dir) = changed("llama-gqa", |_| (), twice) else { return };
    open(dir.path());
    let differing = |all: &mut Vec<Tensor>| {
        twice(all);
        head(all).3[0] ^= 1;
    };
    let dir = changed("llama-gqa", |_| (), differing).expect("the same fixture");
    let error = Checkpoint::open(dir.path()).expect_err("two heads").to_string();
    assert!(
        error.contains("two tensors for lm_head.weight that differ") && error.contains("module.lm_head"),
        "{error}"
    );
}

#[test]
fn numbers_of_a_config_that_only_python_has_are_read_and_refused_only_where_they_count() {
    let Some(dir) = changed("llama-gqa", |_| (), |_| ()) else { return };
    let path = dir.path().join("config.json");
    let text = std::fs::read_to_string(&path).expect("a config");
    let with = |key: &str| std::fs::write(&path, text.replacen('{', &format!("{{{key},"), 1)).expect("written");
    with(r#""time_step_limit": [0.0, Infinity], "unused": NaN"#);
    let (checkpoint, decoder) = open(dir.path());
    let exported = tempfile::tempdir().expect("a temporary folder");
    export(&decoder, &checkpoint, None, exported.path(), ExportOptions::default()).expect("an export");
    let config: Value = read(&exported.path().join("config.json"));
    // as transformers 5 writes them
    assert_eq!(config["time_step_limit"], json!([0.0, {"__float__": "Infinity"}]));
    let text = text.replace("\"rms_norm_eps\"", "\"unused\"");
    std::fs::write(&path, text.replacen('{', r#"{"rms_norm_eps": NaN,"#, 1)).expect("written");
    let error = Checkpoint::open(dir.path()).expect_err("an epsilon of NaN").to_string();
    assert!(error.contains("`rms_norm_eps` must be a finite number"), "{error}");
}

/// Gemma 3's models of text have the placeholder of images, whose id is the number of rows.
#[test]
fn a_tokenizer_with_a_token_beyond_the_embedding_is_used_and_a_text_with_it_refused() {
    let Some(dir) = changed("gemma3", |_| (), |_| ()) else { return };
    let token = json!({
        "id": 512, "content": "<image_soft_token>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    });
    edit(&dir.path().join("tokenizer.json"), |own| {
        own["added_tokens"].as_array_mut().expect("a list").push(token.clone());
    });
    let tokenizer = Tokenizer::from_dir(dir.path()).expect("a tokenizer");
    assert_eq!(tokenizer.vocab_size(), 513);
    assert_eq!(tokenizer.encode("<image_soft_token>", false).expect("known"), [512]);
    let (checkpoint, _) = open(dir.path());
    assert!(check_ends(&[511], checkpoint.arch()).is_ok());
    let error = check_ends(&[1, 512], checkpoint.arch()).expect_err("beyond").to_string();
    assert!(error.contains("end token 512") && error.contains("512 rows"), "{error}");
    let tokenizer = tokenizer.for_embedding(512);
    assert_eq!(tokenizer.vocab_size(), 512);
    assert!(tokenizer.encode("hello", true).is_ok());
    let error = tokenizer.encode("a <image_soft_token>", true).expect_err("beyond").to_string();
    for part in ["\"<image_soft_token>\"", "id 512", "512 rows"] {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
}
