//! `firebrick devices`.

use crate::arguments::DevicesArgs;
use crate::output;
use crate::table::Table;
use firebrick::backends::device::{BackendReport, open, probe};
use firebrick::backends::profile::{self, measure};
use firebrick::engine::plan::size::Bytes;
use firebrick::spec::DeviceProfile;
use std::fmt::Write;

pub fn run(args: &DevicesArgs) -> anyhow::Result<()> {
    let reports = probe();
    if args.measure {
        return measure_all(&reports, args.json);
    }
    let text = if args.json {
        serde_json::to_string_pretty(&reports)? + "\n"
    } else {
        table(&reports)
    };
    output::print(&text)
}

/// A line a device, and one for a backend that has none.
fn table(reports: &[BackendReport]) -> String {
    let mut text = format!(
        "{:<12} {:<36} {:>10} {:>14}  {:<18} NOTE\n",
        "DEVICE", "NAME", "MEMORY", "LARGEST TENSOR", "DTYPES"
    );
    for report in reports {
        for device in &report.devices {
            let size =
                |bytes: Option<u64>| bytes.map_or_else(|| "-".into(), |b| Bytes(b).to_string());
            let (memory, largest) = (size(device.memory_bytes), size(device.largest_buffer));
            let note = if device.software {
                "software adapter: slow, never selected by auto"
            } else if device.integrated {
                "integrated: its memory is the host's"
            } else {
                ""
            };
            // writing to a string cannot fail
            let _ = writeln!(
                text,
                "{:<12} {:<36} {memory:>10} {largest:>14}  {:<18} {note}",
                device.device.to_string(),
                device.name,
                device.dtypes.join(" ")
            );
        }
        if let Some(note) = &report.note {
            let _ = writeln!(
                text,
                "{:<12} {:<36} {:>10} {:>14}  {:<18} {note}",
                report.backend.name(),
                "-",
                "-",
                "-",
                "-"
            );
        }
    }
    text
}

/// Measures every hardware device and saves the results.
fn measure_all(reports: &[BackendReport], json: bool) -> anyhow::Result<()> {
    let mut profiles: Vec<DeviceProfile> = Vec::new();
    let mut table = Table::new(
        2,
        &[
            "DEVICE",
            "NAME",
            "F32 MATMUL",
            "MEMORY",
            "HOST MEMORY",
            "LINK",
            "LAUNCH",
        ],
    );
    let mut folder = None;
    let found = reports.iter().flat_map(|r| &r.devices);
    for info in found.filter(|d| !d.software) {
        let (device, info) = open(info.device)?;
        let profile = measure(&device, &info)?;
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
    let text = match (json, folder) {
        (true, _) => serde_json::to_string_pretty(&profiles)? + "\n",
        (false, Some(folder)) => format!("{}saved in {}\n", table.render(), folder.display()),
        (false, None) => table.render(),
    };
    output::print(&text)
}
