//! `firebrick import`: a configuration on stdout or in a file, the table, JSON, and what is refused.

use super::{Bench, firebrick, program, refused, stderr, succeeded};
use serde_json::{Value, json};
use std::process::Output;

const SCRIPT: &str = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=8 \\\n  \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.rollout.n=4 actor_rollout_ref.model.path=$NO_SUCH_MODEL \\\n  \
    actor_rollout_ref.rollout.pipeline_model_parallel_size=2 actor_rollout_ref.rollout.nam=vllm trainer.total_training_steps=3 data.train_files=rows.jsonl\n";

/// The import must have ended with the exit code for gaps; gives what it printed on stdout.
fn incomplete(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(3), "{}", stderr(output));
    assert!(stderr(output).contains("error: the configuration is incomplete"), "{}", stderr(output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_script_becomes_a_configuration_and_a_table_that_names_every_key() {
    let bench = Bench::new();
    let script = bench.write("run.sh", SCRIPT);
    let written = bench.path("run.yaml");
    let args = ["import", script.to_str().unwrap(), "--output", written.to_str().unwrap()];
    let output = firebrick(&args);
    let said = incomplete(&output);
    for part in [
        "9 keys of verl",
        "MAPPED",
        "data.train_batch_size=8",
        "trainer.train_batch_size: 8",
        "CANNOT BE DONE",
        "the variable NO_SUCH_MODEL, which neither the script nor the environment sets",
        "--pipeline-parallel 2",
        "UNKNOWN",
        "did you mean actor_rollout_ref.rollout.name?",
        "DEFAULTS OF VERL THAT ARE TAKEN",
        "TO BE REPLACED",
    ] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    // keys that results depend on are named at the end and in the configuration
    let gaps = "actor_rollout_ref.model.path, actor_rollout_ref.rollout.nam.";
    assert!(stderr(&output).contains(gaps), "{}", stderr(&output));
    let config = bench.read("run.yaml");
    for part in [
        "# Replace model.path: the model's folder.",
        "# Missing: actor_rollout_ref.model.path=$NO_SUCH_MODEL (",
        "# Missing: actor_rollout_ref.rollout.nam=vllm (",
    ] {
        assert!(config.contains(part), "{part:?} is not in:\n{config}");
    }
    firebrick_engine::config::load(&written, &[]).expect("its own configuration");
}

#[test]
fn without_a_file_the_configuration_goes_to_stdout_and_the_table_to_stderr() {
    let bench = Bench::new();
    let script = bench.write("run.sh", SCRIPT);
    let output = firebrick(&["import", script.to_str().unwrap()]);
    let config = incomplete(&output);
    firebrick_engine::config::parse(&config, &[]).expect("a configuration");
    assert!(stderr(&output).contains("MAPPED"), "{}", stderr(&output));
}

#[test]
fn json_has_the_configuration_and_every_row() {
    let bench = Bench::new();
    let script = bench.write("run.sh", SCRIPT);
    let said = incomplete(&firebrick(&["import", script.to_str().unwrap(), "--json"]));
    let json: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(json["engine"], "verl");
    assert_eq!(json["gaps"], json!(["actor_rollout_ref.model.path", "actor_rollout_ref.rollout.nam"]));
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 9);
    let outcome = |key: &str| {
        let row = rows.iter().find(|row| row["key"] == key).unwrap_or_else(|| panic!("{key}"));
        row["outcome"].as_str().unwrap().to_owned()
    };
    assert_eq!(outcome("data.train_batch_size"), "mapped");
    assert_eq!(outcome("actor_rollout_ref.rollout.pipeline_model_parallel_size"), "not_needed");
    assert_eq!(outcome("actor_rollout_ref.rollout.nam"), "unknown");
    firebrick_engine::config::parse(json["config"].as_str().unwrap(), &[]).expect("a configuration");
}

#[test]
fn of_a_guide_the_block_at_a_line_is_imported_and_json_has_the_lines_of_yaml() {
    let bench = Bench::new();
    let page = "# Guide\n\n```yaml\npolicy:\n  train_micro_batch_size: 4\n```\n\n```sh\npython3 -m verl.trainer.main_ppo \\\n  \
                data.train_batch_size=8\n```\n";
    let page = bench.write("guide.md", page);
    let page = page.to_str().unwrap();
    refused(&firebrick(&["import", page]), &["2 code blocks", "guide.md:3", "3 (yaml), 8 (sh)"]);
    for (line, engine, key, at) in
        [(4, "nemo", "policy.train_micro_batch_size", 5), (9, "verl", "data.train_batch_size", 9)]
    {
        let said = succeeded(&firebrick(&["import", &format!("{page}:{line}"), "--json"]));
        let json: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(json["engine"], engine);
        assert_eq!(json["rows"][0]["key"], key);
        assert_eq!(json["rows"][0]["place"]["line"], at);
    }
}

#[test]
fn an_imported_configuration_is_planned() {
    let bench = Bench::new();
    let script = bench.write("run.sh", SCRIPT);
    let written = bench.path("config.yaml");
    incomplete(&firebrick(&["import", script.to_str().unwrap(), "--output", written.to_str().unwrap()]));
    let arch = "model.arch={model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, \
                num_attention_heads: 4, vocab_size: 256, max_position_embeddings: 2048}";
    let said = succeeded(&bench.firebrick("plan", &["model.path=null", arch, "device=cpu"]));
    assert!(said.contains("8 prompts x 4 completions"), "{said}");
}

#[test]
fn a_run_without_gaps_ends_with_0_and_its_paths_lead_to_the_same_files_from_another_folder() {
    let bench = Bench::new();
    std::fs::create_dir_all(bench.path("rows")).unwrap();
    std::fs::create_dir_all(bench.path("elsewhere/deeper")).unwrap();
    std::fs::create_dir_all(bench.path("models/mine")).unwrap();
    bench.write(
        "run.sh",
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=rows/a.parquet \\\n  \
         data.val_files=[/srv/b.parquet,rows/c.parquet] actor_rollout_ref.model.path=models/mine \\\n  \
         custom_reward_function.path=./grade.py custom_reward_function.name=f trainer.total_training_steps=3 \\\n  \
         trainer.default_local_dir=checkpoints/a\n",
    );
    let import = |args: &[&str]| {
        let mut program = program(&[&["import", "run.sh"], args].concat());
        let output = program.current_dir(bench.path("")).output().unwrap();
        succeeded(&output)
    };
    let here = import(&[]);
    for part in ["train: rows/a.parquet", "path: models/mine", "file: ./grade.py"] {
        assert!(here.contains(part), "{part:?} is not in:\n{here}");
    }
    import(&["--output", "elsewhere/deeper/run.yaml"]);
    let config = bench.read("elsewhere/deeper/run.yaml");
    for part in [
        "train: ../../rows/a.parquet",
        "- /srv/b.parquet",
        "- ../../rows/c.parquet",
        "path: ../../models/mine",
        "file: ../.././grade.py",
        // the run folder is from the working folder
        "output: checkpoints/a",
    ] {
        assert!(config.contains(part), "{part:?} is not in:\n{config}");
    }
    bench.write(
        "run.sh",
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B trainer.total_training_steps=3\n",
    );
    import(&["--output", "elsewhere/run.yaml"]);
    assert!(bench.read("elsewhere/run.yaml").contains("path: Qwen/Qwen3-8B"));
}

#[test]
fn files_that_are_none_of_an_engine_s_are_refused() {
    let bench = Bench::new();
    let ours = bench.path("config.yaml");
    refused(&firebrick(&["import", ours.to_str().unwrap()]), &["no key of the files", "--from"]);
    refused(&firebrick(&["import", "no/such.sh"]), &["cannot read no/such.sh"]);
    let script = bench.write("run.sh", "python3 -m verl.trainer.main_ppo data.seed='1\n");
    refused(&firebrick(&["import", script.to_str().unwrap()]), &["run.sh:1", "never closed"]);
    let output = firebrick(&["import", script.to_str().unwrap(), "--from", "openrlhf"]);
    assert!(stderr(&output).contains("known: verl, trl, nemo, grpo_guide"), "{}", stderr(&output));
}
