//! Limits of a process, and memory.

use super::check::Check;
use super::machine::Machine;
use super::nvidia::has_gpu;
use firebrick::engine::plan::size::Bytes;

/// Open files below which a run with many weight files may fail.
const FEW_FILES: u64 = 1024;

/// Available memory below which little can be trained on the host.
const LITTLE_MEMORY: u64 = 2 << 30;

/// A soft limit of this process, by its name in `/proc/self/limits`; `u64::MAX` for unlimited; `None` if the system
/// does not report it.
fn limit(machine: &Machine, name: &str) -> Option<u64> {
    let text = machine.read("/proc/self/limits")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

pub fn open_files(machine: &Machine) -> Check {
    const NAME: &str = "open files";
    match limit(machine, "Max open files") {
        None => unknown(NAME),
        Some(u64::MAX) => Check::ok(NAME, "unlimited"),
        Some(most @ ..FEW_FILES) => {
            Check::warning(NAME, format!("at most {most}: too few for checkpoints and data in many files"))
                .mended_by("ulimit -n 65536")
        }
        Some(most) => Check::ok(NAME, format!("at most {most}")),
    }
}

pub fn locked_memory(machine: &Machine) -> Check {
    const NAME: &str = "locked memory";
    match limit(machine, "Max locked memory") {
        None => unknown(NAME),
        Some(u64::MAX) => Check::ok(NAME, "unlimited"),
        Some(most) if has_gpu(machine) => {
            Check::warning(NAME, format!("at most {}: pinned host memory and fast networks may want more", Bytes(most)))
                .mended_by("ulimit -l unlimited")
        }
        Some(most) => Check::ok(NAME, format!("at most {}; enough without an NVIDIA GPU", Bytes(most))),
    }
}

fn unknown(name: &str) -> Check {
    Check::missing(name, "the system does not report it (no /proc/self/limits)")
}

/// Bytes of an entry of `/proc/meminfo`.
fn meminfo(text: &str, entry: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(entry))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Host memory available in the system and its control group.
pub fn memory(machine: &Machine) -> Check {
    const NAME: &str = "memory";
    let text = machine.read("/proc/meminfo").unwrap_or_default();
    let (Some(total), Some(available)) = (meminfo(&text, "MemTotal:"), meminfo(&text, "MemAvailable:")) else {
        return Check::missing(NAME, "the system does not report it (no /proc/meminfo)");
    };
    let number = |path: &str| machine.read(path)?.trim().parse::<u64>().ok();
    let group = number("/sys/fs/cgroup/memory.max").map(|most| {
        let used = number("/sys/fs/cgroup/memory.current").unwrap_or(0);
        (most, most.saturating_sub(used))
    });
    let free = group.map_or(available, |(_, left)| left.min(available));
    let group = group.map_or_else(String::new, |(most, _)| format!(", {} for this control group", Bytes(most)));
    let finding = format!("{} available of {}{group}", Bytes(free), Bytes(total));
    if free < LITTLE_MEMORY {
        return Check::warning(NAME, finding).mended_by(format!("firebrick plan CONFIG --budget {free}"));
    }
    Check::ok(NAME, finding)
}
