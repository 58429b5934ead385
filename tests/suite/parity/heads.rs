//! Reward models and critics: one number a sequence, one number a token.

use std::path::Path;

use firebrick_models::Checkpoint;
use firebrick_models::attention::{Grouping, SequenceLayout};
use firebrick_models::forward_context::ForwardContext;
use serde_json::Value;

use crate::support::golden::Golden;
use crate::support::{assert_close, checked, device, fixtures, folders, is_foreign, read, report, values};

/// Scores and values: absolute up to one, relative above.
const TOLERANCE: f64 = 1e-4;

#[test]
fn scores_and_values_of_every_head_folder() {
    if is_foreign() && !fixtures().join("heads").is_dir() {
        return report("no heads/ in FIREBRICK_FIXTURES: none checked");
    }
    let mut rows = 0;
    for dir in folders("heads") {
        let manifest: Value = read(&dir.join("golden/manifest.json"));
        rows += match manifest["format"].as_str() {
            Some("hf-tiny-score/1") => scores(&dir, "right") + scores(&dir, "left"),
            Some("hf-tiny-value/1") => token_values(&dir),
            other => panic!("{}: unknown format {other:?}", dir.display()),
        };
    }
    checked("rows of scalar heads", rows);
}

/// One score a row, read at the rightmost token that is not the padding token.
fn scores(dir: &Path, side: &str) -> usize {
    let golden = Golden::open(&dir.join("golden/scores.safetensors"));
    let config: Value = read(&dir.join("config.json"));
    let pad = config["pad_token_id"].as_i64().expect("a padding token");
    let ids = golden.int_rows(&format!("input_ids_{side}"));
    let mask = golden.int_rows(&format!("attention_mask_{side}"));
    let starts = ids.iter().zip(&mask).map(|(row, mask)| match side {
        "left" => row.len() - mask.iter().filter(|m| **m == 1).count(),
        _ => 0,
    });
    let found = forward(dir, &ids, &starts.collect::<Vec<_>>());
    let expected = golden.floats(&format!("scores_{side}"));
    for (i, row) in ids.iter().enumerate() {
        let last = row.iter().rposition(|&id| id != pad).expect("a real token");
        let label = format!("{}: score of row {i}, {side}-padded", dir.display());
        assert_close(&label, found[i][last], expected[i], TOLERANCE);
    }
    ids.len()
}

/// One value a token.
fn token_values(dir: &Path) -> usize {
    let golden = Golden::open(&dir.join("golden/values.safetensors"));
    let ids = golden.int_rows("input_ids_right");
    let mask = golden.int_rows("attention_mask_right");
    let found = forward(dir, &ids, &vec![0; ids.len()]);
    for (i, expected) in golden.float_rows("values_right").iter().enumerate() {
        for t in (0..expected.len()).filter(|&t| mask[i][t] == 1) {
            let label = format!("{}: value {t} of row {i}", dir.display());
            assert_close(&label, found[i][t], expected[t], TOLERANCE);
        }
    }
    ids.len()
}

/// The head's value at every column of a padded batch, whose rows run packed from `starts` on.
fn forward(dir: &Path, ids: &[Vec<i64>], starts: &[usize]) -> Vec<Vec<f64>> {
    let decoder = Checkpoint::open(dir)
        .and_then(|checkpoint| checkpoint.load(&device()))
        .unwrap_or_else(|error| panic!("{error}"));
    let width = ids[0].len();
    let lengths: Vec<usize> = starts.iter().map(|start| width - start).collect();
    let layout = SequenceLayout::packed(&lengths, Grouping { waste: 0.5, queries: 0 }, decoder.device());
    let ctx = ForwardContext::whole(decoder.arch(), layout, 0, decoder.device());
    let packed: Vec<i64> = ids.iter().zip(starts).flat_map(|(row, &start)| row[start..].to_vec()).collect();
    let rows = [packed.len()];
    let ids = burn::tensor::Tensor::from_data(burn::tensor::TensorData::new(packed, rows), decoder.device());
    let mut found = values(decoder.head().scalar(decoder.hidden(ids, &ctx))).into_iter();
    let row = |(&start, &length)| {
        let padding = std::iter::repeat_n(f64::NAN, start);
        padding.chain(found.by_ref().take(length)).collect()
    };
    starts.iter().zip(&lengths).map(row).collect()
}
