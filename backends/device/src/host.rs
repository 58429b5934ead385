//! Files of the host: memory-mapped reads, synced writes.

use std::fs::{self, File};
use std::io::ErrorKind::{
    AlreadyExists, FileTooLarge, NotFound, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull,
};
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

/// Creates a folder inside one that exists, unless it is there: the folder of a run that was moved is not created again.
///
/// # Errors
/// The system's, where the folder cannot be created.
pub fn create_folder(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == AlreadyExists && path.is_dir() => Ok(()),
        created => created,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_created_inside_one_that_exists_and_is_no_error_if_it_is_there() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("folder");
        create_folder(&folder).unwrap();
        create_folder(&folder).unwrap();
        let gone = parent.path().join("moved");
        assert_eq!(create_folder(&gone.join("folder")).unwrap_err().kind(), NotFound);
        assert!(!gone.exists());
        File::create(parent.path().join("file")).unwrap();
        assert_eq!(create_folder(&parent.path().join("file")).unwrap_err().kind(), AlreadyExists);
    }
}
