//! Where the doctor looks: files of the system, environment variables, programs and libraries. Tests look elsewhere.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Where the dynamic loader looks for libraries besides `LD_LIBRARY_PATH`, on the usual distributions.
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

/// Longest time that a program may take to say its version.
const PATIENCE: Duration = Duration::from_secs(10);

/// Packages that have the same thing, by package manager.
pub struct Packages {
    pub apt: &'static str,
    pub dnf: &'static str,
    pub pacman: &'static str,
    /// None where a Mac has no use for it.
    pub brew: Option<&'static str>,
}

/// A machine to be looked at.
pub struct Machine {
    root: PathBuf,
    variables: BTreeMap<OsString, OsString>,
}

impl Machine {
    /// This one.
    pub fn this() -> Self {
        Self { root: PathBuf::from("/"), variables: std::env::vars_os().collect() }
    }

    /// One whose system files are below a folder, with these environment variables.
    #[cfg(test)]
    pub fn below(root: &Path, variables: &[(&str, &Path)]) -> Self {
        let variables = variables.iter();
        Self {
            root: root.to_owned(),
            variables: variables.map(|(name, value)| ((*name).into(), value.as_os_str().to_owned())).collect(),
        }
    }

    /// Where a file of the system is, given its usual path.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The text of a file of the system; none where it cannot be read.
    pub fn read(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.path(path)).ok()
    }

    /// The entries of a folder of the system; none where it is not there.
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

    /// The first line that a program prints when asked for its version; none where it fails, or does not answer.
    pub fn version(&self, program: &Path) -> Option<String> {
        let mut command = Command::new(program);
        command.arg("--version").env_clear().envs(&self.variables);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().ok()?;
        let started = Instant::now();
        // what it prints is shorter than a pipe, so that it ends without being read
        while child.try_wait().ok()?.is_none() {
            if started.elapsed() > PATIENCE {
                // its end is not waited for in vain
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

    /// Where a library is, whose file name begins so: `libcuda.so.1`.
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
