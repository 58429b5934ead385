//! A run folder knows its inputs, its writer, and which of its checkpoints work.

use super::{Bench, copy_model, firebrick, refused, stderr, succeeded};
use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A task of rows for a copy of a small checkpoint, everything in the bench's folder.
fn rows(bench: &Bench) -> Vec<String> {
    copy_model("llama-gqa", &bench.path("model"));
    let lines = (0..8).map(|i| format!("{{\"q\": \"{i} apples\", \"a\": \"{i}\"}}\n"));
    bench.write("rows.jsonl", &lines.collect::<String>());
    bench.write("reward.py", "def compute_score(solution_str, **_):\n    return float(len(solution_str))\n");
    bench.write("template.jinja", "{{ messages[0].content }}");
    let model = bench.path("model").display().to_string();
    let rewards = "[{kind: number}, {kind: python, file: reward.py}]";
    vec![
        format!("task={{kind: dataset, train: rows.jsonl, prompt: '{{q}}', answer_field: a, rewards: {rewards}}}"),
        "model.arch=null".into(),
        format!("model.path={model}"),
        "model.chat_template=template.jinja".into(),
        "rollout.prompt_length=24".into(),
        "trainer.steps=1".into(),
    ]
}

fn with<'a>(args: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    args.iter().map(String::as_str).chain(more.iter().copied()).collect()
}

#[test]
fn files_that_have_changed_are_named_by_key_and_refused_unless_they_are_allowed() {
    let bench = Bench::new();
    let args = rows(&bench);
    succeeded(&bench.firebrick("train", &with(&args, &[])));
    let resume =
        |more: &[&str]| bench.firebrick("train", &with(&args, &[&["--resume", "trainer.steps=2"], more].concat()));
    for (file, key) in [
        ("rows.jsonl", "task.train (rows.jsonl has "),
        ("reward.py", "task.rewards.1.file (reward.py has "),
        ("template.jinja", "model.chat_template (template.jinja has "),
        ("model/tokenizer.json", "model.path (tokenizer.json has "),
    ] {
        let before = bench.read(file);
        bench.write(file, &format!("{before}\n"));
        refused(&resume(&[]), &["cannot resume", key, "--allow-changed-inputs"]);
        bench.write(file, &before);
    }
    // other weights of the same size
    let path = bench.path("model/model.safetensors");
    let mut weights = std::fs::read(&path).unwrap();
    let last = weights.len() - 1;
    weights[last] ^= 1;
    std::fs::write(&path, &weights).unwrap();
    refused(&resume(&[]), &["model.path (model.safetensors has other contents)"]);
    weights[last] ^= 1;
    std::fs::write(&path, &weights).unwrap();
    // another row of the same length
    bench.write("rows.jsonl", &bench.read("rows.jsonl").replace("7 apples", "9 apples"));
    refused(&resume(&[]), &["task.train (rows.jsonl has other contents)"]);
    let allowed = resume(&["--allow-changed-inputs"]);
    succeeded(&allowed);
    assert!(stderr(&allowed).contains("task.train (rows.jsonl has other contents)"), "{}", stderr(&allowed));
    // from then on they are those of the run
    succeeded(&resume(&["trainer.steps=3"]));
}

#[test]
fn files_that_have_moved_are_accepted_with_a_word_as_long_as_their_contents_are_the_same() {
    let bench = Bench::new();
    let args = rows(&bench);
    succeeded(&bench.firebrick("train", &with(&args, &[])));
    for (from, to) in [
        ("rows.jsonl", "moved/other.jsonl"),
        ("reward.py", "moved/score.py"),
        ("template.jinja", "moved/chat.jinja"),
        ("rows.jsonl", "longer.jsonl"),
    ] {
        let text = bench.read(from);
        bench.write(to, &text);
    }
    copy_model("llama-gqa", &bench.path("moved/model"));
    let model = format!("model.path={}", bench.path("moved/model").display());
    let moved = [
        ("task.train", "task.train=moved/other.jsonl"),
        ("task.rewards.1.file", "task.rewards.1.file=moved/score.py"),
        ("model.chat_template", "model.chat_template=moved/chat.jinja"),
        ("model.path", model.as_str()),
    ];
    for (steps, (key, own)) in (2..).zip(moved) {
        let steps = format!("trainer.steps={steps}");
        let output = bench.firebrick("train", &with(&args, &["--resume", own, &steps]));
        succeeded(&output);
        let said = stderr(&output);
        assert!(said.contains("files have moved since the run began, with the same contents: "), "{key}: {said}");
        assert!(said.contains(&format!("{key} (")) && said.contains("moved/"), "{key}: {said}");
    }
    // other contents at another path are refused, allowed or not
    bench.write("longer.jsonl", &(bench.read("rows.jsonl") + "{\"q\": \"9 apples\", \"a\": \"9\"}\n"));
    let other = with(&args, &["--resume", "task.train=longer.jsonl", "trainer.steps=9"]);
    refused(&bench.firebrick("train", &other), &["cannot resume", "task.train ("]);
    let allowed = [&other[..], &["--allow-changed-inputs"]].concat();
    refused(&bench.firebrick("train", &allowed), &["cannot resume", "task.train ("]);
}

#[test]
fn modules_that_a_reward_file_imports_are_inputs_at_once_or_at_its_first_call() {
    let bench = Bench::new();
    if Command::new("python3").arg("--version").output().is_err() {
        return;
    }
    let args = rows(&bench);
    let score = "import json\nfrom lengths.plain import of\n\
                 def compute_score(solution_str, **_):\n    import late\n    return late.scaled(of(solution_str))\n";
    bench.write("reward.py", score);
    bench.write("lengths/__init__.py", "");
    bench.write("lengths/plain.py", "from . import words\ndef of(text):\n    return float(len(text))\n");
    bench.write("lengths/words.py", "WORDS = 1\n");
    bench.write("late.py", "def scaled(value):\n    return 2 * value\n");
    bench.write("beside.py", "NOTHING = 0\n");
    succeeded(&bench.firebrick("train", &with(&args, &[])));
    let kept: Value = serde_json::from_str(&bench.read("run/inputs.json")).unwrap();
    let names = kept["task.rewards.1.modules"].as_array().expect("modules").iter().map(|own| {
        let path = own["path"].as_str().unwrap().to_owned();
        path.rsplit('/').next().unwrap().to_owned()
    });
    assert_eq!(names.collect::<Vec<_>>(), ["late.py", "__init__.py", "plain.py", "words.py"], "{kept}");
    let resume =
        |more: &[&str]| bench.firebrick("train", &with(&args, &[&["--resume", "trainer.steps=2"], more].concat()));
    for file in ["late.py", "lengths/words.py", "lengths/__init__.py"] {
        let before = bench.read(file);
        bench.write(file, &format!("{before}# other\n"));
        let name = file.rsplit('/').next().unwrap();
        refused(&resume(&[]), &["cannot resume", "task.rewards.1.modules (", &format!("{name} has ")]);
        bench.write(file, &before);
    }
    bench.write("beside.py", "NOTHING = 1\n");
    bench.write("lengths/words.py", "WORDS = 2\n");
    let allowed = resume(&["--allow-changed-inputs"]);
    succeeded(&allowed);
    assert!(stderr(&allowed).contains("words.py has other contents"), "{}", stderr(&allowed));
    // from then on they are those of the run
    succeeded(&resume(&["trainer.steps=3"]));
}

#[test]
fn a_run_that_has_ended_loads_nothing_before_it_says_so() {
    let bench = Bench::new();
    let args = ["trainer.steps=2", "--resume"];
    succeeded(&bench.firebrick("train", &args[..1]));
    let weights = bench.path("run/checkpoints/step-000002/model/model.safetensors");
    let kept = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, "no weights").unwrap();
    let again = bench.firebrick("train", &args);
    succeeded(&again);
    assert!(stderr(&again).contains("nothing to train"), "{}", stderr(&again));
    // one that was killed before its summary was written says so too, and writes it
    std::fs::write(&weights, kept).unwrap();
    std::fs::remove_file(bench.path("run/summary.json")).unwrap();
    let half_removed = bench.path("run/checkpoints/step-000001.removed");
    std::fs::create_dir_all(half_removed.join("model")).unwrap();
    let again = bench.firebrick("train", &args);
    succeeded(&again);
    assert_eq!(stderr(&again).matches("nothing to train").count(), 1, "{}", stderr(&again));
    assert!(bench.read("run/summary.json").contains("\"steps\": 2"));
    assert!(!half_removed.exists());
}

#[test]
fn a_second_process_is_refused_with_the_id_of_the_first_and_touches_nothing() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &["trainer.steps=1"]));
    let config = bench.path("config.yaml");
    let args = ["train", config.to_str().unwrap(), "--resume", "trainer.steps=4000", "trainer.save_freq=-1"];
    let mut first =
        Command::new(super::program_path()).args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    while bench.read("run/metrics.jsonl").lines().count() < 4 {
        assert!(started.elapsed() < Duration::from_mins(1), "the first process takes no steps");
        std::thread::sleep(Duration::from_millis(3));
    }
    let second = bench.firebrick("train", &["--resume", "trainer.steps=5000"]);
    refused(&second, &[&format!("process {} on ", first.id()), "wait until it has ended"]);
    assert!(bench.read("run/config.yaml").contains("steps: 4000"));
    first.kill().unwrap();
    first.wait().unwrap();
    // the lock of a process that was killed is no lock
    succeeded(&bench.firebrick("train", &["--resume", "trainer.steps=2"]));
    let steps = bench.read("run/metrics.jsonl").lines().count();
    assert_eq!(steps, 3, "no step is there twice");
}

#[test]
fn a_run_that_has_ended_says_that_there_is_nothing_to_train_and_stays_as_it_is() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &["trainer.steps=2"]));
    let files = ["config.yaml", "metrics.jsonl", "summary.json", "plan.json"].map(|name| format!("run/{name}"));
    let left = || files.each_ref().map(|file| bench.read(file));
    let before = left();
    for steps in ["trainer.steps=2", "trainer.steps=1"] {
        let again = bench.firebrick("train", &[steps, "--resume"]);
        succeeded(&again);
        let said = stderr(&again);
        assert!(said.contains("nothing to train") && said.contains("raise trainer.steps"), "{said}");
        assert!(!said.contains("finished: ") && !said.contains("training "), "{said}");
        assert!(left() == before, "{steps}");
    }
    let sft = Bench::new();
    sft.write("rows.jsonl", "{\"prompt\": \"1+1=\", \"completion\": \"2\"}\n");
    let epochs = |n: &str| {
        let train = format!("sft={{train: {}, batch_size: 1, epochs: {n}}}", sft.path("rows.jsonl").display());
        sft.firebrick("sft", &[&train, "--resume"])
    };
    // where there is no run, one starts
    let first = epochs("2");
    succeeded(&first);
    assert!(stderr(&first).contains("contains no run, so a new one starts"), "{}", stderr(&first));
    let again = epochs("2");
    succeeded(&again);
    assert!(stderr(&again).contains("raise sft.epochs"), "{}", stderr(&again));
}

#[test]
fn a_run_of_another_version_is_refused_by_its_folder_with_the_way_on() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &["trainer.steps=1"]));
    bench.write("run/config.yaml", &format!("gone_key: 3\n{}", bench.read("run/config.yaml")));
    let again = bench.firebrick("train", &["trainer.steps=2", "--resume"]);
    let folder = bench.path("run");
    refused(&again, &[folder.to_str().unwrap(), "of another version", "gone_key", "set model.path"]);
    succeeded(&firebrick(&["report", folder.to_str().unwrap()]));
}

/// Whether every log-prob under a checkpoint's model is a number.
fn works(bench: &Bench, checkpoint: &str) -> bool {
    let input = bench.write("ids.jsonl", "{\"input_ids\": [3, 4, 5, 6]}\n");
    let output = bench.path("logprobs.jsonl");
    let model = bench.path(&format!("{checkpoint}/model"));
    let [model, input, to] = [&model, &input, &output].map(|path| path.to_str().unwrap());
    firebrick(&["logprobs", "--device", "cpu", "--model", model, "--input", input, "--output", to]);
    let line: Value = serde_json::from_str(&bench.read("logprobs.jsonl")).unwrap();
    line["logprobs"].as_array().unwrap().iter().all(Value::is_number)
}

#[test]
fn a_checkpoint_from_before_updates_were_skipped_stays_and_is_named() {
    for keep in 1..=3 {
        let bench = Bench::new();
        let ruin = "optim={lr: 1.0e+30, clip_grad: null, lr_scheduler: {lr_scheduler_type: linear, warmup_steps: 2}}";
        let keep = format!("trainer.max_ckpt_to_keep={keep}");
        let output = bench.firebrick("train", &[ruin, &keep, "trainer.save_freq=1", "trainer.steps=40"]);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(5), "{said}");
        let error = said.lines().rfind(|line| line.starts_with("Lower ")).expect("advice");
        let (_, good) = error.split_once("the last good checkpoint is ").unwrap_or_else(|| panic!("{error}"));
        let (good, rest) = good.split_once(": delete ").expect("what to delete");
        let good = good.strip_prefix(bench.path("").to_str().unwrap()).expect("a path");
        assert!(works(&bench, good), "{keep}: {error}");
        // the one that it tells to delete does not work, and none was written after it
        let (ruined, _) = rest.split_once(',').expect("a path");
        let ruined = ruined.strip_prefix(bench.path("").to_str().unwrap()).expect("a path");
        assert!(!works(&bench, ruined), "{keep}: {error}");
        let newest = std::fs::read_dir(bench.path("run/checkpoints")).unwrap();
        let newest = newest.map(|entry| entry.unwrap().file_name().into_string().unwrap()).max().unwrap();
        assert!(ruined.ends_with(&newest), "{newest}: {error}");
        assert!(said.contains("no checkpoint is written"), "{said}");
        // it is the way back
        std::fs::remove_dir_all(bench.path(ruined)).unwrap();
        succeeded(&bench.firebrick("train", &[ruin, "--resume", "trainer.steps=1", "trainer.save_freq=1"]));
    }
}

#[test]
fn one_checkpoint_is_kept_of_a_run_that_goes_well_and_the_one_before_until_an_update_succeeds() {
    let bench = Bench::new();
    let found = || {
        let entries = std::fs::read_dir(bench.path("run/checkpoints")).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let one = ["trainer.max_ckpt_to_keep=1", "trainer.save_freq=2"];
    succeeded(&bench.firebrick("train", &[&one[..], &["trainer.steps=5"]].concat()));
    assert_eq!(found(), ["step-000004", "step-000005"]);
    succeeded(&bench.firebrick("train", &[&one[..], &["trainer.steps=7", "--resume"]].concat()));
    assert_eq!(found(), ["step-000006", "step-000007"]);
}

/// Waits until something is there, a minute at most.
#[cfg(unix)]
pub fn wait_for(what: &str, is_there: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_there() {
        assert!(started.elapsed() < Duration::from_mins(1), "{what}");
        std::thread::sleep(Duration::from_millis(3));
    }
}

#[cfg(unix)]
#[test]
fn a_signal_saves_a_checkpoint_of_a_run_that_continues() {
    let bench = Bench::new();
    let mut run = bench.command("train", &["trainer.steps=4000", "trainer.save_freq=-1", "--quiet"]);
    let mut run = run.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let steps = || std::fs::read_to_string(bench.path("run/metrics.jsonl")).unwrap_or_default().lines().count();
    let saved = || {
        std::fs::read_dir(bench.path("run/checkpoints")).map_or(0, |entries| {
            entries.flatten().filter(|entry| !entry.path().to_string_lossy().ends_with(".tmp")).count()
        })
    };
    wait_for("no step", || steps() > 1);
    assert_eq!(saved(), 0);
    let signalled = Command::new("kill").args(["-USR1", &run.id().to_string()]).status().unwrap();
    assert!(signalled.success());
    wait_for("no checkpoint", || saved() == 1);
    let before = steps();
    wait_for("no more steps", || steps() > before + 1);
    run.kill().unwrap();
    run.wait().unwrap();
    assert_eq!(saved(), 1);
}
