//! The inspected machine: system files, environment variables, programs and libraries. Tests use another folder.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Default library folders of the usual distributions, besides `LD_LIBRARY_PATH`.
const LIBRARIES: [&str; 10] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib/x86_64-linux-gnu",
    "/lib64",
    "/lib",
    "/usr/local/lib",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
];

/// Longest time for a program to print its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(10);

/// Packages of a program, by package manager.
pub struct Packages {
    pub apt: &'static str,
    pub dnf: &'static str,
    pub pacman: &'static str,
    /// `None` if a Mac does not need it.
    pub brew: Option<&'static str>,
}

/// An inspected machine.
pub struct Machine {
    root: PathBuf,
    variables: BTreeMap<OsString, OsString>,
}

impl Machine {
    /// This machine.
    pub fn this() -> Self {
        Self { root: PathBuf::from("/"), variables: std::env::vars_os().collect() }
    }

    /// A machine with its system files below a folder, and these environment variables.
    #[cfg(test)]
    pub fn below(root: &Path, variables: &[(&str, &Path)]) -> Self {
        let variables = variables.iter();
        Self {
            root: root.to_owned(),
            variables: variables.map(|(name, value)| ((*name).into(), value.as_os_str().to_owned())).collect(),
        }
    }

    /// Path of a system file, given its usual path.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The text of a file of the system; `None` if it cannot be read.
    pub fn read(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.path(path)).ok()
    }

    /// The entries of a folder of the system; none if it does not exist.
    pub fn entries(&self, folder: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.path(folder));
        let entries = entries.into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    }

    /// An environment variable, if it is set to something.
    pub fn variable(&self, name: &str) -> Option<&OsString> {
        let value = self.variables.get(&OsString::from(name));
        value.filter(|value| !value.is_empty())
    }

    /// A folder that a variable names.
    pub fn folder(&self, name: &str) -> Option<PathBuf> {
        self.variable(name).map(PathBuf::from)
    }

    /// The first program of these names in `PATH`.
    pub fn program(&self, names: &[&str]) -> Option<PathBuf> {
        let path = self.variable("PATH")?;
        let folders: Vec<PathBuf> = std::env::split_paths(path).collect();
        let named = names.iter().flat_map(|name| folders.iter().map(move |f| f.join(name)));
        named.into_iter().find(|program| program.is_file())
    }

    /// The first line of a program's `--version`; `None` if it fails, or does not answer.
    pub fn version(&self, program: &Path) -> Option<String> {
        let mut command = Command::new(program);
        command.arg("--version").env_clear().envs(&self.variables);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().ok()?;
        let started = Instant::now();
        // the output fits the pipe, so that the program ends without a reader
        while child.try_wait().ok()?.is_none() {
            if started.elapsed() > VERSION_TIMEOUT {
                // a killed program ends
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let output = child.wait_with_output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = text.lines().next()?.trim().to_owned();
        output.status.success().then_some(line)
    }

    /// Path of a library by its file name, such as `libcuda.so.1`.
    pub fn library(&self, name: &str) -> Option<PathBuf> {
        let named = self.variable("LD_LIBRARY_PATH");
        let named = named.map(|paths| std::env::split_paths(paths).collect::<Vec<_>>());
        let usual = LIBRARIES.iter().map(|folder| self.path(folder));
        let folders = named.into_iter().flatten().chain(usual);
        folders.map(|folder| folder.join(name)).find(|file| file.exists())
    }

    /// The command that installs packages here.
    pub fn install(&self, packages: &Packages) -> String {
        let managers = [
            ("apt-get", "install", Some(packages.apt)),
            ("dnf", "install", Some(packages.dnf)),
            ("pacman", "-S", Some(packages.pacman)),
            ("brew", "install", packages.brew),
        ];
        let known = managers.iter().find_map(|(name, verb, packages)| {
            let packages = (*packages)?;
            self.program(&[name])?;
            Some(format!("{name} {verb} {packages}"))
        });
        known.unwrap_or_else(|| format!("apt-get install {}", packages.apt))
    }
}
