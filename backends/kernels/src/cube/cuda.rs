//! Kernels in CUDA C++, which NVRTC compiles. `CubeCL` launches them without dynamic shared memory, so that a block has
//! no more than the 48 KiB that a source may declare.

use super::prelude::*;
#[cfg(feature = "cuda")]
use burn_cubecl::CubeDevice;
use cubecl::ir::attributes::BufferIOAttr;
use cubecl::ir::metadata::Info;
use cubecl::ir::{AddressType, ElemType, Scope, UIntKind};
use cubecl::server::{KernelArguments, MetadataBindingInfo};
use cubecl::{CubeKernel, PrecompiledSource};
use firebrick_spec::Activation;
use std::fmt::{self, Debug, Display, Formatter};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Instructions of PTX, as functions.
pub(super) const PTX: &str = include_str!("cuda/ptx.cuh");

/// Rows of heads in shared memory, and scores of attention, for a `DIM`, `SCALE`, `CAPPED` and `CAP`.
pub(super) const HEADS: &str = include_str!("cuda/heads.cuh");

/// The gate of an MLP, for a `GATE` ([`gate_constant`]).
pub(super) const GATE: &str = include_str!("cuda/gate.cuh");

/// A kernel's compile-time parameters, from which its source follows.
pub(super) trait CudaSource: Clone + Debug + Eq + Hash + Send + Sync + 'static {
    /// Name of the function that is launched.
    fn entry_point(&self) -> &'static str;

    /// Threads of a block.
    fn threads(&self) -> usize;

    /// CUDA C++, with `extern "C" __global__` before the entry point. Its last parameter is an `info_st` of the
    /// lengths of all buffers (`static_meta`), then of the launch's sizes.
    fn source(&self) -> String;

    /// Hash of the sources, which are no part of the keys of caches of compiled kernels.
    fn fingerprint() -> u64;
}

/// A number in a kernel's source, compared by its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Constant(u32);

impl Constant {
    /// Holds a number.
    pub fn new(value: f32) -> Self {
        Self(value.to_bits())
    }
}

impl Display for Constant {
    /// The number as CUDA C++ writes it.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{:e}f", f32::from_bits(self.0))
    }
}

/// Hash of some sources.
pub(super) fn fingerprint(sources: impl IntoIterator<Item = String>) -> u64 {
    let mut hasher = DefaultHasher::new();
    sources.into_iter().for_each(|source| source.hash(&mut hasher));
    hasher.finish()
}

/// Types of a source's numbers in half precision: `Element`, and its name in PTX as a macro.
pub(super) fn element_types(dtype: DType) -> String {
    let (element, name) = match dtype {
        DType::F16 => ("__half", "f16"),
        _ => ("__nv_bfloat16", "bf16"),
    };
    format!(
        "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n\
         typedef unsigned int u32;\ntypedef unsigned long long u64;\n\
         typedef {element} Element;\n#define ELEMENT \"{name}\"\n"
    )
}

/// The activation of a source's gate.
pub(super) fn gate_constant(activation: Activation) -> String {
    let name = match activation {
        Activation::Silu => "SILU",
        Activation::Gelu => "GELU",
        Activation::GeluTanh => "GELU_TANH",
    };
    format!("enum {{ SILU, GELU, GELU_TANH }};\nstatic const int GATE = {name};\n")
}

#[derive(Debug)]
struct CudaKernel<S>(S);

impl<S: CudaSource> KernelMetadata for CudaKernel<S> {
    fn name(&self) -> &'static str {
        self.0.entry_point()
    }

    fn id(&self) -> KernelId {
        let threads = CubeDim::new_1d(self.0.threads() as u32);
        KernelId::new::<Self>().info((self.0.clone(), S::fingerprint())).cube_dim(threads.0)
    }

    fn address_type(&self) -> ElemType {
        UIntKind::U64.into()
    }
}

impl<S: CudaSource> CubeKernel for CudaKernel<S> {
    /// An empty body: `source` has the kernel.
    fn define(&self) -> KernelDefinition {
        let threads = CubeDim::new_1d(self.0.threads() as u32);
        let settings = KernelSettings::new(threads.0, ExecutionMode::Checked, AddressType::U64);
        KernelDefinition { body: Scope::root(settings.clone()), settings, info: Info::default() }
    }

    fn source(&self) -> Option<PrecompiledSource> {
        let entrypoint_name = self.0.entry_point().into();
        Some(PrecompiledSource { source: self.0.source(), entrypoint_name, lang: "cuda" })
    }
}

/// Launches a kernel on some blocks, with buffers that it reads, buffers that it writes, and sizes, in the order of its
/// parameters.
pub(super) fn launch_cuda<S: CudaSource>(
    source: S,
    blocks: [usize; 2],
    buffers: &[(&CubeTensor, BufferIOAttr)],
    sizes: &[usize],
) {
    let lengths = buffers.iter().map(|(t, _)| t.handle.size_in_used() / t.elem_size() as u64);
    let info: Vec<u64> = lengths.chain(sizes.iter().map(|&size| size as u64)).collect();
    let words = info.len();
    let arguments = buffers
        .iter()
        .fold(KernelArguments::new(), |arguments, (t, io)| arguments.with_buffer_io(t.handle.clone().binding(), *io));
    buffers[0].0.client.launch(
        Box::new(CudaKernel(source)),
        CubeCount::Static(blocks[0] as u32, blocks[1] as u32, 1),
        arguments.with_info(MetadataBindingInfo::new(info, words)),
    );
}

/// Major compute capability of a tensor's device; `None` if it is none of NVIDIA's.
#[cfg(feature = "cuda")]
pub(super) fn compute_capability(like: &CubeTensor) -> Option<i32> {
    use cudarc::driver::CudaContext;
    use std::sync::{Mutex, PoisonError};

    static KNOWN: Mutex<Vec<(usize, Option<i32>)>> = Mutex::new(Vec::new());
    let CubeDevice::Cuda(cuda) = &like.device else {
        return None;
    };
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, major)) = known.iter().find(|(index, _)| *index == cuda.index) {
        return *major;
    }
    // the primary context, which CubeCL has too
    let capability = CudaContext::new(cuda.index).and_then(|context| context.compute_capability());
    let major = capability.ok().map(|(major, _)| major);
    known.push((cuda.index, major));
    major
}

/// None: this build has no CUDA.
#[cfg(not(feature = "cuda"))]
pub(super) fn compute_capability(_like: &CubeTensor) -> Option<i32> {
    None
}
