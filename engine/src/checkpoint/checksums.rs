//! Checksums of a checkpoint's files, by which a resumed run verifies them. Ranks divide the files.
//!
//! `checksums.json` is written last, before the rename that publishes the folder:
//!
//! ```json
//! {"crc32c": 2864434397, "files": [{"bytes": 1024, "crc32c": 305419896, "path": "model/model.safetensors"}, …],
//!   "format": "firebrick.checkpoint", "version": 1}
//! ```
//!
//! The first `crc32c` is of the other keys as compact JSON with sorted keys. Every version keeps this rule, so that a
//! damaged index is not taken for a newer one.

use super::{json, read_if_there, trainer_state};
use crate::config::RunConfig;
use crate::task::Task;
use crate::world::World;
use crate::{Error, Result};
use firebrick_backends::heartbeat::beat;
use firebrick_backends::host::write_synced;
use firebrick_spec::file::inside;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The index in the folder.
const INDEX: &str = "checksums.json";
const FORMAT: &str = "firebrick.checkpoint";
const VERSION: u64 = 1;
/// Key of the index's checksum.
const CHECKSUM: &str = "crc32c";

/// Bytes of a file that a thread reads.
const BLOCK: u64 = 64 << 20;
/// Bytes per read.
const BUFFER: usize = 16 << 10;

/// Folders between a model and its checkpoint, and one.
const MAX_DEPTH: usize = 3;

/// Endings of files that loading may read.
const LOADED: [&str; 3] = ["json", "safetensors", "jinja"];

/// Size and checksum of a file. Its keys are sorted.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct FileSum {
    bytes: u64,
    crc32c: u32,
    /// Path in the folder, with `/`.
    path: String,
}

/// Index of a folder.
#[derive(Debug, Deserialize, Serialize)]
enum Index {
    /// Its files.
    Files(Vec<FileSum>),
    /// None, as earlier versions wrote it.
    Absent,
    /// Expectation and finding.
    Damaged(String),
}

/// Result of a verification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// All files are as they were written.
    Whole,
    /// The folder has no index.
    Unverified,
    /// The first damaged file, with expectation and finding.
    Damaged(String),
}

/// Writes the index of a folder whose files are complete. All ranks of the world call it together.
///
/// # Errors
/// `Error::Io` if a file cannot be read or the index cannot be written, and if a rank has failed or is gone.
pub(crate) fn write(folder: &Path, world: &World) -> Result<()> {
    let paths = world.run_on_main(|| files_in(folder))?;
    let sums = divided(&paths, world, |path| {
        FileSum::read(folder, path).map_err(Error::io("read", folder.join(path.as_str())))
    })?;
    let written = if world.writes() { write_index(folder, &sums) } else { Ok(()) };
    world.agree(written)
}

/// Verifies a folder against its index. All ranks of the world call it together and get the same verdict.
///
/// # Errors
/// `Error::Resume` for an index of another version and for a file that the index does not name but loading would read;
/// `Error::Io` for a file that this user may not read, and if a rank has failed or is gone.
pub(crate) fn verify(folder: &Path, world: &World) -> Result<Verdict> {
    let sums = match world.run_on_main(|| read_index(folder))? {
        Index::Files(sums) => sums,
        Index::Absent => return Ok(Verdict::Unverified),
        Index::Damaged(what) => return Ok(Verdict::Damaged(what)),
    };
    let damages = divided(&sums, world, |sum| sum.damage(folder))?;
    if let Some(damage) = damages.into_iter().flatten().next() {
        return Ok(Verdict::Damaged(damage));
    }
    world.run_on_main(|| refuse_others(folder, &sums))?;
    Ok(Verdict::Whole)
}

/// Verifies the models of a configuration and of its task's rewards, if they are parts of checkpoints. All ranks call it
/// together.
///
/// # Errors
/// Those of [`check_model`], and if a rank has failed or is gone.
pub(crate) fn verify_models(config: &RunConfig, task: &dyn Task, world: &World) -> Result<()> {
    let lora = config.model.lora.as_ref().and_then(|lora| lora.path.as_ref());
    let critic = config.critic.as_ref().and_then(|critic| critic.model.path.as_ref());
    let judges = task.rewards().into_iter().flat_map(|rewards| rewards.models().map(|(_, model)| &model.path));
    let mut paths = config.model.path.iter().chain(lora).chain(critic).chain(judges);
    paths.try_for_each(|path| verify_model(path, world))
}

/// Verifies the folder of a model, if it is part of a checkpoint, such as `step-000100/model`.
///
/// # Errors
/// `Error::Io` with expectation and finding if a file is not as it was written; `Error::Resume` for checksums of
/// another version.
pub fn check_model(folder: &Path) -> Result<()> {
    verify_model(folder, &World::default())
}

fn verify_model(folder: &Path, world: &World) -> Result<()> {
    let Some((checkpoint, part)) = world.run_on_main(|| checkpoint_of(folder))? else { return Ok(()) };
    let damaged = |path: &str, damage: String| {
        let advice = "restore it, or copy the folder out of the checkpoint if you changed it";
        let error = io::Error::new(ErrorKind::InvalidData, format!("it is damaged, {damage}; {advice}"));
        Err(Error::io("read", checkpoint.join(path))(error))
    };
    let sums = match world.run_on_main(|| read_index(&checkpoint))? {
        Index::Files(sums) => sums,
        Index::Absent => return Ok(()),
        Index::Damaged(damage) => return damaged(INDEX, damage),
    };
    let sums: Vec<FileSum> = sums.into_iter().filter(|sum| Path::new(&sum.path).starts_with(&part)).collect();
    let damages = divided(&sums, world, |sum| sum.damage(&checkpoint))?;
    match sums.iter().zip(damages).find_map(|(sum, damage)| Some((sum, damage?))) {
        None => Ok(()),
        Some((sum, damage)) => damaged(&sum.path, damage),
    }
}

/// The checkpoint that a folder is part of, with the folder's path in it.
fn checkpoint_of(folder: &Path) -> Result<Option<(PathBuf, PathBuf)>> {
    let folder = std::path::absolute(folder).map_err(Error::io("find", folder))?;
    let has_index = |checkpoint: &&Path| checkpoint.join(INDEX).is_file();
    let checkpoint = folder.ancestors().skip(1).take(MAX_DEPTH).find(has_index);
    let part = |checkpoint: &Path| Some((checkpoint.to_owned(), folder.strip_prefix(checkpoint).ok()?.to_owned()));
    Ok(checkpoint.filter(|_| folder.is_dir()).and_then(part))
}

/// Results of work on each item, in their order. Each rank does a part, and all get all results.
fn divided<I: Sync, T: Send + Serialize + serde::de::DeserializeOwned>(
    items: &[I],
    world: &World,
    work: impl Fn(&I) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let (rank, size) = (world.rank(), world.size());
    let part = items.par_iter().enumerate().filter(|(at, _)| at % size == rank);
    let part: Result<Vec<(usize, T)>> = part.map(|(at, item)| Ok((at, work(item)?))).collect();
    let part = world.agree(part)?;
    if world.is_solo() {
        return Ok(part.into_iter().map(|(_, result)| result).collect());
    }
    let mut results: Vec<(usize, T)> = world.gather::<Vec<(usize, T)>>(&part)?.into_iter().flatten().collect();
    results.sort_by_key(|(at, _)| *at);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

impl FileSum {
    fn read(folder: &Path, path: &str) -> io::Result<Self> {
        let file = inside(folder, path)?;
        let about = fs::metadata(&file)?;
        if !about.is_file() {
            return Err(io::Error::other("not a file"));
        }
        let bytes = about.len();
        let blocks = (0..bytes.div_ceil(BLOCK)).into_par_iter().map(|block| {
            let start = block * BLOCK;
            crc_of_block(&file, start, BLOCK.min(bytes - start))
        });
        let blocks: Vec<(u32, usize)> = blocks.collect::<io::Result<_>>()?;
        let crc32c = blocks.into_iter().fold(0, |crc, (block, len)| crc32c::crc32c_combine(crc, block, len));
        Ok(Self { path: path.to_owned(), bytes, crc32c })
    }

    /// Expectation and finding, if the file is not as it was written.
    fn damage(&self, folder: &Path) -> Result<Option<String>> {
        let Self { path, bytes, crc32c } = self;
        let expected = format!("{path}: expected {bytes} bytes with the CRC-32C {crc32c}");
        match Self::read(folder, path) {
            Ok(found) if found == *self => Ok(None),
            Ok(found) if found.bytes != *bytes => Ok(Some(format!("{expected}, found {} bytes", found.bytes))),
            Ok(found) => Ok(Some(format!("{expected}, found {}", found.crc32c))),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                Err(Error::io("read", folder.join(path))(error))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Some(format!("{expected}, found no such file"))),
            Err(error) => Ok(Some(format!("{expected}, which cannot be read ({error})"))),
        }
    }
}

/// CRC-32C of a part of a file, and the length of the part.
fn crc_of_block(path: &Path, start: u64, len: u64) -> io::Result<(u32, usize)> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(start))?;
    let (mut buffer, mut crc, mut left) = ([0; BUFFER], 0, len);
    while left > 0 {
        let next = BUFFER.min(usize::try_from(left).unwrap_or(BUFFER));
        file.read_exact(&mut buffer[..next])?;
        beat();
        crc = crc32c::crc32c_append(crc, &buffer[..next]);
        left -= next as u64;
    }
    Ok((crc, usize::try_from(len).map_err(io::Error::other)?))
}

/// Sorted paths of all files in a folder and its folders, except the index.
fn files_in(folder: &Path) -> Result<Vec<String>> {
    fn add(folder: &Path, prefix: &str, paths: &mut Vec<String>) -> Result<()> {
        for entry in fs::read_dir(folder).map_err(Error::io("read", folder))? {
            let entry = entry.map_err(Error::io("read", folder))?.path();
            let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let path = format!("{prefix}{name}");
            if entry.is_dir() {
                add(&entry, &format!("{path}/"), paths)?;
            } else if path != INDEX {
                paths.push(path);
            }
        }
        Ok(())
    }
    let mut paths = Vec::new();
    add(folder, "", &mut paths)?;
    paths.sort_unstable();
    Ok(paths)
}

/// Rejects files that loading would read although the index does not name them.
fn refuse_others(folder: &Path, sums: &[FileSum]) -> Result<()> {
    let known: BTreeSet<&str> = sums.iter().map(|sum| sum.path.as_str()).collect();
    let is_loaded =
        |path: &String| LOADED.iter().any(|ending| path.rsplit_once('.').is_some_and(|(_, e)| e == *ending));
    let mut others = files_in(folder)?.into_iter().filter(|path| is_loaded(path) && !known.contains(path.as_str()));
    match others.next() {
        None => Ok(()),
        Some(path) => Err(Error::Resume {
            path: folder.join(path),
            detail: format!("{INDEX} does not name this file, so the checkpoint was written without it; move it away"),
        }),
    }
}

/// Checksum of an index: of all keys except its own.
fn checksum_of(index: &Map<String, Value>) -> io::Result<u32> {
    let rest: BTreeMap<&String, &Value> = index.iter().filter(|(key, _)| *key != CHECKSUM).collect();
    Ok(crc32c::crc32c(&serde_json::to_vec(&rest)?))
}

fn write_index(folder: &Path, sums: &[FileSum]) -> Result<()> {
    let path = folder.join(INDEX);
    let text = || {
        let mut index = Map::from_iter([
            ("format".to_owned(), json!(FORMAT)),
            ("version".to_owned(), json!(VERSION)),
            ("files".to_owned(), serde_json::to_value(sums)?),
        ]);
        let checksum = checksum_of(&index)?;
        index.insert(CHECKSUM.to_owned(), json!(checksum));
        json(&index)
    };
    text().and_then(|text| write_synced(&path, text.as_bytes())).map_err(Error::io("write", &path))
}

fn read_index(folder: &Path) -> Result<Index> {
    let path = folder.join(INDEX);
    let bytes = match read_if_there(folder, INDEX) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return Ok(absent(folder)),
        Err(Error::Io { error, .. }) if error.kind() != ErrorKind::PermissionDenied => {
            return Ok(Index::Damaged(format!("{INDEX} cannot be read ({error})")));
        }
        Err(error) => return Err(error),
    };
    let damaged = |finding: &str| Ok(Index::Damaged(format!("{INDEX}: expected checksums of files, found {finding}")));
    let mut index: Map<String, Value> = match serde_json::from_slice(&bytes) {
        Ok(index) => index,
        Err(error) => return damaged(&format!("other text ({error})")),
    };
    let checksum = checksum_of(&index).map_err(Error::io("read", &path))?;
    if index.get(CHECKSUM) != Some(&json!(checksum)) {
        return damaged(&format!("values whose CRC-32C is {checksum}, not that in its key {CHECKSUM}"));
    }
    let value = |key: &str| index.get(key).unwrap_or(&Value::Null);
    let (format, version) = (value("format"), value("version"));
    if *format != FORMAT || *version != VERSION {
        let detail = format!(
            "it has the format {format} in version {version}, and this program reads {FORMAT:?} in version {VERSION}; \
             resume with the version of Firebrick that wrote it, or a newer one"
        );
        return Err(Error::Resume { path, detail });
    }
    match serde_json::from_value(index.remove("files").unwrap_or_default()) {
        Ok(files) => Ok(Index::Files(files)),
        Err(error) => damaged(&error.to_string()),
    }
}

/// A folder without an index: damaged, unless its state is of a version that wrote none.
fn absent(folder: &Path) -> Index {
    match trainer_state::load_state(&folder.join("trainer")) {
        Ok(state) if state.checksums => Index::Damaged(format!("{INDEX}: expected this file, found none")),
        _ => Index::Absent,
    }
}

#[cfg(test)]
mod tests;
