//! The routers' auxiliary loss: its value from transformers' router logits, its gradient by differences, and the same
//! with layers that are computed again.

use std::collections::BTreeMap;
use std::convert::Infallible;

use burn::tensor::{Tensor, TensorData};
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::objective::{LossSums, ROUTER_AUX_LOSS};
use firebrick_engine::plan::ModelPlan;
use firebrick_engine::sequence::Sequence;
use firebrick_models::decoder::Param;
use firebrick_models::random::Stream;
use firebrick_models::unit::ParamSpec;

use super::plans::HEAD_ROWS;
use crate::support::golden::Golden;
use crate::support::model::{Model, nll_rows};
use crate::support::{assert_all_close, assert_close, checked, folders};

const COEFFICIENT: f64 = 0.3;
/// Step of the differences, and what their error of the second order leaves.
const STEP: f64 = 1e-4;
const DIFFERENCES: f64 = 1e-6;

/// The models with experts, and their golden rows with a loss of zero: what is left is the auxiliary one.
fn models() -> impl Iterator<Item = (Model, Vec<Sequence>)> {
    let all = folders("models").into_iter().map(|dir| Model::load(&dir));
    let own = all.filter(|model| model.decoder.arch().route_width() > 0);
    own.map(|mut model| {
        model.router_aux_loss_coef = COEFFICIENT;
        let mut rows = nll_rows(&model.golden("forward.safetensors"));
        for row in &mut rows {
            row.columns.weight = Some(vec![0.0; row.positions.len()]);
        }
        (model, rows)
    })
}

type Found = (LossSums, BTreeMap<String, Vec<f64>>);

fn backward(model: &Model, plan: &ModelPlan, rows: &[Sequence]) -> Found {
    model.backward(plan, 1.0, &Nll, &[rows.iter().collect()])
}

fn value((sums, _): &Found) -> f64 {
    let own = sums.values().find(|(name, _)| *name == ROUTER_AUX_LOSS);
    own.expect("the metric").1
}

/// `E · Σ f · P` of a layer from its router's logits and choices.
fn of_layer(golden: &Golden, layer: usize) -> f64 {
    let logits = golden.float_rows(&format!("router.layer{layer}.logits"));
    let chosen = golden.ints(&format!("router.layer{layer}.experts"));
    let (tokens, count) = (logits.len() as f64, logits[0].len());
    let mut mean = vec![0.0; count];
    for row in &logits {
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        for (mean, x) in mean.iter_mut().zip(row) {
            *mean += x.exp() / sum / tokens;
        }
    }
    let share = |expert: usize| {
        let own = chosen.iter().filter(|&&e| e == expert as i64);
        own.count() as f64 / tokens
    };
    let sum: f64 = (0..count).map(|expert| share(expert) * mean[expert]).sum();
    count as f64 * sum
}

#[test]
fn the_auxiliary_loss_is_that_of_transformers_router_logits() {
    let mut cases = 0;
    for (model, rows) in models() {
        let golden = model.golden("extra.safetensors");
        let found = backward(&model, &model.plain(HEAD_ROWS), &rows[..1]);
        let layers: Vec<usize> = model.decoder.arch().expert_layers().map(|l| l.0).collect();
        let sum: f64 = layers.iter().map(|&layer| of_layer(&golden, layer)).sum();
        // the logits are stored in f32
        assert_close(&model.name, value(&found), sum / layers.len() as f64, 1e-5);
        cases += layers.len();
    }
    checked("auxiliary losses of routers", cases);
}

/// A direction of all parameters, by the names of their tensors.
fn direction(model: &Model) -> BTreeMap<String, Vec<f64>> {
    let mut random = Stream::new(5, 0);
    let tensors = model.decoder.specs().flat_map(ParamSpec::tensors);
    let own = tensors.map(|tensor| {
        let numbers = (0..tensor.numel()).map(|_| f64::from(random.normal()));
        let numbers: Vec<f64> = numbers.map(|x| 0.01 * x).collect();
        (tensor.name, numbers)
    });
    own.collect()
}

/// The model some way along a direction.
fn moved(model: &Model, along: &BTreeMap<String, Vec<f64>>, step: f64) -> Model {
    let mut decoder = model.decoder.clone();
    let all = decoder.update(|_, spec, param| {
        let Param::Device(own) = param else { unreachable!("weights on the device") };
        let parts = spec.tensors().into_iter();
        let mut numbers: Vec<f64> = parts.flat_map(|t| along[&t.name].clone()).collect();
        spec.into_memory(&mut numbers);
        let numbers = TensorData::new(numbers, own.dims());
        let numbers = Tensor::<2>::from_data(numbers, (&own.device(), own.dtype()));
        Ok::<_, Infallible>(Param::Device(own + numbers * step))
    });
    let Ok(()) = all;
    let mut moved = Model::load(&model.dir);
    moved.decoder = decoder;
    moved.router_aux_loss_coef = model.router_aux_loss_coef;
    moved
}

#[test]
fn the_gradient_of_the_auxiliary_loss_is_its_slope_and_padding_has_no_part_in_it() {
    let mut cases = 0;
    for (model, rows) in models() {
        let along = direction(&model);
        let mut padded = model.plain(HEAD_ROWS);
        padded.layout = firebrick_engine::plan::Layout::Padded;
        let mut losses = Vec::new();
        for plan in [model.plain(HEAD_ROWS), model.checkpointed(HEAD_ROWS, 1), padded] {
            let found = backward(&model, &plan, &rows);
            assert_close(&model.name, found.0.loss, 0.0, DIFFERENCES);
            let at = |step: f64| value(&backward(&moved(&model, &along, step), &plan, &rows));
            let slope = COEFFICIENT * (at(STEP) - at(-STEP)) / (2.0 * STEP);
            let pairs = found.1.iter().flat_map(|(name, own)| own.iter().zip(&along[name]));
            let expected: f64 = pairs.map(|(gradient, along)| gradient * along).sum();
            assert!(slope.abs() > 1e-5, "{}: a flat direction", model.name);
            let apart = (slope - expected).abs() / slope.abs();
            assert!(apart < 1e-4, "{}: {slope} against {expected}", model.name);
            losses.push(value(&found));
            cases += 1;
        }
        assert_all_close(&model.name, &losses[1..], &[losses[0]; 2], 1e-10);
    }
    checked("slopes of auxiliary losses", cases);
}
