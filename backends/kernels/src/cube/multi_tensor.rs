//! Optimizer kernels of several matrices in one launch on NVIDIA GPUs, as `PyTorch`'s `multi_tensor_apply`: a model has
//! hundreds of parameters, most of which take less time than their launch.

use super::adamw::Update;
use super::cuda::{CudaSource, compute_capability, fingerprint, launch_cuda};
use super::prelude::*;
use cubecl::ir::attributes::BufferIOAttr::{ReadOnly, ReadWrite, WriteOnly};
use std::sync::LazyLock;

const MATRICES: &str = include_str!("multi_tensor/matrices.cuh");
const ADAMW: &str = include_str!("multi_tensor/adamw.cu");
const SQUARES: &str = include_str!("multi_tensor/squares.cu");

/// Threads of a block, and the elements of a matrix that it has.
const THREADS: usize = 256;
const CHUNK: usize = 16 * THREADS;

/// Slices of a launch of `AdamW`, and matrices of one of sums of squares: as many as a kernel's parameters, at most 4 KiB,
/// have room for.
const SLICES: usize = 16;
const SUMMED: usize = 64;

/// Compile-time parameters of a kernel: the types of its buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Variant {
    AdamW { gradient: DType, moments: DType, stored: Option<DType> },
    Squares(DType),
}

impl Variant {
    /// Matrices of a launch.
    fn matrices(self) -> usize {
        match self {
            Self::AdamW { .. } => SLICES,
            Self::Squares(_) => SUMMED,
        }
    }

    /// Parameters of the kernel: types, names, and how many there are of each, by the macro that gives a place in one.
    fn buffers(self) -> Vec<(&'static str, &'static str, &'static str, usize)> {
        let each = self.matrices();
        match self {
            Self::AdamW { stored, .. } => {
                let mut buffers = vec![
                    ("VALUE", "float*", "value", each),
                    ("GRADIENT", "Gradient const*", "gradient", each),
                    ("FIRST", "Moment const*", "first", each),
                    ("SECOND", "Moment const*", "second", each),
                    ("NEW_FIRST", "Moment*", "new_first", each),
                    ("NEW_SECOND", "Moment*", "new_second", each),
                ];
                buffers.extend(stored.map(|_| ("STORED", "Stored*", "stored", each)));
                buffers
            }
            Self::Squares(_) => vec![("NUMBERS", "Element const*", "numbers", each), ("SUMS", "float*", "sums", 1)],
        }
    }

    fn types(self) -> String {
        let of = |(name, dtype): (&str, DType)| {
            let element = match dtype {
                DType::F16 => "__half",
                DType::BF16 => "__nv_bfloat16",
                _ => "float",
            };
            format!("typedef {element} {name};\n")
        };
        match self {
            Self::AdamW { gradient, moments, stored } => {
                let stored = stored.map(|dtype| ("Stored", dtype));
                [("Gradient", gradient), ("Moment", moments)].into_iter().chain(stored).map(of).collect()
            }
            Self::Squares(dtype) => of(("Element", dtype)),
        }
    }
}

impl CudaSource for Variant {
    fn entry_point(&self) -> &'static str {
        match self {
            Self::AdamW { .. } => "multi_tensor_adamw",
            Self::Squares(_) => "multi_tensor_squares",
        }
    }

    fn threads(&self) -> usize {
        THREADS
    }

    fn source(&self) -> String {
        let buffers = self.buffers();
        let of = |&(_, kind, name, count): &(_, _, _, usize)| (0..count).map(move |i| format!("{kind} {name}{i}"));
        let parameters: Vec<String> = buffers.iter().flat_map(of).collect();
        let place = |&(of, _, name, count): &(&str, _, &str, usize)| {
            let others = (1..count).rev().map(|i| format!("matrix == {i} ? &{name}{i}[at] : "));
            format!("#define {of}(matrix, at) ({}&{name}0[at])\n", others.collect::<Vec<_>>().concat())
        };
        let places: String = buffers.iter().map(place).collect();
        let head = format!(
            "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\ntypedef unsigned int u32;\ntypedef unsigned long long u64;\n\
             #define BUFFER_COUNT {}\n\
             static const u32 THREADS = {THREADS}, CHUNK = {CHUNK}, MATRICES = {};\n",
            parameters.len(),
            self.matrices()
        );
        let kernel = match self {
            Self::AdamW { .. } => ADAMW,
            Self::Squares(_) => SQUARES,
        };
        let kernel = kernel.replace("(BUFFERS,", &format!("({},", parameters.join(", ")));
        [&head, &self.types(), &places, MATRICES, &kernel].concat()
    }

    fn fingerprint() -> u64 {
        static SOURCES: LazyLock<u64> = LazyLock::new(|| {
            let adamw = Variant::AdamW { gradient: DType::F32, moments: DType::F32, stored: Some(DType::BF16) };
            fingerprint([adamw, Variant::Squares(DType::F32)].map(|variant| variant.source()))
        });
        *SOURCES
    }
}

/// Returns true if these kernels run on a tensor's device.
pub(super) fn takes(like: &CubeTensor) -> bool {
    compute_capability(like).is_some()
}

/// Launches updates of slices of parameters, in as few launches as their types allow.
pub(super) fn adamw(mut updates: Vec<Update>) {
    while let Some(dtypes) = updates.first().map(Update::dtypes) {
        let (alike, others) = updates.into_iter().partition::<Vec<Update>, _>(|update| update.dtypes() == dtypes);
        let (gradient, moments, stored) = dtypes;
        let variant = Variant::AdamW { gradient, moments, stored };
        alike.chunks(SLICES).for_each(|updates| launch_adamw(variant, updates));
        updates = others;
    }
}

fn launch_adamw(variant: Variant, updates: &[Update]) {
    // what is left of the kernel's slices is empty
    let slots = || (0..SLICES).map(|i| updates.get(i).unwrap_or(&updates[0]));
    let mut buffers: Vec<_> = slots().map(|one| (&one.value, ReadWrite)).collect();
    buffers.extend(slots().map(|one| (&one.gradient, ReadOnly)));
    for moment in 0..2 {
        buffers.extend(slots().map(|one| (&one.before[moment], ReadOnly)));
    }
    for moment in 0..2 {
        buffers.extend(slots().map(|one| (&one.after[moment], WriteOnly)));
    }
    buffers.extend(slots().filter_map(|one| one.stored.as_ref()).map(|stored| (stored, WriteOnly)));
    let words = |i: usize| updates.get(i).map_or([0; 7], words);
    let sizes: Vec<usize> = (0..SLICES).flat_map(words).collect();
    let blocks = updates.iter().map(|update| update.elements.div_ceil(CHUNK)).sum();
    launch_cuda(variant, [blocks, 1], &buffers, &sizes);
}

/// The words of an update in the kernel's parameters.
fn words(update: &Update) -> [usize; 7] {
    let step = &update.step;
    let [b1, b2] = step.betas;
    let pair = |low: f64, high: u32| (u64::from((low as f32).to_bits()) | u64::from(high) << 32) as usize;
    let floats = |low: f64, high: f64| pair(low, (high as f32).to_bits());
    [
        update.start,
        update.elements,
        floats(step.clip, b1),
        floats(1.0 - b1, b2),
        floats(1.0 - b2, step.second_root),
        floats(step.eps, step.rate),
        pair(step.keep, u32::from(update.fresh)),
    ]
}

/// See [`crate::sums_of_squares`].
pub(crate) fn sums_of_squares(matrices: &[Tensor<2>]) -> Option<Tensor<1>> {
    let mut matrices: Vec<CubeTensor> = matrices.iter().map(|matrix| detached(matrix.clone())).collect();
    matrices.retain(|matrix| matrix.shape().num_elements() > 0);
    let known = |matrix: &CubeTensor| matches!(matrix.dtype, DType::F32 | DType::F16 | DType::BF16);
    if !matrices.first().is_some_and(takes) || !matrices.iter().all(known) {
        return None;
    }
    let chunks = |matrix: &CubeTensor| matrix.shape().num_elements().div_ceil(CHUNK);
    let sums = empty(&matrices[0], [matrices.iter().map(chunks).sum::<usize>()], DType::F32);
    let mut first = 0;
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let alike: Vec<&CubeTensor> = matrices.iter().filter(|matrix| matrix.dtype == dtype).collect();
        for matrices in alike.chunks(SUMMED) {
            let slots = (0..SUMMED).map(|i| (*matrices.get(i).unwrap_or(&matrices[0]), ReadOnly));
            let buffers: Vec<_> = slots.chain([(&sums, WriteOnly)]).collect();
            let elements = (0..SUMMED).map(|i| matrices.get(i).map_or(0, |matrix| matrix.shape().num_elements()));
            let sizes: Vec<usize> = elements.chain([first]).collect();
            let blocks: usize = matrices.iter().map(|matrix| chunks(matrix)).sum();
            launch_cuda(Variant::Squares(dtype), [blocks, 1], &buffers, &sizes);
            first += blocks;
        }
    }
    Some(Cube::tensor(sums))
}
