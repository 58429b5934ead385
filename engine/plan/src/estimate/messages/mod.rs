//! What devices send each other: messages, bytes and seconds by kind.
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
use firebrick_spec::Cluster;
use serde::{Deserialize, Serialize};

/// What a group of devices does with a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MessageKind {
    /// A sum that all have.
    AllReduce,
    /// A sum of which each has a shard.
    ReduceScatter,
    /// Shards put together on all.
    AllGather,
    /// A block for each other.
    AllToAll,
    /// From one to the next.
    Send,
    /// Bytes of each, which all have; as many as each likes.
    Exchange,
}

impl MessageKind {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::AllReduce, Self::ReduceScatter, Self::AllGather, Self::AllToAll, Self::Send, Self::Exchange];

    /// Its name, that of the collective in `firebrick-backends`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::AllToAll => "all_to_all",
            Self::Send => "send",
            Self::Exchange => "exchange",
        }
    }
}

/// The devices that a message is exchanged among.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Replicas, and with them the devices that share a sequence where gradients are summed.
    Data,
    /// Devices that share a sequence.
    Sequence,
    /// Devices that share matrices.
    Tensor,
    /// Stages.
    Pipeline,
}

impl Axis {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Data, Self::Sequence, Self::Tensor, Self::Pipeline];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Sequence => "sequence",
            Self::Tensor => "tensor",
            Self::Pipeline => "pipeline",
        }
    }
}

/// What one device sends.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Operations.
    pub messages: u64,
    /// Bytes to other devices.
    pub bytes: u64,
    /// How long a device waits for them, one after the other; 0 where links are not known.
    pub seconds: f64,
}

/// What one device sends, by kind and by group. Of devices that send unlike amounts, the first, which sends most.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Communication {
    sent: [[Traffic; Axis::ALL.len()]; MessageKind::ALL.len()],
}

impl Communication {
    /// What is sent in operations of a kind in a kind of groups.
    #[must_use]
    pub fn of(&self, kind: MessageKind, along: Axis) -> Traffic {
        self.sent[kind as usize][along as usize]
    }

    /// Seconds of all.
    pub(crate) fn seconds(&self) -> f64 {
        self.sent.iter().flatten().map(|sent| sent.seconds).sum()
    }

    /// Leaves out so many seconds of gathers that run beside computation.
    pub(crate) fn hide_gathers(&mut self, seconds: f64) {
        let own = &mut self.sent[MessageKind::AllGather as usize][Axis::Data as usize];
        own.seconds = (own.seconds - seconds).max(0.0);
    }

    /// Adds so many operations of a kind in a group, each of `bytes` that a device sends and of a buffer of `buffer`
    /// bytes.
    pub(crate) fn add(&mut self, (kind, group): (MessageKind, Group), messages: u64, bytes: u64, buffer: f64) {
        let sent = &mut self.sent[kind as usize][group.along as usize];
        sent.messages += messages;
        sent.bytes += messages * bytes;
        sent.seconds += messages as f64 * group.seconds(kind, buffer);
    }

    /// Adds so many operations on a buffer that is cut evenly.
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

    /// What there is, as a report has it.
    pub(crate) fn in_phase(&self, phase: EstimatePhase) -> Vec<PhaseTraffic> {
        let all = MessageKind::ALL.into_iter().flat_map(|kind| Axis::ALL.map(|along| (kind, along)));
        let some = all.filter_map(|(kind, along)| {
            let Traffic { messages, bytes, seconds } = self.of(kind, along);
            (messages > 0).then_some(PhaseTraffic { phase, kind, along, messages, bytes, seconds })
        });
        some.collect()
    }
}

impl std::ops::AddAssign for Communication {
    fn add_assign(&mut self, other: Self) {
        let pairs = self.sent.iter_mut().flatten();
        for (own, more) in pairs.zip(other.sent.iter().flatten()) {
            own.messages += more.messages;
            own.bytes += more.bytes;
            own.seconds += more.seconds;
        }
    }
}

/// What one device sends in a phase of a step.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct PhaseTraffic {
    /// The phase.
    pub phase: EstimatePhase,
    /// What is done.
    pub kind: MessageKind,
    /// Among which devices.
    pub along: Axis,
    /// How often.
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

    /// Seconds of one operation on a buffer of so many bytes.
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
        let both = self.tensor.saturating_mul(self.sequence);
        let (size, stride) = match along {
            Axis::Tensor => (self.tensor, 1),
            Axis::Sequence => (self.sequence, self.tensor),
            Axis::Data => (self.data, both),
            Axis::Pipeline => (self.pipeline, both.saturating_mul(self.data)),
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
        let near = |found: f64, expected: f64| {
            assert!((found / expected - 1.0).abs() < 5e-3, "{found} {expected}");
        };
        // 7/8 of 8 GB at 100 GB/s
        near(gather(&within(1, 8, 8)), 0.07);
        // and an eighth of it, halved, at 10 GB/s besides
        near(gather(&within(2, 8, 16)), 0.07 + 0.05);
        // a device a machine: all of it between machines
        near(gather(&within(8, 1, 8)), 0.7);
        let both = within(2, 8, 16);
        let summed = seconds(MessageKind::AllReduce, &both, Axis::Data, buffer);
        near(summed, 2.0 * gather(&both));
        // 7 of 16 blocks inside, 8 outside
        let blocks = seconds(MessageKind::AllToAll, &both, Axis::Data, buffer);
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
        let mut found = Communication::default();
        let group = parallel.group(Axis::Data);
        found.even(MessageKind::AllReduce, group, 3, 1000.0);
        let sent = found.of(MessageKind::AllReduce, Axis::Data);
        assert_eq!((sent.messages, sent.bytes, sent.seconds), (3, 4500, 0.0));
    }
}
