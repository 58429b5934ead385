//! Matmuls by cuBLASLt (`matmul: cublaslt`): on a card that has the library, and on the stand-ins for both (`tests/cuda`).
//!
//! The stand-ins read their settings when a process first uses CUDA, so each test runs itself again in a process for it.

use super::model_in;
use super::own_process::{again, is_inner};
use super::stand_in::{EARLY, is_stand_in};
use super::training::TRAINING;
use crate::kernels::products;
use crate::support::model::nll_rows;
use crate::support::{assert_gradient, checked, fixtures, relative_l2, report};
use burn::tensor::{DType, Device, Distribution, Tensor};
use firebrick_backends::Precision;
use firebrick_backends::kernels::{self, open_cublaslt, with_cublaslt};
use firebrick_backends::launches::count;
use firebrick_engine::config::parse;
use firebrick_engine::executor::{Residency, Runtime};
use firebrick_engine::learner::Learner;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::plan::{MemoryConfig, ParamOffload};
use firebrick_engine::trainer::Trainer;
use std::panic::{AssertUnwindSafe, catch_unwind};

const FAULT: &str = "STAND_IN_CUBLASLT";
const DRIVER: &str = "STAND_IN_DRIVER";

/// Every product, however small.
const ALL: Option<usize> = Some(0);

mod cuda {
    macro_rules! tests {
        ($($test:ident),* $(,)?) => {$(
            #[test]
            fn $test() {
                if let Some((device, _alone)) = crate::devices::gpu("cuda") {
                    super::$test(concat!("devices::cublaslt::cuda::", stringify!($test)), &device);
                }
            }
        )*};
    }

    tests!(
        products_and_their_gradients_are_their_formulas,
        products_and_kernels_wait_for_each_other,
        an_update_has_the_gradients_of_our_kernels_in_every_order_that_events_allow,
        a_product_without_a_kernel_of_the_library_has_one_of_ours,
        a_library_that_fails_says_so,
        a_run_that_cannot_use_it_is_refused_with_the_reason,
    );
}

/// True if the library can be used; always with the stand-in.
fn is_there(device: &Device) -> bool {
    match open_cublaslt(device) {
        Ok(version) => {
            report(&format!("cuBLASLt {version}"));
            true
        }
        Err(why) => {
            assert!(!is_stand_in(), "{why}");
            report(&format!("not run: {why}"));
            false
        }
    }
}

/// In every order of streams that the stand-in has; on a card in the order that there is.
fn in_every_order(test: &str, body: impl FnOnce()) {
    if !is_stand_in() || is_inner() {
        return body();
    }
    again(test, &[]);
    for early in ["kernels", "copies", "libraries"] {
        again(test, &[(EARLY, early)]);
    }
}

/// A result, and the kernels of ours that multiplied matrices for it.
fn gemms<R>(work: impl FnOnce() -> R) -> (R, u64) {
    let (result, counts) = count(work);
    (result, counts.get("gemm").copied().unwrap_or_default())
}

fn products_and_their_gradients_are_their_formulas(_: &str, device: &Device) {
    if !is_there(device) {
        return;
    }
    let ((), ours) = gemms(|| products::on_tensor_cores(device));
    let ((), left) = gemms(|| with_cublaslt(ALL, || products::on_tensor_cores(device)));
    assert!(ours > 0 && left == 0, "{ours} kernels of ours, and {left}");
}

/// Products and elementwise kernels in turns, each of which reads what the one before wrote.
fn products_and_kernels_wait_for_each_other(test: &str, device: &Device) {
    const TURNS: u64 = 24;
    if !is_there(device) {
        return;
    }
    in_every_order(test, || {
        let size = if is_stand_in() { 128 } else { 2048 };
        let random = || Tensor::<2>::random([size, size], Distribution::Normal(0.0, 1.0), (device, DType::BF16));
        let (start, w) = (random(), random());
        let scale = f64::from(size).sqrt().recip();
        let chain = || {
            let mut x = start.clone();
            for _ in 0..TURNS {
                x = kernels::linear_unpadded(&(x * scale), &w) + 0.5;
            }
            x.cast(DType::F32).try_into_vec_as::<f64>().expect("numbers")
        };
        let ((ours, by_ours), (library, by_library)) = (gemms(chain), gemms(|| with_cublaslt(ALL, chain)));
        assert_eq!([by_ours, by_library], [TURNS, 0], "kernels of ours");
        let apart = relative_l2(&library, &ours);
        assert!(apart < 0.05, "{apart}");
    });
}

/// What one update in bf16 does to the weights.
fn updated(memory: &MemoryConfig, least: Option<usize>, device: &Device) -> Vec<(String, Vec<f64>)> {
    let (model, golden) = model_in(Precision::Bf16, &fixtures().join("models/llama-gqa"), device);
    let plan = memory.plan(model.decoder.arch()).expect("a plan");
    let runtime = Runtime::new(device).with_prefetch(plan.prefetch).with_cublaslt(least);
    let optim = OptimConfig { clip_grad: None, weight_decay: 0.0, eps: 1e-3, ..OptimConfig::default() };
    let mut learner = Learner::new(model.decoder, plan, optim, runtime);
    learner.model.set_residency(Residency::Pass).expect("weights in their place");
    let rows = nll_rows(&golden);
    let read = |learner: &Learner| -> Vec<(String, Vec<f64>)> {
        let params = learner.decoder().params();
        params.map(|(spec, value)| (spec.name.clone(), value.download().expect("values").to_f64())).collect()
    };
    let before = read(&learner);
    let scores = learner.score(&rows, 1.0).expect("scores").logp;
    learner.update(&rows, 1.0, &Nll, 1.0).expect("an update");
    let moved = read(&learner).into_iter().zip(before).map(|((name, mut after), (_, before))| {
        after.iter_mut().zip(before).for_each(|(after, before)| *after -= before);
        (name, after)
    });
    let scores: Vec<f64> = scores.into_iter().flatten().map(f64::from).collect();
    moved.chain([("log-probs".to_owned(), scores)]).collect()
}

fn an_update_has_the_gradients_of_our_kernels_in_every_order_that_events_allow(test: &str, device: &Device) {
    if !is_there(device) {
        return;
    }
    in_every_order(test, || {
        let away = MemoryConfig {
            gradient_checkpointing: true,
            activation_offload: true,
            param_offload: ParamOffload::Streamed,
            ..MemoryConfig::default()
        };
        for memory in [MemoryConfig::default(), away] {
            let (ours, by_ours) = gemms(|| updated(&memory, None, device));
            let (library, left) = gemms(|| updated(&memory, ALL, device));
            assert!(by_ours > 0 && left == 0, "{by_ours} kernels of ours, and {left}");
            for ((name, ours), (_, library)) in ours.iter().zip(&library) {
                assert_gradient(name, library, ours, 0.05);
            }
            checked("parameters of an update by cuBLASLt", ours.len());
        }
    });
}

fn a_product_without_a_kernel_of_the_library_has_one_of_ours(test: &str, device: &Device) {
    if !is_stand_in() {
        return;
    }
    if !is_inner() {
        return again(test, &[(FAULT, "unsupported")]);
    }
    let ((), ours) = gemms(|| with_cublaslt(ALL, || products::on_tensor_cores(device)));
    assert!(ours > 0, "kernels of ours");
}

fn a_library_that_fails_says_so(test: &str, device: &Device) {
    if !is_stand_in() {
        return;
    }
    if !is_inner() {
        return again(test, &[(FAULT, "failing")]);
    }
    let panic = catch_unwind(AssertUnwindSafe(|| with_cublaslt(ALL, || products::on_tensor_cores(device))));
    let panic = panic.expect_err("it fails");
    let said = firebrick_backends::device::panic_message(panic.as_ref());
    for words in ["cuBLASLt does not multiply", "CUBLAS_STATUS_EXECUTION_FAILED", "matmul: firebrick"] {
        assert!(said.contains(words), "{said}");
    }
}

fn a_run_that_cannot_use_it_is_refused_with_the_reason(test: &str, _: &Device) {
    let temp = tempfile::tempdir().expect("a folder");
    let run = |settings: &[&str]| {
        let output = format!("output={}", temp.path().join("run").display());
        let settings: Vec<String> =
            ["matmul=cublaslt", &output].iter().chain(settings).map(|&setting| setting.to_owned()).collect();
        let trainer = parse(TRAINING, &settings).and_then(|config| Trainer::builder(config).build());
        trainer.map(|_| ()).map_err(|error| error.to_string())
    };
    if !is_stand_in() {
        return;
    }
    let bf16 = ["device=cuda", "precision=bf16"];
    if is_inner() {
        let why = run(&bf16).expect_err("it cannot be used");
        let expected = if std::env::var_os(DRIVER).is_some() { "CUDA 12.5" } else { "libcublasLt.so is not found" };
        assert!(why.contains("matmul: cublaslt") && why.contains(expected), "{why}");
        return;
    }
    run(&bf16).expect("it can be used");
    for (settings, words) in [
        (["device=cpu", "precision=bf16"], "this run's device is cpu"),
        (["device=cuda", "precision=f32"], "set precision: bf16"),
    ] {
        let why = run(&settings).expect_err("it cannot be used");
        assert!(why.contains("matmul: cublaslt") && why.contains(words), "{why}");
    }
    again(test, &[(DRIVER, "12040")]);
    let libraries = std::env::var("LD_LIBRARY_PATH").expect("the stand-in's folders");
    let without: Vec<&str> = libraries.split(':').filter(|folder| !folder.ends_with("/cublaslt")).collect();
    again(test, &[("LD_LIBRARY_PATH", &without.join(":"))]);
}
