//! Traffic between devices: messages, bytes and seconds by kind.
//!
//! A group of `n` devices exchanges a buffer of `B` bytes in rings, in each machine and between machines. One device
//! sends:
//!
//! | kind | bytes | steps |
//! |---|---|---|
//! | all-gather, reduce-scatter | (n - 1) / n B | n - 1 |
//! | all-reduce | 2 (n - 1) / n B | 2 (n - 1) |
//! | all-to-all | (n - 1) / n B | n - 1 |
//! | send | B | 1 |
//! | exchange, of a buffer that one device has | (n - 1) B, from it | n - 1 |
//!
//! A group of `k` devices in each of `m` machines takes (k - 1) / k B and k - 1 steps over the link inside, and (m - 1)
//! / m B / k and m - 1 steps over the one between: devices in the same place of each machine make a ring. Those of
//! NCCL-tests' `PERFORMANCE.md`, hierarchical.

mod phases;
pub mod weights;

use crate::estimate::{EstimatePhase, Parallel};
use crate::named::named;
use firebrick_spec::Cluster;
use serde::{Deserialize, Serialize};

named! {
    /// A collective operation.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
    pub enum MessageKind {
        /// A sum that all have.
        AllReduce = "all_reduce",
        /// A sum of which each has a shard.
        ReduceScatter = "reduce_scatter",
        /// Shards put together on all.
        AllGather = "all_gather",
        /// A block for each other.
        AllToAll = "all_to_all",
        /// From one to the next.
        Send = "send",
        /// Bytes of each, which all have; as many as each likes.
        Exchange = "exchange",
    }
}

named! {
    /// The devices that a message is exchanged among.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
    pub enum Axis {
        /// Replicas, and with them the devices that share a sequence where gradients are summed.
        Data = "data",
        /// Devices that share a sequence.
        Sequence = "sequence",
        /// Devices that share matrices.
        Tensor = "tensor",
        /// Stages.
        Pipeline = "pipeline",
    }
}

/// Traffic of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Operations.
    pub messages: u64,
    /// Bytes to other devices.
    pub bytes: u64,
    /// Seconds that a device waits for them, one after the other; 0 if links are not known.
    pub seconds: f64,
}

/// Traffic of one device, by kind and by group: of the first device, which sends most.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Communication {
    sent: [[Traffic; Axis::ALL.len()]; MessageKind::ALL.len()],
}

impl Communication {
    /// Traffic of one kind along one axis.
    pub fn get(&self, kind: MessageKind, along: Axis) -> Traffic {
        self.sent[kind as usize][along as usize]
    }

    /// Seconds of all.
    pub(crate) fn seconds(&self) -> f64 {
        self.sent.iter().flatten().map(|sent| sent.seconds).sum()
    }

    /// Subtracts `seconds` of gathers that overlap with computation.
    pub(crate) fn hide_gathers(&mut self, seconds: f64) {
        let gathers = &mut self.sent[MessageKind::AllGather as usize][Axis::Data as usize];
        gathers.seconds = (gathers.seconds - seconds).max(0.0);
    }

    /// Adds `messages` operations of a kind in a group: each sends `bytes`, of a buffer of `buffer` bytes.
    pub(crate) fn add(&mut self, (kind, group): (MessageKind, Group), messages: u64, bytes: u64, buffer: f64) {
        let sent = &mut self.sent[kind as usize][group.along as usize];
        sent.messages += messages;
        sent.bytes += messages * bytes;
        sent.seconds += messages as f64 * group.seconds(kind, buffer);
    }

    /// Adds `messages` operations on a buffer that is divided evenly.
    pub(crate) fn even(&mut self, kind: MessageKind, group: Group, messages: u64, buffer: f64) {
        let others = (group.size - 1) as f64 / group.size as f64;
        let bytes = match kind {
            MessageKind::AllReduce => 2.0 * others * buffer,
            MessageKind::Send => buffer,
            MessageKind::Exchange => (group.size - 1) as f64 * buffer,
            MessageKind::AllGather | MessageKind::ReduceScatter | MessageKind::AllToAll => others * buffer,
        };
        self.add((kind, group), messages, bytes as u64, buffer);
    }

    /// So many times as much.
    pub(crate) fn times(mut self, count: u64) -> Self {
        for sent in self.sent.iter_mut().flatten() {
            sent.messages *= count;
            sent.bytes *= count;
            sent.seconds *= count as f64;
        }
        self
    }

    /// Rows of a report: one per kind and axis.
    pub(crate) fn in_phase(&self, phase: EstimatePhase) -> Vec<PhaseTraffic> {
        let pairs = MessageKind::ALL.into_iter().flat_map(|kind| Axis::ALL.map(|along| (kind, along)));
        let some = pairs.filter_map(|(kind, along)| {
            let Traffic { messages, bytes, seconds } = self.get(kind, along);
            (messages > 0).then_some(PhaseTraffic { phase, kind, along, messages, bytes, seconds })
        });
        some.collect()
    }
}

impl std::ops::AddAssign for Communication {
    fn add_assign(&mut self, other: Self) {
        let pairs = self.sent.iter_mut().flatten();
        for (sum, more) in pairs.zip(other.sent.iter().flatten()) {
            sum.messages += more.messages;
            sum.bytes += more.bytes;
            sum.seconds += more.seconds;
        }
    }
}

/// Traffic of one device in a phase of a step.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct PhaseTraffic {
    /// The phase.
    pub phase: EstimatePhase,
    /// The collective operation.
    pub kind: MessageKind,
    /// Among which devices.
    pub along: Axis,
    /// Number of operations.
    pub messages: u64,
    /// Bytes that one device sends to others.
    pub bytes: u64,
    /// Seconds that it waits for them: those of gathers that run beside computation are left out.
    pub seconds: f64,
}

/// Devices that exchange messages, and how they lie in machines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Group {
    pub along: Axis,
    /// Devices.
    pub size: u64,
    /// Those of one machine.
    in_node: u64,
    /// Machines.
    nodes: u64,
    cluster: Option<Cluster>,
}

impl Group {
    /// Every `stride`-th device, `size` of them.
    fn new(along: Axis, size: u64, stride: u64, cluster: Option<Cluster>) -> Self {
        let whole = cluster.map_or(u64::MAX, |cluster| cluster.devices_per_node);
        let in_node = (whole / stride.max(1)).clamp(1, size.max(1));
        Self { along, size: size.max(1), in_node, nodes: size.div_ceil(in_node).max(1), cluster }
    }

    /// Seconds of one operation on a buffer of `buffer` bytes.
    fn seconds(&self, kind: MessageKind, buffer: f64) -> f64 {
        let Some(Cluster { link, node_link, .. }) = self.cluster else {
            return 0.0;
        };
        let [size, inside, nodes] = [self.size, self.in_node, self.nodes].map(|n| n as f64);
        let ring = link.seconds((inside - 1.0) / inside * buffer, inside - 1.0)
            + node_link.seconds((nodes - 1.0) / nodes * buffer / inside, nodes - 1.0);
        match kind {
            MessageKind::AllGather | MessageKind::ReduceScatter => ring,
            MessageKind::AllReduce => 2.0 * ring,
            MessageKind::AllToAll => {
                let [near, far] = [inside - 1.0, size - inside];
                link.seconds(near / size * buffer, near) + node_link.seconds(far / size * buffer, far)
            }
            MessageKind::Send if self.nodes > 1 => node_link.seconds(buffer, 1.0),
            MessageKind::Send => link.seconds(buffer, 1.0),
            MessageKind::Exchange => {
                let [near, far] = [inside - 1.0, size - inside];
                link.seconds(near * buffer, near) + node_link.seconds(far * buffer, far)
            }
        }
    }
}

impl Parallel {
    /// The devices of a kind of groups: those that share matrices lie next to each other, then those that share a
    /// sequence, then replicas; stages are furthest apart.
    pub(crate) fn group(&self, along: Axis) -> Group {
        let replica = self.tensor.saturating_mul(self.sequence);
        let (size, stride) = match along {
            Axis::Tensor => (self.tensor, 1),
            Axis::Sequence => (self.sequence, self.tensor),
            Axis::Data => (self.data, replica),
            Axis::Pipeline => (self.pipeline, replica.saturating_mul(self.data)),
        };
        Group::new(along, size, stride, self.cluster)
    }

    /// The devices that have computed gradients of the same weights.
    pub(crate) fn gradient_group(&self) -> Group {
        let size = self.data.saturating_mul(self.sequence);
        Group::new(Axis::Data, size, self.tensor, self.cluster)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick_spec::LinkSpec;

    fn cluster(nodes: u64, devices: u64) -> Cluster {
        let link = |text: &str| text.parse::<LinkSpec>().expect(text);
        Cluster::new(nodes, devices, link("100GB/s"), link("10GB/s"))
    }

    fn seconds(kind: MessageKind, parallel: &Parallel, along: Axis, buffer: f64) -> f64 {
        parallel.group(along).seconds(kind, buffer)
    }

    #[test]
    fn rings_take_what_the_slowest_link_takes_and_machines_share_the_work() {
        let within =
            |nodes, devices, data| Parallel { data, cluster: Some(cluster(nodes, devices)), ..Parallel::default() };
        let buffer = 8e9;
        let gather = |p: &Parallel| seconds(MessageKind::AllGather, p, Axis::Data, buffer);
        let near = |seconds: f64, expected: f64| {
            assert!((seconds / expected - 1.0).abs() < 5e-3, "{seconds} {expected}");
        };
        // 7/8 of 8 GB at 100 GB/s
        near(gather(&within(1, 8, 8)), 0.07);
        // and an eighth of it, halved, at 10 GB/s besides
        near(gather(&within(2, 8, 16)), 0.07 + 0.05);
        // a device a machine: all of it between machines
        near(gather(&within(8, 1, 8)), 0.7);
        let machines = within(2, 8, 16);
        let summed = seconds(MessageKind::AllReduce, &machines, Axis::Data, buffer);
        near(summed, 2.0 * gather(&machines));
        // 7 of 16 blocks inside, 8 outside
        let blocks = seconds(MessageKind::AllToAll, &machines, Axis::Data, buffer);
        near(blocks, 0.035 + 0.4);
    }

    #[test]
    fn tensor_groups_are_in_a_machine_and_stages_furthest_apart() {
        let parallel = Parallel {
            data: 2,
            tensor: 4,
            pipeline: 4,
            sequence: 2,
            cluster: Some(cluster(8, 8)),
            ..Parallel::default()
        };
        let lies = |along| {
            let group = parallel.group(along);
            [group.size, group.in_node, group.nodes]
        };
        assert_eq!(lies(Axis::Tensor), [4, 4, 1]);
        assert_eq!(lies(Axis::Sequence), [2, 2, 1]);
        assert_eq!(lies(Axis::Data), [2, 1, 2]);
        assert_eq!(lies(Axis::Pipeline), [4, 1, 4]);
    }

    #[test]
    fn without_links_bytes_are_counted_and_seconds_are_not() {
        let parallel = Parallel { data: 4, ..Parallel::default() };
        let mut traffic = Communication::default();
        let group = parallel.group(Axis::Data);
        traffic.even(MessageKind::AllReduce, group, 3, 1000.0);
        let sent = traffic.get(MessageKind::AllReduce, Axis::Data);
        assert_eq!((sent.messages, sent.bytes, sent.seconds), (3, 4500, 0.0));
    }
}
