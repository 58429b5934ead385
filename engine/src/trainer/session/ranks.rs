//! Transport between the ranks of a run, and their machines.

use crate::config::DdpBackend;
use crate::world::World;
use crate::{Error, Result};
use burn::tensor::Device;
use firebrick_backends::DeviceInfo;
use firebrick_backends::collective::{Collective, Nccl};
use firebrick_backends::profile::{self, machine};
use firebrick_spec::{Backend, Cluster, DeviceProfile, MeasuredLinks};
use std::sync::Arc;

/// Connects ranks as `trainer.ddp_backend` says: over NCCL, or unchanged. All ranks call it together, with devices of
/// one kind.
pub(super) fn connect(
    ranks: &Arc<dyn Collective>,
    backend: DdpBackend,
    device: &Device,
    info: &DeviceInfo,
) -> Result<Arc<dyn Collective>> {
    let unchanged = Arc::clone(ranks);
    if ranks.size() == 1 || backend == DdpBackend::Mpi {
        return Ok(unchanged);
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
        Err(why) if backend == DdpBackend::Nccl => Err(Error::Ranks(format!(
            "trainer.ddp_backend: nccl is unavailable: {why} (or `trainer.ddp_backend: mpi`, through host memory; \
             docs/guides/multi_gpu.md)"
        ))),
        Err(why) => {
            if info.device.backend() == Backend::Cuda {
                tracing::warn!("values between ranks pass through host memory, not over NCCL: {why}");
            }
            Ok(unchanged)
        }
    }
}

/// Profile of a device, with the links of rank 0's profile, so that all ranks make the same plan.
pub(super) fn profile_of(world: &World, info: &DeviceInfo) -> Result<DeviceProfile> {
    let profile = profile::of(info);
    let links = world.broadcast(profile.links.map(|links| [links.inside, links.between]))?;
    Ok(DeviceProfile { links: links.map(|[inside, between]| MeasuredLinks { inside, between }), ..profile })
}

/// Machines and links of the ranks; `None` without measured links: then messages take no time.
pub(super) fn cluster(world: &World, profile: &DeviceProfile) -> Result<Option<Cluster>> {
    let Some(links) = profile.links.filter(|_| !world.is_solo()) else {
        return Ok(None);
    };
    let widest = world.tensor_size().max(world.sampling_size());
    let machines = world.exchange(machine())?;
    Ok(Some(placed(&machines, widest, links, profile)))
}

/// Cluster of the machines, given by rank: of equally many consecutive ranks each, which contain every tensor-parallel
/// group of `widest` ranks. Other arrangements count as one machine with the slower link.
fn placed(machines: &[Vec<u8>], widest: usize, links: MeasuredLinks, profile: &DeviceProfile) -> Cluster {
    let ranks = machines.len();
    let each = machines.iter().filter(|machine| **machine == machines[0]).count();
    let is_even = ranks.is_multiple_of(each) && each.is_multiple_of(widest);
    let mut nodes = machines.chunks(each);
    if is_even && nodes.all(|node| node.iter().all(|machine| *machine == node[0])) {
        return profile.cluster(((ranks / each) as u64, each as u64), [None; 2]);
    }
    let slower = MeasuredLinks { inside: links.between.or(links.inside), between: None };
    let profile = DeviceProfile { links: Some(slower), ..profile.clone() };
    profile.cluster((1, ranks as u64), [None; 2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick_spec::{Backend, Link};

    #[test]
    fn ranks_lie_in_machines_of_as_many_each_or_count_as_those_of_one_with_the_slower_link() {
        let links = MeasuredLinks { inside: Some(Link::measured(4e9, 1e-5)), between: Some(Link::measured(1e9, 1e-4)) };
        let profile = DeviceProfile { links: Some(links), ..DeviceProfile::assumed(Backend::Cpu) };
        let layout = |machines: &str, widest| {
            let machines: Vec<Vec<u8>> = machines.bytes().map(|name| vec![name]).collect();
            let cluster = placed(&machines, widest, links, &profile);
            let [inside, between] = [cluster.link, cluster.node_link].map(|link| link.bandwidth);
            (cluster.nodes, cluster.devices_per_node, inside, (cluster.nodes > 1).then_some(between))
        };
        let (fast, slow) = (4_000_000_000, 1_000_000_000);
        assert_eq!(layout("aaaa", 2), (1, 4, fast, None));
        assert_eq!(layout("aabb", 2), (2, 2, fast, Some(slow)));
        assert_eq!(layout("abc", 1), (3, 1, fast, Some(slow)));
        for (machines, widest) in [("aaab", 1), ("abab", 1), ("aabb", 4)] {
            assert_eq!(layout(machines, widest), (1, 4, slow, None), "{machines}");
        }
    }
}
