//! Files of unknown origin: read up to a size, and only from the folder that they belong to.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufRead, ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

/// Largest configuration, plan or template, in bytes: real ones have tens of kilobytes.
pub const MAX_CONFIG_BYTES: u64 = 4 << 20;

/// Largest file of JSON or text that is read at once, in bytes: the largest tokenizers have 40 MB.
pub const MAX_TEXT_BYTES: u64 = 128 << 20;

/// Longest line or row of a file, in bytes.
pub const MAX_LINE_BYTES: usize = 32 << 20;

/// The bytes of a file, at most `most`.
///
/// # Errors
/// The system's, and `InvalidData` for a larger file.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let about = file.metadata()?;
    let mut bytes = Vec::new();
    // a device has no length
    if about.len() <= most {
        bytes.reserve_exact(about.len() as usize);
        file.take(most + 1).read_to_end(&mut bytes)?;
    }
    if about.len() > most || bytes.len() as u64 > most {
        let detail =
            format!("it has more than {most} bytes, the most that such a file may have; is it the right file?");
        return Err(io::Error::new(ErrorKind::InvalidData, detail));
    }
    Ok(bytes)
}

/// The text of a file of at most `most` bytes.
///
/// # Errors
/// Those of [`read`], and `InvalidData` for bytes that are not UTF-8.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    let text = String::from_utf8(read(path, most)?);
    text.map_err(|_| io::Error::new(ErrorKind::InvalidData, "it is not text in UTF-8"))
}

/// Replaces `line` by the next line, with its line break; false at the end.
///
/// # Errors
/// The reader's, and `InvalidData` for a line of more than [`MAX_LINE_BYTES`].
pub fn read_line(from: &mut dyn BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    from.take(MAX_LINE_BYTES as u64 + 1).read_until(b'\n', line)?;
    if line.len() > MAX_LINE_BYTES {
        let detail = format!("a line has more than {MAX_LINE_BYTES} bytes, the most that a line may have");
        return Err(io::Error::new(ErrorKind::InvalidData, detail));
    }
    Ok(!line.is_empty())
}

/// Returns true for a relative path whose parts are all names.
pub fn is_below(name: &str) -> bool {
    !name.is_empty() && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
}

/// The path of a file in a folder, whose name may be of another file's content. It need not exist.
///
/// # Errors
/// `InvalidInput` for a name or a link that leaves the folder. Links into `blobs` of a Hugging Face cache do not.
pub fn inside(folder: &Path, name: &str) -> io::Result<PathBuf> {
    let path = folder.join(name);
    let leads_below = || match (folder.canonicalize(), path.canonicalize()) {
        (Ok(folder), Ok(target)) => target.starts_with(folder) || is_blob(&target),
        // opening it gives the reason
        _ => true,
    };
    if is_below(name) && leads_below() {
        return Ok(path);
    }
    let detail =
        "a link or `..` leads out of the folder, and no file outside of it is read; copy the file into the folder";
    Err(io::Error::new(ErrorKind::InvalidInput, format!("{name}: {detail}")))
}

/// Returns true for a file in `blobs` of a repository's cache, to which its snapshots link.
fn is_blob(path: &Path) -> bool {
    let mut above = path.ancestors().skip(1).filter_map(Path::file_name).filter_map(OsStr::to_str);
    let is_repository = |name: &str| name.starts_with("models--") || name.starts_with("datasets--");
    above.next() == Some("blobs") && above.next().is_some_and(is_repository)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_above_the_limit_is_refused_and_one_at_the_limit_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_text(&path, 5).unwrap(), "12345");
        let error = read(&path, 4).unwrap_err();
        assert!(error.kind() == ErrorKind::InvalidData && error.to_string().contains("more than 4 bytes"), "{error}");
        // no memory is taken for a length that is only claimed
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(read(&path, 1 << 30).unwrap_err().kind(), ErrorKind::InvalidData);
        std::fs::write(&path, b"\xff").unwrap();
        assert!(read_text(&path, 4).unwrap_err().to_string().contains("UTF-8"));
    }

    #[test]
    fn lines_are_read_up_to_the_limit() {
        let long = [vec![b'a'; MAX_LINE_BYTES - 1], vec![b'\n'], b"b".to_vec()].concat();
        let (mut from, mut line) = (long.as_slice(), Vec::new());
        assert!(read_line(&mut from, &mut line).unwrap() && line.len() == MAX_LINE_BYTES);
        assert!(read_line(&mut from, &mut line).unwrap() && line == b"b");
        assert!(!read_line(&mut from, &mut line).unwrap());
        assert_eq!(
            read_line(&mut io::BufReader::new(io::repeat(0)), &mut line).unwrap_err().kind(),
            ErrorKind::InvalidData
        );
    }

    #[cfg(unix)]
    #[test]
    fn a_device_without_end_is_read_up_to_the_limit() {
        let error = read(Path::new("/dev/zero"), 1000).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["../x", "a/../../x", "/etc/passwd", "", ".", "./../x"] {
            assert_eq!(inside(folder.path(), name).unwrap_err().kind(), ErrorKind::InvalidInput, "{name}");
        }
        for name in ["x", "a/x", "..x"] {
            assert_eq!(inside(folder.path(), name).unwrap(), folder.path().join(name));
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_stay_in_the_folder_or_lead_to_blobs_of_the_hub_s_cache() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let snapshot = root.join("models--a--b/snapshots/c");
        let blobs = root.join("models--a--b/blobs");
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(&blobs).unwrap();
        for file in [blobs.join("1"), root.join("secret"), snapshot.join("real")] {
            std::fs::write(file, "x").unwrap();
        }
        for (name, target, is_read) in [
            ("blob", "../../blobs/1", true),
            ("beside", "real", true),
            ("missing", "../../blobs/2", true),
            ("secret", "../../../secret", false),
            ("root", "/", false),
        ] {
            std::os::unix::fs::symlink(target, snapshot.join(name)).unwrap();
            assert_eq!(inside(&snapshot, name).is_ok(), is_read, "{name}");
        }
        // a folder may be a link itself
        std::os::unix::fs::symlink(&snapshot, root.join("model")).unwrap();
        assert!(inside(&root.join("model"), "blob").is_ok());
    }
}
