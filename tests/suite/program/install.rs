//! `packaging/release` and `packaging/install.sh`: what is installed is what was built, and nothing else ever is.

use super::program;
use crate::support::project;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder with a release and one to install into.
struct Release(tempfile::TempDir);

impl Release {
    fn new() -> Self {
        let release = Self(tempfile::tempdir().unwrap());
        fs::create_dir(release.dist()).unwrap();
        release
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn dist(&self) -> PathBuf {
        self.path("dist")
    }

    fn installed(&self) -> PathBuf {
        self.path("prefix/bin/firebrick")
    }

    fn install(&self, from: &str, args: &[&str]) -> Output {
        let mut command = Command::new("sh");
        command.arg(project().join("packaging/install.sh")).arg(from).arg("--prefix").arg(self.path("prefix"));
        command.args(args).output().unwrap()
    }

    /// The same, from the release's folder.
    fn install_here(&self, args: &[&str]) -> Output {
        self.install(self.dist().to_str().unwrap(), args)
    }

    /// An archive whose program is a script, with its line in the list of checksums.
    fn scripted(&self, version: &str, set: &str, script: &str) {
        let name = format!("firebrick-{version}-{}-{set}", target());
        let folder = self.path(&name);
        fs::create_dir(&folder).unwrap();
        let own = folder.join("firebrick");
        fs::write(&own, format!("#!/bin/sh\n{script}\n")).unwrap();
        done(Command::new("chmod").arg("755").arg(&own));
        let archive = format!("{name}.tar.gz");
        let mut tar = Command::new("tar");
        tar.arg("-czf").arg(self.dist().join(&archive)).arg("-C");
        done(tar.arg(self.0.path()).arg(&name));
        let mut sum = Command::new("sha256sum");
        let line = done(sum.arg(&archive).current_dir(self.dist()));
        let list = self.dist().join("SHA256SUMS");
        let before = fs::read_to_string(&list).unwrap_or_default();
        fs::write(&list, before + &line).unwrap();
    }
}

/// What releases of this machine are called.
fn target() -> String {
    let said = done(Command::new("rustc").arg("-vV"));
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    host.unwrap().to_owned()
}

/// Runs a command that has to succeed; gives what it printed.
fn done(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// Says that a script failed with these parts in its message.
fn failed(output: &Output, parts: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    for part in parts {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
}

/// A program as a release, whose `install.sh` installs from `url` by default.
fn packed(program: impl AsRef<Path>, url: impl AsRef<OsStr>) -> Release {
    let release = Release::new();
    let mut pack = Command::new(project().join("packaging/release"));
    pack.arg("--binary").arg(program.as_ref()).arg("--output").arg(release.dist()).arg("cpu");
    done(pack.env("FIREBRICK_URL", url));
    release
}

/// The program of these tests as a release.
fn released() -> Release {
    packed(program(&[]).get_program(), "")
}

/// Serves the files of a folder until the process ends; gives the address.
fn served(folder: &Path) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let folder = folder.to_owned();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (mut first, mut line) = (String::new(), String::from("x"));
            reader.read_line(&mut first).unwrap();
            while !line.trim().is_empty() {
                line.clear();
                reader.read_line(&mut line).unwrap();
            }
            let name = first.split(' ').nth(1).unwrap().trim_start_matches('/');
            let (status, body) = match fs::read(folder.join(name)) {
                Ok(body) => ("200 OK", body),
                Err(_) => ("404 Not Found", Vec::new()),
            };
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(&body).unwrap();
        }
    });
    address
}

#[test]
fn a_release_is_installed_from_urls_without_symbols_and_starts() {
    let release = released();
    let archive = format!("firebrick-{}-{}-cpu.tar.gz", env!("CARGO_PKG_VERSION"), target());
    let list = fs::read_to_string(release.dist().join("SHA256SUMS")).unwrap();
    assert!(list.contains(&archive) && list.lines().count() == 1, "{list}");
    let address = served(&release.dist());
    let file = format!("file://{}", release.dist().display());
    for from in [&file, &address] {
        let output = release.install(from, &[]);
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{from}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(said.contains("installed firebrick") && said.contains("not in PATH"), "{said}");
        let version = done(Command::new(release.installed()).arg("--version"));
        assert!(version.contains(env!("CARGO_PKG_VERSION")), "{version}");
        let symbols = Command::new("nm").arg(release.installed()).output().unwrap();
        assert!(String::from_utf8_lossy(&symbols.stderr).contains("no symbols"));
        // aside and renamed: the program alone is left
        assert_eq!(fs::read_dir(release.path("prefix/bin")).unwrap().count(), 1);
        fs::remove_file(release.installed()).unwrap();
    }
    failed(&release.install(&format!("{address}/elsewhere"), &[]), &["cannot fetch", "elsewhere/SHA256SUMS"]);
}

#[test]
fn the_same_program_gives_the_same_archive() {
    let list = |release: &Release| fs::read_to_string(release.dist().join("SHA256SUMS")).unwrap();
    let (one, other) = (packed("/bin/true", ""), packed("/bin/true", ""));
    assert_eq!(list(&one), list(&other));
}

/// A component of a bill of materials, as `cargo tree` prints it. Crates of a registry have a checksum.
fn named(component: &serde_json::Value) -> String {
    let [name, version] = ["name", "version"].map(|key| component[key].as_str().unwrap());
    let ours = name.starts_with("firebrick-") || ["math-answer", "cubecl-llvm"].contains(&name);
    assert!(ours || component["hashes"][0]["content"].as_str().is_some_and(|sum| sum.len() == 64), "{component}");
    assert!(component["licenses"][0]["expression"].is_string(), "{component}");
    format!("{name} v{version}")
}

#[test]
fn an_archive_has_a_list_of_its_crates_and_a_page_whose_commands_are_the_programs() {
    let release = released();
    let name = format!("firebrick-{}-{}-cpu", env!("CARGO_PKG_VERSION"), target());
    let archive = release.dist().join(format!("{name}.tar.gz"));
    done(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(release.path("")));
    let folder = release.path(&name);
    let page = fs::read_to_string(folder.join("README.md")).unwrap();
    assert!(page.starts_with(&format!("# Firebrick {}\n", env!("CARGO_PKG_VERSION"))), "{page}");
    let parts: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(folder.join("firebrick.cdx.json")).unwrap()).unwrap();
    assert_eq!(parts["metadata"]["component"]["version"], env!("CARGO_PKG_VERSION"));
    let listed: BTreeSet<String> = parts["components"].as_array().unwrap().iter().map(named).collect();
    let mut tree = Command::new("cargo");
    tree.args(["tree", "--locked", "--no-default-features", "--edges", "normal,build", "--prefix", "none"]);
    let tree = done(tree.current_dir(project()));
    for line in tree.lines().filter(|line| !line.is_empty() && !line.starts_with("firebrick v")) {
        let [name, version] = [0, 1].map(|i| line.split(' ').nth(i).unwrap());
        assert!(listed.contains(&format!("{name} {version}")), "{line} is not in the bill of materials");
    }
    let commands = page.lines().filter(|line| line.starts_with("./firebrick "));
    let commands: Vec<Vec<&str>> = commands.map(|line| line.split(' ').skip(1).collect()).collect();
    assert_eq!(commands.len(), 3, "{page}");
    let short = ["warmup=null", "trainer.steps=1", "trainer.train_batch_size=4", "trainer.val_max_samples=4"];
    for (i, command) in commands.iter().enumerate() {
        let mut program = Command::new(folder.join("firebrick"));
        program.current_dir(&folder).stdin(std::process::Stdio::null());
        // a browser is for users
        program.args(command.iter().filter(|argument| **argument != "--open"));
        done(if i == 1 { program.args(short).arg("device=cpu") } else { &mut program });
    }
    assert!(folder.join("runs/run/report.html").is_file());
}

#[test]
fn without_a_source_the_address_of_the_release_or_of_the_environment_is_taken() {
    let release = Release::new();
    release.scripted("0.1.0", "cpu", "echo firebrick 0.1.0");
    let install = |script: &Path, address: &str| {
        let mut command = Command::new("sh");
        command.arg(script).arg("--prefix").arg(release.path("prefix")).env("FIREBRICK_URL", address);
        command.output().unwrap()
    };
    let script = project().join("packaging/install.sh");
    failed(&install(&script, ""), &["no source", "FIREBRICK_URL"]);
    assert!(install(&script, release.dist().to_str().unwrap()).status.success());
    let packed = packed("/bin/true", release.dist());
    assert!(install(&packed.dist().join("install.sh"), "").status.success());
}

#[test]
fn addresses_are_set_in_one_place_and_no_crate_goes_to_a_registry() {
    let metadata = done(
        Command::new("cargo")
            .args(["metadata", "--no-deps", "--locked", "--format-version", "1"])
            .current_dir(project()),
    );
    let metadata: serde_json::Value = serde_json::from_str(&metadata).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 15);
    for package in packages {
        for key in ["repository", "homepage", "documentation"] {
            assert_eq!(package[key], packages[0][key], "{}: {key}", package["name"]);
            let address = package[key].as_str().unwrap();
            assert!(address.is_empty() || address.starts_with("https://"), "{address}");
        }
        // its `[patch.crates-io]` would stay behind
        assert_eq!(package["publish"], serde_json::json!([]), "{}", package["name"]);
    }
}

/// Kernels choose wider instructions at run time, so that the program starts on every processor of its architecture.
#[test]
fn the_program_is_compiled_for_the_oldest_processor_of_its_architecture() {
    let settings = ["Cargo.toml", ".cargo/config.toml", "packaging/release", "packaging/wheel", "pyproject.toml"];
    for file in settings {
        let text = fs::read_to_string(project().join(file)).unwrap();
        assert!(!text.contains("target-cpu") && !text.contains("target-feature"), "{file}");
    }
}

#[test]
fn notes_of_a_release_are_the_changelogs_section() {
    let notes = |version: &str| Command::new(project().join("packaging/notes")).arg(version).output().unwrap();
    let output = notes(env!("CARGO_PKG_VERSION"));
    assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("### "));
    failed(&notes("9.9.9"), &["no section", "9.9.9"]);
}

#[test]
fn a_wheel_of_an_unknown_set_is_refused() {
    let wheel = |args: &[&str]| Command::new(project().join("packaging/wheel")).args(args).output().unwrap();
    failed(&wheel(&["--features", "rocm"]), &["rocm is no feature set", "cuda"]);
    failed(&wheel(&["--target"]), &["--target needs a value"]);
}

#[test]
fn an_archive_that_was_changed_is_not_installed() {
    let release = Release::new();
    release.scripted("0.1.0", "cpu", "echo firebrick 0.1.0");
    assert!(release.install_here(&[]).status.success());
    fs::remove_file(release.installed()).unwrap();
    let archive = fs::read_dir(release.dist())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some_and(|end| end == "gz"));
    let archive = archive.unwrap();
    let mut bytes = fs::read(&archive).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&archive, bytes).unwrap();
    failed(&release.install_here(&[]), &["damaged or was changed", "SHA-256", "Nothing was installed"]);
    assert!(!release.installed().exists());
    // neither is one that the list does not have
    fs::write(release.dist().join("SHA256SUMS"), "").unwrap();
    failed(&release.install_here(&[]), &["no build of 'cpu'"]);
    fs::remove_file(release.dist().join("SHA256SUMS")).unwrap();
    failed(&release.install_here(&[]), &["has no SHA256SUMS"]);
}

#[test]
fn what_is_not_there_and_what_is_there_more_than_once_is_said() {
    let release = Release::new();
    release.scripted("0.1.0", "cpu", "echo firebrick 0.1.0");
    release.scripted("0.2.0-rc.1", "cpu", "echo firebrick 0.2.0-rc.1");
    failed(&release.install_here(&["--features", "cuda"]), &["no build of 'cuda'", "0.1.0", "-cpu.tar.gz"]);
    failed(&release.install_here(&[]), &["several versions", "--version", "0.2.0-rc.1"]);
    assert!(release.install_here(&["--version", "0.2.0-rc.1"]).status.success());
    let said = done(&mut Command::new(release.installed()));
    assert_eq!(said, "firebrick 0.2.0-rc.1\n");
    failed(&release.install_here(&["--version", "0.3.0"]), &["in version 0.3.0"]);
    failed(&release.install_here(&["--features", "a/../b"]), &["letters, digits"]);
    failed(&release.install_here(&["--feature", "cpu"]), &["unknown option --feature"]);
    failed(&release.install_here(&["--features"]), &["--features needs a value"]);
    failed(&release.install("nowhere", &[]), &["neither a folder nor a URL"]);
}

#[test]
fn a_program_that_does_not_start_and_a_folder_that_cannot_be_written_leave_nothing() {
    let release = Release::new();
    release.scripted("0.1.0", "cpu", "echo 'GLIBC_9.99 not found' >&2; exit 1");
    failed(&release.install_here(&[]), &["later C library", "GLIBC_9.99", "cargo install"]);
    release.scripted("0.1.1", "cpu", "echo 'Illegal instruction' >&2; exit 132");
    failed(&release.install_here(&["--version", "0.1.1"]), &["does not start", "Illegal instruction"]);
    assert!(!release.path("prefix").exists());
    release.scripted("0.2.0", "cpu", "echo firebrick");
    fs::create_dir_all(release.installed()).unwrap();
    failed(&release.install_here(&["--version", "0.2.0"]), &["is a folder", "--prefix"]);
    fs::remove_dir_all(release.path("prefix")).unwrap();
    fs::write(release.path("prefix"), "a file").unwrap();
    failed(&release.install_here(&["--version", "0.2.0"]), &["cannot be written", "--prefix"]);
}

#[test]
fn a_later_version_replaces_an_earlier_one_whose_program_goes_on_running() {
    let release = Release::new();
    // an earlier version that runs until its input ends
    release.scripted(
        "0.1.0",
        "cpu",
        "if [ $# -eq 0 ]; then read -r line; echo \"0.1.0 $line\"; else echo firebrick 0.1.0; fi",
    );
    release.scripted("0.2.0", "cpu", "echo firebrick 0.2.0");
    assert!(release.install_here(&["--version", "0.1.0"]).status.success());
    let mut running = Command::new(release.installed());
    let running = running.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let output = release.install_here(&["--version", "0.2.0"]);
    let message = String::from_utf8_lossy(&output.stdout);
    assert!(message.contains("installed firebrick 0.2.0") && message.contains("was firebrick 0.1.0"), "{message}");
    assert_eq!(done(&mut Command::new(release.installed())), "firebrick 0.2.0\n");
    running.stdin.as_ref().unwrap().write_all(b"ends\n").unwrap();
    let ended = running.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&ended.stdout), "0.1.0 ends\n");
}

#[test]
fn a_release_of_an_unknown_set_or_without_its_program_is_refused() {
    let release = |args: &[&str]| {
        let mut command = Command::new(project().join("packaging/release"));
        command.args(args).output().unwrap()
    };
    failed(&release(&["rocm"]), &["rocm is no feature set", "cuda"]);
    for set in ["cpu", "mpi", "cuda-mpi"] {
        failed(&release(&["--binary", "/nowhere/firebrick", set]), &["there is no program"]);
    }
    failed(&release(&["--binary", "x", "cpu", "cuda"]), &["one feature set"]);
}
