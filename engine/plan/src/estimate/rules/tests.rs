//! Rules of thumb in the run's precision, and public models in f32 and bf16.

use super::*;
use firebrick_spec::{Backend, KernelTable, Operation};

/// The profile of `firebrick plan` for a machine without a GPU.
fn gpu() -> DeviceProfile {
    let kernels = KernelTable::new(Operation::ALL).with_vocabulary_tile(8192);
    DeviceProfile::assumed(Backend::Cuda).with_kernels(kernels)
}

fn models() -> Vec<PublicModel> {
    table(&gpu()).expect("public models have plans")
}

#[test]
fn every_public_model_stands_in_f32_and_in_bf16() {
    let models = models();
    let rows = models.iter().map(|m| (m.name, m.precision));
    let expected = names().flat_map(|name| PRECISIONS.map(|precision| (name, precision)));
    assert!(rows.eq(expected));
    for model in models {
        let weights = (model.precision.width() * model.parameters) as f64;
        let presets = model.presets.iter().map(|need| need.preset);
        assert!(presets.eq(MULTIPLIERS.iter().map(|m| m.preset)));
        for need in &model.presets {
            let multiple = need.device_bytes as f64 / weights;
            assert!((need.multiplier - multiple).abs() < 1e-9, "{model:?}");
        }
    }
}

#[test]
fn half_precision_saves_wherever_masters_and_moments_are_on_the_host() {
    for pair in models().chunks(2) {
        let [full, half] = pair else {
            panic!("two precisions a model");
        };
        for (full, half) in full.presets.iter().zip(&half.presets) {
            let saves = half.device_bytes < full.device_bytes;
            let on_host = matches!(full.preset, Preset::Constrained | Preset::Huge);
            assert!(saves || !on_host, "{}: {full:?} {half:?}", pair[0].name);
        }
    }
}

#[test]
fn a_rule_is_a_multiple_of_the_weights_in_the_run_s_precision() {
    let arch = public("Qwen2.5-1.5B").expect("known");
    let models = models();
    for precision in PRECISIONS {
        let workload = Workload::grpo(arch.clone().in_precision(precision), [512, 512], 4, 8);
        assert_eq!(weight_bytes(&workload), precision.width() * Sizes::new(&arch, None).total());
        let needs = under_presets(&workload, 32, &gpu(), &Parallel::default()).expect("a plan under every preset");
        let same = |m: &&PublicModel| m.name == "Qwen2.5-1.5B" && m.precision == precision;
        assert_eq!(needs, models.iter().find(same).expect("in the table").presets, "{precision}");
    }
}

#[test]
fn sequences_longer_than_a_preset_s_micro_batch_are_estimated_all_the_same() {
    let arch = public("Qwen2.5-0.5B").expect("known");
    let workload = Workload::grpo(arch, [8192, 8192], 1, 2);
    let needs = under_presets(&workload, 2, &gpu(), &Parallel::default()).expect("plans");
    assert!(needs.iter().all(|need| need.device_bytes > 0));
}
