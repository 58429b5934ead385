//! Rows that share a prefix have the scores, loss, gradients and updates of rows that are computed apart.

use firebrick_engine::batch::{Batch, forest};
use firebrick_engine::learner::{score_cut, train_cut};
use firebrick_engine::plan::{Layout, MemoryConfig, ModelPlan};
use firebrick_engine::sequence::Sequence;

use super::plans::{HEAD_ROWS, TEMPERATURE, TOLERANCE, assert_same, models, objective, trained};
use crate::support::{assert_all_close, assert_gradient, checked};

/// Completions behind prefixes of three levels: a system prompt of all, the prompts behind it, and two turns behind the
/// first of these.
fn nested(rows: &[Sequence]) -> Vec<Sequence> {
    const COMPLETION: usize = 3;
    let first = &rows[0];
    let piece = |kind: usize, count: usize| -> Vec<u32> {
        let tokens = rows.iter().flat_map(|row| row.tokens.iter().copied()).cycle();
        tokens.skip(5 * kind).take(count).collect()
    };
    let completion = |prompt: &[usize], kind: usize| {
        let prompt: Vec<u32> = prompt.iter().flat_map(|&kind| piece(kind, 20)).collect();
        let sequence = Sequence::completion(&prompt, &piece(kind, COMPLETION));
        let columns = first.columns.map(|column: &Vec<f64>| column[..COMPLETION].to_vec());
        Sequence { tokens: sequence.tokens, positions: sequence.positions, columns, ..first.clone() }
    };
    let prompts: [&[usize]; 5] = [&[0, 1], &[0, 1, 4], &[0, 1, 5], &[0, 2], &[0, 3]];
    prompts.iter().flat_map(|prompt| [completion(prompt, 6), completion(prompt, 7)]).collect()
}

/// Ragged groups: the first rows of a model's batch, which begin alike, and of the first one an identical row, one
/// without a completion, one whose second half alone is scored (an earlier turn is its prompt), and one that goes on
/// behind it; then [`nested`] ones.
fn groups(rows: &[Sequence]) -> Vec<Sequence> {
    let first = &rows[0];
    let part = |tokens: usize, scored: std::ops::Range<usize>| {
        let of = |column: &Vec<f64>| column[scored.clone()].to_vec();
        Sequence {
            tokens: first.tokens[..tokens].to_vec(),
            positions: first.positions[scored.clone()].to_vec(),
            columns: first.columns.map(of),
            ..first.clone()
        }
    };
    let (tokens, scored) = (first.tokens.len(), first.positions.len());
    let mut all = rows.to_vec();
    all.extend([
        first.clone(),
        part(first.positions[0] + 1, 0..0),
        part(tokens, scored / 2..scored),
        part(tokens - 2, scored / 2..scored - 3),
    ]);
    all.extend(nested(rows));
    all
}

#[test]
fn prefixes_of_several_levels_are_shared() {
    let (_, rows) = models().remove(0);
    let mut sequences: Vec<Sequence> = nested(&rows);
    sequences.sort_by(|a, b| a.tokens.cmp(&b.tokens));
    let nodes = forest(&sequences.iter().collect::<Vec<_>>());
    let depth = |mut index: usize| {
        let mut depth = 1;
        while let Some(parent) = nodes[index].parent {
            (index, depth) = (parent, depth + 1);
        }
        depth
    };
    assert_eq!((0..nodes.len()).map(depth).max(), Some(4));
}

#[test]
fn shared_prefixes_change_no_score_loss_or_gradient() {
    // rows that are saved, also by models with gated DeltaNet alone
    let (mut cases, mut saved, mut of_delta_net) = (0, 0, 0);
    for (model, rows) in models() {
        // where a row's scores depend on the rest of its batch, so does the loss
        if !model.manifest.is_local() {
            continue;
        }
        let rows = groups(&rows);
        let whole: Vec<&Sequence> = rows.iter().collect();
        let loss = objective();
        for plain in [model.plain(HEAD_ROWS), model.checkpointed(3, 1)] {
            let expected = model.backward(&plain, TEMPERATURE, &loss, std::slice::from_ref(&whole));
            let scores = model.score(&plain, TEMPERATURE, &rows);
            let longest = rows.iter().map(|row| row.tokens.len()).max().expect("rows");
            for (max_tokens, max_sequences) in [(longest, None), (2 * longest, None), (1000, Some(3)), (1000, None)] {
                let plan = ModelPlan {
                    layout: Layout::SharedPrefix,
                    train_tokens: max_tokens,
                    score_tokens: max_tokens,
                    micro_batch_size: max_sequences,
                    ..plain.clone()
                };
                let label = format!("{}, at most {max_tokens} rows and {max_sequences:?} sequences", model.name);
                let batch = Batch::pack(&rows, train_cut(&plan, &model.decoder)).expect("every row fits");
                let stats = batch.stats(firebrick_engine::batch::grouping(0, model.decoder.device()));
                saved += stats.tokens - stats.unique_tokens;
                if model.decoder.arch().delta_net.is_some() {
                    of_delta_net += stats.tokens - stats.unique_tokens;
                }
                assert_same(&label, &model.backward(&plan, TEMPERATURE, &loss, &batch.micros()), &expected);
                let batch = Batch::pack(&rows, score_cut(&plan, &model.decoder)).expect("every row fits");
                for (indices, micro) in batch.indices().iter().zip(batch.micros()) {
                    let micro: Vec<Sequence> = micro.into_iter().cloned().collect();
                    let found = model.score(&plan, TEMPERATURE, &micro);
                    for ((&i, logp), entropy) in indices.iter().zip(found.logp).zip(found.entropy) {
                        // scores are stored in f32
                        let label = format!("{label}, row {i}");
                        let wide = |values: &[f32]| values.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>();
                        assert_all_close(&label, &wide(&logp), &wide(&scores.logp[i]), 1e-6);
                        assert_all_close(&label, &wide(&entropy), &wide(&scores.entropy[i]), 1e-6);
                    }
                }
                cases += 1;
            }
        }
    }
    assert!(!crate::KERNELS || saved > 100 * cases / 8, "{saved} rows saved in {cases} cases");
    assert!(!crate::KERNELS || of_delta_net > 0, "gated DeltaNet repeats its prefixes");
    checked("batches with shared prefixes", cases);
}

#[test]
fn shared_prefixes_change_no_updated_weight() {
    let mut cases = 0;
    for (model, rows) in models() {
        if !model.manifest.is_local() {
            continue;
        }
        let rows = groups(&rows);
        let updated = |share_prefix| trained(&model, &rows, &MemoryConfig { share_prefix, ..MemoryConfig::default() });
        let (found, expected) = (updated(true), updated(false));
        for (parameter, found) in &found {
            assert_gradient(&format!("{}: {parameter}", model.name), found, &expected[parameter], TOLERANCE);
        }
        cases += 1;
    }
    checked("updates with shared prefixes", cases);
}
