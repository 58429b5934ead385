//! What a dataset file is, by its name.

use std::path::Path;

/// How rows are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// One JSON object a line: also what a file with an unknown ending is taken for.
    Lines,
    /// One JSON list, or lines where the file does not begin with a bracket.
    List,
    Parquet,
}

/// How the file is compressed as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
    Zstd,
}

/// The format of a file by its name.
pub(super) fn format_of(path: &Path) -> (Layout, Compression) {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.to_lowercase();
    let ends = |ending: &str| name.strip_suffix(ending);
    let (stem, compression) = match (ends(".gz"), ends(".zst").or_else(|| ends(".zstd"))) {
        (Some(stem), _) => (stem, Compression::Gzip),
        (None, Some(stem)) => (stem, Compression::Zstd),
        (None, None) => (name.as_str(), Compression::None),
    };
    let layout = match stem.rsplit_once('.').map_or("", |(_, ending)| ending) {
        "parquet" | "pq" => Layout::Parquet,
        "json" => Layout::List,
        _ => Layout::Lines,
    };
    (layout, compression)
}

/// Endings of the files that are rows, where a folder is looked through.
const ROWS: [&str; 5] = ["jsonl", "ndjson", "json", "parquet", "pq"];

/// Files that describe a dataset, and are none of its rows.
const DESCRIPTIONS: [&str; 5] =
    ["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "package.json"];

/// Whether a file found in a folder is taken for rows.
pub(super) fn has_rows(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.to_lowercase();
    !name.starts_with('.') && !DESCRIPTIONS.contains(&name.as_str()) && ROWS.contains(&kind_of(&name))
}

/// The ending that says how rows are written, without that of a compression.
pub(super) fn kind_of(name: &str) -> &str {
    let compressed = [".gz", ".zst", ".zstd"];
    let stem = compressed.iter().find_map(|ending| name.strip_suffix(ending));
    let stem = stem.unwrap_or(name);
    stem.rsplit_once('.').map_or("", |(_, ending)| ending)
}
