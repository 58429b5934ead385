//! Detection of refused memory in a stretch of work.
//!
//! `CubeCL` keeps a failure with the buffers that it left unwritten, and reports it where one of them is read. It
//! forgets a buffer's failure when a later kernel writes to the buffer, be it to another part of it: of a concatenation
//! whose first piece had no memory nothing is known once the last piece is in place. So work that ran out of memory may
//! end in numbers, and the numbers are wrong. A profiling window of `CubeCL` records every failed launch and copy on
//! its device while it is open. This uses that record, and not the window's times. An upload whose memory was refused
//! and that nothing has used yet is no such failure: see [`check_computed`](crate::transfer::check_computed).

use crate::Result;
use burn::tensor::Device;

/// Detects all work of a CUDA device that finds no memory, or depends on what found none, from its start to its end. On
/// other devices it does nothing: on the CPU a failed allocation ends the process, and wgpu reports one by a panic.
#[derive(Debug)]
pub struct Watch(#[cfg(feature = "cuda")] Option<cuda::Window>);

impl Watch {
    /// Begins to watch what is asked of a device from now on. Does not wait for the device.
    ///
    /// # Errors
    /// If the device cannot be asked.
    pub fn start(device: &Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        return cuda::Window::open(device).map(Self);
        #[cfg(not(feature = "cuda"))]
        {
            let _ = device;
            Ok(Self())
        }
    }

    /// Ends the watch. Does not wait for the device: memory is reserved, and so refused, when work is asked for.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) where memory was refused since the start, even if everything
    /// that was read looked right.
    pub fn finish(self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(window) = self.0 {
            return window.close();
        }
        Ok(())
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::{Device, Result};
    use crate::Error;
    use crate::device::cube_probe;
    use burn_cubecl::CubeDevice;
    use burn_cubecl::cubecl::client::{Client, ProfileWindow};
    use burn_cubecl::cubecl::server::ProfileError;
    use burn_cubecl::tensor::CubeTensor;

    /// An open profiling window.
    pub(super) struct Window {
        client: Client,
        window: Option<ProfileWindow>,
    }

    impl std::fmt::Debug for Window {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "Window({:?})", self.window)
        }
    }

    impl Window {
        pub fn open(device: &Device) -> Result<Option<Self>> {
            let probe = cube_probe(device);
            let probe = probe.filter(|probe| matches!(probe.device, CubeDevice::Cuda(_)));
            let Some(CubeTensor { client, .. }) = probe else {
                return Ok(None);
            };
            let window = client.profile_start();
            let window = window.map_err(|e| error(&e))?;
            Ok(Some(Self { client, window: Some(window) }))
        }

        pub fn close(mut self) -> Result<()> {
            let Some(window) = self.window.take() else {
                return Ok(());
            };
            match self.client.profile_end(window).map_err(|e| error(&e)) {
                Err(refused @ Error::OutOfMemory(_)) => Err(refused),
                // what other work failed says itself where its results are read
                Err(other) => {
                    tracing::debug!("work on the device failed: {other}");
                    Ok(())
                }
                Ok(_) => Ok(()),
            }
        }
    }

    fn error(error: &ProfileError) -> Error {
        match error {
            ProfileError::Server(cause) => Error::device(cause.as_ref()),
            other => Error::device(other),
        }
    }

    impl Drop for Window {
        fn drop(&mut self) {
            if let Some(window) = self.window.take() {
                self.client.profile_abandon(window);
            }
        }
    }
}
