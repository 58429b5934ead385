//! Links between devices: how fast one device sends to another inside a machine, and between machines.
//!
//! Peaks are those of the makers, one direction, a device or a port:
//!
//! | name | GB/s | source |
//! |---|---|---|
//! | `nvlink2` … `nvlink5` | 150, 300, 450, 900 | NVIDIA's data sheets of V100, A100, H100 and B200: half of the 300, 600, 900 and 1,800 GB/s of both directions |
//! | `pcie3`, `pcie4`, `pcie5` | 15.75, 31.5, 63 | PCI Express 3.0, 4.0 and 5.0: 16 lanes of 8, 16 and 32 GT/s, coded 128/130 |
//! | `infiniband-hdr`, `infiniband-ndr` | 25, 50 | IBTA's roadmap: four lanes, 200 and 400 Gbit/s a port |
//! | `roce-100g`, `roce-200g`, `roce-400g` | 12.5, 25, 50 | RDMA over Ethernet of that rate |
//! | `ethernet-10g`, `ethernet-25g`, `ethernet-100g` | 1.25, 3.125, 12.5 | IEEE 802.3ae, 802.3by, 802.3bm, through sockets |
//! | `host` | 0.75 | what passes through host memory and MPI, as the trainer's messages do: 64 MiB summed over two ranks take 0.09 s |
//!
//! `firebrick devices --measure` under `mpirun` times the links that ranks have ([`MeasuredLinks`]).
//!
//! Four fifths of a peak count, which long messages usually reach; of `host`, which is measured, all. A step of a ring
//! takes besides what NCCL counts for it (`hwLat` in its `src/graph/tuning.cc`, ring, protocol Simple): 3.4 µs over
//! `NVLink`, 5.7 over `PCIe`, 14 over a network; sockets are taken to take 50.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Share of a peak that long messages usually reach.
const REACHED: f64 = 0.8;

/// A kind of link by the name that people know it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkKind {
    /// `NVLink` of V100.
    Nvlink2,
    /// `NVLink` of A100.
    Nvlink3,
    /// `NVLink` of H100 and H200.
    Nvlink4,
    /// `NVLink` of B200.
    Nvlink5,
    /// PCI Express 3.0, 16 lanes.
    Pcie3,
    /// PCI Express 4.0, 16 lanes.
    Pcie4,
    /// PCI Express 5.0, 16 lanes.
    Pcie5,
    /// `InfiniBand` of 200 Gbit/s.
    InfinibandHdr,
    /// `InfiniBand` of 400 Gbit/s.
    InfinibandNdr,
    /// RDMA over Ethernet of 100 Gbit/s.
    #[serde(rename = "roce-100g")]
    Roce100,
    /// RDMA over Ethernet of 200 Gbit/s.
    #[serde(rename = "roce-200g")]
    Roce200,
    /// RDMA over Ethernet of 400 Gbit/s.
    #[serde(rename = "roce-400g")]
    Roce400,
    /// Ethernet of 10 Gbit/s, through sockets.
    #[serde(rename = "ethernet-10g")]
    Ethernet10,
    /// Ethernet of 25 Gbit/s, through sockets.
    #[serde(rename = "ethernet-25g")]
    Ethernet25,
    /// Ethernet of 100 Gbit/s, through sockets.
    #[serde(rename = "ethernet-100g")]
    Ethernet100,
    /// Through host memory and MPI.
    Host,
    /// A rate that was given as a number.
    Given,
    /// The rate at which ranks were timed to send.
    Measured,
}

/// Each kind with its name, its peak in GB/s of one direction, and the nanoseconds of a step of a ring.
const KINDS: [(LinkKind, &str, f64, u64); 18] = [
    (LinkKind::Nvlink2, "nvlink2", 150.0, 3_400),
    (LinkKind::Nvlink3, "nvlink3", 300.0, 3_400),
    (LinkKind::Nvlink4, "nvlink4", 450.0, 3_400),
    (LinkKind::Nvlink5, "nvlink5", 900.0, 3_400),
    (LinkKind::Pcie3, "pcie3", 15.75, 5_700),
    (LinkKind::Pcie4, "pcie4", 31.5, 5_700),
    (LinkKind::Pcie5, "pcie5", 63.0, 5_700),
    (LinkKind::InfinibandHdr, "infiniband-hdr", 25.0, 14_000),
    (LinkKind::InfinibandNdr, "infiniband-ndr", 50.0, 14_000),
    (LinkKind::Roce100, "roce-100g", 12.5, 14_000),
    (LinkKind::Roce200, "roce-200g", 25.0, 14_000),
    (LinkKind::Roce400, "roce-400g", 50.0, 14_000),
    (LinkKind::Ethernet10, "ethernet-10g", 1.25, 50_000),
    (LinkKind::Ethernet25, "ethernet-25g", 3.125, 50_000),
    (LinkKind::Ethernet100, "ethernet-100g", 12.5, 50_000),
    (LinkKind::Host, "host", 0.75, 20_000),
    (LinkKind::Given, "given", 0.0, 14_000),
    (LinkKind::Measured, "measured", 0.0, 14_000),
];

impl LinkKind {
    /// The kinds that users name: all but [`Given`](Self::Given) and [`Measured`](Self::Measured).
    pub const NAMED: [Self; 16] = {
        let mut named = [Self::Host; 16];
        let mut i = 0;
        while i < named.len() {
            named[i] = KINDS[i].0;
            i += 1;
        }
        named
    };

    /// Its name.
    pub fn name(self) -> &'static str {
        KINDS[self as usize].1
    }

    /// Peak of one direction, bytes a second.
    pub fn peak(self) -> f64 {
        KINDS[self as usize].2 * 1e9
    }

    /// Rate that long messages reach, bytes a second.
    pub fn reached(self) -> f64 {
        match self {
            Self::Host => self.peak(),
            _ => self.peak() * REACHED,
        }
    }

    /// Nanoseconds of a step of a ring, whatever it carries.
    pub fn latency_ns(self) -> u64 {
        KINDS[self as usize].3
    }

    /// Returns true if all devices of a machine share one port, as network cards of Ethernet are usually built in;
    /// `InfiniBand` has a port a device.
    fn is_shared(self) -> bool {
        matches!(self, Self::Ethernet10 | Self::Ethernet25 | Self::Ethernet100)
    }
}

/// A link as a person writes it: a name, `4xinfiniband-ndr` for so many ports a machine, or a rate as `50GB/s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkSpec {
    kind: LinkKind,
    /// Ports of a machine, where they are given.
    ports: Option<u64>,
    /// Bytes a second of one direction, where a number was given.
    given: u64,
}

impl LinkSpec {
    /// A link of a kind.
    pub fn named(kind: LinkKind) -> Self {
        Self { kind, ports: None, given: 0 }
    }

    fn port(self) -> f64 {
        match self.kind {
            LinkKind::Given => self.given as f64,
            kind => kind.reached(),
        }
    }

    /// Share of one device inside a machine: its own link, times the ports, where they are given.
    #[must_use]
    pub fn inside(self) -> Link {
        self.of_device(self.port() * self.ports.unwrap_or(1) as f64)
    }

    /// Share of one of `devices` devices of a machine towards other machines: its own port, or its part of the
    /// machine's.
    #[must_use]
    pub fn between(self, devices: u64) -> Link {
        let shared = |ports: u64| self.port() * ports as f64 / devices.max(1) as f64;
        self.of_device(match self.ports {
            Some(ports) => shared(ports),
            None if self.kind.is_shared() => shared(1),
            None => self.port(),
        })
    }

    fn of_device(self, bandwidth: f64) -> Link {
        Link { kind: self.kind, bandwidth: (bandwidth as u64).max(1), latency_ns: self.kind.latency_ns() }
    }
}

impl FromStr for LinkSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let lower = text.trim().to_ascii_lowercase();
        if let Some(given) = rate(&lower) {
            return Ok(Self { kind: LinkKind::Given, ports: None, given });
        }
        let (ports, name) = match lower.split_once('x') {
            Some((ports, name)) if ports.parse::<u64>().is_ok_and(|n| n > 0) => (ports.parse().ok(), name),
            _ => (None, lower.as_str()),
        };
        match LinkKind::NAMED.into_iter().find(|kind| kind.name() == name) {
            Some(kind) => Ok(Self { kind, ports, given: 0 }),
            None => {
                let names = LinkKind::NAMED.map(LinkKind::name).join(", ");
                Err(format!(
                    "unknown link {text:?}; known: {names}, a number of ports per machine as in 4xinfiniband-ndr, and \
                     rates of one direction as in 50GB/s or 400Gbit/s"
                ))
            }
        }
    }
}

/// Bytes a second of a rate as people write it: `50GB/s`, `400Gbit/s`.
fn rate(text: &str) -> Option<u64> {
    let text = text.strip_suffix("/s")?;
    let units = [("tbit", 1.25e11), ("gbit", 1.25e8), ("mbit", 1.25e5), ("tb", 1e12), ("gb", 1e9), ("mb", 1e6)];
    let (number, unit) = units.into_iter().find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?, unit)))?;
    let number: f64 = number.trim().parse().ok()?;
    (number.is_finite() && number * unit >= 1.0).then_some((number * unit) as u64)
}

/// One device's share of a link: bytes a second in each direction, and the time of an empty message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Its kind.
    pub kind: LinkKind,
    /// Bytes a second that a device sends, and as many that it receives.
    pub bandwidth: u64,
    /// Nanoseconds of a step of a ring, whatever it carries.
    pub latency_ns: u64,
}

impl Link {
    /// Seconds of so many bytes in so many messages, one after the other.
    pub fn seconds(&self, bytes: f64, messages: f64) -> f64 {
        bytes / self.bandwidth as f64 + messages * self.latency_ns as f64 * 1e-9
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gigabytes = self.bandwidth as f64 / 1e9;
        let digits = usize::from(gigabytes < 10.0) + usize::from(gigabytes < 1.0);
        match self.kind {
            LinkKind::Given => write!(f, "{gigabytes:.digits$} GB/s"),
            kind => write!(f, "{} {gigabytes:.digits$} GB/s", kind.name()),
        }
    }
}

/// A device's links to others, as ranks were timed to send each other: the slowest of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredLinks {
    /// Inside a machine, where one has several ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inside: Option<Link>,
    /// Between machines, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between: Option<Link>,
}

impl Link {
    /// A link that was timed: bytes a second, and seconds of a message without any.
    pub fn measured(bandwidth: f64, latency: f64) -> Self {
        Self { kind: LinkKind::Measured, bandwidth: (bandwidth as u64).max(1), latency_ns: (latency * 1e9) as u64 }
    }
}

/// Machines of as many devices each, and their links.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// Machines.
    pub nodes: u64,
    /// Devices of each.
    pub devices_per_node: u64,
    /// Between the devices of a machine.
    pub link: Link,
    /// Between machines, a device.
    pub node_link: Link,
}

impl Cluster {
    /// Machines with the given links.
    pub fn new(nodes: u64, devices_per_node: u64, link: LinkSpec, node_link: LinkSpec) -> Self {
        Self { nodes, devices_per_node, link: link.inside(), node_link: node_link.between(devices_per_node) }
    }

    /// Devices in all.
    pub fn devices(&self) -> u64 {
        self.nodes.saturating_mul(self.devices_per_node)
    }

    /// The links that machines of a device usually have, inside and between, by its name: `NVLink` and `InfiniBand` of
    /// the same generation where it is sold with them, else `PCIe` and Ethernet of 100 Gbit/s; of a CPU messages
    /// through memory.
    pub fn usual_links(device: &str, is_cpu: bool) -> [LinkSpec; 2] {
        let name = device.to_ascii_uppercase();
        let has = |word: &str| name.contains(word);
        let kinds = if is_cpu {
            [LinkKind::Host, LinkKind::Host]
        } else if has("B200") {
            [LinkKind::Nvlink5, LinkKind::InfinibandNdr]
        } else if has("PCIE") {
            [LinkKind::Pcie4, LinkKind::Ethernet100]
        } else if has("H100") || has("H200") {
            [LinkKind::Nvlink4, LinkKind::InfinibandNdr]
        } else if has("A100") {
            [LinkKind::Nvlink3, LinkKind::InfinibandHdr]
        } else if has("V100") {
            [LinkKind::Nvlink2, LinkKind::InfinibandHdr]
        } else {
            [LinkKind::Pcie4, LinkKind::Ethernet100]
        };
        kinds.map(LinkSpec::named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_at_their_own_index() {
        for (index, (kind, ..)) in KINDS.into_iter().enumerate() {
            assert_eq!(kind as usize, index);
        }
    }

    #[test]
    fn links_are_read_by_name_number_and_ports() {
        for kind in LinkKind::NAMED {
            let spec: LinkSpec = kind.name().parse().expect("a name");
            assert_eq!(spec, LinkSpec::named(kind));
            let written = serde_json::to_string(&kind).expect("writes");
            assert_eq!(written, format!("{:?}", kind.name()));
        }
        let bandwidth = |text: &str, devices| {
            let spec: LinkSpec = text.parse().expect(text);
            [spec.inside().bandwidth, spec.between(devices).bandwidth]
        };
        assert_eq!(bandwidth("50GB/s", 8), [50_000_000_000; 2]);
        assert_eq!(bandwidth("400Gbit/s", 8), [50_000_000_000; 2]);
        // a port a device, and one that all share
        assert_eq!(bandwidth("infiniband-ndr", 8)[1], 40_000_000_000);
        assert_eq!(bandwidth("4xinfiniband-ndr", 8)[1], 20_000_000_000);
        assert_eq!(bandwidth("Ethernet-100g", 8)[1], 1_250_000_000);
        for wrong in ["nvlink9", "", "0GB/s", "-1GB/s", "0xnvlink4", "50GB", "NaNGB/s"] {
            let error = wrong.parse::<LinkSpec>().expect_err(wrong);
            assert!(error.contains("nvlink4") && error.contains("50GB/s"), "{error}");
        }
    }

    #[test]
    fn what_a_device_is_sold_with_is_its_usual_link() {
        let names = |device: &str, cpu| Cluster::usual_links(device, cpu).map(|link| link.inside().kind.name());
        assert_eq!(names("NVIDIA H100 80GB HBM3", false), ["nvlink4", "infiniband-ndr"]);
        assert_eq!(names("NVIDIA H100 PCIe", false), ["pcie4", "ethernet-100g"]);
        assert_eq!(names("NVIDIA GeForce RTX 4090", false), ["pcie4", "ethernet-100g"]);
        assert_eq!(names("AMD EPYC", true), ["host", "host"]);
    }

    #[test]
    fn a_faster_generation_is_faster() {
        let kinds = LinkKind::NAMED;
        for pair in [0..4, 4..7, 7..9, 9..12, 12..15] {
            let peaks: Vec<f64> = kinds[pair].iter().map(|kind| kind.peak()).collect();
            assert!(peaks.windows(2).all(|two| two[0] < two[1]), "{peaks:?}");
        }
    }
}
