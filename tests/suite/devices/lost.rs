//! A GPU that is lost in the middle of a run, on wgpu: the run ends with an error that says so, its checkpoint is
//! whole, and it goes on in a new process.
//!
//! A lost device stays lost for its process, so each run has one of its own.

use super::own_process::{again, is_inner};
use crate::devices::gpu;
use crate::support::{checked, report};
use burn::tensor::wgpu::wgpu::Device as OpenedDevice;
use burn::tensor::{Device, DeviceKind, DeviceType};
use firebrick_engine::config::{RunConfig, parse};
use firebrick_engine::metrics::{Event, Observer, Phase};
use firebrick_engine::trainer::{Start, Trainer};
use std::path::PathBuf;

/// The folder of the runs, which processes of the test share.
const FOLDER: &str = "FIREBRICK_TEST_FOLDER";
/// What a process of the test is for.
const PART: &str = "FIREBRICK_TEST_PART";
const TEST: &str = "devices::lost::wgpu::a_run_whose_device_is_lost_says_so_and_resumes_in_a_new_process";

const CONFIG: &str = "
model:
  arch: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
         max_position_embeddings: 32}
task: {kind: arithmetic, difficulty: 1, partial: true, validation_size: 4}
output: run
device: wgpu
rollout: {n: 2, prompt_length: 6, response_length: 4}
trainer: {steps: 3, train_batch_size: 2, seed: 5, test_freq: 0, save_freq: 1}
";

mod wgpu {
    #[test]
    fn a_run_whose_device_is_lost_says_so_and_resumes_in_a_new_process() {
        super::in_processes();
    }
}

fn in_processes() {
    if is_inner() {
        return match &*std::env::var(PART).expect("the outer test sets it") {
            "lost" => loses(),
            "resumed" => runs("lost", Start::Resume),
            "whole" => runs("whole", Start::Fresh),
            part => unreachable!("{part}"),
        };
    }
    let Some((device, alone)) = gpu("wgpu") else {
        return;
    };
    if kind_of(&device).is_none() {
        return report("not run: no device that this test can lose");
    }
    drop(alone);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_str().expect("a path in UTF-8");
    for part in ["lost", "resumed", "whole"] {
        again(TEST, &[(FOLDER, path), (PART, part)]);
    }
    let samples = |run: &str| {
        let file = folder.path().join(run).join("samples.jsonl");
        std::fs::read_to_string(file).expect("samples")
    };
    assert_eq!(samples("lost"), samples("whole"));
    checked("runs whose device was lost", 1);
}

fn folder() -> PathBuf {
    std::env::var_os(FOLDER).expect("the outer test sets it").into()
}

fn config(run: &str) -> RunConfig {
    let mut config = parse(CONFIG, &[]).expect("a configuration");
    config.output = folder().join(run);
    config
}

fn runs(run: &str, start: Start) {
    let built = Trainer::builder(config(run)).start(start).build();
    let summary = built.expect("a run").run().expect("a summary");
    assert_eq!(summary.steps, 3);
}

/// The kind by which Burn opens a device.
fn kind_of(device: &Device) -> Option<DeviceKind> {
    let kinds = [DeviceKind::Cpu, DeviceKind::DiscreteGpu(0), DeviceKind::IntegratedGpu(0), DeviceKind::VirtualGpu(0)];
    kinds.into_iter().find(|kind| Device::wgpu(kind.clone()) == *device)
}

/// Destroys a device when a step's phase begins.
struct Loses {
    device: OpenedDevice,
    from: (Phase, u64),
}

impl Observer for Loses {
    fn event(&mut self, event: Event<'_>) {
        if let Event::Phase { step, phase } = event
            && (phase, step) == self.from
        {
            self.device.destroy();
        }
    }
}

fn loses() {
    let device = Device::enumerate(DeviceType::Wgpu).into_vec().remove(0);
    let kind = kind_of(&device).expect("the outer test knows it");
    // the device that the run is going to use, with a handle of our own
    let opened = Device::wgpu_options().device_kind(kind).init_with_setup();
    let (_, setup) = opened.expect("a device that nobody has used yet");
    let observer = Loses { device: setup.device, from: (Phase::UpdateActor, 2) };
    let built = Trainer::builder(config("lost")).observer(observer).build();
    let error = built.expect("a run").run().expect_err("a lost device");
    let said = error.to_string();
    report(&said);
    for part in ["update_actor", "lost", "resume"] {
        assert!(said.contains(part), "{part} is not in: {said}");
    }
}
