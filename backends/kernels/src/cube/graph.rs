//! Graphs of `CubeCL`: of CUDA and HIP in hardware; on wgpu the recorded dispatches are encoded again.

use super::prelude::*;
use crate::backend::{RecordedGraph, Recorder};
use burn::tensor::Device;
use cubecl::client::Graph;
use std::fmt::{Debug, Formatter};

/// The client of a device, through a tensor of the calling thread's stream.
pub(crate) struct CubeRecorder(CubeTensor);

impl CubeRecorder {
    pub(crate) fn new(device: &Device) -> Self {
        Self(Cube::primitive(Tensor::<1>::empty([1], &device.clone().inner())))
    }
}

impl Recorder for CubeRecorder {
    fn prepare(&self) -> Result<(), String> {
        self.0.client.graph_prepare().map_err(|error| error.to_string())
    }

    fn start(&self) -> Result<(), String> {
        self.0.client.start_capture().map_err(|error| error.to_string())
    }

    fn finish(&self) -> Result<Box<dyn RecordedGraph>, String> {
        let graph = self.0.client.stop_capture().map_err(|error| error.to_string())?;
        Ok(Box::new(CubeGraph(graph)))
    }

    fn wait(&self) -> Result<(), String> {
        cubecl::future::block_on(self.0.client.sync()).map_err(|error| error.to_string())
    }
}

struct CubeGraph(Graph);

impl Debug for CubeGraph {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str("CubeGraph")
    }
}

impl RecordedGraph for CubeGraph {
    fn replay(&self) -> Result<(), String> {
        // SAFETY: the server guards every page that the recording touched for as long as the graph exists: nothing on
        // them moves, and nothing that is allocated later gets them, so that kernels never write to another owner's
        // memory. The graph belongs to one thread, and with it to the stream that everything else of that thread is
        // asked of. Whoever drops a tensor that the recording only read gets wrong numbers, and no access outside of
        // the pools.
        #[allow(unsafe_code, reason = "a replay checks no buffer")]
        let replayed = unsafe { self.0.replay() };
        replayed.map_err(|error| error.to_string())
    }
}
