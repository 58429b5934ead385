//! Inputs that are made to do harm: they end in an error for the user or do nothing, within seconds, and take little
//! more memory than honest ones.
//!
//! The nightly test `hostile` makes several inputs of each kind; here, each kind is made once.

mod chats;
mod configs;
mod models;
mod rows;
mod runs;
mod scripts;

use super::{Bench, copy_model, program, succeeded};
use crate::support::{campaign_points, fixtures, is_campaign};
use rayon::prelude::*;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Inputs by which campaigns found faults: kind and number.
const FOUND: [(&str, u64); 5] = [
    ("many values in a model's JSON", 115),
    ("many values in a model's JSON", 194),
    ("parts of a tokenizer", 205),
    ("keys without number", 243),
    ("many values in a model's JSON", 273),
];

/// A token in the environment of every run.
const SECRET: &str = "hf_SecretOfTheEnvironment";

/// Bytes that an input may take beyond an honest one.
const MORE_BYTES: u64 = 256 << 20;

/// Time of a run; unoptimized code is slow.
const TIME: Duration = Duration::from_secs(if cfg!(debug_assertions) { 60 } else { 10 });

/// Colors, a window title, a line that is overwritten, and a reversed text.
const TERMINAL: &str = "\u{1b}[31m\u{1b}]0;title\u{7}\u{8}\r\u{9b}2J\u{202e}txet";

/// What the program does with an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Job {
    /// `config check`
    Check,
    /// `plan`
    Plan,
    /// `data` on `rows.jsonl`, with a chat template.
    Data,
    /// `generate` on the folder `model`
    Generate,
    /// The same, with the chat template `model/chat_template.jinja`.
    Chat,
    /// `generate` with the folder `adapter`
    Adapter,
    /// `train --plan plan.json`
    Planned,
    /// `train --resume` in the folder `run`
    Resume,
    /// `report run`
    Report,
    /// `watch run --once`
    Watch,
    /// `logprobs` of `rows.jsonl`
    Logprobs,
    /// `import script.sh`
    Import,
}

/// Required outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Required {
    Refused,
    /// Refused or harmless.
    Any,
}

/// A kind of inputs: changes an honest input, with random sizes, and may add arguments.
struct Kind {
    name: &'static str,
    job: Job,
    required: Required,
    make: fn(&Bench, &mut Random) -> Vec<String>,
}

const fn refused(name: &'static str, job: Job, make: fn(&Bench, &mut Random) -> Vec<String>) -> Kind {
    Kind { name, job, required: Required::Refused, make }
}

const fn any(name: &'static str, job: Job, make: fn(&Bench, &mut Random) -> Vec<String>) -> Kind {
    Kind { name, job, required: Required::Any, make }
}

/// Random numbers, by splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % bound
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// A power of two between two of them.
    fn power(&mut self, from: u32, to: u32) -> usize {
        1 << (u64::from(from) + self.below(u64::from(to - from) + 1))
    }

    /// A number that few programs expect.
    fn number(&mut self) -> &'static str {
        self.pick(&[
            "0",
            "-1",
            "65536",
            "2147483647",
            "2147483648",
            "4294967295",
            "4294967296",
            "9007199254740993",
            "9223372036854775807",
            "9223372036854775808",
            "18446744073709551615",
            "18446744073709551616",
            "1e18",
            "1e308",
            "-1e308",
            "1e-320",
        ])
    }
}

/// Writes a file of zeros that takes no space on the disk.
fn write_sparse(bench: &Bench, name: &str, bytes: u64) {
    File::create(bench.path(name)).unwrap().set_len(bytes).unwrap();
}

/// Replaces a file by a link.
fn link(bench: &Bench, name: &str, target: impl AsRef<Path>) {
    let path = bench.path(name);
    let _ = fs::remove_file(&path);
    #[cfg(unix)]
    std::os::unix::fs::symlink(target, path).unwrap();
    #[cfg(not(unix))]
    fs::copy(target, path).unwrap();
}

/// Changes a JSON file.
fn edit(bench: &Bench, name: &str, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_str(&bench.read(name)).unwrap();
    change(&mut value);
    bench.write(name, &value.to_string());
}

/// Changes up to eight bytes of a file.
fn damage(bench: &Bench, name: &str, random: &mut Random) {
    let mut bytes = fs::read(bench.path(name)).unwrap();
    for _ in 0..=random.below(8) {
        let at = random.below(bytes.len() as u64) as usize;
        bytes[at] = random.pick(&[0, 1, 0x7f, 0x80, 0xff]);
    }
    fs::write(bench.path(name), bytes).unwrap();
}

/// A text nested deeply.
fn nested(open: &str, inner: &str, close: &str, depth: usize) -> String {
    [&open.repeat(depth), inner, &close.repeat(depth)].concat()
}

/// Settings of a run on `rows.jsonl`.
const ROWS: &str = "model: {path: MODEL}\noutput: run\ndevice: cpu\n\
    task: {kind: dataset, train: rows.jsonl, prompt_field: q, answer_field: a, rewards: [{kind: exact}]}\n\
    rollout: {n: 2, prompt_length: 200, response_length: 4}\ntrainer: {steps: 1, train_batch_size: 1, save_freq: -1}\n";

impl Job {
    /// Prepares an honest input, and returns the arguments that read it.
    fn prepare(self, bench: &Bench) -> Vec<String> {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect();
        match self {
            Self::Check => words("config check config.yaml"),
            Self::Plan => words("plan config.yaml"),
            Self::Data => {
                bench.write(
                    "config.yaml",
                    &ROWS.replace("MODEL", fixtures().join("models/qwen2-tied").to_str().unwrap()),
                );
                bench.write("rows.jsonl", "{\"q\": \"1+1=\", \"a\": \"2\"}\n");
                words("data config.yaml")
            }
            Self::Generate | Self::Chat => {
                copy_model("llama-gqa", &bench.path("model"));
                bench.write("model/chat_template.jinja", "{{ messages[0].content }}");
                let chat = if self == Self::Chat { " --chat" } else { "" };
                words(&format!("generate --model model --device cpu --max-new-tokens 2 --prompt 1+1={chat}"))
            }
            Self::Adapter => {
                copy_model("llama-gqa", &bench.path("model"));
                models::write_adapter(bench);
                words("generate --model model --adapter adapter --device cpu --max-new-tokens 2 --prompt 1+1=")
            }
            Self::Planned => {
                let planned = program(&["plan", "config.yaml", "--output", "plan.json"])
                    .current_dir(bench.path(""))
                    .output()
                    .unwrap();
                succeeded(&planned);
                words("train config.yaml --plan plan.json --plain trainer.steps=1")
            }
            Self::Resume | Self::Report | Self::Watch => {
                let trained = finished_run();
                super::corruptions::copy_folder(&trained.path("run"), &bench.path("run"));
                match self {
                    Self::Resume => {
                        runs::unseal(bench);
                        words("train config.yaml --resume --plain trainer.steps=2")
                    }
                    Self::Report => words("report run"),
                    _ => words("watch run --once"),
                }
            }
            Self::Logprobs => {
                copy_model("llama-gqa", &bench.path("model"));
                bench.write("rows.jsonl", "{\"input_ids\": [1, 2, 3]}\n");
                words("logprobs --model model --device cpu --input rows.jsonl --output out.jsonl")
            }
            Self::Import => {
                bench.write("script.sh", "python3 -m verl.trainer.main_ppo data.train_batch_size=8\n");
                words("import script.sh --from verl")
            }
        }
    }
}

/// A run of one step, which many jobs copy.
fn finished_run() -> &'static Bench {
    static RUN: OnceLock<Bench> = OnceLock::new();
    RUN.get_or_init(|| {
        let bench = Bench::new();
        succeeded(&bench.firebrick("train", &["trainer.steps=1", "trainer.save_freq=1"]));
        bench
    })
}

/// How a run ended.
struct Ended {
    status: Option<ExitStatus>,
    peak: u64,
    seconds: f64,
    stdout: String,
    stderr: String,
}

/// The largest memory of a process so far, where the system tells it.
fn peak_bytes(child: &Child) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// Runs the program. It is killed when it exceeds the time or `most` bytes.
fn run(bench: &Bench, args: &[String], most: u64) -> Ended {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let [out, err] = ["stdout", "stderr"].map(|name| bench.path(name));
    let mut command = program(&args);
    command.current_dir(bench.path("")).env("HF_TOKEN", SECRET).env("HF_HUB_OFFLINE", "1").stdin(Stdio::null());
    // panics of other crates, which are errors of the user's file, are written for whoever asks for them
    command.env_remove("RUST_BACKTRACE");
    let mut child = command.stdout(File::create(&out).unwrap()).stderr(File::create(&err).unwrap()).spawn().unwrap();
    let (start, mut peak) = (Instant::now(), 0);
    let status = loop {
        peak = peak.max(peak_bytes(&child).unwrap_or(0));
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if start.elapsed() > TIME || peak > most {
            child.kill().unwrap();
            child.wait().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let text = |path: &PathBuf| {
        let mut bytes = fs::read(path).unwrap();
        bytes.truncate(1 << 20);
        String::from_utf8_lossy(&bytes).into_owned()
    };
    Ended { status, peak, seconds: start.elapsed().as_secs_f64(), stdout: text(&out), stderr: text(&err) }
}

/// The largest memory of an honest run of a job.
fn honest_peak(job: Job) -> u64 {
    let bench = Bench::new();
    let ended = run(&bench, &job.prepare(&bench), u64::MAX);
    let succeeded = ended.status.is_some_and(|status| status.success());
    assert!(succeeded, "the honest {job:?} ends with {:?}: {}", ended.status, ended.stderr);
    ended.peak
}

fn kinds() -> impl Iterator<Item = &'static Kind> {
    [configs::KINDS, rows::KINDS, models::KINDS, chats::KINDS, runs::KINDS, scripts::KINDS].into_iter().flatten()
}

/// Returns true for a character that a terminal may obey.
fn is_control(c: char) -> bool {
    (c.is_control() && c != '\n' && c != '\t') || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Runs a kind's input of a number; the exit code, or what is wrong.
fn outcome(kind: &Kind, point: u64, honest_peak: u64) -> Result<i32, String> {
    let bench = Bench::new();
    let mut args = kind.job.prepare(&bench);
    args.extend((kind.make)(&bench, &mut Random(point)));
    let most = honest_peak + MORE_BYTES;
    let ended = run(&bench, &args, most);
    let Ended { status, peak, seconds, stdout, stderr } = &ended;
    let wrong = |what: String| {
        let shown: String = stderr.chars().take(2000).flat_map(char::escape_debug).collect();
        let args = args.iter().map(|arg| arg.chars().take(80).collect::<String>()).collect::<Vec<_>>().join(" ");
        Err(format!("{} {point} ({args}): {what}\n  {shown}", kind.name))
    };
    let Some(status) = status else {
        return wrong(format!("stopped after {seconds:.1} s with {} MiB, honest + 256 are {}", peak >> 20, most >> 20));
    };
    let leak = [stdout, stderr].into_iter().any(|text| text.contains(SECRET)) || has_secret(&bench.path("run"));
    match status.code() {
        _ if leak => wrong("a token of the environment is shown or written".into()),
        _ if [stdout, stderr].into_iter().any(|text| text.contains(rows::MARK)) => {
            wrong("another file is shown".into())
        }
        _ if has_other_script(&bench) => wrong("a script of the run in the report".into()),
        _ if *peak > most => wrong(format!("{} MiB, honest + 256 are {}", peak >> 20, most >> 20)),
        _ if stdout.chars().chain(stderr.chars()).any(is_control) => wrong("control characters".into()),
        Some(2) if stderr.contains("panicked") || stderr.contains("device or its driver") => wrong("a panic".into()),
        Some(2) if kind.job != Job::Check && !stderr.contains("error: ") => wrong("no message".into()),
        Some(2) => Ok(2),
        Some(0) if kind.required == Required::Any => Ok(0),
        Some(3) if kind.job == Job::Import && kind.required == Required::Any => Ok(3),
        code => wrong(format!("exit code {code:?} ({status})")),
    }
}

/// Returns true if a report has another script than its data and its program.
fn has_other_script(bench: &Bench) -> bool {
    let report = fs::read_to_string(bench.path("run/report.html"));
    report.is_ok_and(|html| html.matches("<script").count() != 2 || html.matches("</script").count() != 2)
}

/// Returns true if a file in a folder has the token.
fn has_secret(folder: &Path) -> bool {
    let files = if folder.is_dir() { super::corruptions::files(folder) } else { Vec::new() };
    files.iter().filter(|path| path.metadata().is_ok_and(|about| about.is_file() && about.len() < 1 << 24)).any(
        |path| {
            let bytes = fs::read(path).unwrap_or_default();
            bytes.windows(SECRET.len()).any(|window| window == SECRET.as_bytes())
        },
    )
}

#[test]
fn inputs_made_to_do_harm_are_refused_or_harmless() {
    let kinds: Vec<&Kind> = kinds().collect();
    let points = campaign_points().filter(|_| is_campaign("hostile")).unwrap_or(0..kinds.len() as u64);
    let of_points = points.map(|point| (kinds[point as usize % kinds.len()], point));
    let found = FOUND.iter().map(|&(name, point)| (*kinds.iter().find(|kind| kind.name == name).unwrap(), point));
    let chosen: Vec<(&Kind, u64)> = of_points.chain(found.filter(|_| !is_campaign("hostile"))).collect();
    let jobs: BTreeSet<Job> = chosen.iter().map(|(kind, _)| kind.job).collect();
    let peaks: BTreeMap<Job, u64> = jobs.into_par_iter().map(|job| (job, honest_peak(job))).collect();
    let outcomes: Vec<Result<i32, String>> =
        chosen.into_par_iter().map(|(kind, point)| outcome(kind, point, peaks[&kind.job])).collect();
    let mut counts: BTreeMap<i32, usize> = BTreeMap::new();
    for code in outcomes.iter().flatten() {
        *counts.entry(*code).or_default() += 1;
    }
    let failures: Vec<&str> =
        outcomes.iter().filter_map(|outcome| outcome.as_ref().err().map(String::as_str)).collect();
    let passed = outcomes.len() - failures.len();
    let summary =
        format!("{} kinds, inputs by exit code {counts:?}\n{passed} passed, {} failed\n", kinds.len(), failures.len());
    std::io::stderr().write_all(summary.as_bytes()).unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

/// A message for a person, as JSON.
fn row(question: &str) -> Value {
    json!({"q": question, "a": "2"})
}
