//! `docs/reference/support.md` and the status table of `README.md`, from `docs/reference/support.yaml`.

use super::fill;
use serde::Deserialize;
use std::fmt::Write;
use std::path::Path;

/// The lines of `README.md` between which the table of status is.
pub const START: &str = "<!-- status: generated from docs/reference/support.yaml -->";
/// The line below the table.
pub const END: &str = "<!-- end of status -->";

/// The data file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Support {
    summary: Vec<Summary>,
    words: Vec<Word>,
    families: Vec<Family>,
    algorithms: Vec<Algorithm>,
    devices: Vec<Device>,
    other: Vec<Other>,
    limits: Vec<String>,
    hardware: Vec<Hardware>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Summary {
    device: String,
    tests: String,
    trained: String,
    speed: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Word {
    word: String,
    meaning: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Family {
    families: String,
    algorithms: String,
    cpu: String,
    wgpu: String,
    cuda: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Algorithm {
    algorithms: String,
    compared: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Device {
    #[serde(rename = "device")]
    name: String,
    tests: String,
    hardware: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Other {
    what: String,
    state: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Hardware {
    machine: String,
    date: String,
    ran: String,
}

impl Support {
    pub fn read(root: &Path) -> anyhow::Result<Self> {
        let path = root.join("docs/reference/support.yaml");
        let text = std::fs::read_to_string(&path).map_err(|e| anyhow::anyhow!("{}: {e}", path.display()))?;
        serde_saphyr::from_str(&text).map_err(|e| anyhow::anyhow!("{}: {e}", path.display()))
    }

    pub fn page(&self) -> String {
        let mut page = "<!-- generated from support.yaml -->\n\n# Support\n\n\
                        What has run on which device, and what has not. Figures are in [Benchmarks](benchmarks.md).\n\n\
                        ## Words\n\n"
            .to_owned();
        for Word { word, meaning } in &self.words {
            page.push_str(&fill("- ", &format!("**{word}**: {meaning}")));
        }
        let families = self.families.iter().map(|f| [&*f.families, &f.algorithms, &f.cpu, &f.wgpu, &f.cuda]);
        table(&mut page, "Families and algorithms", ["families", "algorithms", "CPU", "wgpu", "CUDA"], families);
        let algorithms = self.algorithms.iter().map(|a| [&*a.algorithms, &a.compared]);
        table(&mut page, "Algorithms", ["algorithms", "compared with"], algorithms);
        let devices = self.devices.iter().map(|d| [&*d.name, &d.tests, &d.hardware]);
        table(&mut page, "Devices", ["device", "tests", "hardware"], devices);
        let other = self.other.iter().map(|o| [&*o.what, &o.state]);
        table(&mut page, "Data, rewards and tools", ["what", "state"], other);
        page.push_str("\n## Limits\n\n");
        for limit in &self.limits {
            page.push_str(&fill("- ", limit));
        }
        let hardware = self.hardware.iter().map(|h| [&*h.machine, &h.date, &h.ran]);
        table(&mut page, "Hardware", ["machine", "date", "what ran"], hardware);
        page
    }

    /// The table of `README.md`.
    pub fn summary(&self) -> String {
        let rows = self.summary.iter().map(|s| [&*s.device, &s.tests, &s.trained, &s.speed]);
        let mut text = String::new();
        rows_of(&mut text, ["", "tests", "trained", "speed"], rows);
        text
    }
}

fn table<'r, const N: usize>(
    page: &mut String,
    heading: &str,
    columns: [&'r str; N],
    rows: impl Iterator<Item = [&'r str; N]>,
) {
    let _ = write!(page, "\n## {heading}\n\n");
    rows_of(page, columns, rows);
}

fn rows_of<'r, const N: usize>(page: &mut String, columns: [&'r str; N], rows: impl Iterator<Item = [&'r str; N]>) {
    let line = |page: &mut String, cells: [&str; N]| {
        page.push('|');
        for cell in cells {
            let cell = cell.split_whitespace().collect::<Vec<_>>().join(" ");
            let _ = write!(page, " {cell}{}|", if cell.is_empty() { "" } else { " " });
        }
        page.push('\n');
    };
    line(page, columns);
    let _ = writeln!(page, "|{}", "---|".repeat(N));
    for row in rows {
        line(page, row);
    }
}
