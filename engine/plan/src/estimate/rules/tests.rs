//! Public models in f32 and bf16.

use super::*;
use firebrick_spec::{Backend, KernelTable, Operation};

/// Models under the profile of `firebrick plan` for a machine without a GPU.
fn models() -> Vec<PublicModel> {
    let kernels = KernelTable::new(Operation::ALL).with_vocabulary_tile(8192);
    table(&DeviceProfile::assumed(Backend::Cuda).with_kernels(kernels)).expect("public models have plans")
}

#[test]
fn every_public_model_stands_in_f32_and_in_bf16() {
    let models = models();
    let rows = models.iter().map(|m| (m.name, m.precision));
    let expected = names().flat_map(|name| PRECISIONS.map(|precision| (name, precision)));
    assert!(rows.eq(expected));
    for model in models {
        let [fast, balanced, constrained, huge] = &model.presets[..] else { panic!("{}: four presets", model.name) };
        // weights, gradients and two moments; everything but the weights may leave, and they sample on the device
        assert!(fast.multiplier >= 4.0, "{}", model.name);
        for preset in [balanced, constrained, huge] {
            let needs = preset.multiplier;
            assert!(needs >= 1.0 && needs < fast.multiplier, "{}", model.name);
        }
        assert!(balanced.relative_time >= 1.0, "{}", model.name);
    }
}

#[test]
fn half_precision_saves_wherever_masters_and_moments_are_on_the_host() {
    for pair in models().chunks(2) {
        let [full, half] = pair else {
            panic!("two precisions a model");
        };
        for ((full, half), preset) in full.presets.iter().zip(&half.presets).zip(PRESETS) {
            let on_host = matches!(preset, Preset::Constrained | Preset::Huge);
            assert!(half.device_bytes < full.device_bytes || !on_host, "{}: {full:?} {half:?}", pair[0].name);
        }
    }
}
