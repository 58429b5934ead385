//! What benches share that a script runs: their command line, and lines of JSON, written as they are measured so that a
//! bench that is stopped leaves what it had.

use burn::tensor::Device;
use firebrick::backends::device::open;
use firebrick::backends::kernels::open_cublaslt;
use firebrick::backends::{DeviceInfo, DeviceSpec};
use serde_json::Value;
use std::fs::File;
use std::io::Write;

/// A bench's command line: `[--device] D`, `--json FILE`, `--small`, and words of its own.
pub struct Options {
    pub device: DeviceSpec,
    /// Shapes that a processor or a software driver gets through in seconds.
    pub small: bool,
    lines: Option<File>,
    /// The rest, with their values.
    own: Vec<(String, String)>,
}

impl Options {
    /// Ends the program with one line where something makes no sense. `own` are flags with a value that the bench
    /// knows.
    pub fn parse(own: &[&str]) -> Self {
        Self::parse_with(own, &[])
    }

    /// The same with flags without a value, too.
    pub fn parse_with(own: &[&str], switches: &[&str]) -> Self {
        let mut options = Self { device: DeviceSpec::CPU, small: false, lines: None, own: Vec::new() };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().unwrap_or_else(|| fail(&format!("{word} needs a value")));
            match word.as_str() {
                // cargo's own word for "this is a bench"
                "--bench" => {}
                "--small" => options.small = true,
                "--device" => options.device = device(&value()),
                "--json" => options.lines = Some(create(&value())),
                known if switches.contains(&known) => {
                    options.own.push((word, String::new()));
                }
                known if own.contains(&known) => {
                    let value = value();
                    options.own.push((word, value));
                }
                other if !other.starts_with('-') => options.device = device(other),
                other => {
                    fail(&format!("{other} is unknown; there are --device D, --json FILE, --small {}", own.join(" ")))
                }
            }
        }
        options
    }

    /// The value of a flag of the bench's own.
    pub fn own(&self, flag: &str) -> Option<&str> {
        let found = self.own.iter().find(|(name, _)| name == flag);
        found.map(|(_, value)| value.as_str())
    }

    /// The device, and what it is.
    pub fn open(&self) -> (Device, DeviceInfo) {
        open(self.device).unwrap_or_else(|error| fail(&error.to_string()))
    }

    /// True for `--matmul cublaslt`, a flag of the bench's own.
    pub fn cublaslt(&self, device: &Device) -> bool {
        match self.own("--matmul") {
            None | Some("firebrick") => false,
            Some("cublaslt") => {
                open_cublaslt(device).unwrap_or_else(|why| fail(&format!("--matmul cublaslt: {why}")));
                true
            }
            Some(other) => fail(&format!("--matmul {other} is neither firebrick nor cublaslt")),
        }
    }

    /// Adds a line to the JSON file, where one is wanted.
    pub fn write(&mut self, line: &Value) {
        if let Some(file) = &mut self.lines
            && let Err(error) = writeln!(file, "{line}")
        {
            fail(&format!("--json: {error}"));
        }
    }
}

fn device(text: &str) -> DeviceSpec {
    text.parse().unwrap_or_else(|error| fail(&format!("--device: {error}")))
}

fn create(path: &str) -> File {
    File::create(path).unwrap_or_else(|error| fail(&format!("--json {path}: {error}")))
}

/// Ends the program.
#[allow(clippy::print_stderr, reason = "a bench says why it ends")]
pub fn fail(why: &str) -> ! {
    eprintln!("{why}");
    std::process::exit(2);
}
