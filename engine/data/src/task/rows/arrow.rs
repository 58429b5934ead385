//! Rows of Arrow files: those with a footer (also Feather's), and streams, as `datasets` writes them.

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::Path;

use arrow_ipc::reader::{FileReader, StreamReader};

use super::columns;
use super::raw::{Sink, Unread};

/// First bytes of a file with a footer.
const FILE: &[u8] = b"ARROW1";

/// Sends every row of a file to `sink`.
pub(super) fn rows(path: &Path, sink: &mut Sink<'_>) -> Result<(), Unread> {
    let mut file = File::open(path)?;
    let mut first = Vec::new();
    file.by_ref().take(FILE.len() as u64).read_to_end(&mut first)?;
    file.rewind()?;
    let file = BufReader::new(file);
    if first == FILE {
        columns::send(&mut FileReader::try_new(file, None)?, path, sink)
    } else {
        columns::send(&mut StreamReader::try_new(file, None)?, path, sink)
    }
}
