//! Shared code of all kernels: conversions of tensors, buffers, launch grids, reductions over the units of a row.

use crate::autodiff::{self, KernelBackend, enabled, kernel_backend};
use crate::choice::{Operation, used};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Device, FloatDType, Int, IntDType, Shape, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::{copy_contiguous, into_contiguous};
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, zeros_client};
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::{AddressType, ElemType};
use cubecl::prelude::*;
use cubecl::server::CubeCountSelection;
use firebrick_device::device::{Backend, is_cpu};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

kernel_backend!(Cube, into_contiguous);

/// Units of a cube: every GPU supports as many, and several such cubes fit on a multiprocessor.
pub(super) const UNITS: usize = 256;

/// Properties of a device, queried once.
#[derive(Clone, Copy, Debug)]
struct Traits {
    backend: Backend,
    f16: bool,
    bf16: bool,
}

fn traits(device: &Device) -> Traits {
    static KNOWN: Mutex<Vec<(Device, Traits)>> = Mutex::new(Vec::new());
    let device = device.clone().inner();
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, traits)) = known.iter().find(|(d, _)| *d == device) {
        return *traits;
    }
    let probe = Cube::primitive(Tensor::<1>::empty([1], &device));
    let traits = Traits {
        backend: backend(&probe.device),
        f16: device.supports_dtype(FloatDType::F16),
        bf16: device.supports_dtype(FloatDType::BF16),
    };
    known.push((device, traits));
    traits
}

/// Cargo features unify: with `vulkan` or `metal` built in, wgpu compiles to SPIR-V or MSL.
fn backend(device: &CubeDevice) -> Backend {
    match device {
        CubeDevice::Cuda(_) => Backend::Cuda,
        _ if cfg!(feature = "metal") => Backend::Metal,
        _ if cfg!(feature = "vulkan") => Backend::Vulkan,
        _ => Backend::Wgpu,
    }
}

/// Returns true if models on this device run an operation through its kernel.
pub(crate) fn available(operation: Operation, device: &Device) -> bool {
    let dtype = device.settings().float_dtype.into();
    enabled() && !is_cpu(device) && computes_in(operation, device, dtype)
}

/// Returns true if a kernel is used for a tensor: the device computes in its type, and models use the operation's
/// kernel there.
pub(super) fn supports<const D: usize>(operation: Operation, tensor: &Tensor<D>) -> bool {
    let device = tensor.device();
    enabled() && !is_cpu(&device) && computes_in(operation, &device, tensor.dtype())
}

/// Returns true if an operation's kernel is used for these tensors, all of one type.
pub(crate) fn alike<const D: usize>(operation: Operation, tensors: &[&Tensor<D>]) -> bool {
    tensors.iter().all(|t| supports(operation, *t) && t.dtype() == tensors[0].dtype())
}

/// [`alike`], without autodiff.
pub(crate) fn plain<const D: usize>(operation: Operation, tensors: &[&Tensor<D>]) -> bool {
    alike(operation, tensors) && tensors.iter().all(|t| !t.device().is_autodiff())
}

/// Returns true if kernels are used on a device at all.
pub(crate) fn enabled_on(device: &Device) -> bool {
    enabled() && !is_cpu(device)
}

fn computes_in(operation: Operation, device: &Device, dtype: DType) -> bool {
    let traits = traits(device);
    let computes = match dtype {
        DType::F32 => true,
        DType::F16 => traits.f16,
        DType::BF16 => traits.bf16,
        _ => false,
    };
    computes && used(operation, traits.backend)
}

/// A tensor without autodiff, contiguous.
pub(super) fn detached<const D: usize>(tensor: Tensor<D>) -> CubeTensor {
    autodiff::detached::<Cube, D>(tensor)
}

/// Indices as 32-bit integers, contiguous.
pub(super) fn integers(tensor: &Tensor<1, Int>) -> CubeTensor {
    let tensor = tensor.clone().cast(IntDType::I32);
    let opened = tensor.try_into_primitive::<Cube>();
    into_contiguous(opened.expect("the device was checked before"))
}

/// A new buffer on a tensor's device.
pub(super) fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    empty_device_contiguous_dtype(client, device, shape.into(), dtype)
}

/// A new buffer of which a kernel writes everything, or else zeros.
pub(super) fn empty_or_zeros(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType, whole: bool) -> CubeTensor {
    let shape = shape.into();
    if whole {
        return empty(like, shape, dtype);
    }
    // Burn pads rows of zeros on CUDA, unless there is only one
    let flat_shape = Shape::new([shape.num_elements()]);
    let flat = zeros_client(like.client.clone(), like.device.clone(), flat_shape, dtype);
    CubeTensor::new_contiguous(flat.client, flat.device, shape, flat.handle, flat.dtype)
}

/// Elements of a contiguous tensor in the same memory, in a shape.
pub(super) fn slice_of(tensor: &CubeTensor, elements: Range<usize>, shape: impl Into<Shape>) -> CubeTensor {
    let bytes = |elements: usize| (elements * tensor.elem_size()) as u64;
    let after = tensor.shape().num_elements() - elements.end;
    let handle = tensor.handle.clone().offset_start(bytes(elements.start)).offset_end(bytes(after));
    CubeTensor::new_contiguous(tensor.client.clone(), tensor.device.clone(), shape.into(), handle, tensor.dtype)
}

/// Returns true if nobody else has a tensor's buffer. The thread that serves the device holds a buffer while it
/// allocates it, so that one which is being made looks shared: then this waits until that thread has done what it was
/// asked for, and looks again.
pub(super) fn is_unshared(tensor: &CubeTensor) -> bool {
    tensor.can_mut() || tensor.client.exclusive(|| ()).is_ok() && tensor.can_mut()
}

/// A contiguous tensor that may be written to: the same where it is not shared, a contiguous copy otherwise.
pub(super) fn into_writable(tensor: CubeTensor) -> CubeTensor {
    if is_unshared(&tensor) {
        tensor
    } else {
        // Burn's own copy may have padding between rows on CUDA, and kernels count elements without it
        copy_contiguous(tensor)
    }
}

/// The buffer of an output: that of an input where it is not shared, and whether it is; otherwise a new one of its
/// shape and type.
pub(super) fn reuse_or_alloc(input: &CubeTensor) -> (CubeTensor, bool) {
    reuse_if(input.can_mut(), input)
}

/// The buffer of an output: an input's own, or a new one of its shape and type. Says which.
pub(super) fn reuse_if(reuse: bool, input: &CubeTensor) -> (CubeTensor, bool) {
    if reuse { (input.clone(), true) } else { (empty(input, input.shape(), input.dtype), false) }
}

/// The argument of an output that may be in the buffer of the `input`-th argument.
pub(super) fn output_arg(out: &CubeTensor, in_place: bool, input: usize) -> BufferArg {
    if in_place {
        let length = [out.shape().num_elements()];
        BufferArg::Alias { input_pos: input, length }
    } else {
        out.clone().into_buffer_arg()
    }
}

/// Types that a kernel takes as a buffer.
pub(super) trait IntoBuffer {
    fn into_buffer(self) -> BufferArg;
}

impl IntoBuffer for CubeTensor {
    fn into_buffer(self) -> BufferArg {
        self.into_buffer_arg()
    }
}

impl IntoBuffer for &CubeTensor {
    fn into_buffer(self) -> BufferArg {
        buffer(self)
    }
}

impl IntoBuffer for BufferArg {
    fn into_buffer(self) -> BufferArg {
        self
    }
}

/// A tensor as a kernel's buffer.
pub(super) fn buffer(tensor: &CubeTensor) -> BufferArg {
    tensor.clone().into_buffer_arg()
}

/// Launches a kernel: on a [`Grid`], with the length of vectors where it loads such, with buffers, then with its other
/// arguments.
macro_rules! launch {
    (
        $($kernel:ident)::+ $(::<$($generic:ty),+>)?, $grid:expr, $($vector:path,)? [$($buffer:expr),* $(,)?],
        $($argument:expr),+ $(,)?
    ) => {{
        let grid: &$crate::cube::launch::Grid = &$grid;
        $($kernel)::+::launch$(::<$($generic),+>)?(
            &grid.client,
            grid.count.clone(),
            grid.dim,
            grid.address,
            $($vector,)?
            $($crate::cube::launch::IntoBuffer::into_buffer($buffer),)*
            $($argument),+
        )
    }};
}
pub(super) use launch;

/// A tensor's element type, as kernels take it.
pub(super) fn elem(tensor: &CubeTensor) -> ElemType {
    dtype_to_storage_type(tensor.dtype)
}

/// The dimensions of a tensor.
pub(super) fn dims<const D: usize>(tensor: &CubeTensor) -> [usize; D] {
    tensor.shape().dims()
}

/// Elements that an elementwise kernel reads at a time, where rows have `n`: 16 bytes on CUDA where all buffers are
/// aligned to that, one elsewhere.
pub(super) fn vector_size<const N: usize>(tensors: [&CubeTensor; N], n: usize) -> usize {
    let size = 16 / tensors[0].elem_size();
    let aligned = |t: &&CubeTensor| t.handle.offset_start.unwrap_or(0).is_multiple_of(16);
    let fits = matches!(tensors[0].device, CubeDevice::Cuda(_)) && n.is_multiple_of(size);
    if fits && tensors.iter().all(aligned) { size } else { 1 }
}

/// Cubes that fill a GPU: two per multiprocessor, of which 32 are assumed where the device does not say.
pub(super) fn cubes_to_fill(like: &CubeTensor) -> usize {
    let hardware = &like.client.properties().hardware;
    2 * hardware.num_streaming_multiprocessors.map_or(32, |cores| cores as usize)
}

/// At least as many cubes as a launch needs; those beyond must do nothing.
pub(super) struct Grid {
    pub client: Client,
    pub count: CubeCount,
    pub dim: CubeDim,
    /// The address type that the largest buffer needs.
    pub address: AddressType,
}

impl Grid {
    /// Cubes of [`UNITS`] units. `largest` are the tensors of the launch that may be its largest.
    pub fn cubes<const N: usize>(largest: [&CubeTensor; N], count: usize) -> Self {
        Self::new(largest, count, CubeDim::new_1d(UNITS as u32))
    }

    /// Cubes of [`UNITS`] units, one unit for each of `count` elements.
    pub fn elements<const N: usize>(largest: [&CubeTensor; N], count: usize) -> Self {
        Self::cubes(largest, count.div_ceil(UNITS))
    }

    /// Cubes of some units.
    pub fn new<const N: usize>(largest: [&CubeTensor; N], count: usize, dim: CubeDim) -> Self {
        let client = largest[0].client.clone();
        let count = CubeCountSelection::new(&client, count as u32).cube_count();
        let address = largest.into_iter().map(CubeTensor::required_address_type).max();
        Self { client, count, dim, address: address.unwrap_or_default() }
    }
}

/// Rows of a cube and units of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RowGrid {
    pub units: usize,
    pub rows: usize,
}

impl RowGrid {
    /// For rows of `n` elements: a power of two of units, about one for every four elements. Short rows share a cube.
    pub fn new(n: usize) -> Self {
        let units = n.div_ceil(4).next_power_of_two().clamp(32, UNITS);
        Self { units, rows: UNITS / units }
    }

    /// Cubes for so many rows.
    pub fn cubes<const N: usize>(self, largest: [&CubeTensor; N], rows: usize) -> Grid {
        Grid::new(largest, rows.div_ceil(self.rows), CubeDim::new_2d(self.units as u32, self.rows as u32))
    }
}

/// A unit's row, which may be beyond the last.
#[cube]
pub(super) fn row_index(#[comptime] grid: RowGrid) -> usize {
    CUBE_POS * comptime!(grid.rows) + UNIT_POS_Y as usize
}

/// An element for every unit of a cube, for [`row_sum`] and [`row_max`].
#[cube]
pub(super) fn row_lanes(#[comptime] grid: RowGrid) -> Shared<[f32]> {
    Shared::<[f32]>::new_slice(comptime!(grid.units * grid.rows))
}

/// The sum of a value over the units of a row (those of one `UNIT_POS_Y`), in a fixed order. `lanes` has an element for
/// every unit of the cube, all of which must call this.
#[cube]
pub(super) fn row_sum(lanes: &mut Shared<[f32]>, value: f32, #[comptime] units: usize) -> f32 {
    row_reduce::<f32>(lanes, value, false, units)
}

/// The maximum of a value over the units of a row; see [`row_sum`].
#[cube]
pub(super) fn row_max<N: Numeric>(lanes: &mut Shared<[N]>, value: N, #[comptime] units: usize) -> N {
    row_reduce::<N>(lanes, value, true, units)
}

#[cube]
fn row_reduce<N: Numeric>(
    lanes: &mut Shared<[N]>,
    value: N,
    #[comptime] to_largest: bool,
    #[comptime] units: usize,
) -> N {
    let first = UNIT_POS_Y as usize * units;
    let lane = first + UNIT_POS_X as usize;
    lanes[lane] = value;
    sync_cube();
    let steps = comptime!(units.ilog2() as usize);
    #[unroll]
    for step in 0..steps {
        let half = comptime!(units >> (step + 1));
        if (UNIT_POS_X as usize) < half {
            let other = lanes[lane + half];
            if to_largest {
                lanes[lane] = max(lanes[lane], other);
            } else {
                lanes[lane] += other;
            }
        }
        sync_cube();
    }
    let result = lanes[first];
    sync_cube();
    result
}
