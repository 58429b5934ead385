//! What carries values between the ranks of a run.

use crate::config::DdpBackend;
use crate::{Error, Result};
use burn::tensor::Device;
use firebrick_backends::DeviceInfo;
use firebrick_backends::collective::{Collective, Nccl};
use firebrick_spec::Backend;
use std::sync::Arc;

/// The ranks of a run as `trainer.ddp_backend` says: over NCCL, or as they are. All ranks come here together, with
/// devices of one kind.
pub(super) fn connect(
    ranks: &Arc<dyn Collective>,
    asked: DdpBackend,
    device: &Device,
    info: &DeviceInfo,
) -> Result<Arc<dyn Collective>> {
    let as_they_are = Arc::clone(ranks);
    if ranks.size() == 1 || asked == DdpBackend::Mpi {
        return Ok(as_they_are);
    }
    let joined = if info.device.backend() == Backend::Cuda {
        Nccl::join(ranks, device)?
    } else {
        let device = info.device;
        Err(format!("the ranks compute on {device}; set `device: cuda`"))
    };
    match joined {
        Ok(joined) => {
            tracing::info!("values go from GPU to GPU over NCCL ({} ranks)", ranks.size());
            Ok(joined)
        }
        Err(why) if asked == DdpBackend::Nccl => Err(Error::Ranks(format!(
            "trainer.ddp_backend: nccl is unavailable: {why} (or `trainer.ddp_backend: mpi`, through host memory; \
             docs/guides/multi_gpu.md)"
        ))),
        Err(why) => {
            if info.device.backend() == Backend::Cuda {
                tracing::warn!("values between ranks pass through host memory, not over NCCL: {why}");
            }
            Ok(as_they_are)
        }
    }
}
