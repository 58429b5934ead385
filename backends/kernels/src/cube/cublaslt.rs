//! Matrix products by cuBLASLt, NVIDIA's library, which is opened at run time. Its kernels have more shared memory than
//! the 48 KiB of a block that `CubeCL` leaves to a source of ours (`cuda.rs`).

#![allow(unsafe_code, reason = "cuBLASLt is a library of C")]

mod side_stream;

use super::prelude::*;
use burn_cubecl::CubeDevice;
use cubecl::cuda::CudaRuntime;
use cubecl::server::Handle;
use cubecl_runtime::runtime::Runtime;
use cudarc::cublaslt::result::{self as lt, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasLtMatmulDescAttributes_t as Of, cublasLtMatmulPreferenceAttributes_t as Prefers,
};
use cudarc::driver::sys::CUstream;
use firebrick_spec::CUBLASLT_WORKSPACE;
use side_stream::SideStream;
use std::any::Any;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

/// A column-major matrix, as the library reads matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand<'a> {
    pub matrix: &'a CubeTensor,
    /// True if its transpose is multiplied.
    pub transposed: bool,
    /// Numbers from one column in memory to the next.
    pub pitch: usize,
}

/// Row-major `out = a · b`: `[m, k] · [k, n]` of one half-precision type, summed in f32.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matmul<'a> {
    /// Column-major `[k, m]`, or its transpose.
    pub a: Operand<'a>,
    /// Column-major `[n, k]`, or its transpose.
    pub b: Operand<'a>,
    /// `m`, `n`, `k`.
    pub sizes: [usize; 3],
    /// A contiguous matrix or one row of the result's type, which is added before the result is rounded.
    pub plus: Option<&'a CubeTensor>,
    /// True if the product is added to what is there.
    pub adds: bool,
    /// Contiguous, of the operands' type or f32.
    pub out: &'a CubeTensor,
}

/// Reason why matmuls were not launched.
pub(super) enum Refused {
    /// A buffer was not allocated or not computed: a kernel launched on it reports the error.
    Buffer,
    /// The library has no kernel for a product.
    Shape,
    /// The library or the driver fails.
    Failed(String),
}

impl From<CublasError> for Refused {
    fn from(error: CublasError) -> Self {
        match error.0 {
            sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => Self::Shape,
            status => Self::Failed(format!("{status:?}")),
        }
    }
}

/// The library, open for one GPU.
struct Library {
    handle: sys::cublasLtHandle_t,
    stream: SideStream,
    workspace: Place,
}

// SAFETY: a handle may be used from any thread, and is used under a lock.
unsafe impl Send for Library {}

/// Address of a buffer. While this lives its memory is neither moved nor given to others.
struct Place {
    at: u64,
    _held: Box<dyn Any + Send>,
}

const NOT_FOUND: &str = "libcublasLt.so is not found; install the CUDA toolkit's cuBLAS, or add the library's folder to \
                         LD_LIBRARY_PATH";

type Opened = Result<Arc<Mutex<Library>>, String>;

/// The library of each GPU, by the GPU's number.
static LIBRARIES: Mutex<Vec<(usize, Opened)>> = Mutex::new(Vec::new());

/// Opens the library for a tensor's GPU and gives its version.
///
/// # Errors
/// Why it cannot be used, with what to do.
pub(crate) fn open(like: &CubeTensor) -> Result<String, String> {
    library(like)?;
    // SAFETY: it is open.
    let version = unsafe { sys::cublasLtGetVersion() };
    let [major, minor, patch] = [version / 10_000, version / 100 % 100, version % 100];
    Ok(format!("{major}.{minor}.{patch}"))
}

/// Launches matmuls, one after the other.
///
/// # Errors
/// The reason why not all were launched. Some may have been, only if it is [`Refused::Failed`].
pub(super) fn multiply(products: &[Matmul<'_>]) -> Result<(), Refused> {
    let like = products[0].out;
    let library = library(like).map_err(Refused::Failed)?;
    let multiply = || library.lock().unwrap_or_else(PoisonError::into_inner).multiply(products);
    // on the thread that serves the device, which is asked once for all places
    let done = like.client.exclusive(multiply);
    done.unwrap_or_else(|error| Err(Refused::Failed(error.to_string())))
}

/// The library of a tensor's GPU.
fn library(like: &CubeTensor) -> Opened {
    let CubeDevice::Cuda(cuda) = &like.device else {
        return Err("the device is not an NVIDIA GPU".into());
    };
    let mut known = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, opened)) = known.iter().find(|(gpu, _)| *gpu == cuda.index) {
        return opened.clone();
    }
    let opened = Library::open(cuda.index, like).map(|library| Arc::new(Mutex::new(library)));
    known.push((cuda.index, opened.clone()));
    opened
}

impl Library {
    fn open(gpu: usize, like: &CubeTensor) -> Result<Self, String> {
        // SAFETY: opening the library runs its initialisers, which only initialise it.
        if !unsafe { sys::is_culib_present() } {
            return Err(NOT_FOUND.into());
        }
        // binds the context to this thread, whose GPU the handle is for
        let stream = SideStream::new(gpu)?;
        let handle = lt::create_handle().map_err(|CublasError(status)| format!("cublasLtCreate: {status:?}"))?;
        let room = empty(like, [CUBLASLT_WORKSPACE], DType::U8);
        let workspace = Place::of(&room).ok_or("no memory for its workspace of 32 MiB")?;
        Ok(Self { handle, stream, workspace })
    }

    fn multiply(&self, products: &[Matmul<'_>]) -> Result<(), Refused> {
        let mut places = Places::default();
        let prepare = |product| self.prepare(product, &mut places);
        let prepared = products.iter().map(prepare).collect::<Result<Vec<_>, _>>()?;
        let run = |stream| prepared.iter().try_for_each(|product| self.enqueue(product, stream));
        let enqueued = self.stream.run(run).map_err(|error| Refused::Failed(format!("the GPU's driver: {error}")))?;
        // others may be under way
        enqueued.map_err(|CublasError(status)| Refused::Failed(format!("cublasLtMatmul: {status:?}")))
    }

    /// Describes a product, and takes the kernel that the library's heuristics choose for it.
    fn prepare<'a>(&self, product: &Matmul<'a>, places: &mut Places<'a>) -> Result<Prepared, Refused> {
        let [m, n, k] = product.sizes;
        let of = type_of(product.a.matrix.dtype);
        let to = type_of(product.out.dtype);
        // a row-major matrix is the column-major one of its transpose: bᵀ · aᵀ
        let side = |operand: Operand<'_>, [rows, columns]: [usize; 2]| {
            let [rows, columns] = if operand.transposed { [columns, rows] } else { [rows, columns] };
            Layout::new(of, [rows, columns], operand.pitch)
        };
        let (left, right) = (side(product.b, [n, k])?, side(product.a, [k, m])?);
        let result = Layout::new(to, [n, m], n)?;
        let [a, b, out] = [product.a.matrix, product.b.matrix, product.out].map(|tensor| places.at(tensor));
        let (a, b, out) = (a?, b?, out?);
        let plus = product.plus.map(|plus| places.at(plus).map(|at| (at, dims::<2>(plus)[0] == m))).transpose()?;

        let description = Description::new()?;
        description.set(Of::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(product.b.transposed))?;
        description.set(Of::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(product.a.transposed))?;
        let (base, beta) = match plus {
            Some((matrix, true)) => (matrix, 1.0),
            Some((row, false)) => {
                let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
                description.set(Of::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
                description.set(Of::CUBLASLT_MATMUL_DESC_BIAS_POINTER, row)?;
                (out, 0.0)
            }
            None => (out, f32::from(u8::from(product.adds))),
        };
        let preference = Preference::new()?;
        preference.set(Prefers::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CUBLASLT_WORKSPACE as u64)?;
        for (attribute, address) in [
            (Prefers::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (Prefers::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (Prefers::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, base),
            (Prefers::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out),
        ] {
            // the power of two that divides the address
            preference.set(attribute, 1_u32 << address.trailing_zeros().min(8))?;
        }
        // SAFETY: all descriptions live until the call returns.
        let chosen = unsafe {
            let (description, preference) = (description.0, preference.0);
            lt::get_matmul_algo_heuristic(self.handle, description, left.0, right.0, result.0, result.0, preference)?
        };
        Ok(Prepared {
            description,
            layouts: [left, right, result],
            algorithm: chosen.algo,
            at: [b, a, base, out],
            beta,
        })
    }

    /// Asks the stream for a product.
    fn enqueue(&self, product: &Prepared, stream: CUstream) -> Result<(), CublasError> {
        let Prepared { description, layouts: [left, right, result], algorithm, at, beta } = product;
        let [b, a, base, out] = at.map(|address| address as *mut c_void);
        // SAFETY: all descriptions live until the call returns. The places are as large as the layouts say, belong to the
        // device of the handle, and stay until work that comes after this stream's is asked for.
        unsafe {
            lt::matmul(
                self.handle,
                description.0,
                (&raw const ALPHA).cast(),
                std::ptr::from_ref(beta).cast(),
                b.cast_const(),
                left.0,
                a.cast_const(),
                right.0,
                base.cast_const(),
                result.0,
                out,
                result.0,
                algorithm,
                self.workspace.at as *mut c_void,
                CUBLASLT_WORKSPACE,
                stream.cast(),
            )
        }
    }
}

/// Factor of products.
static ALPHA: f32 = 1.0;

/// A product and its kernel.
struct Prepared {
    description: Description,
    /// Of the left and right operand and the result.
    layouts: [Layout; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    /// Addresses of the left and right operand, of what the product is added to, and of the result.
    at: [u64; 4],
    /// Factor of what the product is added to.
    beta: f32,
}

impl Place {
    /// The place of a tensor, after all that this thread asked the device for until now; `None` if it has none, or nothing
    /// computed what should be there.
    fn of(tensor: &CubeTensor) -> Option<Self> {
        let handle: Handle = tensor.handle.clone();
        let held = tensor.client.get_resource::<<CudaRuntime as Runtime>::Server>(handle).ok()?;
        Some(Self { at: held.resource().ptr, _held: Box::new(held) })
    }
}

/// Places of tensors, each asked for once.
#[derive(Default)]
struct Places<'a>(Vec<(&'a CubeTensor, Place)>);

impl<'a> Places<'a> {
    fn at(&mut self, tensor: &'a CubeTensor) -> Result<u64, Refused> {
        if let Some((_, place)) = self.0.iter().find(|(known, _)| std::ptr::eq(*known, tensor)) {
            return Ok(place.at);
        }
        let place = Place::of(tensor).ok_or(Refused::Buffer)?;
        let at = place.at;
        self.0.push((tensor, place));
        Ok(at)
    }
}

fn type_of(dtype: DType) -> sys::cudaDataType {
    match dtype {
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

/// A `cublasLtMatrixLayout_t`.
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(of: sys::cudaDataType, [rows, columns]: [usize; 2], pitch: usize) -> Result<Self, CublasError> {
        lt::create_matrix_layout(of, rows as u64, columns as u64, pitch as i64).map(Self)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: it was made and not given back.
        let _ = unsafe { lt::destroy_matrix_layout(self.0) };
    }
}

/// A `cublasLtMatmulDesc_t` of products that are summed in f32.
struct Description(sys::cublasLtMatmulDesc_t);

impl Description {
    fn new() -> Result<Self, CublasError> {
        let sums = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        lt::create_matmul_desc(sums, sys::cudaDataType::CUDA_R_32F).map(Self)
    }

    fn set<T: Copy>(&self, attribute: Of, value: T) -> Result<(), CublasError> {
        // SAFETY: the attribute has the value's type, and is copied.
        unsafe { lt::set_matmul_desc_attribute(self.0, attribute, (&raw const value).cast(), size_of::<T>()) }
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: it was made and not given back.
        let _ = unsafe { lt::destroy_matmul_desc(self.0) };
    }
}

/// A `cublasLtMatmulPreference_t`.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Self, CublasError> {
        lt::create_matmul_pref().map(Self)
    }

    fn set<T: Copy>(&self, attribute: Prefers, value: T) -> Result<(), CublasError> {
        // SAFETY: the attribute has the value's type, and is copied.
        unsafe { lt::set_matmul_pref_attribute(self.0, attribute, (&raw const value).cast(), size_of::<T>()) }
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: it was made and not given back.
        let _ = unsafe { lt::destroy_matmul_pref(self.0) };
    }
}
