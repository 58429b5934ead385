//! The test that holds the engine together: for every plan and every cut, loss and each gradient equal those of the
//! plain whole-graph plan on the whole batch.

use std::collections::BTreeMap;
use std::ops::Range;

use firebrick_engine::batch::{Cut, MicroBatch, Sequence, pack};
use firebrick_engine::objective::grpo::GrpoConfig;
use firebrick_engine::objective::kl::KlType;
use firebrick_engine::plan::{Keep, ModelPlan, Segment};
use firebrick_engine::schedule::LossSums;
use firebrick_models::random::Stream;

use crate::support::model::{Model, scored_rows};
use crate::support::{assert_close, assert_gradient, checked, folders};

/// Losses and metrics, absolute up to one; gradient tensors, relative L2.
const TOLERANCE: f64 = 1e-10;
const TEMPERATURE: f64 = 0.7;
const HEAD_ROWS: usize = 1024;

/// The models with gradients, and a batch for each.
fn models() -> Vec<(Model, Vec<Sequence>)> {
    let with_gradients = |dir: &std::path::PathBuf| dir.join("golden/grads.safetensors").is_file();
    let dirs = folders("models").into_iter().filter(with_gradients);
    dirs.map(|dir| {
        let model = Model::load(&dir);
        let rows = batch(&model);
        (model, rows)
    })
    .collect()
}

/// Every term of the loss at work: clipping on both sides, dual clip, KL, entropy bonus.
fn objective() -> GrpoConfig {
    GrpoConfig {
        clip_ratio_c: Some(1.5),
        kl_loss_coef: 0.05,
        kl_loss_type: KlType::K3,
        entropy_coeff: 0.02,
        ..GrpoConfig::default()
    }
}

/// The golden rows; the first tokens of each are a prompt and not scored. Weights and advantages differ by token, and
/// the old policy is close enough to the current one that some ratios are clipped and some are not.
fn batch(model: &Model) -> Vec<Sequence> {
    let mut rows = scored_rows(&model.golden("forward.safetensors"));
    let mut random = Stream::new(7, 0);
    for (i, row) in rows.iter_mut().enumerate() {
        row.positions.pop();
        row.positions.drain(..2 + i);
        row.weights = row
            .positions
            .iter()
            .map(|_| 0.01 + f64::from(random.normal()).abs())
            .collect();
        row.advantages = row
            .positions
            .iter()
            .map(|_| f64::from(random.normal()))
            .collect();
    }
    let plan = model.plain(HEAD_ROWS);
    let micro = model.micro(&rows.iter().collect::<Vec<_>>());
    let scores = firebrick_engine::schedule::Schedule::new(&model.decoder, &plan, TEMPERATURE)
        .score(&micro)
        .expect("scoring");
    for (row, logp) in rows.iter_mut().zip(scores.logp) {
        row.old_logp = logp.iter().map(|l| l + 0.3 * random.normal()).collect();
        row.ref_logp = logp.iter().map(|l| l + 0.3 * random.normal()).collect();
    }
    rows
}

type Gradients = BTreeMap<String, Vec<f64>>;

fn whole(model: &Model, rows: &[Sequence]) -> Vec<MicroBatch> {
    vec![model.micro(&rows.iter().collect::<Vec<_>>())]
}

fn assert_same(label: &str, found: &(LossSums, Gradients), expected: &(LossSums, Gradients)) {
    assert_close(
        &format!("{label}: loss"),
        found.0.loss,
        expected.0.loss,
        TOLERANCE,
    );
    assert_eq!(found.0.tokens, expected.0.tokens, "{label}");
    for ((name, found), (_, expected)) in found.0.values().zip(expected.0.values()) {
        assert_close(&format!("{label}: {name}"), found, expected, TOLERANCE);
    }
    assert!(
        found.1.keys().eq(expected.1.keys()),
        "{label}: other parameters"
    );
    for (name, found) in &found.1 {
        assert_gradient(
            &format!("{label}: {name}"),
            found,
            &expected.1[name],
            TOLERANCE,
        );
    }
}

/// Every plan that is compared with the plain one.
fn plans(model: &Model) -> Vec<(String, ModelPlan)> {
    let body = model.decoder.body();
    let mut plans = vec![
        ("small head chunks".to_owned(), model.plain(3)),
        (
            "every layer checkpointed".to_owned(),
            model.checkpointed(HEAD_ROWS, 1),
        ),
        (
            "every second layer checkpointed".to_owned(),
            model.checkpointed(HEAD_ROWS, 2),
        ),
        (
            "every layer checkpointed, small head chunks".to_owned(),
            model.checkpointed(3, 1),
        ),
    ];
    for (name, size, keeps) in [
        ("halves", 1, [Keep::Input; 2]),
        ("halves with their graphs", 1, [Keep::Graph; 2]),
        ("halves, mixed", 1, [Keep::Graph, Keep::Input]),
        (
            "three halves a segment, mixed",
            3,
            [Keep::Input, Keep::Graph],
        ),
    ] {
        let segments = cut(body.clone(), size, keeps);
        let plain = model.plain(HEAD_ROWS);
        plans.push((name.to_owned(), ModelPlan { segments, ..plain }));
    }
    plans
}

/// Segments of `size` units that keep one thing and another by turns.
fn cut(body: Range<usize>, size: usize, keeps: [Keep; 2]) -> Vec<Segment> {
    let end = body.end;
    let starts = body.step_by(size).enumerate();
    let segment = |(i, start): (usize, usize)| Segment {
        units: start..(start + size).min(end),
        keep: keeps[i % 2],
    };
    starts.map(segment).collect()
}

#[test]
fn every_plan_gives_the_loss_and_gradients_of_the_plain_one() {
    let mut cases = 0;
    for (model, rows) in models() {
        let run = |plan: &ModelPlan| {
            model.backward(plan, TEMPERATURE, &objective(), &whole(&model, &rows))
        };
        let expected = run(&model.plain(HEAD_ROWS));
        assert_eq!(
            expected.1.len(),
            model.decoder.specs().count(),
            "{}",
            model.name
        );
        for (name, plan) in plans(&model) {
            let label = format!("{}, {name}", model.name);
            assert_same(&label, &run(&plan), &expected);
            cases += 1;
        }
    }
    checked("plans against the plain one", cases);
}

#[test]
fn every_cut_of_a_batch_gives_its_loss_and_gradients() {
    let mut cases = 0;
    for (model, rows) in models() {
        // where a row's scores depend on the rest of its batch, so does the loss
        if !model.manifest.is_local() {
            continue;
        }
        let run = |plan: &ModelPlan, micros: &[MicroBatch]| {
            model.backward(plan, TEMPERATURE, &objective(), micros)
        };
        let expected = run(&model.plain(HEAD_ROWS), &whole(&model, &rows));
        let longest = rows.iter().map(|row| row.tokens.len()).max().expect("rows");
        for (max_tokens, max_sequences) in [
            (longest, None),
            (2 * longest, None),
            (3 * longest - 1, None),
            (usize::MAX, Some(1)),
            (usize::MAX, None),
        ] {
            let by = Cut {
                max_tokens,
                max_sequences,
                key: "memory.train_tokens",
            };
            let packed = pack(&rows, by).expect("every row fits");
            let micros: Vec<MicroBatch> = packed
                .iter()
                .map(|micro| model.micro(&micro.iter().map(|&i| &rows[i]).collect::<Vec<_>>()))
                .collect();
            for plan in [model.plain(3), model.checkpointed(HEAD_ROWS, 1)] {
                let label = format!("{}, {} micro-batches", model.name, micros.len());
                assert_same(&label, &run(&plan, &micros), &expected);
                cases += 1;
            }
        }
    }
    checked("cuts of a batch", cases);
}
