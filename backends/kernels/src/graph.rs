//! Work of a GPU that is recorded once and replayed as a whole (a CUDA graph).

use super::backend::{RecordedGraph, Recorder};
use super::cublaslt::with_cublaslt;
use super::operations::by_device;
use burn::tensor::Device;
use firebrick_device::{Error, Result};

/// Kernels that were recorded with their arguments. A replay launches all of them again, on the buffers that they were
/// recorded with.
#[derive(Debug)]
pub struct Graph(Box<dyn RecordedGraph>);

/// Times that the work runs before it is recorded: the memory that it takes is there then, since a recording cannot
/// allocate any.
const WARM_UP: usize = 2;

impl Graph {
    /// Returns true if a device records graphs: GPUs do.
    pub fn is_supported(device: &Device) -> bool {
        recorder(device).is_some()
    }

    /// Runs `work` twice, records it a third time, and gives the graph and what the recorded run returned, whose
    /// tensors each replay writes to. The recorded run is not computed: the first replay does that.
    ///
    /// `work` must launch the same kernels each time, with results that do not change where it runs again. It neither
    /// uploads nor reads. Tensors that it reads and does not own have to stay as long as the graph, and at their
    /// places.
    ///
    /// # Errors
    /// [`Error::Graph`] where the device does not record, or refused what was recorded. What was recorded last may then
    /// be unreadable: tensors that `work` writes in place are lost.
    pub fn capture<T>(device: &Device, mut work: impl FnMut() -> T) -> Result<(Self, T)> {
        // a capture cannot contain waits for a library's stream
        let mut work = || with_cublaslt(None, &mut work);
        let refused = |reason: String| Error::Graph { reason };
        let recorder = recorder(device).ok_or_else(|| refused("a CPU launches no kernels".into()))?;
        recorder.prepare().map_err(refused)?;
        let mut last = None;
        for _ in 0..WARM_UP {
            // the last result stays until there is another one, so that the recording finds more room than it needs
            let next = work();
            recorder.wait().map_err(refused)?;
            last = Some(next);
        }
        drop(last);
        recorder.start().map_err(refused)?;
        let result = work();
        let graph = recorder.finish().map_err(refused)?;
        Ok((Self(graph), result))
    }

    /// Runs the recorded kernels again, after everything that was asked of the device before.
    ///
    /// # Errors
    /// [`Error::Graph`] with what the device said.
    pub fn replay(&self) -> Result<()> {
        self.0.replay().map_err(|reason| Error::Graph { reason })
    }
}

/// The recorder of graphs on a device.
fn recorder(device: &Device) -> Option<Box<dyn Recorder>> {
    by_device!(device, cpu => None, cube => Some(Box::new(crate::cube::CubeRecorder::new(device))))
}
