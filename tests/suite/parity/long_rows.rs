//! What `golden/extra.safetensors` holds of newer families: hidden states after every layer, and a row that is longer
//! than windows, chunks of prompts and trained contexts, against transformers.

use burn::tensor::Tensor;
use firebrick_engine::batch::MicroBatch;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::plan::Layout;
use firebrick_engine::sequence::Sequence;
use firebrick_models::KvCacheDtype;
use firebrick_models::cache::{BlockTable, Chunk, KvCache};
use firebrick_models::unit::UnitKind;

use crate::support::golden::Golden;
use crate::support::model::{Model, scored_rows};
use crate::support::{assert_all_close, assert_gradient, checked, folders, values};

/// The file.
pub(crate) const EXTRA: &str = "extra.safetensors";

const HIDDEN: &str = "hidden.";
const GRADIENT: &str = "long.grad.";
/// Of these `routers` compares the choices; logits and weights follow from hidden states before and after.
const ROUTER: &str = "router.";
/// Of linear attention; `linear_attention` compares these.
const DELTA: &str = "delta.";
const RECURRENT: &str = ".recurrent_state";

/// What is compared of the long row besides gradients.
const LONG: [&str; 4] = ["long.entropy", "long.input_ids", "long.last_logits", "long.logprobs"];

/// The models with such a file, and the file.
pub(super) fn models() -> impl Iterator<Item = (Model, Golden)> {
    let dirs = folders("models").into_iter();
    let with = dirs.filter(|dir| dir.join("golden").join(EXTRA).is_file());
    with.map(|dir| {
        let model = Model::load(&dir);
        let golden = model.golden(EXTRA);
        (model, golden)
    })
}

/// The long row, every position of it scored.
pub(super) fn long_row(golden: &Golden) -> Sequence {
    let ids = golden.ints("long.input_ids").into_iter();
    let tokens: Vec<u32> = ids.map(|id| u32::try_from(id).expect("an id")).collect();
    Sequence { positions: (0..tokens.len()).collect(), tokens, ..Sequence::default() }
}

fn compare_scores(model: &Model, label: &str, golden: &Golden, [logp, entropy]: [&[f64]; 2]) {
    let tolerance = model.tolerance();
    let targets = logp.len() - 1;
    let expected = golden.floats("long.logprobs");
    assert_all_close(label, &logp[..targets], &expected, tolerance);
    assert_all_close(label, entropy, &golden.floats("long.entropy"), tolerance);
}

#[test]
fn every_tensor_beside_the_batch_is_one_that_is_compared() {
    let mut tensors = 0;
    for (model, golden) in models() {
        for name in golden.names() {
            let parts = [HIDDEN, GRADIENT, ROUTER, DELTA].iter().any(|p| name.starts_with(p));
            let state = name.starts_with("long.layer") && name.ends_with(RECURRENT);
            assert!(parts || state || LONG.contains(&name.as_str()), "{}: {name}", model.name);
            tensors += 1;
        }
    }
    checked("further tensors of model folders known", tensors);
}

#[test]
fn hidden_states_after_every_layer() {
    let mut states = 0;
    for (model, golden) in models() {
        let row = &scored_rows(&model.golden("forward.safetensors"))[..1];
        let (arch, device) = (model.decoder.arch(), model.decoder.device());
        let own: Vec<&Sequence> = row.iter().collect();
        let micro = MicroBatch::new(arch, &own, Layout::Packed, 0, device);
        let mut x = model.decoder.embed(micro.ids.clone());
        let mut compare = |name: &str, x: &Tensor<2>| {
            let label = format!("{}: {name}", model.name);
            let expected = golden.floats(&format!("{HIDDEN}{name}"));
            assert_all_close(&label, &values(x.clone()), &expected, model.tolerance());
            states += 1;
        };
        compare("embed", &x);
        for unit in model.decoder.body() {
            let weights = model.decoder.weights(unit);
            x = model.decoder.run(unit, &weights, x, &micro.ctx);
            if let UnitKind::Mlp(layer) = model.decoder.kind(unit) {
                compare(&format!("layer{layer}"), &x);
            }
        }
    }
    checked("hidden states", states);
}

#[test]
fn scores_of_a_long_row_whole_and_through_the_cache() {
    let rows = models().map(|(model, golden)| hold_scores(&model, &golden));
    checked("long rows", rows.sum());
}

/// Compares the scores of the long row, and says in how many ways through the cache.
pub(crate) fn hold_scores(model: &Model, golden: &Golden) -> usize {
    let row = long_row(golden);
    let scores = model.score(&model.plain(64), 1.0, std::slice::from_ref(&row));
    let [logp, entropy] =
        [&scores.logp[0], &scores.entropy[0]].map(|all| all.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>());
    let label = format!("{}: the long row", model.name);
    compare_scores(model, &label, golden, [&logp, &entropy]);
    let prefills = [64, row.tokens.len() - 1];
    for prefill in prefills {
        let label = format!("{label}, through the cache, {prefill} tokens at a time");
        let hidden = through_the_cache(model, &row.tokens, prefill);
        let head = model.decoder.head();
        let targets = row.tokens[1..].iter().chain(&[0]);
        let targets: Vec<i64> = targets.map(|&id| i64::from(id)).collect();
        let scores = head.score(hidden.clone(), model.ids(&targets), 1.0);
        let found = [scores.logp, scores.entropy].map(values);
        compare_scores(model, &label, golden, found.each_ref().map(Vec::as_slice));
        let last = hidden.narrow(0, targets.len() - 1, 1);
        let expected = golden.floats("long.last_logits");
        assert_all_close(&label, &values(head.logits(last)), &expected, model.tolerance());
    }
    prefills.len()
}

/// Hidden states of a row's tokens: two chunks of a prompt, `prefill` tokens each as far as there are so many, and then
/// a token at a time.
fn through_the_cache(model: &Model, tokens: &[u32], prefill: usize) -> Tensor<2> {
    run_through_the_cache(model, tokens, prefill).0
}

/// The same, with the cache and the sequence's blocks in it.
pub(super) fn run_through_the_cache(model: &Model, tokens: &[u32], prefill: usize) -> (Tensor<2>, KvCache, BlockTable) {
    let (decoder, device) = (&model.decoder, model.decoder.device());
    let arch = decoder.arch();
    let blocks = vec![16; KvCache::groups(arch)];
    let mut cache = KvCache::new(arch, &blocks, KvCacheDtype::Auto, device);
    let mut table = cache.begin(&[]);
    let mut parts = Vec::new();
    while table.tokens() < tokens.len() {
        let start = table.tokens();
        let chunked = start < 2 * prefill;
        let count = if chunked { prefill } else { 1 };
        let count = count.min(tokens.len() - start);
        assert!(cache.append(&mut table, count), "too few blocks");
        let own = start..start + count;
        let ids: Vec<i64> = tokens[own.clone()].iter().map(|&id| i64::from(id)).collect();
        let metadata = if chunked {
            let chunk = Chunk { table: &table, tokens: own };
            cache.prefill(arch, &[chunk])
        } else {
            cache.decode(arch, &[Some(&table)])
        };
        parts.push(decoder.hidden_cached(model.ids(&ids), &metadata, &mut cache));
    }
    (Tensor::cat(parts, 0), cache, table)
}

#[test]
fn gradients_of_a_long_row() {
    let tensors = models().map(|(model, golden)| hold_gradients(&model, &golden));
    checked("gradient tensors of long rows", tensors.sum());
}

/// Compares the gradients of the long row, with and without recomputing, and says how many.
pub(crate) fn hold_gradients(model: &Model, golden: &Golden) -> usize {
    let mut tensors = 0;
    let mut row = long_row(golden);
    row.positions.pop();
    let targets = row.positions.len();
    row.columns.weight = Some(vec![1.0 / targets as f64; targets]);
    for plan in [model.plain(1024), model.checkpointed(64, 1)] {
        let (_, found) = model.backward(&plan, 1.0, &Nll, &[vec![&row]]);
        let all = golden.names().into_iter();
        for name in all.filter(|name| name.starts_with(GRADIENT)) {
            let label = format!("{}: {name}", model.name);
            let found = &found[&name[GRADIENT.len()..]];
            assert_gradient(&label, found, &golden.floats(&name), model.tolerance());
            tensors += 1;
        }
    }
    tensors
}
