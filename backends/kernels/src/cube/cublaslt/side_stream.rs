//! A stream that is ordered with `CubeCL`'s private streams.

use cudarc::driver::sys::{CUcontext, CUevent, CUresult, CUstream, cuGetProcAddress_v2};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use std::ffi::{CStr, c_void};
use std::mem::transmute;
use std::sync::Arc;

/// Records or awaits an event of a context.
type OfContext = unsafe extern "C" fn(CUcontext, CUevent) -> CUresult;

/// CUDA 12.5, whose driver knows events of a context.
const OLDEST_DRIVER: i32 = 12_050;

/// A stream whose work runs after all earlier work of its context and before all later work. The host does not wait for
/// the GPU.
pub(super) struct SideStream {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    before: CudaEvent,
    after: CudaEvent,
    /// `cuCtxRecordEvent`: an event after all work of a context.
    record: OfContext,
    /// `cuCtxWaitEvent`: all later work of a context waits for an event.
    wait: OfContext,
}

impl SideStream {
    /// A stream of a GPU's primary context, which `CubeCL` has too.
    ///
    /// # Errors
    /// What the driver says, or that it is too old.
    pub fn new(gpu: usize) -> Result<Self, String> {
        let failed = |error: DriverError| format!("the GPU's driver: {error}");
        let context = CudaContext::new(gpu).map_err(failed)?;
        let stream = context.new_stream().map_err(failed)?;
        let [before, after] = [(); 2].map(|()| context.new_event(None).map_err(failed));
        let [record, wait] = [c"cuCtxRecordEvent", c"cuCtxWaitEvent"].map(function);
        Ok(Self { stream, before: before?, after: after?, record: record?, wait: wait?, context })
    }

    /// Runs `enqueue`, which launches work on the stream. No stream of the context may be in capture.
    ///
    /// # Errors
    /// What the driver says.
    pub fn run<R>(&self, enqueue: impl FnOnce(CUstream) -> R) -> Result<R, DriverError> {
        self.context.bind_to_thread()?;
        self.of_context(self.record, &self.before)?;
        self.stream.wait(&self.before)?;
        let result = enqueue(self.stream.cu_stream());
        self.after.record(&self.stream)?;
        self.of_context(self.wait, &self.after)?;
        Ok(result)
    }

    fn of_context(&self, function: OfContext, event: &CudaEvent) -> Result<(), DriverError> {
        // SAFETY: the context and its event live as long as this does.
        unsafe { function(self.context.cu_ctx(), event.cu_event()) }.result()
    }
}

/// A function of the driver, by its name.
fn function(name: &CStr) -> Result<OfContext, String> {
    let mut found: *mut c_void = std::ptr::null_mut();
    let mut why = std::mem::MaybeUninit::uninit();
    // SAFETY: it writes an address and a reason.
    let code = unsafe { cuGetProcAddress_v2(name.as_ptr(), &raw mut found, OLDEST_DRIVER, 0, why.as_mut_ptr()) };
    if code.result().is_err() || found.is_null() {
        return Err(format!(
            "the GPU's driver has no {}; update it to one for CUDA 12.5 or later",
            name.to_string_lossy()
        ));
    }
    // SAFETY: both functions have this type since they exist.
    Ok(unsafe { transmute::<*mut c_void, OfContext>(found) })
}
