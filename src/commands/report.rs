//! `firebrick report`: runs as one HTML file.

use crate::arguments::ReportArgs;
use crate::output;
use crate::report_page::html;
use firebrick::backends::host::write_synced;
use firebrick::engine::Error;
use firebrick::engine::plan::size::Bytes;
use firebrick::report::Report;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Default name of the file.
const FILE: &str = "report.html";

pub fn run(args: &ReportArgs) -> anyhow::Result<()> {
    let report = Report::read(&args.runs, args.samples)?;
    let path = match (&args.output, &args.runs[..]) {
        (Some(path), _) => path.clone(),
        (None, [run]) => run.join(FILE),
        (None, _) => PathBuf::from(FILE),
    };
    let html = html(&report);
    write(&path, html.as_bytes())?;
    for run in &report.runs {
        for note in &run.notes {
            output::message(&format!("{}: {note}", run.name));
        }
    }
    let size = Bytes(html.len() as u64);
    output::print(&format!("{} ({size})\n", path.display()))?;
    if args.open {
        open(&path);
    }
    Ok(())
}

/// Writes a file atomically: to a temporary file, synced, renamed.
fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(format!(".{}.tmp", std::process::id()));
    let aside = PathBuf::from(aside);
    let written = write_synced(&aside, bytes).and_then(|()| fs::rename(&aside, path));
    written.map_err(|error| {
        // remove the temporary file; report the first error
        let _ = fs::remove_file(&aside);
        Error::io("write", path)(error)
    })
}

/// Opens the report with the system's own opener. The report exists even if there is none.
fn open(path: &Path) {
    let (program, arguments): (&str, &[&str]) = match std::env::consts::OS {
        "macos" => ("open", &[]),
        // `start` takes its first quoted argument for a title
        "windows" => ("cmd", &["/C", "start", ""]),
        _ => ("xdg-open", &[]),
    };
    let mut command = Command::new(program);
    command.args(arguments).arg(path);
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let detail = match quiet.status() {
        Ok(status) if status.success() => return,
        Ok(status) => format!("{program} failed ({status})"),
        Err(error) => format!("{program} could not be started ({error})"),
    };
    output::message(&format!("the report is written but not opened: {detail}; open {} in a browser", path.display()));
}
