//! Every algorithm's loss, gradients and metrics are those of the CPU.

use super::training::rollouts;
use super::{model, on_devices};
use crate::support::model::Model;
use crate::support::tolerance::F32_ELSEWHERE;
use crate::support::{assert_close, assert_gradient, checked, fixtures};
use burn::tensor::Device;
use firebrick_engine::objective::{AdaptiveCoefficients, Algorithm, Objective, OptimizerStep, TokenLoss};

on_devices! {
    every_algorithm_has_the_loss_and_gradients_of_the_cpu,
}

fn every_algorithm_has_the_loss_and_gradients_of_the_cpu(device: &Device) {
    let (here, _) = model(&fixtures().join("models/qwen2-tied"), device);
    let on_cpu = Model::load(&here.dir);
    let start = rollouts(&on_cpu, 0);
    for algorithm in Algorithm::ALL {
        let mut settings = algorithm.settings();
        settings.entropy_coeff = 0.01;
        settings.kl_loss_coef = 0.05;
        let objective = settings.build().expect("an objective");
        let mut sequences = start.clone();
        let scores = on_cpu.score(&on_cpu.plain(64), 1.0, &sequences);
        objective.prepare(
            &mut OptimizerStep { sequences: &mut sequences, max_length: 16, scores: Some(&scores), seed: 1, step: 0 },
            &mut AdaptiveCoefficients::default(),
        );
        let loss: &dyn TokenLoss = &objective;
        let micros = vec![sequences.iter().collect()];
        let expected = on_cpu.backward(&on_cpu.plain(64), 1.0, loss, &micros);
        let found = here.backward(&here.plain(64), 1.0, loss, &micros);
        let label = format!("{algorithm:?}");
        assert_close(&label, found.0.loss, expected.0.loss, F32_ELSEWHERE);
        for ((name, a), (_, b)) in found.0.values().zip(expected.0.values()) {
            assert_close(&format!("{label}: {name}"), a, b, F32_ELSEWHERE);
        }
        for (parameter, found) in &found.1 {
            let label = format!("{label}: {parameter}");
            assert_gradient(&label, found, &expected.1[parameter], F32_ELSEWHERE);
        }
    }
    checked("algorithms beside the CPU", Algorithm::ALL.len());
}
