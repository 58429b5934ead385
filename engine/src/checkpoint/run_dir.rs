//! The run folder: its files, and checkpoints that are complete or absent.

use super::run_lock::RunLock;
use super::{if_there, json};
use crate::{Error, Result};
use firebrick_spec::file::{MAX_CONFIG_BYTES, read_line, read_text};
use serde::Serialize;
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const CONFIG: &str = "config.yaml";
const CHECKPOINTS: &str = "checkpoints";
/// Ending of a folder during its removal.
const REMOVED: &str = ".removed";
/// Ending of a damaged checkpoint's folder.
const DAMAGED: &str = ".damaged";

/// A run folder that can be written to.
#[derive(Clone, Debug)]
pub struct RunDir {
    path: PathBuf,
    /// False on other ranks, whose writes do nothing.
    writes: bool,
    /// Excludes other processes.
    _lock: Option<Arc<RunLock>>,
}

impl RunDir {
    /// Returns true if a folder holds a run.
    pub fn holds_run(path: &Path) -> bool {
        path.join(CONFIG).is_file()
    }

    /// Rejects a folder that holds a run.
    ///
    /// # Errors
    /// `Error::RunExists` if it does.
    pub fn check_free(path: &Path) -> Result<()> {
        if path.join(CONFIG).exists() {
            return Err(Error::RunExists { path: path.to_owned() });
        }
        Ok(())
    }

    /// Creates a run folder, which must not hold a run.
    ///
    /// # Errors
    /// `Error::RunExists`, `Error::RunBusy` if another process is creating one there, and `Error::Io` if the folder or
    /// its configuration cannot be written.
    pub fn create(path: &Path, config_yaml: &str) -> Result<Self> {
        Self::check_free(path)?;
        fs::create_dir_all(path.join(CHECKPOINTS)).map_err(Error::io("create the run folder", path))?;
        let dir = Self::locked(path)?;
        // another process may have been faster
        Self::check_free(path)?;
        dir.write(CONFIG, config_yaml.as_bytes())?;
        Ok(dir)
    }

    /// Opens a run folder to continue its run.
    ///
    /// # Errors
    /// `Error::Resume` if it holds no run; `Error::RunBusy` if another process writes it; `Error::Io` if its folder of
    /// checkpoints cannot be created.
    pub fn open(path: &Path) -> Result<Self> {
        if !Self::holds_run(path) {
            let detail = "it contains no run (no config.yaml); start one without --resume".into();
            return Err(Error::Resume { path: path.to_owned(), detail });
        }
        let dir = Self::locked(path)?;
        fs::create_dir_all(path.join(CHECKPOINTS)).map_err(Error::io("create", path))?;
        Ok(dir)
    }

    fn locked(path: &Path) -> Result<Self> {
        let lock = RunLock::take(path)?;
        Ok(Self { path: path.to_owned(), writes: true, _lock: Some(Arc::new(lock)) })
    }

    /// A run folder that another rank writes. Writes to it do nothing.
    pub fn read_only(path: &Path) -> Self {
        Self { path: path.to_owned(), writes: false, _lock: None }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The configuration that the run was started with.
    ///
    /// # Errors
    /// `Error::Io` where it cannot be read.
    pub fn config_yaml(&self) -> Result<String> {
        let path = self.path.join(CONFIG);
        read_text(&path, MAX_CONFIG_BYTES).map_err(Error::io("read", path))
    }

    /// Writes a file whole: aside, synced, renamed.
    ///
    /// # Errors
    /// `Error::Io` if it cannot be written; the file is then unchanged.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        if !self.writes {
            return Ok(());
        }
        let (path, aside) = (self.path.join(name), self.path.join(format!("{name}.tmp")));
        let write = || {
            let mut file = File::create(&aside)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&aside, &path)?;
            sync_parent(&path)
        };
        write().map_err(|error| {
            // the first error is the one to report
            let _ = fs::remove_file(&aside);
            Error::io("write", &path)(error)
        })
    }

    /// Writes a JSON file whole.
    ///
    /// # Errors
    /// `Error::Io` if the value cannot be serialized, or the file cannot be written.
    pub fn write_json(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let mut text = json(value).map_err(Error::io("write", self.path.join(name)))?;
        text.push('\n');
        self.write(name, text.as_bytes())
    }

    /// Removes a file, if it exists.
    ///
    /// # Errors
    /// `Error::Io` if it cannot be removed.
    pub fn remove(&self, name: &str) -> Result<()> {
        let path = self.path.join(name);
        if !self.writes {
            return Ok(());
        }
        if_there(fs::remove_file(&path)).map_err(Error::io("remove", path))
    }

    /// Appends lines to a JSON Lines file.
    ///
    /// # Errors
    /// `Error::Io` if a line cannot be serialized or written.
    pub fn append(&self, name: &str, lines: &[impl Serialize]) -> Result<()> {
        let mut text = Vec::new();
        for line in lines {
            let path = self.path.join(name);
            serde_json::to_writer(&mut text, line).map_err(|e| Error::io("append to", path)(e.into()))?;
            text.push(b'\n');
        }
        self.append_text(name, &text)
    }

    /// Appends text to a file.
    ///
    /// # Errors
    /// `Error::Io` where it cannot be written.
    pub fn append_text(&self, name: &str, text: &[u8]) -> Result<()> {
        let path = self.path.join(name);
        if !self.writes {
            return Ok(());
        }
        let mut open = OpenOptions::new();
        let file = open.create(true).append(true).open(&path);
        file.and_then(|mut file| file.write_all(text)).map_err(Error::io("append to", &path))
    }

    /// Removes the lines of later steps, and a truncated line, so that a resumed run repeats none.
    ///
    /// # Errors
    /// `Error::Io` if the file cannot be read or written.
    pub fn rewind(&self, name: &str, step_key: &str, last_step: u64) -> Result<()> {
        let path = self.path.join(name);
        let mut lines = match File::open(&path) {
            Ok(file) => BufReader::new(file),
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(Error::io("read", path)(e)),
        };
        // a killed process may have truncated the last line inside a character
        let is_kept = |line: &[u8]| {
            serde_json::from_slice::<Value>(line)
                .is_ok_and(|v| v.get(step_key).and_then(Value::as_u64).is_some_and(|s| s <= last_step))
        };
        let (mut kept, mut line) = (Vec::new(), Vec::new());
        while read_line(&mut lines, &mut line).map_err(Error::io("read", &path))? {
            if is_kept(&line) {
                kept.extend_from_slice(line.trim_ascii_end());
                kept.push(b'\n');
            }
        }
        self.write(name, &kept)
    }

    /// Builds a folder under a temporary name and renames it: readers see all of it or nothing.
    ///
    /// # Errors
    /// Those of `build`, and `Error::Io` if a folder cannot be created, synced or renamed.
    pub fn publish(&self, name: &str, build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let aside = self.stage(name)?;
        if self.writes {
            build(&aside)?;
        }
        self.complete(name)
    }

    /// Creates a folder under a temporary name. Other ranks write to it after this.
    ///
    /// # Errors
    /// `Error::Io` if the folder cannot be created, or an older one not be removed.
    pub fn stage(&self, name: &str) -> Result<PathBuf> {
        let aside = self.path.join(format!("{name}.tmp"));
        if self.writes {
            clear(&aside)?;
            // the folder of a run that was moved is not created again
            fs::create_dir(&aside).map_err(Error::io("create", &aside))?;
        }
        Ok(aside)
    }

    /// Renames a staged folder, once it is synced.
    ///
    /// # Errors
    /// `Error::Io` if the folder cannot be synced or renamed.
    pub fn complete(&self, name: &str) -> Result<PathBuf> {
        let (path, aside) = (self.path.join(name), self.path.join(format!("{name}.tmp")));
        if !self.writes {
            return Ok(path);
        }
        sync_folders(&aside)?;
        discard(&path)?;
        fs::rename(&aside, &path).map_err(Error::io("rename", &aside))?;
        // the rename itself is durable once its folder is synced
        sync_parent(&path).map_err(Error::io("sync", &path))?;
        Ok(path)
    }

    /// Name of a step's checkpoint folder, relative to the run folder.
    pub fn checkpoint_name(step: u64) -> String {
        format!("{CHECKPOINTS}/step-{step:06}")
    }

    /// Complete checkpoints by ascending step.
    ///
    /// # Errors
    /// `Error::Io` if the folder cannot be read.
    pub fn checkpoints(&self) -> Result<Vec<(u64, PathBuf)>> {
        let dir = self.path.join(CHECKPOINTS);
        let entries = fs::read_dir(&dir).map_err(Error::io("read", &dir))?;
        let checkpoints = entries.filter_map(|entry| {
            let path = entry.ok()?.path();
            let step = path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()?;
            Some((step, path))
        });
        let mut checkpoints: Vec<(u64, PathBuf)> = checkpoints.collect();
        checkpoints.sort_unstable();
        Ok(checkpoints)
    }

    /// Renames the checkpoints after a step, which are damaged, so that they are none of the run's any more.
    ///
    /// # Errors
    /// `Error::Io` if a folder cannot be read or renamed.
    pub fn set_aside_after(&self, step: u64) -> Result<()> {
        if !self.writes {
            return Ok(());
        }
        for (_, path) in self.checkpoints()?.into_iter().filter(|(later, _)| *later > step) {
            let to = with_ending(&path, DAMAGED);
            clear(&to)?;
            fs::rename(&path, &to).map_err(Error::io("rename", &path))?;
            sync_parent(&to).map_err(Error::io("sync", &to))?;
        }
        Ok(())
    }

    /// Removes the oldest checkpoints beyond `keep`, except those of the steps `spared`.
    ///
    /// # Errors
    /// `Error::Io` if a folder cannot be read or removed.
    pub fn prune(&self, keep: usize, spared: &[u64]) -> Result<()> {
        if !self.writes {
            return Ok(());
        }
        for (_, path) in self.checkpoints()?.iter().rev().skip(keep).filter(|(step, _)| !spared.contains(step)) {
            discard(path)?;
        }
        // folders that a killed process did not remove
        let dir = self.path.join(CHECKPOINTS);
        for entry in fs::read_dir(&dir).map_err(Error::io("read", &dir))? {
            let path = entry.map_err(Error::io("read", &dir))?.path();
            if path.to_string_lossy().ends_with(REMOVED) {
                clear(&path)?;
            }
        }
        Ok(())
    }
}

/// Removes a folder, if it exists. Renames it first, so that readers see all of it or nothing.
fn discard(path: &Path) -> Result<()> {
    let aside = with_ending(path, REMOVED);
    clear(&aside)?;
    if_there(fs::rename(path, &aside)).map_err(Error::io("rename", path))?;
    clear(&aside)
}

/// Removes a folder, if it exists.
fn clear(path: &Path) -> Result<()> {
    if_there(fs::remove_dir_all(path)).map_err(Error::io("remove", path))
}

/// A path with an ending added to its name.
fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(ending);
    path.into()
}

/// Syncs a folder's entries. Windows has no such call for folders.
fn sync_folder(path: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
}

/// Syncs the folder of a file or folder.
fn sync_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), sync_folder)
}

/// Syncs a folder and all folders in it.
fn sync_folders(path: &Path) -> Result<()> {
    for entry in fs::read_dir(path).map_err(Error::io("read", path))? {
        let entry = entry.map_err(Error::io("read", path))?.path();
        if entry.is_dir() {
            sync_folders(&entry)?;
        }
    }
    sync_folder(path).map_err(Error::io("sync", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run() -> (tempfile::TempDir, RunDir) {
        let temp = tempfile::tempdir().unwrap();
        let run = RunDir::create(&temp.path().join("run"), "output: x\n").unwrap();
        (temp, run)
    }

    #[test]
    fn a_folder_that_holds_a_run_is_refused_with_the_way_on() {
        let (_temp, run) = run();
        let message = RunDir::create(run.path(), "").unwrap_err().to_string();
        assert!(message.contains("--resume") && message.contains("output"), "{message}");
    }

    #[test]
    fn rewinding_drops_later_steps_and_a_torn_line() {
        let (_temp, run) = run();
        run.append("metrics.jsonl", &[json!({"s": 1}), json!({"s": 2}), json!({"s": 3})]).unwrap();
        let path = run.path().join("metrics.jsonl");
        let mut torn = fs::read(&path).unwrap();
        torn.extend(b"{\"s\": 2, \"to\xC3");
        fs::write(&path, torn).unwrap();
        run.rewind("metrics.jsonl", "s", 2).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"s\":1}\n{\"s\":2}\n");
    }

    #[test]
    fn a_checkpoint_that_failed_half_way_is_not_there() {
        let (_temp, run) = run();
        let failed = run.publish(&RunDir::checkpoint_name(5), |dir| {
            fs::write(dir.join("half"), "x").unwrap();
            Err(Error::Config("full disk".into()))
        });
        assert!(failed.is_err());
        assert!(run.checkpoints().unwrap().is_empty());
        run.publish(&RunDir::checkpoint_name(5), |_| Ok(())).unwrap();
        assert_eq!(run.checkpoints().unwrap()[0].0, 5);
    }

    #[test]
    fn the_oldest_checkpoints_are_removed() {
        let (_temp, run) = run();
        // a process that was killed while it removed one
        let half = run.path().join("checkpoints/step-000005.removed/model");
        fs::create_dir_all(&half).unwrap();
        assert!(run.checkpoints().unwrap().is_empty());
        for step in [10, 20, 30] {
            run.publish(&RunDir::checkpoint_name(step), |_| Ok(())).unwrap();
        }
        run.prune(2, &[]).unwrap();
        assert!(!half.exists());
        let steps = || run.checkpoints().unwrap().iter().map(|c| c.0).collect::<Vec<_>>();
        assert_eq!(steps(), [20, 30]);
        run.prune(1, &[20]).unwrap();
        assert_eq!(steps(), [20, 30]);
        run.prune(1, &[]).unwrap();
        assert_eq!(steps(), [30]);
    }

    #[test]
    fn damaged_checkpoints_stay_under_another_name() {
        let (_temp, run) = run();
        for step in [10, 20, 30, 20, 30] {
            run.publish(&RunDir::checkpoint_name(step), |_| Ok(())).unwrap();
            if step == 30 {
                run.set_aside_after(10).unwrap();
            }
        }
        assert_eq!(run.checkpoints().unwrap().iter().map(|c| c.0).collect::<Vec<_>>(), [10]);
        let mut names: Vec<_> =
            fs::read_dir(run.path().join(CHECKPOINTS)).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["step-000010", "step-000020.damaged", "step-000030.damaged"]);
    }
}
