//! Tests of the readers, also with hostile texts.

mod cases;
mod nemo;
mod pages;
mod programs;
mod scripts;
mod versions;
use super::entry::{Entry, SourceValue};
use super::literal::hydra;
use super::rules::Rules;
use super::{Engine, ImportError, Imported, KeyOutcome, Options, SourceFile, import};
use serde_json::{Value, json};
use std::fmt::Write;

fn environment(name: &str) -> Option<String> {
    (name == "HOME").then(|| "/srv".to_owned())
}

fn entries(name: &str, text: &str) -> Vec<Entry> {
    SourceFile::new(name, text).read(&[], &environment).unwrap_or_else(|e| panic!("{e}")).entries
}

fn value(entries: &[Entry], key: &str) -> Value {
    let entry = entries.iter().rfind(|entry| entry.key == key);
    match entry.map(|entry| &entry.value) {
        Some(SourceValue::Known(value)) => value.clone(),
        other => panic!("{key}: {other:?}"),
    }
}

fn refusal(name: &str, text: &str) -> String {
    let files = [SourceFile::new(name, text)];
    match import(&files, &Options::default(), &environment) {
        Err(error) => error.to_string(),
        Ok(imported) => panic!("read as {}", imported.config),
    }
}

fn imported(name: &str, text: &str) -> Imported {
    let files = [SourceFile::new(name, text)];
    import(&files, &Options::default(), &environment).unwrap_or_else(|e| panic!("{e}"))
}

/// The imported configuration's value at a place.
fn at(imported: &Imported, path: &str) -> Value {
    let config: Value = serde_saphyr::from_str(&imported.config).expect("YAML");
    config.pointer(path).cloned().unwrap_or(Value::Null)
}

fn outcome<'i>(imported: &'i Imported, key: &str) -> &'i KeyOutcome {
    let row = imported.rows.iter().find(|row| row.key == key);
    &row.unwrap_or_else(|| panic!("no row {key}")).outcome
}

#[test]
fn hydra_s_values_are_words_lists_mappings_and_quoted_texts() {
    for (text, expected) in [
        ("1e-6", json!(1e-6)),
        ("256", json!(256)),
        ("-1", json!(-1)),
        ("True", json!(true)),
        ("null", Value::Null),
        ("", Value::Null),
        ("vllm", json!("vllm")),
        ("Qwen/Qwen3-8B", json!("Qwen/Qwen3-8B")),
        ("['console','wandb']", json!(["console", "wandb"])),
        ("[console, wandb]", json!(["console", "wandb"])),
        (r#"["a,b", 'it\'s']"#, json!(["a,b", "it's"])),
        ("{a: 1, b: [x]}", json!({"a": 1, "b": ["x"]})),
        ("[]", json!([])),
        ("[unclosed", json!("[unclosed")),
        ("1.5.2", json!("1.5.2")),
    ] {
        assert_eq!(hydra(text), expected, "{text}");
    }
    let deep = "[".repeat(100_000);
    assert_eq!(hydra(&deep), json!(deep), "too deep to be a list");
}

#[test]
fn a_script_s_variables_defaults_quotes_and_lists_are_followed() {
    let script = r#"#!/bin/bash
set -x   # a comment
project="my run"
N=${N:-8}
model=${MODEL_PATH:-"$HOME/models/Qwen3-8B"}
longest=$(( (512 + 1024) * N ))
DATA=(
    data.train_files="['$HOME/a.parquet']"   # rows
    data.train_batch_size=$((N*4))
)
COMMON="algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.n=$N"
CUDA_VISIBLE_DEVICES=0 python3 -m verl.trainer.main_ppo "${DATA[@]}" $COMMON \
    actor_rollout_ref.model.path="$model" \
    +actor_rollout_ref.actor.extra='{a: 1}' \
    trainer.project_name='not $project' trainer.experiment_name="$project" \
    trainer.logger=['console','wandb'] \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${longest} \
    ~trainer.total_epochs $@ 2>&1 | tee log.txt
"#;
    let result = entries("run.sh", script);
    for (key, expected) in [
        ("data.train_files", json!(["/srv/a.parquet"])),
        ("data.train_batch_size", json!(32)),
        ("algorithm.adv_estimator", json!("grpo")),
        ("actor_rollout_ref.rollout.n", json!(8)),
        ("actor_rollout_ref.model.path", json!("/srv/models/Qwen3-8B")),
        ("actor_rollout_ref.actor.extra.a", json!(1)),
        ("trainer.project_name", json!("not $project")),
        ("trainer.experiment_name", json!("my run")),
        ("trainer.logger", json!(["console", "wandb"])),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", json!(12_288)),
    ] {
        assert_eq!(value(&result, key), expected, "{key}");
    }
    assert_eq!(result.len(), 12, "{result:?}");
    assert!(result.iter().any(|entry| entry.removes && entry.key == "trainer.total_epochs"));
    assert_eq!(result[0].place.line, Some(13));
}

#[test]
fn what_only_running_a_script_could_tell_is_named() {
    let script = "NOW=$(date +%Y)\npython3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=run-$NOW trainer.total_epochs=$EPOCHS data.seed=1\n";
    let imported = imported("run.sh", script);
    let why = |key: &str| match outcome(&imported, key) {
        KeyOutcome::Cannot { why } => why.clone(),
        other => panic!("{key}: {other:?}"),
    };
    assert!(why("actor_rollout_ref.model.path").contains("the output of the command date +%Y"));
    assert!(
        why("trainer.total_epochs").contains("the variable EPOCHS, which neither the script nor the environment sets")
    );
}

#[test]
fn lines_of_overrides_are_read_without_a_command_and_later_ones_count() {
    let result = imported(
        "settings.txt",
        "data.train_batch_size=64 \\\n  algorithm.adv_estimator=grpo\ndata.train_batch_size=32\n",
    );
    assert_eq!(result.engine, Engine::Verl);
    assert!(result.config.contains("train_batch_size: 32"), "{}", result.config);
    assert_eq!(result.rows.len(), 2);
    assert_eq!(result.rows[0].replaces.len(), 1);
}

#[test]
fn a_file_over_another_overrides_it_and_says_where() {
    let files = [
        SourceFile::new(
            "base.yaml",
            "data: {train_batch_size: 64, max_prompt_length: 256}\nalgorithm: {adv_estimator: grpo}\n",
        ),
        SourceFile::new(
            "run.sh",
            "python3 -m verl.trainer.main_ppo data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=8\n",
        ),
    ];
    let imported = import(&files, &Options::default(), &environment).expect("two files");
    assert!(imported.config.contains("train_batch_size: 16"), "{}", imported.config);
    assert!(imported.config.contains("prompt_length: 256"), "{}", imported.config);
    let row = imported.rows.iter().find(|row| row.key == "data.train_batch_size").expect("a row");
    assert_eq!(row.replaces[0].file, "base.yaml");
    assert_eq!(row.place.as_ref().map(ToString::to_string), Some("run.sh:1".to_owned()));
}

#[test]
fn python_s_keyword_arguments_are_read_with_names_and_arithmetic() {
    let program = r#"
from trl import GRPOConfig, GRPOTrainer
MODEL = "Qwen/Qwen3-0.6B"   # a comment with GRPOConfig(
common = {"beta": 0.04}

def main():
    args = GRPOConfig(
        output_dir=f"runs/{MODEL}", learning_rate=1e-5,
        max_completion_length=2**10,
        model_init_kwargs={"dtype": torch.bfloat16},
        run_name="a" "b",
        stop=["x", "y",],
        **common,
    )
    trainer = GRPOTrainer(model=MODEL, reward_funcs=[think_format_reward, accuracy_reward], args=args)
"#;
    let result = entries("train.py", program);
    for (key, expected) in [
        ("learning_rate", json!(1e-5)),
        ("max_completion_length", json!(1024)),
        ("model_init_kwargs.dtype", json!("bfloat16")),
        ("run_name", json!("ab")),
        ("stop", json!(["x", "y"])),
        ("beta", json!(0.04)),
        ("GRPOTrainer.model", json!("Qwen/Qwen3-0.6B")),
        ("GRPOTrainer.reward_funcs", json!(["think_format_reward", "accuracy_reward"])),
        ("output_dir", json!("runs/Qwen/Qwen3-0.6B")),
    ] {
        assert_eq!(value(&result, key), expected, "{key}");
    }
    let output = result.iter().find(|entry| entry.key == "output_dir").expect("output_dir");
    assert_eq!(output.place.line, Some(8));
}

#[test]
fn flags_of_a_launch_command_are_read() {
    let script = "accelerate launch --num_processes 4 examples/grpo.py --model_name_or_path Qwen/Qwen3-0.6B \\\n  --learning_rate=1e-6 --use_vllm --lora_target_modules q_proj v_proj --beta 0.0\n";
    let result = entries("run.sh", script);
    for (key, expected) in [
        ("num_processes", json!(4)),
        ("model_name_or_path", json!("Qwen/Qwen3-0.6B")),
        ("learning_rate", json!(1e-6)),
        ("use_vllm", json!(true)),
        ("lora_target_modules", json!(["q_proj", "v_proj"])),
        ("beta", json!(0.0)),
    ] {
        assert_eq!(value(&result, key), expected, "{key}");
    }
}

#[test]
fn yaml_s_references_to_other_keys_are_followed() {
    let yaml = "data: {max_prompt_length: 300, train_batch_size: 8}\nalgorithm: {adv_estimator: grpo}\nactor_rollout_ref:\n  rollout:\n    \
                prompt_length: ${oc.select:data.max_prompt_length,512}\n    response_length: ${oc.env:NOT_SET,77}\n  \
                model: {path: '${oc.env:HOME}/m'}\n  ref: {strategy: '${actor_rollout_ref.nothing}', log_prob_max_token_len_per_gpu: '${actor_rollout_ref.nothing}'}\n";
    let imported = imported("verl.yaml", yaml);
    assert!(imported.config.contains("path: /srv/m"), "{}", imported.config);
    assert!(imported.config.contains("response_length: 77"), "{}", imported.config);
    let KeyOutcome::Cannot { why } = outcome(&imported, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu") else {
        panic!("a reference to nothing");
    };
    assert!(why.contains("which is not among the files"), "{why}");
    // of what nothing here needs, no value has to be known
    assert!(matches!(outcome(&imported, "actor_rollout_ref.ref.strategy"), KeyOutcome::NotNeeded { .. }));
}

#[test]
fn references_in_a_circle_end() {
    let imported =
        imported("verl.yaml", "data: {seed: '${data.shuffle}', shuffle: '${data.seed}', train_batch_size: 8}\n");
    for key in ["data.seed", "data.shuffle"] {
        assert!(matches!(outcome(&imported, key), KeyOutcome::Cannot { .. }), "{key}");
    }
}

#[test]
fn hostile_texts_are_refused_with_their_place() {
    for (name, text, parts) in [
        ("a.sh", "python3 -m verl.trainer.main_ppo data.seed='1\n", &["a.sh:1", "never closed"][..]),
        ("a.sh", "\npython3 -m x data.seed=\"$((1+\n", &["a.sh:2", "never closed"]),
        ("a.sh", "X=(1 2\npython3 -m x a.b=1\n", &["a.sh:1", "never closed"]),
        ("a.sh", "cat <<END\nno end\n", &["a.sh:1", "END"]),
        ("a.sh", "echo nothing\n", &["a.sh", "no settings found"]),
        ("a.sh", "python -m a b.c=1\npython -m a b.c=2\n", &["a.sh:2", "line 1"]),
        ("a.py", "GRPOConfig(output_dir='x\n)", &["a.py:1", "never closed"]),
        ("a.py", "GRPOConfig(output_dir='x'\n", &["a.py:1", "never closed"]),
        ("a.sh", "\npython3 -m x a.b={1..99999999999999999999}\n", &["a.sh:2", "more digits"]),
        ("a.sh", "python3 -m x a.b=~99999999999999999999\n", &["a.sh:1", "more digits"]),
        ("a.sh", "python3 -m x a.b=1 99999999999> log\n", &["a.sh:1", "more digits"]),
        ("a.py", "GRPOConfig(\n", &["a.py:1", "never closed"]),
        ("a.py", "x = = 1\n", &["a.py:1", "expected Python"]),
        ("a.sh", "\nif true; then\necho\n", &["a.sh:2", "never closed"]),
        ("a.sh", "echo a.b=1\n;;\n", &["a.sh:2", "expected bash"]),
        ("a.py", "print(1)\n", &["a.py", "no settings found"]),
        ("a.py", "GRPOConfig()\nGRPOConfig()\n", &["a.py:2", "line 1"]),
        ("a.yaml", "a: [unclosed", &["a.yaml", "is not YAML"]),
        ("a.yaml", "- 1\n- 2\n", &["a.yaml", "mapping"]),
        ("a.json", "{\"a\": }", &["a.json", "is not JSON"]),
        ("a.yaml", "lerning: {rate: 1}\n", &["--from", "lerning.rate"]),
        ("a.yaml", "", &["a.yaml"]),
    ] {
        let error = refusal(name, text);
        for part in parts {
            assert!(error.contains(part), "{text:?}: {part:?} is not in {error}");
        }
    }
    assert!(refusal("a.yaml", &" ".repeat(5 << 20)).contains("bytes"));
}

#[test]
fn a_file_that_would_grow_without_end_is_refused() {
    let mut yaml = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for n in 1..12 {
        let alias = format!("*a{}, ", n - 1).repeat(10);
        let _ = writeln!(yaml, "a{n}: &a{n} [{}]", alias.trim_end_matches(", "));
    }
    assert!(refusal("bomb.yaml", &yaml).contains("is not YAML"));
    let mut script = "x0=aaaaaaaaaa\n".to_owned();
    for n in 1..40 {
        let _ = writeln!(script, "x{n}=$x{0}$x{0}", n - 1);
    }
    script.push_str("python3 -m verl.trainer.main_ppo data.seed=$x39\n");
    assert!(refusal("bomb.sh", &script).contains("longer than 256 KiB"));
    let (open, shut) = (500, 100_000);
    for (name, text) in [
        ("deep.sh", format!("python3 -m x a.b={}1{}\n", "${q:-".repeat(open), "}".repeat(open))),
        ("deep.sh", "(".repeat(shut)),
        ("deep.sh", "( ".repeat(40)),
        ("deep.sh", "case a in a) ".repeat(20)),
        ("deep.sh", "$(".repeat(shut)),
        ("deep.sh", "if true; then\n".repeat(shut)),
        ("deep.sh", "! ".repeat(shut)),
        ("deep.sh", format!("python3 -m x a.b=$(({}1))\n", "-".repeat(shut))),
        ("deep.sh", "f() { f; }\nf\npython3 -m x a.b=1\n".to_owned()),
        ("deep.sh", format!("python3 -m x a.b={}\n", "{a,".repeat(open))),
        ("deep.py", format!("GRPOConfig(beta={}1)\n", "-".repeat(shut))),
        ("deep.py", format!("GRPOConfig(beta={}1)\n", "(".repeat(shut))),
        ("deep.py", format!("GRPOConfig(beta=1{})\n", " + 1".repeat(shut))),
        ("deep.py", format!("GRPOConfig(beta=a{})\n", ".a".repeat(shut))),
        ("deep.py", format!("GRPOConfig(beta={}1)\n", "lambda: ".repeat(shut))),
        ("deep.py", (0..500).fold(String::new(), |text, n| text + &" ".repeat(n) + "if a:\n")),
    ] {
        assert!(refusal(name, &text).contains("too deeply"), "{}", &text[..60.min(text.len())]);
    }
    let ways = (0..12).fold(String::new(), |text, n| text + &format!("if [ -f {n} ]; then X{n}=1; fi\n"));
    assert!(refusal("ways.sh", &(ways + "python3 -m x a.b=1\n")).contains("more than 512 ways"));
}

#[test]
fn cases_within_cases_are_read() {
    let cases = ["case a in\n(a) ".repeat(4), "X=8".to_owned(), ";;\n*) X=9 ;;\nesac\n".repeat(4)].concat();
    let imported = imported("a.sh", &format!("{cases}python3 -m verl.trainer.main_ppo data.train_batch_size=$X\n"));
    assert!(imported.config.contains("train_batch_size: 8"), "{}", imported.config);
}

#[test]
fn a_value_that_doubles_line_by_line_is_unknown() {
    for (first, next) in [("'ab'", "x + x"), ("[1]", "x + x"), ("[1]", "[x, x]"), ("{}", "{'a': x, 'b': x}")] {
        let script =
            format!("x = {first}\n{}GRPOConfig(num_generations=8, output_dir=x)\n", format!("x = {next}\n").repeat(60));
        let imported = imported("a.py", &script);
        assert!(imported.config.len() < 10_000, "{next}: {} bytes", imported.config.len());
    }
}

#[test]
fn integers_of_a_program_that_do_not_fit_are_unknown() {
    for number in ["-(-9223372036854775807 - 1)", "1 << 63"] {
        let entries = entries("a.py", &format!("GRPOConfig(max_steps={number})\n"));
        let entry = entries.iter().find(|entry| entry.key == "max_steps").expect("the key");
        assert!(matches!(entry.value, SourceValue::Unresolved { .. }), "{number}: {:?}", entry.value);
    }
}

#[test]
fn anchors_are_followed() {
    let imported = imported("a.yaml", "data: &d {train_batch_size: 8}\nalgorithm: {adv_estimator: grpo}\nother: *d\n");
    assert!(imported.config.contains("train_batch_size: 8"));
    assert!(matches!(outcome(&imported, "other.train_batch_size"), KeyOutcome::Unknown { .. }));
}

#[test]
fn an_unknown_key_is_listed_with_the_nearest_known_one() {
    let imported = imported("a.sh", "data.train_batch_sise=8 algorithm.adv_estimator=grpo\n");
    let KeyOutcome::Unknown { nearest } = outcome(&imported, "data.train_batch_sise") else {
        panic!("known?");
    };
    assert_eq!(nearest.as_deref(), Some("data.train_batch_size"));
}

#[test]
fn a_value_that_is_none_of_a_key_s_is_named_and_leaves_a_configuration_that_is_accepted() {
    let imported = imported(
        "a.sh",
        "data.train_batch_size=many actor_rollout_ref.actor.optim.lr=-3 algorithm.adv_estimator=grpo\n",
    );
    assert_eq!(imported.problem, None);
    for key in ["data.train_batch_size", "actor_rollout_ref.actor.optim.lr"] {
        assert!(matches!(outcome(&imported, key), KeyOutcome::Cannot { .. }), "{key}: {:?}", outcome(&imported, key));
    }
}

#[test]
fn an_engine_s_name_is_read_and_another_is_refused_with_those_that_are_known() {
    for engine in Engine::ALL {
        assert_eq!(engine.name().parse(), Ok(engine));
    }
    let refused = "openrlhf".parse::<Engine>().expect_err("not known");
    assert!(refused.contains("verl, trl, nemo, grpo_guide"), "{refused}");
    let unknown = ImportError::UnknownEngine("x".into());
    assert_eq!(unknown.to_string(), "x");
}

#[test]
fn no_key_stands_twice_in_an_engine_s_tables() {
    for engine in Engine::ALL {
        assert!(engine.rules().names().count() > 0, "{engine}");
    }
    for (table, why) in [
        ("ab  absent\n[a]\nb  off", "ab has two rules"),
        ("a  not_needed $NOWHERE", "an unknown name"),
        ("a  somehow", "no rule or function somehow"),
        ("a  where? absent", "no condition where"),
        ("a\n  number>x  absent", "expected a comparison"),
    ] {
        let error = Rules::read(&[table], &[]).err().unwrap_or_default();
        assert!(error.contains(why), "{table:?}: {error}");
    }
}
