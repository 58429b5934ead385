//! Devices, as `firebrick devices` probes them.

use super::check::Check;
use super::programs::install;
use firebrick::backends::device::{BackendReport, DeviceInfo};
use firebrick::engine::plan::size::Bytes;
use firebrick::spec::Backend;

/// A check per device, one per backend without devices, and the device of `auto`.
pub fn checks(reports: &[BackendReport]) -> Vec<Check> {
    let mut checks = Vec::new();
    for report in reports {
        checks.extend(report.devices.iter().map(device));
        // Metal exists only on macOS
        let possible = report.backend != Backend::Metal || cfg!(target_os = "macos");
        if let Some(note) = report.note.as_ref().filter(|_| possible) {
            let name = report.backend.name();
            let check = Check::missing(name, note.as_str());
            checks.push(if report.built { check } else { check.mended_by(install(name)) });
        }
    }
    checks.push(auto(reports));
    checks
}

fn device(info: &DeviceInfo) -> Check {
    let memory = info.memory_bytes;
    let memory = memory.map_or_else(String::new, |bytes| format!(", {}", Bytes(bytes)));
    let software = if info.software {
        "; a software adapter: slow, never selected by auto"
    } else if info.integrated {
        "; integrated: its memory is the host's"
    } else {
        ""
    };
    let dtypes = info.dtypes.join(" ");
    let finding = format!("{}{memory}, {dtypes}{software}", info.name);
    Check::ok(info.device.to_string(), finding)
}

/// The device of `auto`; backends are probed in its order.
fn auto(reports: &[BackendReport]) -> Check {
    let mut devices = reports.iter().flat_map(|report| &report.devices);
    let best = devices.clone().find(|device| !device.software);
    match (best, devices.next()) {
        (Some(best), _) => Check::ok("auto", format!("takes {}", best.device)),
        (None, Some(other)) => Check::warning("auto", format!("selects no device; name {} explicitly", other.device))
            .mended_by(format!("firebrick train CONFIG --device {}", other.device)),
        (None, None) => Check::failed("auto", "no device can be opened: nothing can train")
            .mended_by("cargo install --path . --locked --force"),
    }
}
