use super::*;

fn tracked<'a>(folder: &'a Path, config: &'a Value, last_step: Option<u64>) -> TrackedRun<'a> {
    TrackedRun { folder, project: "my.project", name: "first", config, yaml: "", last_step }
}

fn metrics(value: f64) -> Metrics {
    Metrics::from([("actor/lr".to_owned(), value)])
}

/// Runs, steps and metrics in the order in which Trackio reads them.
fn rows(database: &Path) -> Vec<(String, i64, String)> {
    let connection = Connection::open(database).unwrap();
    let mut statement = connection.prepare("SELECT run_id, step, metrics FROM metrics ORDER BY timestamp, id").unwrap();
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)));
    let rows: Vec<_> = rows.unwrap().map(Result::unwrap).collect();
    rows
}

#[test]
fn a_resumed_run_goes_on_in_its_own_rows_and_another_has_others() {
    let temp = tempfile::tempdir().unwrap();
    let (run, other) = (temp.path().join("run"), temp.path().join("other"));
    std::fs::create_dir_all(&run).unwrap();
    std::fs::create_dir_all(&other).unwrap();
    let config = json!({"trainer": {"steps": 3}});
    let trackio = temp.path().join("trackio");
    let mut first = Trackio::in_folder(&trackio);
    first.begin(&tracked(&run, &config, None)).unwrap();
    for step in 0..3 {
        first.metrics(step, &metrics(step as f64)).unwrap();
    }
    let mut another = Trackio::in_folder(&trackio);
    another.begin(&tracked(&other, &config, None)).unwrap();
    another.metrics(7, &metrics(0.5)).unwrap();
    // the session was killed after step 2, its checkpoint is of step 1
    let mut second = Trackio::in_folder(&trackio);
    second.begin(&tracked(&run, &config, Some(1))).unwrap();
    second.metrics(2, &metrics(f64::NAN)).unwrap();

    let rows = rows(&trackio.join("myproject.db"));
    let run_rows: Vec<_> = rows.iter().filter(|row| row.0 == rows[0].0).collect();
    let values: Vec<_> = run_rows.iter().map(|row| (row.1, row.2.as_str())).collect();
    assert_eq!(values, [(0, r#"{"actor/lr":0.0}"#), (1, r#"{"actor/lr":1.0}"#), (2, r#"{"actor/lr":"NaN"}"#)]);
    assert_eq!(rows.len(), 4, "{rows:?}");
    let connection = Connection::open(trackio.join("myproject.db")).unwrap();
    let configs: i64 = connection.query_row("SELECT COUNT(*) FROM configs", [], |row| row.get(0)).unwrap();
    assert_eq!(configs, 2);
}

#[test]
fn rows_of_a_time_in_which_the_database_was_locked_are_written_afterwards() {
    let temp = tempfile::tempdir().unwrap();
    let mut tracker = Trackio::in_folder(temp.path());
    tracker.begin(&tracked(temp.path(), &Value::Null, None)).unwrap();
    let path = temp.path().join("myproject.db");
    let other = Connection::open(&path).unwrap();
    other.execute_batch("BEGIN EXCLUSIVE").unwrap();
    let error = tracker.metrics(1, &metrics(1.0)).unwrap_err();
    assert!(error.to_string().contains("locked"), "{error}");
    // it was waited for once, and is not waited for again
    let started = std::time::Instant::now();
    for step in 2..100 {
        assert!(tracker.metrics(step, &metrics(2.0)).is_err());
    }
    assert!(started.elapsed() < 10 * BUSY_TIMEOUT, "{:?}", started.elapsed());
    other.execute_batch("COMMIT").unwrap();
    tracker.metrics(100, &metrics(3.0)).unwrap();
    let steps: Vec<i64> = rows(&path).iter().map(|row| row.1).collect();
    assert_eq!(steps, (1..=100).collect::<Vec<_>>());
}

#[test]
fn a_database_that_can_never_be_written_to_keeps_the_latest_rows_only() {
    let temp = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(temp.path().join("myproject.db")).unwrap();
    let mut tracker = Trackio::in_folder(temp.path());
    let error = tracker.begin(&tracked(temp.path(), &Value::Null, None));
    assert!(error.unwrap_err().to_string().contains("myproject.db"));
    for step in 0..MAX_PENDING as u64 + 10 {
        assert!(tracker.metrics(step, &Metrics::new()).is_err());
    }
    assert_eq!(tracker.pending.len(), MAX_PENDING);
    assert_eq!(tracker.pending[0].step, 10);
}

#[test]
fn the_folder_is_the_one_that_trackio_uses() {
    let folder_with = |set: &'static [(&'static str, &'static str)]| {
        folder(|name| {
            let variable = set.iter().find(|(known, _)| *known == name);
            variable.map(|(_, value)| PathBuf::from(value))
        })
    };
    let expect = |path: &str| Some(PathBuf::from(path));
    assert_eq!(folder_with(&[("TRACKIO_DIR", "/t"), ("HF_HOME", "/h")]), expect("/t"));
    assert_eq!(folder_with(&[("TRACKIO_DIR", ""), ("HF_HOME", "/h")]), expect("/h/trackio"));
    assert_eq!(folder_with(&[("XDG_CACHE_HOME", "/c"), ("HOME", "/u")]), expect("/c/huggingface/trackio"));
    assert_eq!(folder_with(&[("HOME", "/u")]), expect("/u/.cache/huggingface/trackio"));
    assert_eq!(folder_with(&[]), None);
    let mut homeless = Trackio { folder: None, ..Trackio::new() };
    let error = homeless.begin(&tracked(Path::new("."), &Value::Null, None));
    assert!(error.unwrap_err().to_string().contains("TRACKIO_DIR"));
    assert_eq!(file_stem("my.model v2"), "mymodelv2");
    assert_eq!(file_stem("..."), "default");
}
