//! What `firebrick plan --nodes N --gpus M` prints: degrees, bytes, seconds, messages and what binds, in twenty lines.

use super::units::{bytes, duration, traffic};
use crate::planned::Links;
use firebrick::engine::plan::PlanReport;
use firebrick::engine::plan::estimate::{EstimatePhase, MessageKind};
use firebrick::engine::plan::planner::Request;
use firebrick::spec::{Cluster, LinkKind};

/// Other degrees that are named.
const NAMED: usize = 3;

/// Machines, their links, and whether these are known.
pub fn machines(cluster: Cluster, links: Links) -> String {
    let Cluster { nodes, devices_per_node, link, node_link } = cluster;
    let each = match nodes {
        1 => format!("1 machine x {devices_per_node}: {link}"),
        _ => format!("{nodes} machines x {devices_per_node}: {link} inside, {node_link} a device between"),
    };
    let assumed = if links.are_assumed(cluster) { " (assumed; --link, --node-link)" } else { "" };
    format!("{each}{assumed}")
}

/// Whether the trainer runs the degrees, and how.
pub fn runs(request: &Request) -> String {
    let parallel = &request.parallel;
    if !request.is_run() {
        return "an estimate: `firebrick train` does not support these degrees, and rejects this plan".to_owned();
    }
    let start = match parallel.devices() {
        1 => "run by `firebrick train`".to_owned(),
        ranks => format!("run by `mpirun -n {ranks} firebrick train`"),
    };
    let is_own = |cluster: Cluster| matches!(cluster.link.kind, LinkKind::Host | LinkKind::Measured);
    if parallel.cluster.is_none_or(is_own) {
        start
    } else {
        format!("{start} over NCCL; without NCCL, values pass through host memory: --link host --node-link host")
    }
}

/// Bytes that one device sends in a phase, and the seconds that it waits for them; dashes where it sends nothing.
pub fn sent(report: &PlanReport, phase: EstimatePhase) -> [String; 2] {
    let messages = report.communication.iter().filter(|traffic| traffic.phase == phase);
    let (sent, waits) =
        messages.fold((0, 0.0), |(sent, waits), message| (sent + message.bytes, waits + message.seconds));
    if sent > 0 { [bytes(sent), duration(waits)] } else { ["-", "-"].map(str::to_owned) }
}

/// What one device sends in a step, by kind.
pub fn messages(report: &PlanReport) -> String {
    let each: Vec<String> = MessageKind::ALL
        .into_iter()
        .filter_map(|kind| {
            let own = report.communication.iter().filter(|t| t.kind == kind);
            let (count, sent, seconds) =
                own.fold((0, 0, 0.0), |(n, b, s), t| (n + t.messages, b + t.bytes, s + t.seconds));
            (count > 0).then(|| traffic(kind.name(), count, sent, seconds))
        })
        .collect();
    if each.is_empty() {
        return String::new();
    }
    format!("messages of a device, a step: {}\n", each.join("; "))
}

/// What keeps a step from being faster, and memory from being less.
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
    let own: Vec<String> = report
        .other_degrees
        .iter()
        .take(NAMED)
        .map(|own| {
            let kept = if own.reshard_after_forward { "" } else { ", reshard_after_forward=false" };
            let degrees = own.parallel.to_string();
            let degrees = degrees.split_once(": ").map_or(degrees.as_str(), |d| d.1);
            format!("{degrees}{kept} {}", duration(own.seconds))
        })
        .collect();
    if own.is_empty() {
        return String::new();
    }
    format!("others  {}\n", own.join("; "))
}
