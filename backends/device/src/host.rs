//! Files of the host: memory-mapped reads, synced writes.

use std::fs::File;
use std::io::ErrorKind::{FileTooLarge, NotFound, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
use std::io::{self, Write};
use std::path::Path;

/// A file mapped read-only, so that a checkpoint larger than memory can be read tensor by tensor.
#[derive(Debug)]
pub struct MappedFile(memmap2::Mmap);

impl MappedFile {
    /// Maps a file.
    ///
    /// # Errors
    /// The system's, where the file cannot be opened or mapped.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the map is read-only and private to this value. Another process that shortens the file while it is
        // mapped could end this one by a bus error; checkpoints are replaced by rename, never rewritten in place.
        #[allow(unsafe_code, reason = "mapping a file has no safe form")]
        let map = unsafe { memmap2::Mmap::map(&file)? };
        Ok(Self(map))
    }

    /// The file's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Actions of messages that change files.
const CHANGES: [&str; 7] = ["append to", "create", "create the run folder", "remove", "rename", "sync", "write"];

/// Remedy for a failed change of a file, to be appended to a message; empty for failed reads and other errors.
pub fn remedy(action: &str, error: &io::Error) -> &'static str {
    if !CHANGES.contains(&action) {
        return "";
    }
    match error.kind() {
        StorageFull | QuotaExceeded | FileTooLarge => "; free space on its disk; a run then continues with --resume",
        ReadOnlyFilesystem | PermissionDenied => "; make its folder writable; a run then continues with --resume",
        NotFound => "; its folder is gone; a run continues with --resume and `output` set to its folder",
        _ => "",
    }
}

/// Writes a file and waits until it is on disk (`fsync`).
///
/// # Errors
/// The system's, where the file cannot be created, written or synced.
pub fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}
