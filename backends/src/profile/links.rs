//! Times what the ranks of a run send each other: inside a machine, and between machines.

use crate::collective::{Collective, Flat, Result};
use firebrick_spec::{Link, MeasuredLinks};
use std::sync::Arc;
use std::time::Instant;

/// Bytes that each rank gives to a gather whose time is that of its bytes.
const LARGE: usize = 16 << 20;

/// Gathers of these, and of a byte, of which the median counts. The first few are not looked at.
const LARGE_TURNS: usize = 5;
const SMALL_TURNS: usize = 50;
const WARM_UP: usize = 2;

/// Id of this machine: the start of its system, or its name.
pub fn machine() -> Vec<u8> {
    let files = ["/proc/sys/kernel/random/boot_id", "/etc/hostname"];
    let read = files.into_iter().find_map(|file| std::fs::read(file).ok());
    let named = || std::env::var("HOSTNAME").or_else(|_| std::env::var("COMPUTERNAME"));
    read.unwrap_or_else(|| named().unwrap_or_default().into_bytes())
}

/// Times gathers of the ranks of each machine, all machines at once, and of the ranks in the same place of each
/// machine, all places at once, as groups of a run gather. Gives the slowest of all ranks, the same on every rank;
/// `machine` is what tells this rank's machine from others. The ranks should have nothing else to do.
///
/// # Errors
/// Those of the ranks' operations.
pub fn measure_links(world: &Arc<dyn Collective>, machine: &[u8]) -> Result<MeasuredLinks> {
    let machines = world.exchange(machine.to_vec())?;
    let rank = world.rank();
    let node = machines.iter().position(|other| other == machine).unwrap_or(rank);
    let place = machines[..rank].iter().filter(|other| *other == machine).count();
    let inside = timed(world, world.split(node, rank)?.as_ref())?;
    let between = timed(world, world.split(place, rank)?.as_ref())?;
    Ok(MeasuredLinks { inside, between })
}

/// The slowest link of groups that all gather at the same time; none where each is alone.
fn timed(world: &Arc<dyn Collective>, group: &dyn Collective) -> Result<Option<Link>> {
    world.agree(None)?;
    let others = (group.size() - 1) as f64;
    let times = if others > 0.0 {
        let small = median(group, 1, SMALL_TURNS)?;
        let large = median(group, LARGE, LARGE_TURNS)?;
        // a ring's bytes and steps
        let bandwidth = others * LARGE as f64 / (large - small).max(1e-9);
        [bandwidth, small / others]
    } else {
        [f64::INFINITY, 0.0]
    };
    let times = world.exchange(times.map(f64::to_le_bytes).concat())?;
    let times: Vec<Vec<f64>> = times.iter().map(|bytes| bytemuck::pod_collect_to_vec(bytes)).collect();
    let bandwidth = times.iter().map(|rank| rank[0]).fold(f64::INFINITY, f64::min);
    let latency = times.iter().map(|rank| rank[1]).fold(0.0, f64::max);
    Ok(bandwidth.is_finite().then(|| Link::measured(bandwidth, latency)))
}

/// Seconds of a gather to which every rank gives so many bytes.
fn median(group: &dyn Collective, bytes: usize, turns: usize) -> Result<f64> {
    let mut seconds = Vec::with_capacity(turns);
    for turn in 0..WARM_UP + turns {
        let values = Flat::Bytes(vec![group.rank() as u8; bytes]);
        group.agree(None)?;
        let start = Instant::now();
        drop(group.all_gather(values)?);
        if turn >= WARM_UP {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[turns / 2])
}
