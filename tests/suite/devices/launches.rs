//! Kernels of a decoding step on a GPU: matrices that are joined, and steps that are captured as graphs, change no
//! token and launch fewer.

use super::rollout::{Asked, DRAWN, PROMPTS, TRUNCATED, assert_same, run_captured};
use super::{backend, model, on_gpus};
use crate::support::fixtures;
use crate::support::model::{Model, nll_rows};
use crate::support::report;
use burn::tensor::{DType, Device, Tensor};
use firebrick_backends::device::Backend;
use firebrick_backends::kernels::{self, KvPool, SlotMapping, write_kv};
use firebrick_backends::launches::{LaunchCounts, before_each, count, total};
use firebrick_backends::memory::{read, read_pools};
use firebrick_backends::transfer::HostTensor;
use firebrick_backends::{MAX_GRAPHS, Precision};
use firebrick_engine::batch::Batch;
use firebrick_engine::executor::{Executor, Gradients, Runtime};
use firebrick_engine::learner::train_cut;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::optim::{AdamW, OptimConfig};
use firebrick_engine::plan::{Layout, MemoryConfig, ModelPlan};
use firebrick_engine::sequence::Sequence;
use firebrick_models::arch::Mixer;
use firebrick_models::{Arch, Decoder, KvCacheDtype, Prepack, Quantization};
use firebrick_sampler::{Generated, SchedulerConfig};
use serde_json::{Value, json};
use std::cell::Cell;
use std::hint::spin_loop;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

on_gpus! {
    before_a_launch_what_it_reads_and_what_it_writes_is_in_use,
    a_pool_that_is_being_made_is_written_in_place,
    joined_matrices_change_no_token,
    steps_that_replay_a_graph_draw_the_same_tokens,
    more_shapes_than_graphs_are_kept_draw_the_same_tokens,
    a_graph_reads_long_sequences_as_they_grow,
    weights_and_caches_in_8_bits_are_captured_too,
    joined_matrices_save_six_kernels_a_layer,
    few_rows_in_half_precision_take_five_kernels_a_layer,
    a_replayed_step_launches_no_kernel_of_a_layer,
    gated_delta_net_decodes_and_trains_through_its_kernels,
    a_shared_prompt_launches_the_kernels_of_a_repeated_one,
    an_uploaded_matrix_has_no_padding_between_its_rows,
    an_optimizer_step_updates_the_parameters_of_a_unit_in_one_launch,
}

fn before_a_launch_what_it_reads_and_what_it_writes_is_in_use(device: &Device) {
    let tensor = 4 << 20;
    let x = Tensor::<2>::ones([1 << 10, 1 << 10], device);
    let before = read(device).in_use_bytes;
    let most = Rc::new(Cell::new(0));
    let (seen, on) = (Rc::clone(&most), device.clone());
    let look = move || seen.set(seen.get().max(read_pools(&on).expect("pools").in_use_bytes));
    // the tensor that is summed is gone when the sum is there
    let y = before_each(look, || (x.clone() + x.clone()).sum());
    let after = read(device).in_use_bytes;
    drop(y);
    let (most, after) = (most.get() - before, after - before);
    assert!(most >= tensor && most < 2 * tensor, "{most} bytes");
    assert!(after < tensor, "{after} bytes");
}

/// The thread that serves a device allocates a pool, sooner or later, while this one asks for what writes it.
fn a_pool_that_is_being_made_is_written_in_place(device: &Device) {
    const POOLS: usize = 300;
    let device = &device.clone().inner();
    let new: Tensor<3> = Tensor::ones([1, 2, 32], device);
    let mapping = SlotMapping::new(vec![3], device);
    let (pools, launches) = count(|| {
        let pools = (0..POOLS).map(|i| {
            device.sync().expect("a device that works");
            let pool = KvPool::float(2, 64, 32, DType::F32, device);
            // what is asked for goes to that thread some launches at a time
            let mut other = Tensor::<1>::ones([1], device);
            for _ in 0..i % 40 {
                other = other * 2.0;
            }
            let (asked, later) = (Instant::now(), Duration::from_micros(i as u64 % 7 * 5));
            while asked.elapsed() < later {
                spin_loop();
            }
            write_kv(pool, [&new, &new], &mapping)
        });
        pools.collect::<Vec<_>>()
    });
    assert_eq!(pools.len(), POOLS);
    let copies = launches_of(&launches, "copy_kernel");
    assert_eq!(copies, 0, "{launches:?}");
}

const JOINED: Prepack = Prepack { panels: true, quantization: None };

/// The first of these that are needed are captured.
const SIZES: [usize; 4] = [1, 2, 4, 8];

/// Long enough for steps to be captured, with completions that end at different lengths.
const RAGGED: Asked = Asked { stop_ids: 3, new: 24, ..DRAWN };

fn sample(model: &Model, asked: Asked, limits: &SchedulerConfig, prepack: Prepack, sizes: &[usize]) -> Generated {
    let prompts = PROMPTS.map(<[u32]>::to_vec);
    run_captured(model, &prompts, asked, limits, prepack, sizes)
}

fn joined_matrices_change_no_token(device: &Device) {
    let limits = SchedulerConfig::new(64);
    for name in ["qwen2-tied", "qwen3-sharded", "gemma2", "mistral-window", "gemma3", "ministral3"] {
        let (model, _) = model(&fixtures().join("models").join(name), device);
        let joined = model.decoder.prepacked(JOINED).expect("copies");
        assert!(joined.prepacked_bytes() > 0, "{name}");
        let run = |prepack| sample(&model, DRAWN, &limits, prepack, &[]).samples;
        assert_same(&run(JOINED), &run(Prepack::default()));
    }
}

fn steps_that_replay_a_graph_draw_the_same_tokens(device: &Device) {
    for name in ["qwen2-tied", "qwen3-sharded"] {
        let (model, _) = model(&fixtures().join("models").join(name), device);
        for asked in [RAGGED, Asked { new: 16, ..TRUNCATED }] {
            for (prepack, ahead) in [(Prepack::default(), false), (JOINED, true)] {
                let limits = SchedulerConfig { async_scheduling: Some(ahead), ..SchedulerConfig::new(64) };
                let eager = sample(&model, asked, &limits, prepack, &[]);
                let replayed = sample(&model, asked, &limits, prepack, &SIZES);
                assert_same(&replayed.samples, &eager.samples);
                assert_eq!(eager.stats.graph_replays, 0);
                assert!(replayed.stats.graph_replays > 0, "{:?}", replayed.stats);
            }
        }
    }
}

/// On CUDA, Burn pads rows that are no multiple of 512 bytes where it uploads them, and kernels would copy them.
fn an_uploaded_matrix_has_no_padding_between_its_rows(device: &Device) {
    let matrix = |rows: usize| HostTensor::from_values(vec![0.5; rows * 96], [rows, 96]).upload(device);
    let (x, w, norm) = (matrix(5), matrix(64), matrix(1));
    let (_, launches) = count(|| kernels::linear(&kernels::rms_norm(&x, &norm, 1e-6, 0.0), &w));
    assert_eq!(launches_of(&launches, "copy_kernel"), 0, "{launches:?}");
}

fn more_shapes_than_graphs_are_kept_draw_the_same_tokens(device: &Device) {
    let (model, _) = model(&fixtures().join("models/qwen2-tied"), device);
    let asked = Asked { new: 48, n: 8, ..RAGGED };
    let run = |sizes: &[usize]| sample(&model, asked, &SchedulerConfig::new(64), JOINED, sizes);
    let sizes: Vec<usize> = (1..=2 * MAX_GRAPHS).collect();
    let (eager, replayed) = (run(&[]), run(&sizes));
    assert_same(&replayed.samples, &eager.samples);
    assert!(replayed.stats.graph_replays > 0, "{:?}", replayed.stats);
}

fn a_graph_reads_long_sequences_as_they_grow(device: &Device) {
    let Value::Object(config) = json!({
        "model_type": "qwen2", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2
    }) else {
        unreachable!("an object")
    };
    let arch = Arch::from_config(&config, Path::new("test")).expect("a valid architecture");
    let mut model = Model::load(&fixtures().join("models/qwen2-tied"));
    model.decoder = Decoder::random(arch, 1, device);
    // the longest passes 1,024 tokens, from which on its tokens are divided among cubes
    let long: Vec<u32> = (0..1014).map(|i| i * 31 % 59 + 3).collect();
    let prompts = [long, PROMPTS[0].to_vec()];
    let asked = Asked { new: 24, n: 1, ..DRAWN };
    let run = |sizes: &[usize]| run_captured(&model, &prompts, asked, &SchedulerConfig::new(4), JOINED, sizes);
    let (eager, replayed) = (run(&[]), run(&[2]));
    assert_same(&replayed.samples, &eager.samples);
    // both shapes have been captured
    assert!(replayed.stats.graph_replays > 12, "{:?}", replayed.stats);
}

fn weights_and_caches_in_8_bits_are_captured_too(device: &Device) {
    let (model, _) = model(&fixtures().join("models/qwen2-tied"), device);
    let limits = SchedulerConfig { kv_cache_dtype: KvCacheDtype::Int8, ..SchedulerConfig::new(64) };
    let eight_bits = Prepack { panels: false, quantization: Some(Quantization::Int8) };
    let asked = Asked { new: 16, ..DRAWN };
    for prepack in [eight_bits, JOINED] {
        let eager = sample(&model, asked, &limits, prepack, &[]);
        let replayed = sample(&model, asked, &limits, prepack, &SIZES);
        assert_same(&replayed.samples, &eager.samples);
        assert!(replayed.stats.graph_replays > 3, "{:?}", replayed.stats);
    }
}

/// Kernels that a decoding step launches, of six sequences of which none ends.
fn kernels_per_step(model: &Model, prepack: Prepack, sizes: &[usize]) -> f64 {
    let limits = SchedulerConfig::new(64);
    let run = |new| {
        let asked = Asked { new, ..DRAWN };
        let (generated, launches) = count(|| sample(model, asked, &limits, prepack, sizes));
        (generated.stats.decode_steps, total(&launches))
    };
    let ((few, first), (many, all)) = (run(10), run(30));
    (all - first) as f64 / (many - few) as f64
}

fn joined_matrices_save_six_kernels_a_layer(device: &Device) {
    let (model, _) = model(&fixtures().join("models/qwen2-tied"), device);
    let layers = model.decoder.arch().num_layers as f64;
    let separate = kernels_per_step(&model, Prepack::default(), &[]);
    let joined = kernels_per_step(&model, JOINED, &[]);
    assert!(joined + 6.0 * layers <= separate, "{separate} and {joined} kernels in {layers} layers");
}

/// On NVIDIA's tensor cores: with the same probabilities as kernels one by one, up to rounding.
fn few_rows_in_half_precision_take_five_kernels_a_layer(device: &Device) {
    if backend(device) != Backend::Cuda {
        return;
    }
    let Value::Object(config) = json!({
        "model_type": "qwen2", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2
    }) else {
        unreachable!("an object")
    };
    let mut arch = Arch::from_config(&config, Path::new("test")).expect("a valid architecture");
    arch.precision = Precision::Bf16;
    let layers = arch.num_layers as f64;
    let mut model = Model::load(&fixtures().join("models/qwen2-tied"));
    model.decoder = Decoder::random(arch, 1, device);
    let joined = kernels_per_step(&model, JOINED, &[]);
    // the first norm, and what a step does besides its layers
    assert!(joined <= 5.0 * layers + 12.0, "{joined} kernels in {layers} layers");

    let limits = SchedulerConfig::new(64);
    let run = |prepack| sample(&model, Asked { new: 24, ..DRAWN }, &limits, prepack, &[]).samples;
    let (found, expected) = (run(JOINED), run(Prepack::default()));
    let (mut alike, mut all) = (0, 0);
    for (found, expected) in found.iter().zip(&expected) {
        all += expected.tokens.len();
        // from the first other token on the text is another one
        let same = found.tokens.iter().zip(&expected.tokens).take_while(|(a, b)| a == b).count();
        for (a, b) in found.logps[..same].iter().zip(&expected.logps) {
            assert!((a - b).abs() < 0.1, "log-probs {a} and {b}");
        }
        alike += same;
    }
    assert!(10 * alike >= 8 * all, "{alike} of {all} tokens");
}

fn a_replayed_step_launches_no_kernel_of_a_layer(device: &Device) {
    let (model, _) = model(&fixtures().join("models/qwen2-tied"), device);
    let replayed = kernels_per_step(&model, JOINED, &SIZES);
    // inputs, a copy of the tokens, and what reading those may take
    assert!(replayed <= 3.0, "{replayed} kernels");
}

/// Launches of kernels whose names begin so.
fn launches_of(counts: &LaunchCounts, kernel: &str) -> u64 {
    let prefix = format!("{kernel}::");
    let own = counts.iter().filter(|(name, _)| name.starts_with(&prefix));
    own.map(|(_, launches)| launches).sum()
}

fn gated_delta_net_decodes_and_trains_through_its_kernels(device: &Device) {
    let (model, golden) = model(&fixtures().join("models/qwen3_5"), device);
    let arch = model.decoder.arch();
    let mixers = arch.count(Mixer::GatedDeltaNet) as u64;
    let limits = SchedulerConfig::new(64);
    let run = |new| {
        let asked = Asked { new, ..DRAWN };
        let (generated, launches) = count(|| sample(&model, asked, &limits, Prepack::default(), &[]));
        (generated.stats.decode_steps as u64, launches)
    };
    let ((few, first), (many, all)) = (run(10), run(30));
    for kernel in ["convolve_next", "log_decays_forward", "delta_rule_forward", "gated_normalise"] {
        let more = launches_of(&all, kernel) - launches_of(&first, kernel);
        assert_eq!(more, (many - few) * mixers, "{kernel}: {all:?}");
    }
    let step = (total(&all) - total(&first)) as f64 / (many - few) as f64;

    let rows = nll_rows(&golden);
    let plan = model.plain(1024);
    let whole = vec![rows.iter().collect()];
    let (_, trained) = count(|| model.backward(&plan, 1.0, &Nll, &whole));
    for (kernel, times) in [
        ("convolve", 1),
        ("convolution_backward", 1),
        ("log_decays_forward", 1),
        ("log_decays_backward", 1),
        // the backward pass runs through the sequences once more
        ("delta_rule_forward", 2),
        ("delta_rule_reverse", 1),
        ("delta_rule_chunks", 2),
        ("delta_rule_rows", 1),
        ("delta_rule_decays", 1),
        ("gated_normalise", 1),
        ("gated_norm_backward", 1),
    ] {
        let found = launches_of(&trained, kernel);
        assert_eq!(found, times * mixers, "{kernel}: {trained:?}");
    }
    report(&format!(
        "{} layers of Qwen 3.5: {step} kernels a decoding step, {} a micro-batch",
        arch.num_layers,
        total(&trained)
    ));
}

/// Without copies: rows of the matrices would have padding between them if Burn made them.
fn an_optimizer_step_updates_the_parameters_of_a_unit_in_one_launch(device: &Device) {
    if backend(device) != Backend::Cuda {
        return;
    }
    let Value::Object(config) = json!({
        "model_type": "qwen2", "vocab_size": 96, "hidden_size": 144, "intermediate_size": 208, "num_hidden_layers": 6,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": true
    }) else {
        unreachable!("an object")
    };
    let mut arch = Arch::from_config(&config, Path::new("test")).expect("a valid architecture");
    arch.precision = Precision::Bf16;
    let mut decoder = Decoder::random(arch, 1, device);
    let plan = MemoryConfig::default().plan(decoder.arch()).expect("a plan");
    let mut sequence = Sequence::completion(&[5, 7, 9], &[11, 13, 15, 17]);
    sequence.columns.weight = Some(vec![0.25; 4]);
    let sequences = [sequence];
    let batch = Batch::pack(&sequences, train_cut(&plan, &decoder)).expect("micro-batches");
    let runtime = Runtime::new(device);
    let mut optimizer = AdamW::new(OptimConfig::default(), &decoder);
    // the first step makes moments
    let steps = [(); 2].map(|()| {
        let mut gradients = Gradients::planned(decoder.specs().count(), &plan, &runtime);
        let executor = Executor::new(&plan, &runtime, 1.0);
        executor.backward(&mut decoder, &batch.micros(), &Nll, &mut gradients, None).expect("a backward pass");
        count(|| optimizer.step(&mut decoder, gradients, 1e-3, &runtime).expect("an optimizer step")).1
    });
    let launches = |name: &str| steps[1].get(name).copied().unwrap_or(0);
    let units = decoder.units().iter().filter(|unit| !unit.range.is_empty()).count() as u64;
    assert_eq!(launches("multi_tensor_adamw"), units, "{:?}", steps[1]);
    // 64 of 74 gradients, and the others
    assert_eq!((decoder.specs().count(), launches("multi_tensor_squares")), (74, 2), "{:?}", steps[1]);
    assert_eq!(total(&steps[1]), units + 2, "{:?}", steps[1]);
}

fn a_shared_prompt_launches_the_kernels_of_a_repeated_one(device: &Device) {
    let (model, _) = model(&fixtures().join("models/qwen2-tied"), device);
    let prompt: Vec<u32> = (3..19).collect();
    let rows: Vec<Sequence> = (1..=4)
        .map(|n| {
            let completion: Vec<u32> = (0..5 + n).map(|i| 7 * n + i).collect();
            let mut row = Sequence::completion(&prompt, &completion);
            row.columns.weight = Some(vec![0.1; completion.len()]);
            row
        })
        .collect();
    let launched = |layout| {
        let plan = ModelPlan { layout, ..model.plain(1024) };
        let batch = Batch::pack(&rows, train_cut(&plan, &model.decoder)).expect("one micro-batch");
        assert_eq!(batch.micros().len(), 1);
        let run = || model.backward(&plan, 1.0, &Nll, &batch.micros());
        // constants of a shape are made once
        run();
        total(&count(run).1)
    };
    let (shared, repeated) = (launched(Layout::SharedPrefix), launched(Layout::Packed));
    assert!(shared <= repeated, "{shared} kernels with a shared prompt, {repeated} with a repeated one");
    report(&format!("{shared} kernels a micro-batch with a shared prompt, {repeated} with a repeated one"));
}
