//! `AdamW` and gradient clipping against torch, in the precision of the binary that includes this file.

use burn::tensor::{FloatDType, Tensor, TensorData};
use firebrick_engine::executor::Gradients;
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::optim::config::{Moments, UpdateAt};
use firebrick_engine::world::World;
use serde::Deserialize;
use serde_json::Value;

use crate::support::{assert_all_close, assert_close, checked, device, fixtures, parse, read, values};

/// How torch spells this binary's precision, and how closely two codes agree in it.
fn precision() -> (&'static str, f64) {
    match crate::PRECISION {
        FloatDType::F32 => ("float32", 2e-6),
        FloatDType::F64 => ("float64", 1e-12),
        other => panic!("no goldens in {other:?}"),
    }
}

#[derive(Deserialize)]
struct Golden {
    inputs: Inputs,
    cases: Vec<Case>,
}

/// Parameters, and their gradients at every step.
#[derive(Deserialize)]
struct Inputs {
    params: Vec<Value>,
    grads: Vec<Vec<Value>>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    #[serde(rename = "fn")]
    func: String,
    params: Value,
    outputs: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AdamWParams {
    lr: f64,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
    max_grad_norm: Option<f64>,
    dtype: String,
}

#[derive(Deserialize)]
struct AdamWOutputs {
    steps: Vec<StepOutputs>,
}

#[derive(Deserialize)]
struct StepOutputs {
    grad_norm: f64,
    params: Vec<Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClipParams {
    max_norm: f64,
    grads: String,
    #[serde(rename = "note")]
    _note: Option<String>,
}

#[derive(Deserialize)]
struct ClipOutputs {
    total_norm: f64,
    grads: Vec<Value>,
}

#[test]
fn adamw_and_clipping() {
    let golden: Golden = read(&fixtures().join("optim/optim.json"));
    let (mut updates, mut clippings) = (0, 0);
    for case in &golden.cases {
        match case.func.as_str() {
            "torch.optim.AdamW" => updates += check_adamw(case, &golden.inputs),
            "torch.nn.utils.clip_grad_norm_" => clippings += check_clipping(case, &golden.inputs),
            // the schedules' own parity test takes these
            "transformers.get_scheduler" => {}
            other => panic!("{}: unknown fn {other}", case.name),
        }
    }
    let (dtype, _) = precision();
    checked(&format!("AdamW cases in {dtype}"), updates);
    checked(&format!("clipping cases in {dtype}"), clippings);
}

/// Every step of a case in this binary's precision; none of one in another.
fn check_adamw(case: &Case, inputs: &Inputs) -> usize {
    let params: AdamWParams = parse(&case.name, &case.params);
    let outputs: AdamWOutputs = parse(&case.name, &case.outputs);
    assert!(matches!(params.dtype.as_str(), "float32" | "float64"), "{}", params.dtype);
    let (dtype, tolerance) = precision();
    if params.dtype != dtype {
        return 0;
    }
    let config = OptimConfig {
        lr: params.lr,
        betas: params.betas,
        eps: params.eps,
        weight_decay: params.weight_decay,
        clip_grad: params.max_grad_norm,
        ..OptimConfig::default()
    };
    let mut tensors: Vec<(Tensor<2>, Option<Moments>)> = inputs.params.iter().map(|p| (tensor(p), None)).collect();
    for ((step, grads), expected) in (1..).zip(&inputs.grads).zip(&outputs.steps) {
        let label = format!("{}, step {step}", case.name);
        let mut gradients = gathered(grads);
        let norm = gradients.global_norm(&World::default()).expect("a norm");
        assert_close(&format!("{label}: norm"), norm, expected.grad_norm, tolerance);
        let clip = config.clip_coefficient(norm);
        let at = UpdateAt { step, lr: params.lr, decays: true };
        for (i, (value, moments)) in tensors.iter_mut().enumerate() {
            let gradient = taken(&mut gradients, i) * clip;
            let (after, kept) = config.update(at, value.clone(), gradient, moments.take());
            let label = format!("{label}: parameter {i}");
            let expected = numbers(&expected.params[i]).1;
            assert_all_close(&label, &values(after.clone()), &expected, tolerance);
            (*value, *moments) = (after, Some(kept));
        }
    }
    1
}

fn check_clipping(case: &Case, inputs: &Inputs) -> usize {
    let params: ClipParams = parse(&case.name, &case.params);
    let outputs: ClipOutputs = parse(&case.name, &case.outputs);
    let index = params.grads.strip_prefix("grads[").and_then(|rest| rest.strip_suffix(']'));
    let index: usize =
        index.and_then(|i| i.parse().ok()).unwrap_or_else(|| panic!("{}: unknown grads {}", case.name, params.grads));
    let config = OptimConfig { clip_grad: Some(params.max_norm), ..OptimConfig::default() };
    let (_, tolerance) = precision();
    let mut gradients = gathered(&inputs.grads[index]);
    let norm = gradients.global_norm(&World::default()).expect("a norm");
    assert_close(&case.name, norm, outputs.total_norm, tolerance);
    let clip = config.clip_coefficient(norm);
    for (i, expected) in outputs.grads.iter().enumerate() {
        let found = values(taken(&mut gradients, i) * clip);
        assert_all_close(&case.name, &found, &numbers(expected).1, tolerance);
    }
    1
}

fn taken(gradients: &mut Gradients, index: usize) -> Tensor<2> {
    gradients.take(index).expect("a gradient").into_device(&device())
}

fn gathered(grads: &[Value]) -> Gradients {
    let mut gradients = Gradients::new(grads.len());
    for (i, grad) in grads.iter().enumerate() {
        gradients.add(i, tensor(grad));
    }
    gradients
}

/// A vector as one row, or a matrix.
fn tensor(value: &Value) -> Tensor<2> {
    let (shape, numbers) = numbers(value);
    Tensor::from_data(TensorData::new(numbers, shape), &device())
}

fn numbers(value: &Value) -> ([usize; 2], Vec<f64>) {
    let row = |row: &Value| -> Vec<f64> { parse("a row of numbers", row) };
    let rows: Vec<Vec<f64>> = match value.as_array().and_then(|list| list.first()) {
        Some(Value::Array(_)) => parse("a matrix", value),
        _ => vec![row(value)],
    };
    ([rows.len(), rows[0].len()], rows.concat())
}
