//! The commands beside training.

use super::{Bench, firebrick, succeeded};
use serde_json::Value;

fn model() -> String {
    crate::support::fixtures().join("models/llama-gqa").to_str().unwrap().to_owned()
}

#[test]
fn devices_lists_the_cpu_for_people_and_for_programs() {
    assert!(succeeded(&firebrick(&["devices"])).contains("cpu"));
    let reports: Value = serde_json::from_str(&succeeded(&firebrick(&["devices", "--json"]))).unwrap();
    let cpu = reports.as_array().unwrap().iter().find(|r| r["backend"] == "cpu").unwrap();
    assert_eq!(cpu["devices"][0]["device"], "cpu");
}

#[test]
fn logprobs_writes_t_minus_1_log_probs_and_t_entropies_in_order() {
    let bench = Bench::new();
    let input = bench.write(
        "in.jsonl",
        "{\"input_ids\": [507, 41, 68, 275]}\n{\"prompt\": \"Jean has\", \"completion\": \" 30\"}\n{\"input_ids\": [7]}\n",
    );
    let output = bench.path("out.jsonl");
    succeeded(&firebrick(&[
        "logprobs",
        "--model",
        &model(),
        "--input",
        input.to_str().unwrap(),
        "--output",
        output.to_str().unwrap(),
        "--device",
        "cpu",
        "--temperature",
        "0.7",
    ]));
    let lines: Vec<Value> = bench.read("out.jsonl").lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(lines.len(), 3);
    let lengths = |v: &Value| (v["logprobs"].as_array().unwrap().len(), v["entropy"].as_array().unwrap().len());
    assert_eq!(lengths(&lines[0]), (3, 4));
    assert_eq!(lengths(&lines[2]), (0, 1));
    assert!(lines[0]["logprobs"][0].as_f64().unwrap() < 0.0);
}

#[test]
fn generate_repeats_itself_by_seed_and_differs_by_sample() {
    let model = model();
    let args = [
        "generate",
        "--model",
        &model,
        "--prompt",
        "Jean has 30",
        "-n",
        "3",
        "--max-new-tokens",
        "12",
        "--device",
        "cpu",
    ];
    let first = succeeded(&firebrick(&args));
    assert_eq!(first, succeeded(&firebrick(&args)));
    let lines: std::collections::BTreeSet<&str> = first.lines().collect();
    assert!(lines.len() > 1, "{first}");
    let other = succeeded(&firebrick(&[&args[..], &["--seed", "9"]].concat()));
    assert_ne!(first, other);
}

#[test]
fn generate_in_json_carries_tokens_and_both_log_probs() {
    let args = [
        "generate",
        "--model",
        &model(),
        "--prompt",
        "Jean",
        "--json",
        "--top-k",
        "5",
        "--max-new-tokens",
        "4",
        "--device",
        "cpu",
    ];
    let line: Value = serde_json::from_str(succeeded(&firebrick(&args)).lines().next().unwrap()).unwrap();
    let (truncated, full) = (&line["logprobs"], &line["full_logprobs"]);
    assert_eq!(line["tokens"].as_array().unwrap().len(), truncated.as_array().unwrap().len());
    assert!(truncated[0].as_f64().unwrap() > full[0].as_f64().unwrap());
}

#[test]
fn eval_scores_a_trained_checkpoint_like_the_run_did() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &["trainer.steps=1"]));
    let model = bench.path("run/checkpoints/step-000001/model");
    let out = succeeded(&bench.firebrick("eval", &["--json", "--model", model.to_str().unwrap()]));
    let result: Value = serde_json::from_str(&out).unwrap();
    let summary: Value = serde_json::from_str(&bench.read("run/summary.json")).unwrap();
    assert_eq!(result["reward"], summary["last"]["val-core/arithmetic/reward"]);
    assert_eq!(result["prompts"], 10);
}

#[test]
fn bench_says_where_the_time_of_a_step_goes_and_leaves_nothing_but_its_trace() {
    let bench = Bench::new();
    let trace = bench.path("trace.json");
    let args = ["--steps", "2", "--json", "--trace", trace.to_str().unwrap()];
    let report: Value = serde_json::from_str(&succeeded(&bench.firebrick("bench", &args))).unwrap();
    assert_eq!(report["steps"], 2);
    let seconds = |list: &str, name: &str| {
        let lines = report[list].as_array().unwrap();
        let line = lines.iter().find(|l| l["name"] == name);
        line.unwrap_or_else(|| panic!("no {name} in {report}"))["seconds_per_step"].as_f64().unwrap()
    };
    let step = report["seconds_per_step"].as_f64().unwrap();
    let phases = seconds("phases", "gen") + seconds("phases", "update_actor");
    // how much of a step of milliseconds they are depends on what else the machine does
    assert!(phases > 0.0 && phases <= 1.001 * step, "{report}");
    assert!(seconds("families", "product") > 0.0, "{report}");
    let spans: Value = serde_json::from_str(&std::fs::read_to_string(&trace).unwrap()).unwrap();
    assert!(spans["traceEvents"].as_array().unwrap().len() > 10);
    assert!(!bench.path("run").exists(), "the run that is timed is not the user's");
}
