//! Numbers that are NaN or infinite: skipped steps, and the end of a run with the first of them.

use super::{Bench, copy_model, stderr};
use std::process::Command;

#[test]
fn an_infinite_reward_skips_the_step_and_ends_the_run_with_its_name_and_sample() {
    let bench = Bench::new();
    if Command::new("python3").arg("--version").output().is_err() {
        return;
    }
    copy_model("llama-gqa", &bench.path("model"));
    let lines = (0..8).map(|i| format!("{{\"q\": \"{i} apples\", \"a\": \"{i}\"}}\n"));
    bench.write("rows.jsonl", &lines.collect::<String>());
    let calls = "calls = []\ndef endless(completions, **_):\n    calls.append(1)\n    \
                 return [float('inf') if i == 1 else 0.5 for i in range(len(completions))]\n";
    bench.write("reward.py", calls);
    let model = format!("model.path={}", bench.path("model").display());
    let output = bench.firebrick(
        "train",
        &[
            "task={kind: dataset, train: rows.jsonl, prompt: '{q}', answer_field: a, rewards: [{kind: python, file: \
             reward.py, function: endless}]}",
            "model.arch=null",
            &model,
            "rollout.prompt_length=24",
            "trainer.max_consecutive_skips=2",
            "trainer.save_freq=1",
        ],
    );
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(5), "{said}");
    for part in [
        "`endless` (",
        "line 2) returned inf; rewards must be finite",
        "step 1, update_actor: reward `python` is inf in draw 0 (train row ",
        "not finite for 2 optimizer steps of update_actor in a row, last at step 2",
        "first: reward `python` is inf in draw 4 (train row ",
        "), sample 1\n",
        "Correct the reward, and continue with --resume --allow-changed-inputs from the last good checkpoint",
    ] {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
    // the weights are good, so they are saved
    assert!(bench.path("run/checkpoints/step-000001/trainer/state.json").is_file());
}
