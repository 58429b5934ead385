//! `firebrick report`: one file that loads nothing, whose numbers are the run's and whose texts stay texts.

use super::{Bench, program, refused, stderr, succeeded};
use serde_json::{Value, json};
use std::fmt::Write;
use std::fs;

/// What a hostile prompt or completion may hold.
const HOSTILE: &str = "</script><script>alert(1)</script><!--\u{0}\u{1b}[31m\u{202e}desrever\u{2028}\u{2066}\"\\";

impl Bench {
    /// `firebrick report RUN… ARGS…` in the bench's folder.
    pub fn report(&self, args: &[&str]) -> std::process::Output {
        let folder = self.path("");
        let mut command = program(&[&["report"], args].concat());
        command.current_dir(folder).output().unwrap()
    }

    /// The data block of a report, which is the only place that may hold a run's texts.
    pub fn data(&self, file: &str) -> Value {
        let html = self.read(file);
        assert_eq!(html.matches("</script").count(), 2, "the data's and the program's");
        for load in ["src=", "<link", "@import", "url(", "fetch(", "<iframe"] {
            let page = html.split("id=\"data\">").next().unwrap();
            assert!(!page.contains(load), "{load}");
        }
        let (_, rest) = html.split_once("id=\"data\">").unwrap();
        let (block, _) = rest.split_once("</script").unwrap();
        assert!(!block.contains('<'));
        serde_json::from_str(block).unwrap()
    }

    /// A run folder made by hand.
    fn made(&self, name: &str, lines: &[(&str, String)]) {
        let config = "model: {path: m}\noutput: x\ntask: {kind: arithmetic}\n";
        self.write(&format!("{name}/config.yaml"), config);
        for (file, text) in lines {
            self.write(&format!("{name}/{file}"), text);
        }
    }
}

/// A line of `samples.jsonl`.
fn sample(step: u64, draw: u64, at: u64, completion: &str, reward: f64) -> String {
    let line = json!({
        "step": step, "draw": draw, "sample": at, "prompt": format!("{draw}+1="), "completion": completion,
        "answer": "3", "reward": reward, "reward_parts": [["correct", reward]], "advantage": 0.25,
        "finish": if at == 0 { "length" } else { "stop" }, "tokens": 5,
    });
    line.to_string() + "\n"
}

fn lines(bench: &Bench, file: &str) -> Vec<Value> {
    let text = bench.read(file);
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Holds every metric of every line against the report's columns, to six digits; gives how many.
fn compare(columns: &Value, metrics: &[Value]) -> usize {
    let mut compared = 0;
    for (at, line) in metrics.iter().enumerate() {
        let line = line.as_object().unwrap().iter();
        for (name, value) in line.filter(|(name, _)| *name != "training/global_step") {
            let found = &columns[name][at];
            match value.as_f64() {
                None => assert!(found.is_null(), "{name}: {found}"),
                Some(value) => {
                    let error = (found.as_f64().unwrap() - value).abs();
                    assert!(error <= 5e-6 * value.abs(), "{name}: {found} instead of {value}");
                }
            }
            compared += 1;
        }
    }
    compared
}

#[test]
fn a_report_holds_every_number_of_its_run_at_six_digits() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &["memory.snapshot=1"]));
    let said = succeeded(&bench.report(&["run"]));
    assert!(said.contains("report.html"), "{said}");
    let data = bench.data("run/report.html");
    let run = &data["runs"][0];
    let metrics = lines(&bench, "run/metrics.jsonl");
    assert_eq!(run["metrics"]["steps"], json!([0, 1, 2, 3]));
    let compared = compare(&run["metrics"]["columns"], &metrics);
    assert!(compared > 100, "{compared} numbers");
    // all 48 samples are shown, since there is room; so are what the grader read and the gold answer
    let samples = lines(&bench, "run/samples.jsonl");
    assert_eq!(run["samples"]["total"], samples.len());
    assert_eq!(run["samples"]["shown"], samples.len());
    let first = &run["samples"]["groups"][0];
    assert_eq!(first["prompt"], samples[0]["prompt"]);
    assert_eq!(first["answer"], samples[0]["answer"]);
    assert_eq!(first["samples"][0]["text"], samples[0]["completion"]);
    let read = samples[0]["completion"].as_str().unwrap().trim();
    assert_eq!(first["samples"][0]["read"][0][1], read);
    // bytes are exact
    let memory = lines(&bench, "run/memory.jsonl");
    let of_gen = |line: &&Value| line["phase"] == "gen" && line["step"] == 1;
    let read = memory.iter().find(of_gen).unwrap();
    let phases = run["memory"]["phases"].as_array().unwrap();
    let phase = phases.iter().find(|phase| phase["name"] == "gen").unwrap();
    assert_eq!(phase["peak_bytes"][0], read["peak_bytes"]);
    assert_eq!(phase["estimates"], json!(["rollout"]));
    let timeline: Value = serde_json::from_str(&bench.read("run/memory_timeline.json")).unwrap();
    assert_eq!(run["timeline"]["accounts"], timeline["accounts"]);
    assert_eq!(run["plan"]["peak_bytes"], run["summary"]["predicted_peak_bytes"]);
    assert_eq!(run["settings"]["optim.lr"], "0.001");
    assert_eq!(run["notes"], json!([]));
    assert!(fs::read_dir(bench.path("run")).unwrap().all(|entry| {
        let name = entry.unwrap().file_name();
        !name.to_string_lossy().ends_with(".tmp")
    }));
}

#[test]
fn a_hostile_sample_is_data_and_a_megabyte_of_text_is_cut_with_its_length() {
    let bench = Bench::new();
    let long = format!("{}{HOSTILE}END", "x".repeat(1 << 20));
    let samples = sample(1, 0, 0, HOSTILE, 1.0) + &sample(1, 0, 1, &long, 0.0);
    bench.made("run", &[("samples.jsonl", samples)]);
    succeeded(&bench.report(&["run"]));
    let data = bench.data("run/report.html");
    let shown = &data["runs"][0]["samples"];
    let group = &shown["groups"][0];
    assert_eq!(group["samples"][0]["text"], HOSTILE);
    let cut = group["samples"][1]["text"].as_array().unwrap();
    let kept = |part: &Value| part.as_str().unwrap().chars().count();
    let all = long.chars().count();
    assert_eq!(kept(&cut[0]) + cut[1].as_u64().unwrap() as usize + kept(&cut[2]), all);
    assert!(cut[2].as_str().unwrap().ends_with("END"));
    assert_eq!(shown["cut"], 1);
    assert!(bench.read("run/report.html").len() < 300_000);
}

#[test]
fn runs_are_read_together_and_those_that_differ_in_a_seed_are_marked() {
    let bench = Bench::new();
    for (name, settings) in [
        ("a", ["trainer.seed=1", "optim.lr=0.001"]),
        ("b", ["trainer.seed=2", "optim.lr=0.001"]),
        ("c", ["trainer.seed=1", "optim.lr=0.002"]),
    ] {
        let output = format!("output={}", bench.path(name).display());
        succeeded(&bench.firebrick("train", &[&[output.as_str()], &settings[..]].concat()));
    }
    succeeded(&bench.report(&["a", "b", "c"]));
    let data = bench.data("report.html");
    let runs = data["runs"].as_array().unwrap();
    let of = |key: &str| runs.iter().map(|run| run[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("name"), ["a", "b", "c"]);
    assert_eq!(of("repeats"), [0, 0, 2]);
    succeeded(&bench.report(&["a", "--output", "one.html", "--samples", "4"]));
    let one = bench.data("one.html");
    assert_eq!(one["runs"][0]["samples"]["shown"], 4);
    assert_eq!(one["runs"][0]["samples"]["total"], 48);
}

#[test]
fn what_is_missing_or_cut_off_is_said_and_left_out() {
    let bench = Bench::new();
    let metrics = "{\"training/global_step\":1,\"actor/entropy\":0.5}\n{\"training/global_step\":2,\"act";
    let samples = sample(1, 0, 0, "3", 1.0) + "{\"step\":1,\"draw\":0,\"comp\u{fffd}";
    bench.made(
        "run",
        &[
            ("metrics.jsonl", metrics.into()),
            ("samples.jsonl", samples),
            ("memory_timeline.json", "{\"format\":".into()),
            ("plan.json", "[".into()),
        ],
    );
    let output = bench.report(&["run"]);
    succeeded(&output);
    let said = stderr(&output);
    let data = bench.data("run/report.html");
    let run = &data["runs"][0];
    assert_eq!(run["metrics"]["steps"], json!([1]));
    assert_eq!(run["samples"]["total"], 1);
    for part in ["memory", "timeline", "plan", "summary"] {
        assert!(run[part].is_null(), "{part}");
    }
    let notes = run["notes"].to_string();
    for part in [
        "metrics.jsonl: 1 line could not be read",
        "samples.jsonl: 1 line could not be read",
        "There is no memory.jsonl",
        "memory_timeline.json could not be read",
        "plan.json could not be read",
        "the run has not ended",
    ] {
        assert!(notes.contains(part) && said.contains(part), "{part}: {notes}\n{said}");
    }
}

#[test]
fn a_folder_without_a_run_and_a_file_that_cannot_be_written_are_refused() {
    let bench = Bench::new();
    refused(&bench.report(&["nowhere"]), &["nowhere", "no such run folder"]);
    fs::create_dir(bench.path("empty")).unwrap();
    let parts = ["empty", "contains no run", "config.yaml", "`output`"];
    refused(&bench.report(&["empty"]), &parts);
    bench.made("run", &[]);
    let output = bench.report(&["run", "--output", "absent/report.html"]);
    refused(&output, &["cannot write", "report.html"]);
    assert!(!bench.path("run/report.html").exists());
}

#[test]
fn a_report_that_no_program_can_open_is_written_all_the_same() {
    let bench = Bench::new();
    bench.made("run", &[]);
    let mut command = program(&["report", "run", "--open"]);
    command.current_dir(bench.path("")).env("PATH", "");
    let output = command.output().unwrap();
    succeeded(&output);
    let said = stderr(&output);
    assert!(said.contains("not opened") && said.contains("report.html"), "{said}");
    assert!(bench.path("run/report.html").exists());
}

/// A run of 1,000 steps with 80 metrics, 64 samples of about a thousand characters and four phases each.
fn long_run() -> Bench {
    let bench = Bench::new();
    let (mut metrics, mut samples, mut memory) = (String::new(), String::new(), String::new());
    let text = "Let us think step by step. ".repeat(40);
    for step in 1..=1000_u64 {
        let mut line = json!({"training/global_step": step});
        for metric in 0..80_u64 {
            line[format!("group{}/metric{metric}", metric % 8)] =
                json!((step * 7919 + metric * 104_729) as f64 / 1.0e6 / 3.0);
        }
        writeln!(metrics, "{line}").unwrap();
        for at in 0..64 {
            let reward = ((step * 31 + at * 17) % 97) as f64 / 96.0;
            samples += &sample(step, step * 8 + at / 8, at % 8, &text, reward);
        }
        for phase in ["gen", "old_log_prob", "ref", "update_actor"] {
            let account = |category: &str| json!({"category": category, "home": "device", "bytes": 123_456_789, "peak_bytes": 123_456_789_u64 + step});
            let accounts = ["parameters", "kv_cache", "moments", "gradients", "live_graph"].map(account);
            let line = json!({"step": step, "phase": phase, "source": "counted_heap", "in_use_bytes": 987_654_321,
                "reserved_bytes": 987_654_321, "peak_bytes": 1_987_654_321, "accounts": accounts});
            writeln!(memory, "{line}").unwrap();
        }
    }
    bench.made("run", &[("metrics.jsonl", metrics), ("samples.jsonl", samples), ("memory.jsonl", memory)]);
    bench
}

#[test]
fn a_thousand_steps_with_64_thousand_samples_stay_below_eight_megabytes() {
    let bench = long_run();
    succeeded(&bench.report(&["run"]));
    let data = bench.data("run/report.html");
    let run = &data["runs"][0];
    assert_eq!(run["metrics"]["columns"].as_object().unwrap().len(), 80);
    assert_eq!(run["metrics"]["steps"].as_array().unwrap().len(), 1000);
    assert_eq!(run["samples"]["total"], 64_000);
    assert_eq!(run["samples"]["total_groups"], 8000);
    assert_eq!(run["samples"]["shown"], 400);
    assert_eq!(run["samples"]["truncated"], 8000);
    let counts = run["rewards"]["counts"].as_array().unwrap();
    let sum = |column: &Value| column.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum::<u64>();
    assert_eq!(counts.iter().map(sum).sum::<u64>(), 64_000);
    // as many samples as anyone asks for
    succeeded(&bench.report(&["run", "--samples", "64000", "--output", "all.html"]));
    assert_eq!(bench.data("all.html")["runs"][0]["samples"]["shown"], 64_000);
    let bytes = fs::metadata(bench.path("run/report.html")).unwrap().len();
    assert!(bytes < 8_000_000, "{bytes} bytes");
}
