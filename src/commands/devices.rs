//! `firebrick devices`.

use crate::arguments::DevicesArgs;
use firebrick::backends::device::probe;

pub fn run(args: &DevicesArgs) -> anyhow::Result<()> {
    let reports = probe();
    if args.json {
        println!("{}", serde_json::to_string_pretty(&reports)?);
        return Ok(());
    }
    println!(
        "{:<12} {:<36} {:>10}  {:<18} NOTE",
        "DEVICE", "NAME", "MEMORY", "DTYPES"
    );
    for report in &reports {
        for device in &report.devices {
            let memory = device.memory_bytes.map_or_else(
                || "-".into(),
                |b| format!("{:.1} GiB", b as f64 / f64::from(1 << 30)),
            );
            let note = if device.software {
                "software adapter: works, slowly; never picked by auto"
            } else {
                ""
            };
            println!(
                "{:<12} {:<36} {memory:>10}  {:<18} {note}",
                device.device.to_string(),
                device.name,
                device.dtypes.join(" ")
            );
        }
        if let Some(note) = &report.note {
            println!(
                "{:<12} {:<36} {:>10}  {:<18} {note}",
                report.backend.name(),
                "-",
                "-",
                "-"
            );
        }
    }
    Ok(())
}
