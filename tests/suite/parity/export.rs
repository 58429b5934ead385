//! Every model folder, loaded and written again: the same names, types, numbers and config.

use std::collections::BTreeMap;
use std::path::Path;

use firebrick_models::Checkpoint;
use firebrick_models::checkpoint::{ExportOptions, export};
use safetensors::SafeTensors;
use serde_json::Value;

use crate::support::{checked, device, folders, read};

/// Type, shape and bytes of every tensor in a folder, by name.
fn tensors(dir: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for entry in dir.read_dir().expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let bytes = std::fs::read(&path).expect("weights");
        let file = SafeTensors::deserialize(&bytes).expect("safetensors");
        for (name, view) in file.tensors() {
            let dtype = format!("{:?}", view.dtype());
            all.insert(name, (dtype, view.shape().to_vec(), view.data().to_vec()));
        }
    }
    all
}

fn config(dir: &Path) -> Value {
    read(&dir.join("config.json"))
}

#[test]
fn every_model_is_exported_as_it_was_read() {
    let mut cases = 0;
    for dir in folders("models") {
        // what is quantised is written as plain numbers: `mxfp4`
        if config(&dir).get("quantization_config").is_some() {
            continue;
        }
        let source = Checkpoint::open(&dir).expect("a fixture");
        let decoder = source.load(&device()).expect("its weights");
        let out = tempfile::tempdir().expect("a temporary folder");
        export(&decoder, &source, None, out.path(), ExportOptions::default()).expect("an export");
        let label = dir.display();
        assert!(tensors(out.path()) == tensors(&dir), "{label}: other tensors");
        assert_eq!(config(out.path()), config(&dir), "{label}");
        cases += 1;
    }
    checked("models exported", cases);
}
