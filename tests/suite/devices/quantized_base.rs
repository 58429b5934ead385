//! Frozen bases in few bits: what a device widens and multiplies is what the host widens, and models beside such a base
//! are models of those numbers.

use super::{model, on_devices};
use crate::support::model::{Model, nll_rows, scored_rows};
use crate::support::{assert_all_close, assert_close, assert_gradient, checked, fixtures, folders, values};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use firebrick_backends::device::is_cpu;
use firebrick_backends::kernels::{self, ExpertInput, ExpertRows};
use firebrick_backends::launches::{count, total};
use firebrick_backends::quantized::{quantize, widened};
use firebrick_backends::transfer::HostTensor;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::plan::{MemoryConfig, ParamOffload};
use firebrick_engine::sequence::Sequence;
use firebrick_models::adapter::LoraConfig;
use firebrick_models::random::{DrawKey, Stream};
use firebrick_models::unit::TargetModule;
use firebrick_models::{BaseFormat, Decoder};
use firebrick_sampler::{GenerationRequest, Generator, SamplingParams};
use firebrick_spec::QuantizedLayout;
use std::path::PathBuf;

on_devices! {
    widened_numbers_are_those_of_the_host_to_the_bit,
    a_product_and_its_gradient_are_those_of_the_widened_matrix,
    few_rows_are_multiplied_with_codes_in_one_kernel,
    a_product_with_experts_and_its_gradient_are_those_of_their_widened_matrices,
    log_probs_are_those_of_the_model_of_the_widened_weights,
    gradients_of_adapters_are_those_beside_the_widened_weights_wherever_weights_live,
    the_sampler_and_the_trainer_agree_beside_a_quantised_base,
}

/// Log-probs of a quantised base and of the model of its widened weights.
const LOG_PROBS: f64 = 1e-5;
/// Gradient tensors of adapters, relative L2: the sums of a product's backward pass are cut otherwise.
const GRADIENTS: f64 = 1e-5;
/// Sampler and trainer.
const SAMPLED: f64 = 1e-4;

/// Rows that blocks and words do not end with, and a matrix whose last block, group and byte are not whole.
const SHAPES: [[usize; 2]; 4] = [[4, 64], [3, 43], [50, 33], [131, 127]];

fn matrix(layout: QuantizedLayout) -> HostTensor {
    let mut random = Stream::new(3, layout.numbers() as u64);
    let values: Vec<f32> = (0..layout.numbers()).map(|_| random.normal()).collect();
    quantize(&values, layout)
}

fn layouts() -> impl Iterator<Item = QuantizedLayout> {
    let all = BaseFormat::ALL.into_iter();
    all.flat_map(|format| SHAPES.map(|shape| QuantizedLayout::new(format, shape)))
}

/// The float types that a device has.
fn dtypes(device: &Device) -> Vec<DType> {
    let halves = [(FloatDType::BF16, DType::BF16), (FloatDType::F16, DType::F16)];
    let halves = halves.into_iter().filter(|(f, _)| device.supports_dtype(*f));
    let halves = halves.map(|(_, dtype)| dtype);
    std::iter::once(DType::F32).chain(halves).collect()
}

fn widened_numbers_are_those_of_the_host_to_the_bit(device: &Device) {
    for layout in layouts() {
        let host = matrix(layout);
        let expected = widened(host.words(), layout);
        let words = host.into_device(device);
        for dtype in dtypes(device) {
            let wide = kernels::dequantize(&words, layout, dtype);
            assert_eq!((wide.dims(), wide.dtype()), ([layout.rows, layout.cols], dtype));
            let shape = [layout.rows, layout.cols];
            let rounded = TensorData::new(expected.clone(), shape).convert_dtype(dtype);
            let rounded: Vec<f64> = rounded.iter::<f64>().collect();
            assert_eq!(values(wide), rounded, "{layout:?} in {dtype:?}");
        }
        // to the host and back, as weights that wait there
        let back = HostTensor::download(words).expect("words").into_verbatim();
        let bits = |words: &[f32]| words.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(back.words()), bits(matrix(layout).words()));
    }
}

fn a_product_and_its_gradient_are_those_of_the_widened_matrix(device: &Device) {
    for layout in layouts() {
        let words = matrix(layout).into_device(device);
        for dtype in dtypes(device) {
            let tolerance = if dtype == DType::F32 { 1e-5 } else { 2e-2 };
            for rows in [1, 9, 300] {
                let numbers = |columns: usize, stream: u64| -> Tensor<2> {
                    let mut random = Stream::new(4, stream);
                    let values: Vec<f32> = (0..rows * columns).map(|_| random.normal()).collect();
                    let data = TensorData::new(values, [rows, columns]).convert_dtype(dtype);
                    Tensor::from_data(data, (device, dtype))
                };
                let (x, up) = (numbers(layout.cols, 1), numbers(layout.rows, 2));
                let run = |of: &dyn Fn(&Tensor<2>) -> Tensor<2>| {
                    let leaf = x.clone().autodiff().require_grad();
                    let y = of(&leaf);
                    let mut gradients = (y.clone() * up.clone().autodiff()).sum().backward();
                    let dx = leaf.grad_remove(&mut gradients).expect("a gradient");
                    (values(y.inner()), values(dx))
                };
                let wide = kernels::dequantize(&words, layout, dtype);
                let found = run(&|x| kernels::quantized_linear(x, &words, layout));
                let expected = run(&|x| x.clone().matmul(wide.clone().autodiff().transpose()));
                let label = format!("{rows} rows, {layout:?} in {dtype:?}");
                assert_gradient(&label, &found.0, &expected.0, tolerance);
                assert_gradient(&label, &found.1, &expected.1, tolerance);
                let plain = values(kernels::quantized_linear(&x, &words, layout));
                assert_eq!(plain, found.0, "{label}: with and without a graph");
            }
        }
    }
}

/// No matrix is widened for a decoding step: rows that fill a kernel's tiles or not, and matrices that fill its panels
/// or not.
fn few_rows_are_multiplied_with_codes_in_one_kernel(device: &Device) {
    for (format, [outputs, inputs]) in [
        (BaseFormat::Int8, [33, 64]),
        (BaseFormat::Int8, [128, 300]),
        (BaseFormat::Nf4, [33, 64]),
        (BaseFormat::Nf4, [100, 1096]),
    ] {
        let layout = QuantizedLayout::new(format, [outputs, inputs]);
        let words = matrix(layout).into_device(device);
        for rows in [1, 2, 3, 16, 64] {
            let mut random = Stream::new(6, rows as u64);
            let numbers: Vec<f32> = (0..rows * inputs).map(|_| random.normal()).collect();
            let x = Tensor::<2>::from_data(TensorData::new(numbers, [rows, inputs]), device);
            let wide = kernels::dequantize(&words, layout, DType::F32);
            let expected = values(x.clone().matmul(wide.transpose()));
            let (found, mut launches) = count(|| kernels::quantized_linear(&x, &words, layout));
            // rows that a card has apart are put together first
            launches.remove("copy_kernel::CopyKernel");
            let found = values(found);
            assert_gradient(&format!("{rows} rows, {layout:?}"), &found, &expected, 1e-5);
            if !is_cpu(device) {
                assert_eq!(total(&launches), 1, "{rows} rows, {layout:?}: {launches:?}");
            }
        }
    }
}

fn a_product_with_experts_and_its_gradient_are_those_of_their_widened_matrices(device: &Device) {
    let (experts, per_token, tokens) = (5, 2, 40);
    // of which the last is never chosen
    let chosen: Vec<u32> = (0..tokens * per_token).map(|i| ((i * 7 + i / per_token) % (experts - 1)) as u32).collect();
    let rows = ExpertRows::new(&chosen, per_token, experts, device);
    for layout in layouts() {
        let layout = QuantizedLayout::stacked(layout.format, experts, [layout.rows, layout.cols]);
        let mut random = Stream::new(5, layout.numbers() as u64);
        let count = experts * layout.numbers();
        let values_of_all: Vec<f32> = (0..count).map(|_| random.normal()).collect();
        let host = quantize(&values_of_all, layout);
        // each expert is what it would be by itself
        for (expert, own) in values_of_all.chunks(layout.numbers()).enumerate() {
            let (alone, each) = (quantize(own, layout.one()), layout.words());
            let bits = |words: &[f32]| words.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
            let beside = &host.words()[expert * each..(expert + 1) * each];
            assert_eq!(bits(alone.words()), bits(beside), "{layout:?}, expert {expert}");
        }
        let wide_on_host = widened(host.words(), layout);
        let words = host.into_device(device);
        for dtype in dtypes(device) {
            let tolerance = if dtype == DType::F32 { 1e-5 } else { 2e-2 };
            let wide = kernels::dequantize(&words, layout, dtype);
            let data = TensorData::new(wide_on_host.clone(), layout.shape()).convert_dtype(dtype);
            assert_eq!(values(wide.clone()), data.iter::<f64>().collect::<Vec<_>>());
            for (reads, count) in [(ExpertInput::Tokens, tokens), (ExpertInput::Sorted, tokens * per_token)] {
                let numbers = |rows: usize, columns: usize| -> Tensor<2> {
                    let mut random = Stream::new(4, columns as u64);
                    let values: Vec<f32> = (0..rows * columns).map(|_| random.normal()).collect();
                    let data = TensorData::new(values, [rows, columns]).convert_dtype(dtype);
                    Tensor::from_data(data, (device, dtype))
                };
                let x = numbers(count, layout.cols);
                let up = numbers(tokens * per_token, layout.rows);
                let run = |of: &dyn Fn(&Tensor<2>) -> Tensor<2>| {
                    let leaf = x.clone().autodiff().require_grad();
                    let y = of(&leaf);
                    let mut gradients = (y.clone() * up.clone().autodiff()).sum().backward();
                    let dx = leaf.grad_remove(&mut gradients).expect("a gradient");
                    (values(y.inner()), values(dx))
                };
                let of_codes = |x: &Tensor<2>| kernels::quantized_expert_linear(x, &words, layout, &rows, reads);
                let found = run(&of_codes);
                let wide = wide.clone().autodiff();
                let expected = run(&|x| kernels::expert_linear(x, &wide, &rows, reads));
                let label = format!("{reads:?}, {layout:?} in {dtype:?}");
                assert_gradient(&label, &found.0, &expected.0, tolerance);
                assert_gradient(&label, &found.1, &expected.1, tolerance);
                assert_eq!(values(of_codes(&x)), found.0, "{label}: without a graph");
            }
        }
    }
}

/// Model folders: all on the CPU, three on a GPU.
fn models(device: &Device) -> Vec<PathBuf> {
    if !is_cpu(device) {
        return ["llama-gqa", "qwen2-tied", "gpt-oss"].map(|name| fixtures().join("models").join(name)).into();
    }
    folders("models")
}

/// Adapters of all matrices, whose B is not zero.
pub(super) fn adapted(base: &Decoder, rank: usize) -> Decoder {
    let mut targets = TargetModule::all();
    targets.extend([TargetModule::ExpertGateUp, TargetModule::ExpertDown]);
    let lora = LoraConfig { rank, alpha: 6.0, target_modules: targets, ..LoraConfig::default() };
    let mut random = Stream::new(13, 1);
    let adapted = base.with_adapters(lora, |_, spec| {
        let values: Vec<f32> = (0..spec.numel()).map(|_| 0.1 * random.normal()).collect();
        let data = TensorData::new(values, spec.rows_cols());
        Ok::<_, firebrick_models::Error>(Tensor::from_data(data, base.device()))
    });
    adapted.expect("adapters")
}

/// A model with a base in few bits, and the model of its widened weights.
fn pair(dir: &std::path::Path, format: BaseFormat, device: &Device) -> [Model; 2] {
    let [(mut few, _), (mut wide, _)] = [model(dir, device), model(dir, device)];
    let base = few.decoder.with_quantized_base(format).expect("a base");
    few.decoder = adapted(&base, 3);
    wide.decoder = adapted(&base.with_widened_base(), 3);
    assert!(few.decoder.num_params() == wide.decoder.num_params());
    [few, wide]
}

fn flat(model: &Model, rows: &[Sequence]) -> Vec<f64> {
    let scores = model.score(&model.plain(1024), 1.0, rows);
    scores.logp.iter().flatten().map(|&v| f64::from(v)).collect()
}

fn log_probs_are_those_of_the_model_of_the_widened_weights(device: &Device) {
    let mut cases = 0;
    for dir in models(device) {
        for format in BaseFormat::ALL {
            let [few, wide] = pair(&dir, format, device);
            let rows = scored_rows(&few.golden("forward.safetensors"));
            let label = format!("{}, {format}", few.name);
            let expected = flat(&wide, &rows);
            assert_all_close(&label, &flat(&few, &rows), &expected, LOG_PROBS);
            // the reference policy: the same base
            let [few, wide] = [few, wide].map(|mut model| {
                model.decoder = model.decoder.adapters_off();
                model
            });
            let reference = flat(&wide, &rows);
            assert_ne!(reference, expected, "adapters do something");
            assert_all_close(&label, &flat(&few, &rows), &reference, LOG_PROBS);
            cases += 1;
        }
    }
    checked("models with a base in few bits", cases);
}

type Setting = fn(&mut MemoryConfig);

fn gradients_of_adapters_are_those_beside_the_widened_weights_wherever_weights_live(device: &Device) {
    let settings: [(&str, Setting); 4] = [
        ("plain", |_| {}),
        ("checkpointed", |m| m.gradient_checkpointing = true),
        ("streamed", |m| {
            m.gradient_checkpointing = true;
            m.param_offload = ParamOffload::Streamed;
        }),
        ("streamed, inputs and gradients on the host", |m| {
            m.gradient_checkpointing = true;
            m.activation_offload = true;
            m.grad_offload = true;
            m.param_offload = ParamOffload::Streamed;
        }),
    ];
    let mut tensors = 0;
    for dir in models(device) {
        for format in BaseFormat::ALL {
            let [few, wide] = pair(&dir, format, device);
            let rows = nll_rows(&few.golden("forward.safetensors"));
            let micros = [rows.iter().collect::<Vec<_>>()];
            let (sums, expected) = wide.backward(&wide.plain(1024), 1.0, &Nll, &micros);
            for (name, set) in settings {
                let mut memory = MemoryConfig::default();
                set(&mut memory);
                let plan = memory.plan(few.decoder.arch()).expect("a plan");
                let (found_sums, found) = few.backward(&plan, 1.0, &Nll, &micros);
                let label = format!("{}, {format}, {name}", few.name);
                assert_close(&label, found_sums.loss, sums.loss, LOG_PROBS);
                assert!(found.keys().eq(expected.keys()), "{label}: {:?}", found.keys());
                for (parameter, found) in &found {
                    let label = format!("{label}: {parameter}");
                    assert_gradient(&label, found, &expected[parameter], GRADIENTS);
                    tensors += 1;
                }
            }
        }
    }
    checked("gradient tensors beside a base in few bits", tensors);
}

fn the_sampler_and_the_trainer_agree_beside_a_quantised_base(device: &Device) {
    let mut tokens = 0;
    for name in ["llama-gqa", "qwen2-tied", "qwen3-moe", "gpt-oss"] {
        for format in BaseFormat::ALL {
            let [few, wide] = pair(&fixtures().join("models").join(name), format, device);
            let sampling = SamplingParams { max_new_tokens: 8, ..SamplingParams::default() };
            let requests: Vec<GenerationRequest> = (0..3)
                .map(|prompt_index| GenerationRequest {
                    tokens: (0..4).map(|i| 7 + 31 * i + prompt_index).collect(),
                    key: DrawKey { seed: 3, step: 1, prompt_index, sample: 0 },
                    max_new_tokens: None,
                })
                .collect();
            let samples = |model: &Model| {
                let generator = Generator::new(&model.decoder, None, &sampling).expect("settings");
                generator.run(&requests, 2, 16).expect("samples")
            };
            let found = samples(&few);
            for (found, expected) in found.iter().zip(samples(&wide)) {
                assert_eq!(found.tokens, expected.tokens, "{name}, {format}");
            }
            for sample in &found {
                let prompt = &requests[sample.request].tokens;
                let row = Sequence::completion(prompt, &sample.tokens);
                let trained = flat(&few, &[row]);
                let sampled: Vec<f64> = sample.full_logps.iter().map(|&v| f64::from(v)).collect();
                let label = format!("{name}, {format}");
                assert_all_close(&label, &sampled, &trained[..sampled.len()], SAMPLED);
                tokens += sampled.len();
            }
        }
    }
    checked("sampled tokens beside a base in few bits", tokens);
}
