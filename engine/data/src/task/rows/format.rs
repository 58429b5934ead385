//! Formats of dataset files, by their names and their first bytes.

use std::path::Path;

use super::raw::Unread;

/// Layout of rows in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// One JSON object per line; the default for unknown endings.
    Lines,
    /// One JSON list, or lines if the file does not begin with a bracket.
    List,
    /// A line of names, then lines of fields, with this separator.
    Csv(u8),
    Parquet,
    /// Arrow's file or stream, as Feather and `datasets` have it.
    Arrow,
}

/// Compression of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
    Zstd,
}

/// Supported formats, for messages.
const SUPPORTED: &str = "supported are JSON Lines, JSON lists, CSV and TSV (also as .gz or .zst), Parquet and Arrow";

/// Unsupported compressions and formats, with their file endings.
const UNSUPPORTED: [(&str, &str); 19] = [
    ("xz", "xz"),
    ("LZMA", "lzma"),
    ("bzip2", "bz2"),
    ("LZ4", "lz4"),
    ("Brotli", "br"),
    ("Snappy", "sz snappy"),
    ("compress", "z"),
    ("zip", "zip"),
    ("7-Zip", "7z"),
    ("RAR", "rar"),
    ("tar", "tar tgz"),
    ("Excel", "xlsx xls"),
    ("pickle", "pkl pickle"),
    ("NumPy", "npy npz"),
    ("ORC", "orc"),
    ("Avro", "avro"),
    ("HDF5", "h5 hdf5"),
    ("SQLite", "db sqlite"),
    ("TFRecord", "tfrecord"),
];

/// The format of a file by its name.
pub(super) fn format_of(path: &Path) -> (Layout, Compression) {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.to_lowercase();
    let ends = |ending: &str| name.strip_suffix(ending);
    let compression = match (ends(".gz"), ends(".zst").or_else(|| ends(".zstd"))) {
        (Some(_), _) => Compression::Gzip,
        (None, Some(_)) => Compression::Zstd,
        (None, None) => Compression::None,
    };
    let layout = match kind_of(&name) {
        "parquet" | "pq" => Layout::Parquet,
        "arrow" | "feather" => Layout::Arrow,
        "csv" => Layout::Csv(b','),
        "tsv" => Layout::Csv(b'\t'),
        "json" => Layout::List,
        _ => Layout::Lines,
    };
    (layout, compression)
}

/// Returns true if objects in a file's rows have all others' fields as nulls: a table has a
/// type for each column.
pub(crate) fn fills_structs(path: &Path) -> bool {
    matches!(format_of(path).0, Layout::Parquet | Layout::Arrow)
}

/// Endings of row files in a folder; those of the second list count if there are none of the
/// first.
const ROWS: [&[&str]; 2] = [&["jsonl", "ndjson", "json", "parquet", "pq"], &["arrow", "feather", "csv", "tsv"]];

/// Files that describe a dataset.
const DESCRIPTIONS: [&str; 5] =
    ["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "package.json"];

/// The row files of a folder.
pub(super) fn with_rows<'a>(files: &[&'a String]) -> Vec<&'a String> {
    let has_rows = |file: &str, endings: &[&str]| {
        let name = file.rsplit('/').next().unwrap_or(file).to_lowercase();
        !name.starts_with('.') && !DESCRIPTIONS.contains(&name.as_str()) && endings.contains(&kind_of(&name))
    };
    let select = |endings: &&[&str]| -> Vec<&'a String> {
        files.iter().copied().filter(|file| has_rows(file.as_str(), endings)).collect()
    };
    ROWS.iter().map(select).find(|files| !files.is_empty()).unwrap_or_default()
}

/// The ending of the layout, without that of a compression.
pub(super) fn kind_of(name: &str) -> &str {
    let compressed = [".gz", ".zst", ".zstd"];
    let stem = compressed.iter().find_map(|ending| name.strip_suffix(ending));
    let stem = stem.unwrap_or(name);
    stem.rsplit_once('.').map_or("", |(_, ending)| ending)
}

/// Content of a file by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Gzip,
    Zstd,
    Parquet,
    Arrow,
    /// An unsupported content.
    Other(&'static str),
}

const MAGIC_BYTES: [(&[u8], Content); 24] = [
    (b"\x1F\x8B", Content::Gzip),
    (b"\x28\xB5\x2F\xFD", Content::Zstd),
    (b"PAR1", Content::Parquet),
    (b"ARROW1", Content::Arrow),
    (b"\xFF\xFF\xFF\xFF", Content::Arrow),
    (b"PARE", Content::Other("encrypted Parquet")),
    (b"\xFF\xFE", Content::Other("text in UTF-16; write it in UTF-8")),
    (b"\xFE\xFF", Content::Other("text in UTF-16; write it in UTF-8")),
    (b"\xFD7zXZ\0", Content::Other("compressed with xz")),
    (b"BZh", Content::Other("compressed with bzip2")),
    (b"\x04\x22\x4D\x18", Content::Other("compressed with LZ4")),
    (b"PK\x03\x04", Content::Other("a zip archive")),
    (b"7z\xBC\xAF\x27\x1C", Content::Other("a 7-Zip archive")),
    (b"ORC", Content::Other("ORC")),
    (b"Obj\x01", Content::Other("Avro")),
    (b"SQLite format 3", Content::Other("an SQLite database")),
    (b"\x89HDF", Content::Other("HDF5")),
    (b"\x93NUMPY", Content::Other("a NumPy array")),
    (b"\x80\x02", Content::Other("a Python pickle")),
    (b"\x80\x04", Content::Other("a Python pickle")),
    (b"\x80\x05", Content::Other("a Python pickle")),
    (b"version https://git-lfs", Content::Other("a pointer of Git LFS; fetch the file with `git lfs pull`")),
    (b"<!DOCTYPE", Content::Other("a web page; download the file again")),
    (b"<html", Content::Other("a web page; download the file again")),
];

/// Bytes of a file that [`check`] looks at.
pub(super) const FIRST_BYTES: usize = 32;

/// Rejects an unsupported file, or one with other content than its name says, by its first bytes.
pub(super) fn check(path: &Path, first: &[u8]) -> Result<(), Unread> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let ending = name.rsplit_once('.').map_or("", |(_, ending)| ending);
    let is_unsupported = |(_, endings): &&(&str, &str)| endings.split(' ').any(|known| known == ending);
    if let Some((what, _)) = UNSUPPORTED.iter().find(is_unsupported) {
        return Err(Unread::Refused(format!("its format is {what} (.{ending}), which is not supported; {SUPPORTED}")));
    }
    let expected = match format_of(path) {
        (Layout::Parquet | Layout::Arrow, Compression::Gzip | Compression::Zstd) => {
            let detail = "Parquet and Arrow files inside of a compressed file are not supported; decompress it";
            return Err(Unread::Refused(detail.into()));
        }
        (_, Compression::Gzip) => Some(Content::Gzip),
        (_, Compression::Zstd) => Some(Content::Zstd),
        (Layout::Parquet, _) => Some(Content::Parquet),
        (Layout::Arrow, _) => Some(Content::Arrow),
        (Layout::Lines | Layout::List | Layout::Csv(_), _) => None,
    };
    // a CSV file's names may begin like another file's bytes
    let is_text = |b: &u8| *b >= b' ' || b"\t\r\n".contains(b);
    let is_csv = matches!(format_of(path).0, Layout::Csv(_)) && first.iter().all(is_text);
    let content = MAGIC_BYTES.iter().find(|(bytes, _)| {
        let may_be_name = bytes.iter().all(u8::is_ascii_alphanumeric);
        first.starts_with(bytes) && !(is_csv && may_be_name)
    });
    let content = content.map(|(_, content)| *content);
    let rename = |what: &str, ending: &str| {
        format!("its content is {what}, not what its name indicates; rename it to end in {ending}")
    };
    Err(Unread::Refused(match content {
        None => return Ok(()),
        content if content == expected => return Ok(()),
        Some(Content::Gzip) => rename("compressed with gzip", ".gz"),
        Some(Content::Zstd) => rename("compressed with Zstandard", ".zst"),
        Some(Content::Parquet) => rename("Parquet", ".parquet"),
        Some(Content::Arrow) => rename("Arrow", ".arrow"),
        Some(Content::Other(what)) => format!("it is {what}; {SUPPORTED}"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_csv_rows_only_where_it_has_no_others() {
        let of = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            let references: Vec<&String> = names.iter().collect();
            with_rows(&references).into_iter().cloned().collect::<Vec<_>>()
        };
        assert_eq!(of(&["a.csv", "b.jsonl.gz", "README.md", "state.json"]), ["b.jsonl.gz"]);
        assert_eq!(of(&["a.csv", "x/b.arrow", "README.md", "x/state.json"]), ["a.csv", "x/b.arrow"]);
    }
}
