//! Every case of `losses/`: advantages, aggregation, policy losses, KL, entropy, critics.

mod ppo;
mod trl;
mod verl;

use std::collections::BTreeMap;

use burn::tensor::{Tensor, TensorData};
use firebrick_engine::objective::{Loss, Reduction, Scores, TokenInputs, TokenLoss};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::support::{assert_close, checked, device, json_files, parse, read, values};

#[derive(Deserialize)]
struct File {
    format: String,
    input_sets: BTreeMap<String, Set>,
    cases: Vec<Case>,
}

/// Named nested lists.
type Set = BTreeMap<String, Value>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    #[serde(rename = "fn")]
    func: String,
    input_set: Option<String>,
    params: Value,
    #[serde(default)]
    inputs: Set,
    outputs: Value,
    grads: Option<Set>,
}

impl Case {
    fn params<T: DeserializeOwned>(&self) -> T {
        parse(&self.name, &self.params)
    }

    /// A gradient, where the case stores any.
    fn gradient(&self, of: &str) -> Option<Rows> {
        let grads = self.grads.as_ref()?;
        Some(rows(grads.get(of).unwrap_or_else(|| panic!("{}: no gradient of {of}", self.name))))
    }

    fn output(&self, name: &str) -> &Value {
        let output = self.outputs.get(name);
        output.unwrap_or_else(|| panic!("{}: no output {name}", self.name))
    }
}

#[test]
fn every_loss_case() {
    let mut built: BTreeMap<String, usize> = BTreeMap::new();
    for path in json_files("losses") {
        let file: File = read(&path);
        assert_eq!(file.format, "rl-loss-golden/1", "{}", path.display());
        for case in &file.cases {
            check(case, &set_of(case, &file.input_sets));
            *built.entry(case.func.clone()).or_default() += 1;
        }
    }
    for (func, cases) in built {
        checked(&format!("cases of {func}"), cases);
    }
}

fn check(case: &Case, set: &Set) {
    match case.func.as_str() {
        "trl.GRPOTrainer._compute_loss" => trl::compute_loss(case, set),
        "trl.RLOOTrainer._compute_loss" => trl::rloo_loss(case, set),
        "trl GRPO advantages" => trl::advantages(case),
        "trl RLOO advantages" => trl::rloo_advantages(case),
        "agg_loss" => verl::agg_loss(case, set),
        "kl_penalty" => verl::kl(case, set),
        "compute_entropy_loss" => verl::entropy_loss(case, set),
        "compute_value_loss" => ppo::value_loss(case, set),
        "compute_rewards" => ppo::rewards(case, set),
        "compute_gae_advantage_return" => ppo::gae(case, set),
        "masked_whiten" => ppo::whiten(case, set),
        "AdaptiveKLController" => ppo::adaptive_kl(case),
        func if func.starts_with("compute_policy_loss_") => verl::policy_loss(case, set),
        func if func.ends_with("_outcome_advantage") => verl::advantages(case, set),
        other => panic!("{}: unknown fn {other}", case.name),
    }
}

/// The set a case names; the file's only one where it names none.
fn set_of(case: &Case, sets: &BTreeMap<String, Set>) -> Set {
    match &case.input_set {
        Some(name) => sets[name].clone(),
        None if sets.len() == 1 => sets.values().next().expect("one set").clone(),
        None => case.inputs.clone(),
    }
}

/// A matrix by rows.
type Rows = Vec<Vec<f64>>;

fn rows(value: &Value) -> Rows {
    parse("a matrix", value)
}

/// Which tokens of a batch are scored.
struct Mask(Vec<Vec<bool>>);

impl Mask {
    fn new(value: &Value) -> Self {
        let row = |row: Vec<f64>| row.into_iter().map(|m| m > 0.5).collect();
        Self(rows(value).into_iter().map(row).collect())
    }

    /// Scored tokens of each sequence.
    fn lengths(&self) -> Vec<usize> {
        let count = |row: &Vec<bool>| row.iter().filter(|m| **m).count();
        self.0.iter().map(count).collect()
    }

    fn width(&self) -> usize {
        self.0[0].len()
    }

    /// The scored elements of a matrix, one after another.
    fn pick(&self, matrix: &[Vec<f64>]) -> Vec<f64> {
        let all = self.0.iter().flatten().zip(matrix.iter().flatten());
        all.filter(|(m, _)| **m).map(|(_, &v)| v).collect()
    }

    /// The matrix of scored elements, zeros elsewhere.
    fn spread(&self, scored: &[f64]) -> Rows {
        let mut scored = scored.iter().copied();
        let mut element = |m: &bool| {
            if *m { scored.next().expect("an element") } else { 0.0 }
        };
        self.0.iter().map(|row| row.iter().map(&mut element).collect()).collect()
    }

    /// Advantages of the scored tokens, whether given by token or by sequence.
    fn advantages(&self, value: &Value) -> Vec<f64> {
        if value[0].is_array() {
            return self.pick(&rows(value));
        }
        let by_sequence: Vec<f64> = parse("advantages", value);
        let width = self.width();
        let by_token: Rows = by_sequence.iter().map(|&a| vec![a; width]).collect();
        self.pick(&by_token)
    }
}

fn vector(values: Vec<f64>) -> Tensor<1> {
    let n = values.len();
    Tensor::from_data(TensorData::new(values, [n]), &device())
}

/// What a loss says of a batch.
struct Outcome {
    loss: f64,
    metrics: BTreeMap<&'static str, f64>,
    d_logp: Vec<f64>,
    d_entropy: Vec<f64>,
}

/// Runs a token loss and its backward.
fn run(loss: &dyn TokenLoss, logp: &[f64], entropy: &[f64], inputs: &TokenInputs) -> Outcome {
    let scores = Scores {
        logp: vector(logp.to_vec()).autodiff().require_grad(),
        entropy: vector(entropy.to_vec()).autodiff().require_grad(),
    };
    let Loss { total, metrics } = loss.loss(&scores, inputs);
    let mut grads = total.backward();
    let mut gradient = |leaf: &Tensor<1>| match leaf.grad_remove(&mut grads) {
        Some(gradient) => values(gradient),
        None => vec![0.0; logp.len()],
    };
    let (d_logp, d_entropy) = (gradient(&scores.logp), gradient(&scores.entropy));
    let sequences = inputs.lengths.iter().filter(|&&n| n > 0).count();
    let value = |reduction: Reduction, sum| reduction.value(sum, logp.len(), sequences);
    Outcome {
        loss: values(total.inner())[0],
        metrics: metrics.into_iter().map(|m| (m.name, value(m.reduction, values(m.sum)[0]))).collect(),
        d_logp,
        d_entropy,
    }
}

/// Compares a gradient of the scored tokens with a stored matrix.
fn assert_rows(label: &str, mask: &Mask, found: &[f64], expected: &Rows, tolerance: f64) {
    for (i, (found, expected)) in mask.spread(found).iter().zip(expected).enumerate() {
        for (t, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            assert_close(&format!("{label}[{i}][{t}]"), found, expected, tolerance);
        }
    }
}
