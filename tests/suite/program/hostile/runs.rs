//! Run folders: plans, checkpoints and logs that another program wrote.

use super::rows::MARK;
use super::{Bench, Job, Kind, Random, TERMINAL, any, damage, edit, link, nested, refused, write_sparse};
use serde_json::{Value, json};
use std::fs;

/// The checkpoint of the finished run.
const STEP: &str = "run/checkpoints/step-000001";

pub(super) const KINDS: &[Kind] = &[
    any("numbers of a plan", Job::Planned, |bench, random| {
        let number: Value = serde_json::from_str(random.number()).unwrap();
        edit(bench, "plan.json", |plan| {
            let mut places = Vec::new();
            numbers(&plan["plan"], "/plan", &mut places);
            let place = &places[random.below(places.len() as u64) as usize];
            *plan.pointer_mut(place).unwrap() = number;
        });
        Vec::new()
    }),
    refused("units of a plan", Job::Planned, |bench, random| {
        let units = random.pick(&[[0, u64::MAX], [5, 1], [u64::MAX, u64::MAX], [0, 0], [1, 2]]);
        edit(bench, "plan.json", |plan| {
            plan["plan"]["models"]["policy"]["segments"][0]["units"] = json!({"start": units[0], "end": units[1]});
        });
        Vec::new()
    }),
    refused("a plan of another shape", Job::Planned, |bench, random| {
        match random.below(4) {
            0 => write_sparse(bench, "plan.json", random.power(24, 42) as u64),
            1 => drop(bench.write("plan.json", &nested("{\"plan\":", "1", "}", random.power(8, 18)))),
            2 => drop(bench.write("plan.json", &json!({"plan": {"models": {(TERMINAL): 1}}}).to_string())),
            _ => edit(bench, "plan.json", |plan| plan["plan"]["models"] = json!(TERMINAL)),
        }
        Vec::new()
    }),
    any("numbers of a trainer's state", Job::Resume, |bench, random| {
        let key =
            random.pick(&["step", "draws", "optimizer_steps", "skipped_steps", "tokens", "seconds", "peak_bytes"]);
        let number: Value = serde_json::from_str(random.number()).unwrap();
        edit(bench, &format!("{STEP}/trainer/state.json"), |state| state[key] = number);
        Vec::new()
    }),
    refused("a trainer's state of another shape", Job::Resume, |bench, random| {
        let name = format!("{STEP}/trainer/state.json");
        match random.below(4) {
            0 => write_sparse(bench, &name, random.power(28, 42) as u64),
            1 => drop(bench.write(&name, &nested("{\"step\":", "1", "}", random.power(8, 18)))),
            2 => link(bench, &name, "/dev/zero"),
            _ => edit(bench, &name, |state| state["mode"] = json!(TERMINAL)),
        }
        Vec::new()
    }),
    refused("checksums of files elsewhere", Job::Resume, |bench, random| {
        bench.write("secret", MARK);
        link(bench, &format!("{STEP}/link"), "../../../secret");
        let path = random.pick(&["../../../secret", "/etc/passwd", "/dev/zero", "link", "/dev/tty", "."]);
        let bytes = random.pick(&[0, 21, u64::MAX, 1 << 40]);
        let files = json!([{"bytes": bytes, "crc32c": 0, "path": path}]);
        let sealed: std::collections::BTreeMap<&str, Value> =
            [("files", files), ("format", json!("firebrick.checkpoint")), ("version", json!(1))].into();
        let crc32c = crc32c::crc32c(&serde_json::to_vec(&sealed).unwrap());
        let mut index = json!(sealed);
        index["crc32c"] = json!(crc32c);
        bench.write(&format!("{STEP}/checksums.json"), &index.to_string());
        Vec::new()
    }),
    refused("an index of checksums of another shape", Job::Resume, |bench, random| {
        let name = format!("{STEP}/checksums.json");
        match random.below(3) {
            0 => write_sparse(bench, &name, random.power(28, 42) as u64),
            1 => link(bench, &name, "/dev/zero"),
            _ => drop(bench.write(&name, &nested("[", "", "]", random.power(8, 18)))),
        }
        Vec::new()
    }),
    any("a damaged file of an optimizer", Job::Resume, |bench, random| {
        let path = bench.path(&format!("{STEP}/trainer/optimizer.safetensors"));
        let mut bytes = fs::read(&path).unwrap();
        for _ in 0..=random.below(4) {
            bytes[random.below(1000) as usize] = random.below(256) as u8;
        }
        fs::write(path, bytes).unwrap();
        Vec::new()
    }),
    refused("a file of an optimizer that is elsewhere", Job::Resume, |bench, random| {
        let name = format!("{STEP}/trainer/optimizer.safetensors");
        fs::rename(bench.path(&name), bench.path("outside.safetensors")).unwrap();
        match random.below(3) {
            0 => link(bench, &name, bench.path("outside.safetensors")),
            1 => link(bench, &name, "/dev/zero"),
            _ => {
                let shard = json!({"name": "x", "shape": [1, 1], "range": [0, 1], "file": "../../../../outside.safetensors", "offset": 0, "crc32c": 0});
                bench.write(
                    &format!("{STEP}/trainer/optimizer.index.json"),
                    &json!({"ranks": 1, "tensors": [shard]}).to_string(),
                );
            }
        }
        Vec::new()
    }),
    refused("a run's configuration of another shape", Job::Resume, |bench, random| {
        match random.below(3) {
            0 => write_sparse(bench, "run/config.yaml", random.power(24, 42) as u64),
            1 => drop(bench.write("run/config.yaml", &format!("a: {}\n", nested("[", "", "]", random.power(8, 18))))),
            _ => drop(bench.write("run/config.yaml", &format!("a: {TERMINAL:?}\n"))),
        }
        Vec::new()
    }),
    any("lines of a run", Job::Report, |bench, random| {
        lines(bench, random);
        Vec::new()
    }),
    any("lines of a run that is watched", Job::Watch, |bench, random| {
        lines(bench, random);
        Vec::new()
    }),
    any("files of a run", Job::Report, |bench, random| {
        let name = random.pick(&[
            "run/plan.json",
            "run/summary.json",
            "run/config.yaml",
            "run/memory_timeline.json",
            "run/timeline.json",
        ]);
        match random.below(4) {
            0 => write_sparse(bench, name, random.power(28, 42) as u64),
            1 => drop(bench.write(name, &nested("[", "", "]", random.power(8, 18)))),
            2 => drop(bench.write(name, TERMINAL)),
            _ if bench.path(name).exists() => damage(bench, name, random),
            _ => {}
        }
        Vec::new()
    }),
];

/// Adds lines to the files of a run.
fn lines(bench: &Bench, random: &mut Random) {
    let name = random.pick(&["run/metrics.jsonl", "run/samples.jsonl", "run/events.jsonl"]);
    let html = format!("</script><script>alert(1)</script><img src=x onerror=alert(1)>{TERMINAL}");
    let number: Value = serde_json::from_str(random.number()).unwrap();
    let line = match random.below(7) {
        0 => json!({"step": number, "reward": number, "prompt": html, "completion": html}).to_string(),
        1 => {
            let path = bench.path(name);
            let text = fs::read_to_string(&path).unwrap_or_default();
            bench.write(name, &text);
            let file = fs::OpenOptions::new().write(true).open(path).unwrap();
            file.set_len(random.power(28, 42) as u64).unwrap();
            return;
        }
        2 => nested("{\"step\":", "1", "}", random.power(8, 20)),
        3 => {
            let metrics = (0..random.power(10, 17)).map(|at| (format!("m/{at}{html}"), json!(at)));
            Value::Object([("step".to_owned(), json!(1))].into_iter().chain(metrics).collect()).to_string()
        }
        4 => json!({"step": 1, "prompt": html.repeat(1 << 16), "completion": html.repeat(1 << 16)}).to_string(),
        5 => json!({
            "step": 1, "draw": number, "sample": number, "prompt": html, "completion": html, "answer": html, "reward": number,
            "reward_parts": [[html, number]], "advantage": number, "finish": html, "tokens": number,
        })
        .to_string(),
        _ => format!("{{\"step\": 1, \"x\": {}}}", "9".repeat(random.power(8, 20))),
    };
    let text = fs::read_to_string(bench.path(name)).unwrap_or_default();
    bench.write(name, &format!("{text}{line}\n{line}\n"));
}

/// JSON pointers of all numbers in a value.
fn numbers(value: &Value, at: &str, places: &mut Vec<String>) {
    match value {
        Value::Number(_) => places.push(at.to_owned()),
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(entry, value)| numbers(value, &format!("{at}/{entry}"), places));
        }
        Value::Object(map) => map.iter().for_each(|(key, value)| numbers(value, &format!("{at}/{key}"), places)),
        _ => {}
    }
}

/// Makes the checkpoint one of an early version, whose files have no checksums.
pub(super) fn unseal(bench: &Bench) {
    let _ = fs::remove_file(bench.path(&format!("{STEP}/checksums.json")));
    edit(bench, &format!("{STEP}/trainer/state.json"), |state| state["checksums"] = json!(false));
}
