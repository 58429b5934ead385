//! Which of `CubeK`'s ways to multiply matrices is the fastest at which shape: what `kernels/cube/product.rs` chooses
//! by.
//!
//! `cargo bench -p firebrick-kernels --bench products [-- WAY]`: a line of JSON for each way and shape, of the first
//! GPU. With the number of a way, that way alone: compiling kernels takes longer than running them, so several
//! processes may compile at once. They take turns at measuring.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

use burn::backend::Cube;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::kernels::CubeStagedMatmulRoutineSettings;
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level::Strategy;
use cubek::matmul::multi_level::components::tile::TileMatmulKind::{Cmma, Mma};
use cubek::matmul::multi_level::routines::batch::double_buffering::DoubleBufferingArgs;
use cubek::matmul::multi_level::routines::batch::ordered_double_buffering::OrderedSelectionArgs;
use cubek::matmul::multi_level::routines::batch::simple::SimpleArgs;
use cubek::matmul::routine::BlueprintStrategy::Inferred;
use cubek::matmul::tiled;
use cubek_std::InputBinding;
use firebrick_device::device::open;
use serde_json::json;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

type Way = cubek::matmul::strategy::Strategy;

/// Rows of the left matrix, the inner dimension, columns of the right one; whether each is stored the other way round.
struct Shape {
    name: &'static str,
    size: [usize; 3],
    transposed: [bool; 2],
}

const fn shape(name: &'static str, size: [usize; 3], transposed: [bool; 2]) -> Shape {
    Shape { name, size, transposed }
}

/// Products of Qwen2.5-0.5B: of 8,192 tokens in training and of 64 and 512 rows in decoding.
const SHAPES: &[Shape] = &[
    shape("gate forward", [8192, 896, 4864], [false, true]),
    shape("down forward", [8192, 4864, 896], [false, true]),
    shape("key forward", [8192, 896, 128], [false, true]),
    shape("query forward", [8192, 896, 896], [false, true]),
    shape("gate inputs", [8192, 4864, 896], [false, false]),
    shape("down inputs", [8192, 896, 4864], [false, false]),
    shape("key inputs", [8192, 128, 896], [false, false]),
    shape("gate weights", [4864, 8192, 896], [true, false]),
    shape("query weights", [896, 8192, 896], [true, false]),
    shape("key weights", [128, 8192, 896], [true, false]),
    shape("head forward", [1024, 896, 151_936], [false, true]),
    shape("head inputs", [1024, 151_936, 896], [false, false]),
    shape("head weights", [151_936, 1024, 896], [true, false]),
    shape("decode 512 gate up", [512, 896, 9728], [false, true]),
    shape("decode 512 down", [512, 4864, 896], [false, true]),
    shape("decode 512 qkv", [512, 896, 1152], [false, true]),
    shape("decode 64 gate up", [64, 896, 9728], [false, true]),
    shape("decode 64 down", [64, 4864, 896], [false, true]),
    shape("decode 64 qkv", [64, 896, 1152], [false, true]),
];

fn ways() -> Vec<(&'static str, Way)> {
    let simple = |tile_matmul, multi_rows| SimpleArgs { tile_matmul, multi_rows };
    let double = |tile_matmul, specialized| DoubleBufferingArgs { tile_matmul, specialized };
    let ordered = |tile_matmul, rows| OrderedSelectionArgs {
        tile_matmul,
        partition_k: Some(2),
        row_count: Some(rows),
        rows_per_plane: Some(2),
    };
    let many = vec![
        ("simple cyclic cmma", Strategy::SimpleCyclicCmma(Inferred(simple(Cmma, false)))),
        ("simple cyclic cmma, rows", Strategy::SimpleCyclicCmma(Inferred(simple(Cmma, true)))),
        ("simple cyclic mma", Strategy::SimpleCyclicMma(Inferred(simple(Mma, false)))),
        ("simple cyclic mma, rows", Strategy::SimpleCyclicMma(Inferred(simple(Mma, true)))),
        ("double cyclic cmma", Strategy::DoubleCyclicCmma(Inferred(double(Cmma, false)))),
        ("double cyclic mma", Strategy::DoubleCyclicMma(Inferred(double(Mma, false)))),
        ("double cyclic mma, specialized", Strategy::DoubleCyclicMma(Inferred(double(Mma, true)))),
        ("ordered double cmma 8", Strategy::OrderedDoubleCmma(Inferred(ordered(Cmma, 8)))),
        ("ordered double mma 8", Strategy::OrderedDoubleMma(Inferred(ordered(Mma, 8)))),
        ("ordered double mma 4", Strategy::OrderedDoubleMma(Inferred(ordered(Mma, 4)))),
        ("specialized cyclic mma", Strategy::SpecializedCyclicMma(Inferred(().into()))),
        ("simple tma mma", Strategy::SimpleTmaMma(Inferred(simple(Mma, false)))),
        ("simple tma mma, rows", Strategy::SimpleTmaMma(Inferred(simple(Mma, true)))),
        ("specialized tma cmma", Strategy::SpecializedTmaCmma(Inferred(().into()))),
        ("specialized tma mma", Strategy::SpecializedTmaMma(Inferred(().into()))),
    ];
    let tiled = tiled::Strategy::Cmma(CubeStagedMatmulRoutineSettings::DEFAULT);
    many.into_iter()
        .map(|(name, way)| (name, Way::MultiLevel(way)))
        .chain([("tiled cmma", Way::Tiled(tiled))])
        .collect()
}

fn primitive(tensor: Tensor<2>) -> CubeTensor {
    tensor.try_into_primitive::<Cube>().expect("a GPU's tensor")
}

fn matrix(rows: usize, columns: usize, transposed: bool, device: &Device) -> CubeTensor {
    let stored = if transposed { [columns, rows] } else { [rows, columns] };
    let spread = Distribution::Normal(0.0, 1.0);
    let values = Tensor::<2>::random(stored, spread, (device, DType::BF16));
    primitive(if transposed { values.transpose() } else { values })
}

fn multiply(way: &Way, [a, b]: &[CubeTensor; 2], out: &CubeTensor) -> Result<(), String> {
    let elem = dtype_to_storage_type(DType::BF16);
    let globals = MatmulGlobalElems { lhs: elem, rhs: elem, out: elem };
    let [left, right] = [a, b].map(|t| InputBinding::new(t.clone().binding(), elem));
    let mut types = MatmulElems::from_globals(&globals);
    launch_ref(way, &out.client, left, right, out.clone().binding(), &mut types).map_err(|error| format!("{error:?}"))
}

fn wait(tensor: &CubeTensor) {
    cubecl::future::block_on(tensor.client.sync()).expect("a device that answers");
}

/// Seconds of one product and its largest difference from the first way's, over the largest value.
fn measure(way: &Way, shape: &Shape, device: &Device) -> Result<(f64, f32), String> {
    let [m, k, n] = shape.size;
    let inputs = [matrix(m, k, shape.transposed[0], device), matrix(k, n, shape.transposed[1], device)];
    let out = || {
        let like = &inputs[0];
        empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), [m, n].into(), DType::BF16)
    };
    let (expected, found) = (out(), out());
    multiply(&Way::Auto, &inputs, &expected)?;
    multiply(way, &inputs, &found)?;
    wait(&found);
    let turn = File::create(std::env::temp_dir().join("firebrick-products")).map_err(|e| e.to_string())?;
    turn.lock().map_err(|e| e.to_string())?;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let started = Instant::now();
        for _ in 0..6 {
            multiply(way, &inputs, &found)?;
        }
        wait(&found);
        best = best.min(started.elapsed().as_secs_f64() / 6.0);
    }
    drop(turn);
    let [expected, found] = [expected, found].map(|t| Tensor::<2>::from_primitive::<Cube>(t).cast(DType::F32));
    let largest: f32 = expected.clone().abs().max().into_scalar();
    let apart: f32 = (expected - found).abs().max().into_scalar();
    Ok((best, apart / largest))
}

fn main() {
    let chosen = std::env::args().skip(1).find_map(|word| word.parse::<usize>().ok());
    let (device, _) = open("cuda".parse().expect("a name")).expect("a GPU");
    for (number, (name, way)) in ways().into_iter().enumerate() {
        if chosen.is_some_and(|chosen| chosen != number) {
            continue;
        }
        for shape in SHAPES {
            let found = catch_unwind(AssertUnwindSafe(|| measure(&way, shape, &device)));
            let found = found.unwrap_or_else(|_| Err("panicked".into()));
            let line = match found {
                Ok((seconds, apart)) => {
                    let flops = 2.0 * shape.size.iter().product::<usize>() as f64;
                    json!({"way": name, "shape": shape.name, "size": shape.size, "tflops": flops / seconds / 1e12, "apart": apart})
                }
                Err(why) => {
                    json!({"way": name, "shape": shape.name, "error": why.chars().take(200).collect::<String>()})
                }
            };
            println!("{line}");
        }
    }
}
