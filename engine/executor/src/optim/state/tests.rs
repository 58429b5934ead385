//! Moments that exist before the first update.

use super::*;
use firebrick_backends::device::{DeviceSpec, open};

const SHAPE: [usize; 2] = [3, 300];

fn matrix(device: &Device, seed: f32) -> Tensor<2> {
    let count = SHAPE[0] * SHAPE[1];
    let values = (0..count).map(|i| (i as f32 * seed).sin());
    Tensor::from_data(TensorData::new(values.collect::<Vec<f32>>(), SHAPE), device)
}

/// Bits of a parameter in f32, or in bf16 with an f32 master, and of its moments after two updates, and the bytes of
/// moments and master before the first.
fn updated([home, idle]: [Home; 2], kind: MomentKind, half: bool, reserved: bool) -> (Vec<Vec<u32>>, u64) {
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
    let (config, accounts) = (OptimConfig::default(), Accounts::new());
    let mut state = ParamState::new(home, idle, kind, SHAPE);
    let mut value = matrix(&device, 0.37);
    if half {
        value = stored_as(value, DType::BF16);
    }
    if reserved {
        for _ in 0..2 {
            state.reserve(false, &device, &accounts).expect("moments of zeros");
            if half {
                let value = Param::Device(value.clone());
                state.reserve_master(value, &device, &accounts).expect("a master");
            }
        }
    }
    let before = [Category::Moments, Category::MasterWeights]
        .into_iter()
        .flat_map(|kept| [Home::Device, Home::Host].map(|home| accounts.balance(kept, home).bytes))
        .sum();
    let mut value = Param::Device(value);
    for step in 1..=2 {
        let update = Update {
            config: &config,
            at: UpdateAt { step, lr: 0.01, decays: true },
            clip: 0.5,
            device: &device,
            accounts: &accounts,
        };
        let gradient = Gradient::Device(matrix(&device, 0.11 * step as f32));
        value = state.update(update, value, gradient, &mut AdamWBatch::default()).expect("an update on the CPU");
    }
    let moments = state.moments().expect("readable").expect("two updates");
    let value = match value {
        Param::Device(value) => HostTensor::download(value).expect("readable"),
        Param::Host(value) => value,
    };
    let bits = |values: &Vec<f32>| values.iter().map(|v| v.to_bits()).collect();
    let tensors = [value.to_f32()].into_iter().chain(moments);
    (tensors.map(|values| bits(&values)).collect(), before)
}

#[test]
fn moments_and_masters_before_the_first_update_change_no_bit_of_it() {
    for kind in [MomentKind::F32, MomentKind::Bf16, MomentKind::Block8] {
        for (home, idle) in [(Home::Device, Home::Device), (Home::Device, Home::Host), (Home::Host, Home::Host)] {
            for half in [false, true] {
                let (plain, nothing) = updated([home, idle], kind, half, false);
                let (reserved, bytes) = updated([home, idle], kind, half, true);
                let which = format!("{kind:?}, {home:?}, {idle:?}, in half precision: {half}");
                assert!(plain == reserved, "{which}");
                assert!(nothing == 0 && bytes > 0, "{which}: {bytes}");
            }
        }
    }
}

#[test]
fn moments_and_masters_that_are_forgotten_give_their_bytes_back() {
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
    let accounts = Accounts::new();
    let mut state = ParamState::new(Home::Device, Home::Device, MomentKind::F32, SHAPE);
    state.reserve(false, &device, &accounts).expect("moments of zeros");
    let held = || accounts.balance(Category::Moments, Home::Device).bytes;
    assert_eq!(held(), 2 * 4 * (SHAPE[0] * SHAPE[1]) as u64);
    state.forget_moments();
    assert!(held() == 0 && state.is_fresh());
    let masters = || accounts.balance(Category::MasterWeights, Home::Device).bytes;
    let value = Param::Device(stored_as(matrix(&device, 0.37), DType::BF16));
    state.reserve_master(value, &device, &accounts).expect("a master");
    assert!(state.has_master() && masters() == 4 * (SHAPE[0] * SHAPE[1]) as u64);
    state.forget_master();
    assert!(masters() == 0 && !state.has_master());
}
