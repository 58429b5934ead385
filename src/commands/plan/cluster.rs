//! Output of `firebrick plan --nodes N --gpus M`: degrees, bytes, seconds, messages and bottlenecks, in twenty lines.

use super::units::{bytes, duration, traffic};
use crate::planned::Links;
use firebrick::engine::plan::PlanReport;
use firebrick::engine::plan::estimate::{EstimatePhase, MessageKind};
use firebrick::engine::plan::planner::Request;
use firebrick::spec::{Cluster, LinkKind};

/// Most named other degrees.
const MAX_DEGREES: usize = 3;

/// Machines, their links, and whether the links are assumed.
pub fn machines(cluster: Cluster, links: Links) -> String {
    let Cluster { nodes, devices_per_node, link, node_link } = cluster;
    let each = match nodes {
        1 => format!("1 machine x {devices_per_node}: {link}"),
        _ => format!("{nodes} machines x {devices_per_node}: {link} inside, {node_link} a device between"),
    };
    let assumed = if links.are_assumed(cluster) { " (assumed; --link, --node-link)" } else { "" };
    format!("{each}{assumed}")
}

/// The command that trains with the degrees, if the trainer supports them.
pub fn runs(request: &Request) -> String {
    let parallel = &request.parallel;
    if !request.is_supported() {
        return "an estimate: `firebrick train` does not support these degrees, and rejects this plan".to_owned();
    }
    let start = match parallel.devices() {
        1 => "run by `firebrick train`".to_owned(),
        ranks => format!("run by `mpirun -n {ranks} firebrick train`"),
    };
    let is_default = |cluster: Cluster| matches!(cluster.link.kind, LinkKind::Host | LinkKind::Measured);
    if parallel.cluster.is_none_or(is_default) {
        start
    } else {
        format!("{start} over NCCL; without NCCL, values pass through host memory: --link host --node-link host")
    }
}

/// Bytes that one device sends in a phase, and the seconds that it waits for them; dashes if it sends nothing.
pub fn sent(report: &PlanReport, phase: EstimatePhase) -> [String; 2] {
    let messages = report.communication.iter().filter(|traffic| traffic.phase == phase);
    let (sent, waits) =
        messages.fold((0, 0.0), |(sent, waits), message| (sent + message.bytes, waits + message.seconds));
    if sent > 0 { [bytes(sent), duration(waits)] } else { ["-", "-"].map(str::to_owned) }
}

/// Messages of one device in a step, by kind.
pub fn messages(report: &PlanReport) -> String {
    let each: Vec<String> = MessageKind::ALL
        .into_iter()
        .filter_map(|kind| {
            let messages = report.communication.iter().filter(|t| t.kind == kind);
            let (count, sent, seconds) =
                messages.fold((0, 0, 0.0), |(n, b, s), t| (n + t.messages, b + t.bytes, s + t.seconds));
            (count > 0).then(|| traffic(kind.name(), count, sent, seconds))
        })
        .collect();
    if each.is_empty() {
        return String::new();
    }
    format!("messages of a device, a step: {}\n", each.join("; "))
}

/// Bottlenecks of time and memory.
pub fn binds(request: &Request, report: &PlanReport) -> String {
    let Some(peak) = report.peak_phase() else {
        return String::new();
    };
    let most = peak.categories.iter().max_by_key(|(_, b)| **b);
    let most =
        most.map_or_else(String::new, |(category, b)| format!(", most of it {} ({})", category.name(), bytes(*b)));
    let room = request.allowed().map_or_else(String::new, |allowed| format!(" of {}", bytes(allowed)));
    let step = report.seconds.total().max(1e-12);
    let waits = report.communication.iter().fold(0.0, |s, t| s + t.seconds);
    let each = report.seconds.by_phase();
    let longest = each.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
    let longest =
        longest.map_or_else(String::new, |(phase, seconds)| format!("{phase} {:.0} %", 100.0 * seconds / step));
    format!(
        "binds   memory: {}, {}{room}{most}; time: {longest} of a step, messages {:.0} %\n",
        peak.name,
        bytes(report.peak_bytes),
        100.0 * waits / step
    )
}

/// Other degrees that fit.
pub fn others(report: &PlanReport) -> String {
    let others: Vec<String> = report
        .other_degrees
        .iter()
        .take(MAX_DEGREES)
        .map(|other| {
            let kept = if other.reshard_after_forward { "" } else { ", reshard_after_forward=false" };
            let degrees = other.parallel.to_string();
            let degrees = degrees.split_once(": ").map_or(degrees.as_str(), |d| d.1);
            format!("{degrees}{kept} {}", duration(other.seconds))
        })
        .collect();
    if others.is_empty() {
        return String::new();
    }
    format!("others  {}\n", others.join("; "))
}
