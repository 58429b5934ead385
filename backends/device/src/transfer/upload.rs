//! Copies to the device ahead of their use.

use super::copy_streams::{CopyStreams, Incoming};
use super::host_tensor::HostTensor;
use crate::trace::span;
use burn::tensor::{Device, Tensor};

/// Matrices on their way to the device. Their memory there exists from the beginning.
#[derive(Debug)]
pub struct Upload(Way);

#[derive(Debug)]
enum Way {
    /// In the queue of the kernels, before those that need them.
    Queued(Vec<Tensor<2>>),
    /// On a stream of their own.
    Beside(Incoming),
}

impl Upload {
    /// Copies in the queue of the device's kernels.
    pub(super) fn queued(matrices: Vec<HostTensor>, device: &Device) -> Self {
        let there = matrices.into_iter().map(|m| m.into_device(device));
        Self(Way::Queued(there.collect()))
    }

    /// Copies on a stream of their own.
    #[allow(unreachable_code, reason = "without CUDA there is no such stream, which the compiler sees")]
    pub(super) fn beside_kernels(streams: &CopyStreams, matrices: Vec<HostTensor>) -> Self {
        let data = matrices.into_iter().map(HostTensor::into_data).collect();
        Self(Way::Beside(streams.make_room(data)))
    }

    /// Asks for the copies, if nobody has yet. They wait for what the device was asked for before this upload was
    /// begun, and for nothing since: begin it, ask for kernels, then start, and the copies run beside those kernels.
    ///
    /// The two are apart since asking for a copy may keep `CubeCL`'s thread of the device until an earlier one is
    /// through, which holds up kernels that are asked for afterwards.
    pub fn start(&mut self) {
        let _span = span("copy to device", 0.0);
        if let Way::Beside(incoming) = &mut self.0 {
            incoming.start();
        }
    }

    /// The matrices. What the calling thread asks the device for from now on waits for their copies, on the device.
    /// They are `[rows, columns]` each.
    pub fn finish(self) -> Vec<Tensor<2>> {
        match self.0 {
            Way::Queued(there) => there,
            Way::Beside(incoming) => incoming.arrive(),
        }
    }
}
