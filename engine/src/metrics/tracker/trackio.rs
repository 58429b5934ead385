//! Trackio: rows in its local database, which `trackio show` and Trackio's Python API read.
//!
//! The tables are those of Trackio 0.43 (`SQLiteStorage.init_db`) that are written here or read by readers. Trackio
//! adds the others when it opens the database to write, and updates older schemas.

use super::{TrackedRun, Tracker, TrackerResult};
use crate::metrics::described::Metrics;
use rusqlite::{Connection, TransactionBehavior, params};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::fmt::Write;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// File of the run folder with the id of its run in the database.
const LINK: &str = "trackio.json";

/// Timeout for a database that another program writes to. After a timeout there is no wait until a write succeeds.
const BUSY_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum pending rows; the oldest are dropped.
const MAX_PENDING: usize = 10_000;

/// A point in time as Trackio writes it, from seconds since 1970.
const TIME: &str = "strftime('%Y-%m-%dT%H:%M:%f+00:00', ?1, 'unixepoch')";

const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS metrics (
        id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, timestamp TEXT NOT NULL, run_name TEXT NOT NULL,
        step INTEGER NOT NULL, metrics TEXT NOT NULL, log_id TEXT, space_id TEXT
    );
    CREATE TABLE IF NOT EXISTS configs (
        id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, run_name TEXT NOT NULL, config TEXT NOT NULL,
        created_at TEXT NOT NULL, UNIQUE(run_id)
    );
    CREATE TABLE IF NOT EXISTS system_metrics (
        id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, timestamp TEXT NOT NULL, run_name TEXT NOT NULL,
        metrics TEXT NOT NULL, log_id TEXT, space_id TEXT
    );
    CREATE TABLE IF NOT EXISTS project_metadata (key TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS alerts (
        id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, timestamp TEXT NOT NULL, run_name TEXT NOT NULL,
        title TEXT NOT NULL, text TEXT, level TEXT NOT NULL DEFAULT 'warn', step INTEGER, alert_id TEXT
    );
    CREATE INDEX IF NOT EXISTS idx_metrics_run_step ON metrics(run_id, step);
    CREATE INDEX IF NOT EXISTS idx_metrics_run_timestamp ON metrics(run_id, timestamp);
    CREATE INDEX IF NOT EXISTS idx_configs_run_name ON configs(run_name);
";

/// Writes a run's metrics and configuration into Trackio's database of the project, in `TRACKIO_DIR` or Trackio's
/// default folder.
///
/// A resumed run continues its rows: `trackio.json` in the run folder has their id, and rows of later steps are
/// removed. If a write fails, its rows are kept and written with the next.
#[derive(Debug)]
pub struct Trackio {
    folder: Option<PathBuf>,
    run: Option<Run>,
    database: Option<Connection>,
    /// True if the run's configuration is in the database, and rows of later steps are removed.
    begun: bool,
    waits: bool,
    pending: VecDeque<Row>,
}

#[derive(Debug)]
struct Run {
    path: PathBuf,
    id: String,
    name: String,
    config: String,
    last_step: Option<u64>,
    started: f64,
}

#[derive(Debug)]
struct Row {
    step: u64,
    time: f64,
    metrics: String,
}

impl Default for Trackio {
    fn default() -> Self {
        Self::new()
    }
}

impl Trackio {
    /// A tracker without a run, in Trackio's folder: `TRACKIO_DIR`, or else `trackio` in the cache of Hugging Face.
    pub fn new() -> Self {
        Self {
            folder: folder(|name| std::env::var_os(name).map(PathBuf::from)),
            run: None,
            database: None,
            begun: false,
            waits: true,
            pending: VecDeque::new(),
        }
    }

    /// A tracker without a run, in another folder.
    pub fn in_folder(folder: &Path) -> Self {
        Self { folder: Some(folder.to_owned()), ..Self::new() }
    }

    fn flush(&mut self) -> TrackerResult {
        let Some(run) = &self.run else {
            return Err("there is no folder for its database: set TRACKIO_DIR or HOME".into());
        };
        let written = write(&mut self.database, run, self.begun, self.waits, &self.pending);
        self.waits = written.is_ok();
        match written {
            Ok(()) => {
                self.begun = true;
                self.pending.clear();
                Ok(())
            }
            Err(error) => {
                // reopened later, since its file may have been replaced
                self.database = None;
                Err(format!("cannot write to {}: {error}", run.path.display()).into())
            }
        }
    }
}

impl Tracker for Trackio {
    fn name(&self) -> &'static str {
        "trackio"
    }

    fn begin(&mut self, run: &TrackedRun<'_>) -> TrackerResult {
        let linked = self.folder.as_ref().map(|folder| {
            let (id, linked) = link(run);
            self.run = Some(Run {
                path: folder.join(format!("{}.db", file_stem(run.project))),
                id,
                name: run.name.to_owned(),
                config: config(run.config).to_string(),
                last_step: run.last_step,
                started: now(),
            });
            linked
        });
        self.flush()?;
        linked.unwrap_or(Ok(()))
    }

    fn metrics(&mut self, step: u64, metrics: &Metrics) -> TrackerResult {
        let values = metrics.iter().map(|(name, value)| (name.clone(), number(*value)));
        self.pending.push_back(Row { step, time: now(), metrics: Value::Object(values.collect()).to_string() });
        if self.pending.len() > MAX_PENDING {
            self.pending.pop_front();
        }
        self.flush()
    }
}

/// Writes what waits in one transaction: all of it or nothing.
fn write(
    database: &mut Option<Connection>,
    run: &Run,
    begun: bool,
    waits: bool,
    rows: &VecDeque<Row>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let connection = match database {
        Some(open) => open,
        None => database.insert(open(&run.path, waits)?),
    };
    connection.busy_timeout(if waits { BUSY_TIMEOUT } else { Duration::ZERO })?;
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if !begun {
        transaction.execute_batch(SCHEMA)?;
        let last = run.last_step.map_or(-1, |step| step as i64);
        transaction.execute(r"DELETE FROM metrics WHERE run_id = ?1 AND step > ?2", params![run.id, last])?;
        transaction.execute(
            &format!(
                "INSERT INTO configs (created_at, run_id, run_name, config) VALUES ({TIME}, ?2, ?3, ?4)
                 ON CONFLICT(run_id) DO UPDATE SET run_name = excluded.run_name, config = excluded.config"
            ),
            params![run.started, run.id, run.name, run.config],
        )?;
    }
    for row in rows {
        transaction.execute(
            &format!(
                "INSERT INTO metrics (timestamp, run_id, run_name, step, metrics) VALUES ({TIME}, ?2, ?3, ?4, ?5)"
            ),
            params![row.time, run.id, run.name, row.step as i64, row.metrics],
        )?;
    }
    Ok(transaction.commit()?)
}

fn open(path: &Path, waits: bool) -> Result<Connection, Box<dyn std::error::Error + Send + Sync>> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let connection = Connection::open(path)?;
    connection.busy_timeout(if waits { BUSY_TIMEOUT } else { Duration::ZERO })?;
    // the mode of Trackio, which also has this variable for network folders
    let mode = std::env::var("TRACKIO_SQLITE_JOURNAL_MODE").unwrap_or_default();
    let modes = ["wal", "delete", "truncate", "persist", "memory", "off"];
    let mode = modes.iter().find(|known| mode.eq_ignore_ascii_case(known));
    connection.pragma_update(None, "journal_mode", mode.unwrap_or(&"wal"))?;
    connection.pragma_update(None, "synchronous", "normal")?;
    Ok(connection)
}

/// Trackio's folder, from the variables that name it.
fn folder(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.as_os_str().is_empty());
    if let Some(folder) = set("TRACKIO_DIR") {
        return Some(folder);
    }
    let hugging_face = set("HF_HOME").or_else(|| {
        let cache = set("XDG_CACHE_HOME").or_else(|| {
            let home = set("HOME").or_else(|| set("USERPROFILE"))?;
            Some(home.join(".cache"))
        })?;
        Some(cache.join("huggingface"))
    })?;
    Some(hugging_face.join("trackio"))
}

/// Name of a project's database: the characters that Trackio keeps of the project's name.
fn file_stem(project: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, '-' | '_');
    let stem: String = project.chars().filter(kept).collect();
    if stem.is_empty() { "default".into() } else { stem }
}

/// Id of the run in the database: the one in its folder, or a new one, which is written there.
fn link(run: &TrackedRun<'_>) -> (String, TrackerResult) {
    let path = run.folder.join(LINK);
    let earlier = std::fs::read(&path).ok();
    let earlier: Option<Value> = earlier.and_then(|text| serde_json::from_slice(&text).ok());
    let known = earlier.as_ref().filter(|link| link["project"] == run.project);
    if let Some(id) = known.and_then(|link| link["run_id"].as_str()) {
        return (id.to_owned(), Ok(()));
    }
    let id = new_id();
    let link = json!({"project": run.project, "run": run.name, "run_id": id});
    let written = std::fs::write(&path, format!("{link}\n"));
    let written = written.map_err(|error| {
        format!("cannot write {}: {error}; a resumed run will be another one in Trackio", path.display())
    });
    (id, written.map_err(Into::into))
}

/// 32 random hexadecimal digits, as ids of Trackio.
fn new_id() -> String {
    let mut id = String::new();
    for part in 0..2_u8 {
        // each state has random keys
        let digits = RandomState::new().hash_one((part, std::process::id()));
        // writing to a string cannot fail
        let _ = write!(id, "{digits:016x}");
    }
    id
}

/// A configuration in Trackio's format, with its additional entries.
fn config(config: &Value) -> Value {
    let mut entries: Map<String, Value> = config.as_object().cloned().unwrap_or_default();
    entries.insert("_Username".into(), Value::Null);
    entries.insert("_Group".into(), Value::Null);
    Value::Object(entries)
}

/// A number in Trackio's format: strings for numbers that are not finite.
fn number(value: f64) -> Value {
    if value.is_nan() {
        "NaN".into()
    } else if value.is_infinite() {
        if value > 0.0 { "Infinity" } else { "-Infinity" }.into()
    } else {
        json!(value)
    }
}

fn now() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests;
