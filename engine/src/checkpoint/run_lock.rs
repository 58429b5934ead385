//! One writer at a time: a locked file in the run folder that names the process.
//!
//! The system releases the lock when the process ends, so the file of a killed process is taken over.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The file that is locked.
pub(super) const LOCK: &str = "run.lock";

/// Reads of a locked file that is not written yet.
const MAX_READS: usize = 20;

/// Time between reads.
const READ_INTERVAL: Duration = Duration::from_millis(10);

/// Lock of a run folder, held until it is dropped.
#[derive(Debug)]
pub(super) struct RunLock(#[expect(dead_code, reason = "the open file is the lock")] File);

/// Process that writes a run folder.
#[derive(Debug, Deserialize, Serialize)]
struct Writer {
    pid: u32,
    host: String,
    /// Seconds since 1970.
    started: u64,
}

impl RunLock {
    /// Locks a run folder.
    ///
    /// # Errors
    /// `Error::RunBusy` if another process writes it; `Error::Io` if the file cannot be written.
    pub fn take(folder: &Path) -> Result<Self> {
        let path = folder.join(LOCK);
        let open = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
        let mut file = open.map_err(Error::io("write", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let writer = Writer::read(&mut file);
                return Err(Error::RunBusy { path: folder.to_owned(), writer: Writer::description(writer.as_ref()) });
            }
            // such as a file system over a network without locks
            Err(TryLockError::Error(error)) => {
                tracing::warn!(
                    "{} cannot be locked ({error}), so a second process that resumes this run would not be refused",
                    path.display()
                );
            }
        }
        let writer = Writer { pid: std::process::id(), host: host(), started: now() };
        writer.write(&mut file).map_err(Error::io("write", &path))?;
        Ok(Self(file))
    }
}

impl Writer {
    fn write(&self, file: &mut File) -> std::io::Result<()> {
        file.set_len(0)?;
        file.rewind()?;
        serde_json::to_writer(&mut *file, self)?;
        file.write_all(b"\n")
    }

    /// Reads the writer that holds the lock.
    fn read(file: &mut File) -> Option<Self> {
        for _ in 0..MAX_READS {
            let mut text = String::new();
            let read = file.rewind().and_then(|()| file.read_to_string(&mut text));
            if let Some(writer) = read.ok().and_then(|_| serde_json::from_str(&text).ok()) {
                return Some(writer);
            }
            std::thread::sleep(READ_INTERVAL);
        }
        None
    }

    fn description(writer: Option<&Self>) -> String {
        let Some(Self { pid, host, started }) = writer else {
            return "another process".to_owned();
        };
        let seconds = now().saturating_sub(*started);
        format!("process {pid} on {host}, which started {seconds} s ago,")
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Name of the machine.
#[cfg(unix)]
fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Name of the machine.
#[cfg(not(unix))]
fn host() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_else(|_| "this machine".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_writer_is_refused_with_the_id_of_the_first_as_long_as_that_writes() {
        let folder = tempfile::tempdir().unwrap();
        let first = RunLock::take(folder.path()).unwrap();
        let error = RunLock::take(folder.path()).unwrap_err();
        assert!(error.is_user_error());
        let message = error.to_string();
        let process = format!("process {}", std::process::id());
        assert!(message.contains(&process) && message.contains(&host()), "{message}");
        drop(first);
        drop(RunLock::take(folder.path()).unwrap());
    }

    #[test]
    fn the_lock_of_a_process_that_is_gone_is_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        for left in ["{\"pid\":1,\"host\":\"x\",\"started\":5}\n", "", "torn"] {
            std::fs::write(folder.path().join(LOCK), left).unwrap();
            let lock = RunLock::take(folder.path()).unwrap();
            let text = std::fs::read_to_string(folder.path().join(LOCK)).unwrap();
            let writer: Writer = serde_json::from_str(&text).unwrap();
            assert_eq!(writer.pid, std::process::id());
            drop(lock);
        }
    }
}
