use super::{Follower, ViewUpdate};
use crate::Pick;
use std::fs::{OpenOptions, write};
use std::io::Write;
use std::path::PathBuf;

const CONFIG: &str = "model: {path: m}\ntask: {kind: arithmetic}\noutput: run\ntrainer: {steps: 7}\n";

/// A run folder that a test writes.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        write(folder.path("config.yaml"), CONFIG).unwrap();
        folder
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    fn append(&self, file: &str, text: &str) {
        let mut file = OpenOptions::new().create(true).append(true).open(self.path(file)).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    fn follow(&self) -> Follower {
        Follower::open(self.0.path()).unwrap()
    }
}

fn metrics(step: u64, reward: &str) -> String {
    format!("{{\"training/global_step\": {step}, \"critic/score/mean\": {reward}}}\n")
}

fn sample(step: u64, draw: u64, completion: &str, reward: f64) -> String {
    format!(
        "{{\"step\": {step}, \"draw\": {draw}, \"sample\": 0, \"prompt\": \"1+1=\", \"completion\": \"{completion}\", \
         \"answer\": \"2\", \"reward\": {reward}, \"reward_parts\": [[\"exact\", {reward}]], \"advantage\": 0.5, \
         \"finish\": \"length\", \"tokens\": 1}}\n"
    )
}

/// The steps and rewards of news.
fn rewards(news: &[ViewUpdate]) -> Vec<(u64, Option<f64>)> {
    let steps = news.iter().filter_map(|news| match news {
        ViewUpdate::Metrics { step, metrics, .. } => Some((*step, metrics.get("critic/score/mean").copied())),
        _ => None,
    });
    steps.collect()
}

fn opened(news: &[ViewUpdate]) -> bool {
    news.iter().any(|news| matches!(news, ViewUpdate::Opened { .. }))
}

#[test]
fn a_folder_without_a_run_is_refused() {
    let empty = tempfile::tempdir().unwrap();
    let error = Follower::open(empty.path()).err().expect("refused");
    assert!(error.to_string().contains("config.yaml"), "{error}");
    assert!(error.is_user_error());
}

#[test]
fn each_line_is_told_once_and_a_line_that_is_not_whole_when_it_is() {
    let folder = Folder::new();
    folder.append("metrics.jsonl", &metrics(1, "0.25"));
    let mut follower = folder.follow();
    let first = follower.poll().unwrap();
    assert_eq!(rewards(&first), [(1, Some(0.25))]);
    let Some(ViewUpdate::Opened { steps, task, .. }) = first.first() else {
        panic!("{first:?}");
    };
    assert_eq!(*steps, Some(7));
    assert!(task.is_some());
    assert_eq!(follower.poll().unwrap(), []);
    let line = metrics(2, "null");
    folder.append("metrics.jsonl", &line[..20]);
    assert_eq!(follower.poll().unwrap(), []);
    folder.append("metrics.jsonl", &line[20..]);
    assert_eq!(rewards(&follower.poll().unwrap()), [(2, None)]);
}

#[test]
fn the_samples_of_a_step_are_one_piece_of_news_even_if_they_are_written_in_two() {
    let folder = Folder::new();
    folder.append("samples.jsonl", &sample(1, 0, "9", 0.0));
    folder.append("samples.jsonl", &sample(2, 1, "2", 1.0));
    let mut follower = folder.follow();
    follower.poll().unwrap();
    folder.append("samples.jsonl", &sample(2, 1, "3", 0.0));
    let news = follower.poll().unwrap();
    let [ViewUpdate::Samples { step: 2, samples }] = &news[..] else {
        panic!("{news:?}");
    };
    let shown: Vec<(Pick, &str)> = samples.iter().map(|(pick, e)| (*pick, e.completion.as_str())).collect();
    let wanted = [(Pick::Newest, "3"), (Pick::Best, "2"), (Pick::Worst, "3")];
    assert_eq!(shown, wanted);
    assert!(samples[0].1.is_truncated());
}

#[test]
fn a_run_that_is_resumed_is_told_again_from_its_start() {
    let folder = Folder::new();
    folder.append("metrics.jsonl", &(metrics(1, "0.1") + &metrics(2, "0.2") + &metrics(3, "0.3")));
    let mut follower = folder.follow();
    assert_eq!(rewards(&follower.poll().unwrap()).len(), 3);
    // as a resumed run rewinds its files: aside, renamed
    write(folder.path("aside"), metrics(1, "0.1")).unwrap();
    std::fs::rename(folder.path("aside"), folder.path("metrics.jsonl")).unwrap();
    let news = follower.poll().unwrap();
    assert!(opened(&news));
    assert_eq!(rewards(&news), [(1, Some(0.1))]);
}

#[test]
fn a_run_has_ended_once_its_summary_is_newer_than_its_start() {
    let folder = Folder::new();
    let mut follower = folder.follow();
    assert!(!follower.poll().unwrap().contains(&ViewUpdate::Ended { steps: 3 }));
    write(folder.path("summary.json"), "{\"steps\": 3}").unwrap();
    assert_eq!(follower.poll().unwrap(), [ViewUpdate::Ended { steps: 3 }]);
    assert_eq!(follower.poll().unwrap(), []);
    // resumed: config.yaml is written again
    let later = std::time::SystemTime::now() + std::time::Duration::from_mins(1);
    let config = OpenOptions::new().write(true).open(folder.path("config.yaml")).unwrap();
    config.set_modified(later).unwrap();
    let news = follower.poll().unwrap();
    assert!(opened(&news) && !news.contains(&ViewUpdate::Ended { steps: 3 }));
}

#[test]
fn the_log_is_told_by_its_levels() {
    let folder = Folder::new();
    folder.append(
        "run.log",
        "2026-11-23T01:02:03Z  WARN memory grows\n2026-11-23T01:02:04Z  INFO saved step-000001\n\
         2026-11-23T01:02:05Z DEBUG a detail\n",
    );
    let news = folder.follow().poll().unwrap();
    let wanted = [ViewUpdate::Warning("memory grows".into()), ViewUpdate::Note("saved step-000001".into())];
    assert_eq!(news[1..], wanted);
}
