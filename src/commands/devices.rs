//! `firebrick devices`.

use crate::arguments::DevicesArgs;
use crate::output;
use crate::table::Table;
use firebrick::backends::collective::{Collective, Settings, launched_world};
use firebrick::backends::device::{BackendReport, DeviceInfo, open, probe};
use firebrick::backends::profile::{self, machine, measure, measure_links};
use firebrick::engine::plan::size::Bytes;
use firebrick::spec::{Backend, DeviceProfile, Link, MeasuredLinks};
use std::sync::Arc;

pub fn run(args: &DevicesArgs) -> anyhow::Result<()> {
    if args.measure {
        let world = launched_world(Settings::default())?;
        return measure_all(&world, args.json).inspect_err(|error| {
            if world.size() > 1 {
                world.abort(&error.to_string());
            }
        });
    }
    let reports = probe();
    output::print_as(args.json, &reports, || table(&reports))
}

/// A line per device, and one per backend without devices.
fn table(reports: &[BackendReport]) -> String {
    let line = |[device, name, memory, largest, dtypes, note]: [&str; 6]| {
        format!("{device:<12} {name:<36} {memory:>10} {largest:>14}  {dtypes:<18} {note}\n")
    };
    let size = |bytes: Option<u64>| bytes.map_or_else(|| "-".into(), |bytes| Bytes(bytes).to_string());
    let mut text = line(["DEVICE", "NAME", "MEMORY", "LARGEST TENSOR", "DTYPES", "NOTE"]);
    for report in reports {
        for info in &report.devices {
            let note = match (info.software, info.integrated) {
                (true, _) => "software adapter: slow, never selected by auto",
                (false, true) => "integrated: its memory is the host's",
                (false, false) => "",
            };
            let (device, dtypes) = (info.device.to_string(), info.dtypes.join(" "));
            let [memory, largest] = [info.memory_bytes, info.largest_buffer].map(size);
            text += &line([&device, &info.name, &memory, &largest, &dtypes, note]);
        }
        if let Some(note) = &report.note {
            text += &line([report.backend.name(), "-", "-", "-", "-", note]);
        }
    }
    text
}

/// Measures every hardware device and, of several ranks, their links; saves the results. The first rank measures
/// devices while the others wait, and prints.
fn measure_all(world: &Arc<dyn Collective>, json: bool) -> anyhow::Result<()> {
    if world.rank() > 0 {
        // after the first rank has measured devices
        world.agree(None)?;
        measure_links(world, &machine())?;
        return Ok(());
    }
    let reports = probe();
    let mut measured: Vec<(DeviceInfo, DeviceProfile)> = Vec::new();
    for info in reports.iter().flat_map(|r| &r.devices) {
        if !info.software {
            let (device, info) = open(info.device)?;
            let profile = measure(&device, &info)?;
            measured.push((info, profile));
        }
    }
    let links = if world.size() > 1 {
        world.agree(None)?;
        Some(measure_links(world, &machine())?)
    } else {
        None
    };
    save_and_print(measured, links, json)
}

fn save_and_print(
    measured: Vec<(DeviceInfo, DeviceProfile)>,
    links: Option<MeasuredLinks>,
    json: bool,
) -> anyhow::Result<()> {
    let mut profiles: Vec<DeviceProfile> = Vec::new();
    let mut table = Table::new(2, &["DEVICE", "NAME", "F32 MATMUL", "MEMORY", "HOST MEMORY", "LINK", "LAUNCH"]);
    let mut folder = None;
    for (info, mut profile) in measured {
        profile.links = match info.device.backend() {
            // ranks on CPUs use these links; earlier measurements stay
            Backend::Cpu => links.or_else(|| profile::of(&info).links),
            _ => None,
        };
        let path = profile::save(&profile, info.device)?;
        folder = path.parent().map(std::path::Path::to_owned);
        let rate = |bytes: f64| format!("{:.1} GB/s", bytes / 1e9);
        table.row(vec![
            info.device.to_string(),
            info.name.clone(),
            format!("{:.2} TFLOP/s", profile.matmul_flops.f32 / 1e12),
            rate(profile.memory_bandwidth),
            rate(profile.host_bandwidth),
            profile.host_link.map_or_else(|| "unified".into(), rate),
            format!("{:.1} us", profile.kernel_overhead * 1e6),
        ]);
        profiles.push(profile);
    }
    let text = table.render() + &links.map_or_else(String::new, link_lines);
    let saved = folder.map_or_else(String::new, |folder| format!("saved in {}\n", folder.display()));
    output::print_as(json, &profiles, || text + &saved)
}

/// A line per link.
fn link_lines(links: MeasuredLinks) -> String {
    let line = |place: &str, link: Option<Link>| {
        link.map_or_else(String::new, |link| {
            let (rate, wait) = (link.bandwidth as f64 / 1e9, link.latency_ns as f64 / 1e3);
            format!("ranks {place}, over MPI: {rate:.2} GB/s, {wait:.1} us\n")
        })
    };
    line("of a machine", links.inside) + &line("of several machines", links.between)
}
