//! `trainer.log_tokens`: a run keeps some groups with their tokens, and its report shows them.

use super::{Bench, refused, succeeded};
use serde_json::{Value, json};

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn texts(list: &Value) -> String {
    let pieces = list.as_array().unwrap().iter();
    pieces.map(|piece| piece.as_str().unwrap()).collect()
}

fn entries(line: &Value, key: &str) -> usize {
    line[key].as_array().map_or(0, Vec::len)
}

/// The line of `samples.jsonl` of the same completion.
fn sample_of<'a>(samples: &'a [Value], line: &Value) -> &'a Value {
    let same = |sample: &&Value| ["step", "draw", "sample"].iter().all(|key| sample[*key] == line[*key]);
    samples.iter().find(same).unwrap()
}

#[test]
fn tokens_make_up_the_texts_of_the_samples_and_agree_with_the_metrics() {
    let bench = Bench::new();
    let settings = ["trainer.log_tokens=2", "task.partial=true", "update.old_log_probs=trainer"];
    succeeded(&bench.firebrick("train", &settings));
    let samples = lines(&bench.read("run/samples.jsonl"));
    let all = lines(&bench.read("run/tokens.jsonl"));
    assert_eq!(all[0], json!({"step": 0, "every": 1, "max_bytes": 64 << 20}));
    // two groups of four in each of three steps
    assert_eq!(all.len(), 1 + 3 * 2 * 4);
    let mut apart = 0.0_f64;
    for line in &all[1..] {
        let sample = sample_of(&samples, line);
        let tokens = line["tokens"].as_u64().unwrap() as usize;
        assert_eq!(sample["tokens"], line["tokens"]);
        for key in ["pieces", "sampler_logp", "trainer_logp", "mismatch", "advantage", "mask"] {
            assert_eq!(entries(line, key), tokens, "{key}");
        }
        // special tokens are tokens of the completion but no part of its text
        let text = texts(&line["pieces"]);
        let completion = sample["completion"].as_str().unwrap();
        assert_eq!(text.replace("<eos>", "").replace("<pad>", ""), completion);
        assert_eq!(text.ends_with("<eos>"), sample["finish"] == "stop");
        let advantage = line["advantage"][0].as_f64().unwrap();
        assert!((advantage - sample["advantage"].as_f64().unwrap()).abs() < 1e-6);
        for at in 0..tokens {
            let of = |key: &str| line[key][at].as_f64().unwrap();
            let own = of("trainer_logp").exp() - of("sampler_logp").exp();
            assert!((own - of("mismatch")).abs() < 1e-6, "nothing is truncated here");
            apart = apart.max(of("mismatch").abs());
        }
    }
    let metrics = lines(&bench.read("run/metrics.jsonl"));
    let largest = metrics[1..].iter().map(|line| line["training/rollout_probs_diff_max"].as_f64().unwrap());
    assert!(apart <= largest.fold(0.0, f64::max) + 1e-7);
}

#[test]
fn a_run_is_the_same_with_and_without_its_tokens_kept() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &[]));
    assert!(!bench.path("run/tokens.jsonl").exists());
    let other = format!("output={}", bench.path("kept").display());
    succeeded(&bench.firebrick("train", &["trainer.log_tokens=1", &other]));
    assert_eq!(bench.read("run/samples.jsonl"), bench.read("kept/samples.jsonl"));
}

#[test]
fn a_resumed_run_has_the_tokens_of_one_that_was_never_stopped() {
    let bench = Bench::new();
    let kept = ["trainer.log_tokens=1", "trainer.steps=4"];
    let whole = format!("output={}", bench.path("whole").display());
    succeeded(&bench.firebrick("train", &[&kept[..], &[&whole]].concat()));
    succeeded(&bench.firebrick("train", &[&kept[..], &["trainer.steps=2"]].concat()));
    // what a kill leaves: a later step, and a line that was cut off
    let torn = bench.read("run/tokens.jsonl") + "{\"step\":3,\"draw\":1}\n{\"step\":3,\"dr";
    bench.write("run/tokens.jsonl", &torn);
    succeeded(&bench.firebrick("train", &[&kept[..], &["--resume"]].concat()));
    assert_eq!(bench.read("run/tokens.jsonl"), bench.read("whole/tokens.jsonl"));
}

#[test]
fn a_report_has_the_tokens_that_were_kept_and_says_what_it_leaves_out() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &["trainer.log_tokens=1"]));
    succeeded(&bench.report(&["run"]));
    let data = bench.data("run/report.html");
    let samples = &data["runs"][0]["samples"];
    assert_eq!((&samples["total_with_tokens"], &samples["with_tokens"]), (&json!(12), &json!(12)));
    let groups = samples["groups"].as_array().unwrap();
    let all = lines(&bench.read("run/tokens.jsonl"));
    let of = |line: &Value| {
        let group = groups.iter().find(|group| group["step"] == line["step"] && group["draw"] == line["draw"]);
        group.unwrap()["samples"]
            .as_array()
            .unwrap()
            .iter()
            .find(|sample| sample["sample"] == line["sample"])
            .unwrap()
            .clone()
    };
    for line in &all[1..] {
        let shown = &of(line)["by_token"];
        assert_eq!(shown["pieces"], line["pieces"]);
        assert_eq!(shown["left_out"], 0);
        for (at, value) in shown["sampler"].as_array().unwrap().iter().enumerate() {
            let own = line["sampler_logp"][at].as_f64().unwrap();
            assert!((value.as_f64().unwrap() - own).abs() <= 5.1e-3 * own.abs(), "three digits");
        }
        assert!(shown["advantage"].is_number(), "one number for all tokens");
        assert_eq!(shown["masked"], json!([]));
    }
    // of a selection of one group only its own
    succeeded(&bench.report(&["run", "--samples", "4", "--output", "few.html"]));
    let few = &bench.data("few.html")["runs"][0]["samples"];
    assert!(few["with_tokens"].as_u64().unwrap() <= 4);
    assert_eq!(few["total_with_tokens"], 12);
}

#[test]
fn tokens_that_are_missing_or_broken_are_said_and_hostile_ones_are_data() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &["trainer.log_tokens=1"]));
    let whole = bench.read("run/tokens.jsonl");
    let first: Value = serde_json::from_str(whole.lines().nth(1).unwrap()).unwrap();
    let mut hostile = first.clone();
    let piece = "</script><script>alert(1)</script>\u{0}\u{202e}";
    for (key, value) in
        [("pieces", json!([piece])), ("sampler_logp", json!([null])), ("mask", json!([0])), ("advantage", json!([0.5]))]
    {
        hostile[key] = value;
    }
    hostile["mismatch"] = Value::Null;
    bench.write("run/tokens.jsonl", &format!("{{\"step\":0}}\n{hostile}\n{{\"step\":1,\"dr"));
    succeeded(&bench.report(&["run"]));
    let run = &bench.data("run/report.html")["runs"][0];
    assert!(run["notes"].to_string().contains("tokens.jsonl: 1 line could not be read"));
    let shown = run["samples"]["groups"].as_array().unwrap().iter().find_map(|group| {
        let samples = group["samples"].as_array().unwrap().iter();
        samples.map(|sample| &sample["by_token"]).find(|own| own.is_object())
    });
    let shown = shown.unwrap();
    assert_eq!((&shown["pieces"], &shown["masked"]), (&json!([piece]), &json!([0])));
    assert_eq!((&shown["sampler"], &shown["mismatch"]), (&json!([null]), &Value::Null));
    std::fs::remove_file(bench.path("run/tokens.jsonl")).unwrap();
    succeeded(&bench.report(&["run"]));
    let run = &bench.data("run/report.html")["runs"][0];
    assert!(run["notes"].to_string().contains("There is no tokens.jsonl"));
}

#[test]
fn a_number_of_groups_below_zero_is_refused() {
    let bench = Bench::new();
    refused(&bench.firebrick("train", &["trainer.log_tokens=-1"]), &["log_tokens"]);
}
