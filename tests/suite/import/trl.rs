//! TRL's and open-r1's runs: which algorithm they are of, on how many devices, and what their rewards and data become.

use firebrick_engine::config::parse;
use firebrick_import::{Imported, KeyOutcome, Options, SourceFile, import};
use serde_json::{Value, json};

fn read(files: &[(&str, &str)], options: &Options) -> Result<Imported, String> {
    let files: Vec<SourceFile> = files.iter().map(|(name, text)| SourceFile::new(*name, *text)).collect();
    import(&files, options, &|_| None).map_err(|error| error.to_string())
}

fn imported(files: &[(&str, &str)]) -> Imported {
    read(files, &Options::default()).unwrap_or_else(|error| panic!("{files:?}: {error}"))
}

fn refused(files: &[(&str, &str)]) -> String {
    match read(files, &Options::default()) {
        Err(error) => error,
        Ok(imported) => panic!("{files:?}: {}", imported.config),
    }
}

/// A setting of the configuration, which has to be accepted.
fn at(imported: &Imported, key: &str) -> Value {
    assert_eq!(imported.problem, None, "{}", imported.config);
    let config = parse(&imported.config, &[]).unwrap_or_else(|e| panic!("{e}\n{}", imported.config));
    let whole = serde_json::to_value(config).expect("JSON");
    whole.pointer(&format!("/{}", key.replace('.', "/"))).cloned().unwrap_or_default()
}

fn gap(imported: &Imported, key: &str) -> String {
    let row = imported.gaps().find(|row| row.key.trim_start_matches("--") == key);
    match row.map(|row| &row.outcome) {
        Some(KeyOutcome::Cannot { why }) => why.clone(),
        _ => panic!("{key} is no gap: {:?}", imported.rows),
    }
}

fn missing(imported: &Imported) -> Vec<&str> {
    imported.missing.iter().map(|own| own.key.as_str()).collect()
}

#[test]
fn devices_are_those_of_the_launcher_and_batches_follow() {
    let settings = "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_generations 8 \
                    --learning_rate 1e-6 --max_steps 100";
    for (launch, devices) in [
        ("torchrun --nproc_per_node=8 grpo.py", 8),
        ("torchrun --nproc_per_node 8 --master_port 29500 grpo.py", 8),
        ("torchrun --nproc-per-node=4 --nnodes 2 grpo.py", 8),
        ("python -m torch.distributed.run --nproc_per_node 8 grpo.py", 8),
        ("accelerate launch --num_processes 8 -m pkg.grpo", 8),
        ("accelerate launch --multi_gpu --num_machines 2 --num_processes 8 grpo.py", 8),
        ("accelerate launch --num_processes=2 grpo.py", 2),
        ("deepspeed --num_gpus 8 grpo.py", 8),
        ("deepspeed --num_gpus=4 --num_nodes=2 grpo.py", 8),
        ("deepspeed --include localhost:0,1,2,3 grpo.py", 4),
        ("python grpo.py", 1),
    ] {
        let found = imported(&[("run.sh", &format!("{launch} {settings}\n"))]);
        assert_eq!(at(&found, "trainer.train_batch_size"), devices, "{launch}");
        assert_eq!(at(&found, "update.ppo_mini_batch_size"), devices, "{launch}");
        assert_eq!(at(&found, "memory.micro_batch_size"), 4, "{launch}");
        assert_eq!(at(&found, "optim.lr"), 1e-6, "{launch}");
        let names_devices = found.adjusted.iter().any(|own| own.contains("--devices N"));
        assert_eq!(names_devices, devices == 1, "{launch}: {:?}", found.adjusted);
        let outcome = found.rows.iter().find(|row| matches!(row.outcome, KeyOutcome::Unknown { .. }));
        assert!(outcome.is_none(), "{launch}: {outcome:?}");
    }
}

#[test]
fn groups_that_are_not_whole_on_one_device_name_the_option_for_devices() {
    let yaml =
        "num_generations: 16\nper_device_train_batch_size: 8\nmax_completion_length: 1024\nnum_train_epochs: 2\n";
    let found = imported(&[("grpo.yaml", yaml)]);
    assert!(gap(&found, "per_device_train_batch_size").contains("pass --devices N"));
    assert!(missing(&found).contains(&"trainer.train_batch_size"), "{:?}", found.missing);
    let what = found.missing.iter().find(|own| own.key == "trainer.train_batch_size").expect("missing");
    assert!(what.what.contains("--devices N"), "{}", what.what);
    assert_eq!(at(&found, "rollout.n"), 16, "what is known is set");
    let options = Options { devices: Some(4), rows: Some(100), ..Options::default() };
    let found = read(&[("grpo.yaml", yaml)], &options).expect("TRL");
    assert_eq!(at(&found, "trainer.train_batch_size"), 2);
    assert_eq!(at(&found, "trainer.steps"), 100);
    let launched =
        imported(&[("grpo.yaml", yaml), ("run.sh", "accelerate launch --num_processes 3 grpo.py --seed 1\n")]);
    assert!(gap(&launched, "per_device_train_batch_size").contains("TRL rejects that too"));
}

#[test]
fn the_command_the_class_the_trainer_or_the_keys_choose_the_algorithm() {
    let flags = "--learning_rate 1e-6 --max_steps 5";
    for (program, name) in [
        ("trl grpo", "grpo"),
        ("trl rloo", "rloo"),
        ("trl ppo", "ppo"),
        ("accelerate launch --num_processes 2 examples/scripts/rloo/rloo.py", "rloo"),
        ("python -m trl.scripts.grpo", "grpo"),
        ("python train_ppo.py", "ppo"),
    ] {
        let found = imported(&[("run.sh", &format!("{program} {flags}\n"))]);
        assert_eq!(at(&found, "objective.name"), name, "{program}");
    }
    for (yaml, name) in [
        ("learning_rate: 1.0e-6\nnum_generations: 4\n", "grpo"),
        ("learning_rate: 1.0e-6\nbeta: 0.04\nreward_funcs: [accuracy_reward]\n", "grpo"),
        ("learning_rate: 1.0e-6\nnormalize_advantages: true\n", "rloo"),
        ("learning_rate: 1.0e-6\ncliprange: 0.2\nreward_model_path: m/r\n", "ppo"),
    ] {
        assert_eq!(at(&imported(&[("run.yaml", yaml)]), "objective.name"), name, "{yaml}");
    }
    let named = imported(&[("recipes/rloo.yaml", "learning_rate: 1.0e-6\nmax_steps: 5\n")]);
    assert_eq!(at(&named, "objective.name"), "rloo");
    // RLOO's defaults, not GRPO's
    let rloo = imported(&[("run.sh", &format!("trl rloo {flags}\n"))]);
    let kl = ["rollout.n", "objective.use_kl_in_reward", "objective.kl_ctrl.kl_coef", "objective.kl_loss_coef"];
    assert_eq!(kl.map(|key| at(&rloo, key)), [json!(2), json!(true), json!(0.05), json!(0.0)]);
}

#[test]
fn training_that_is_not_by_rewards_is_refused_and_never_a_silent_grpo() {
    let dpo = "model_name_or_path: q/m\nbeta: 0.1\nloss_type: sigmoid\nlearning_rate: 5.0e-7\nmax_length: 1024\n";
    let sft = "model_name_or_path: q/m\nlearning_rate: 2.0e-5\npacking: true\nmax_steps: 10\n";
    let factory = "model_name_or_path: q/m\nstage: dpo\ndo_train: true\nfinetuning_type: lora\npref_beta: 0.1\n\
                   learning_rate: 5.0e-6\nper_device_train_batch_size: 1\n";
    let plain = "model_name_or_path: q/m\nlearning_rate: 2.0e-5\nmax_steps: 10\n";
    let default_loss = "model_name_or_path: q/m\nbeta: 0.1\nlearning_rate: 5.0e-7\nmax_prompt_length: 512\n";
    for (text, part) in [
        (dpo, "DPO"),
        (sft, "firebrick sft"),
        (factory, "LLaMA-Factory"),
        (plain, "num_generations"),
        (default_loss, "num_generations"),
        ("learning_rate: 1.0e-6\ndesirable_weight: 1.0\n", "KTO"),
    ] {
        let said = refused(&[("run.yaml", text)]);
        assert!(said.contains(part), "{text}: {said}");
    }
    for (command, part) in [
        ("trl sft --learning_rate 2e-5 --packing", "firebrick sft"),
        ("trl dpo --beta 0.1 --learning_rate 2e-5", "DPO"),
        ("accelerate launch --num_processes 8 scripts/dpo.py --beta 0.1 --learning_rate 1e-6", "DPO"),
        ("python -m trl.scripts.kto --learning_rate 1e-6", "KTO"),
    ] {
        let said = refused(&[("run.sh", &format!("{command}\n"))]);
        assert!(said.contains(part), "{command}: {said}");
    }
    // the command decides where keys may be of several
    let named = imported(&[("grpo.yaml", default_loss), ("run.sh", "trl grpo --config grpo.yaml\n")]);
    assert_eq!(at(&named, "objective.kl_loss_coef"), 0.1);
}

#[test]
fn names_of_open_r1_have_counterparts() {
    let yaml = "num_generations: 8\nper_device_train_batch_size: 8\nmax_steps: 5\nlearning_rate: 1.0e-6\n\
                system_prompt: Think first.\ndataset_prompt_column: problem\nreward_funcs: [accuracy, format, tag_count, cosine]\n\
                reward_weights: [1.0, 0.5, 0.25, 1.0]\ncosine_max_len: 2000\nmodel_revision: v2\nmodel_name_or_path: q/m\n\
                dataset_name: open-r1/OpenR1-Math-220k\nchat_template: \"{{ messages[0].content }}\"\nwandb_project: p\n";
    let found = imported(&[("c.yaml", yaml)]);
    assert_eq!(at(&found, "task.system_prompt"), "Think first.");
    assert_eq!(at(&found, "task.messages"), json!([{"role": "user", "content": "{problem}"}]));
    assert_eq!(at(&found, "model.chat_template"), "{{ messages[0].content }}");
    assert_eq!(at(&found, "model.path"), "q/m@v2");
    assert_eq!(at(&found, "task.train"), "open-r1/OpenR1-Math-220k");
    assert_eq!(at(&found, "trainer.project_name"), "p");
    let rewards = at(&found, "task.rewards");
    let parts: Vec<_> = rewards.as_array().expect("rewards").iter().map(|own| (&own["kind"], &own["weight"])).collect();
    let expected = [("trl_accuracy", 1.0), ("regex", 0.5), ("python", 0.25), ("python", 1.0)];
    assert_eq!(parts, expected.map(|(kind, weight)| (json!(kind), json!(weight))).each_ref().map(|(a, b)| (a, b)));
    assert_eq!(rewards[2]["function"], "tag_count_reward");
    assert_eq!(rewards[3]["file"], "src/open_r1/rewards.py");
    // open-r1's defaults beside what is written
    let arguments = json!({
        "min_value_wrong": 0.0, "max_value_wrong": -0.5, "min_value_correct": 0.5, "max_value_correct": 1.0, "max_len": 2000,
    });
    assert_eq!(rewards[3]["arguments"], arguments);
    assert_eq!(found.gaps().count(), 0, "{:?}", found.rows);
}

#[test]
fn weights_are_those_of_the_reward_model_and_then_of_the_functions() {
    let yaml = "num_generations: 8\nreward_model_name_or_path: org/scorer\nreward_funcs: [accuracy_reward]\n\
                reward_weights: [0.25, 2.0]\n";
    let rewards = at(&imported(&[("c.yaml", yaml)]), "task.rewards");
    for own in rewards.as_array().expect("rewards") {
        let expected = if own["kind"] == "model" { 0.25 } else { 2.0 };
        assert_eq!(own["weight"], expected, "{rewards}");
    }
}

#[test]
fn the_format_of_open_r1_is_its_pattern() {
    let found = imported(&[("c.yaml", "num_generations: 8\nreward_funcs: [format]\n")]);
    let pattern = at(&found, "task.rewards.0.pattern");
    let pattern = format!("(?s){}", pattern.as_str().expect("a pattern"));
    let pattern = regex::Regex::new(&pattern).expect("a pattern");
    // what Python's re.match with DOTALL and MULTILINE finds
    for (text, expected) in [
        ("<think>\na\nb\n</think>\n<answer>\n4\n</answer>", true),
        ("<think>\na\n</think>\n<answer>\n4\n</answer>\nand more", true),
        ("<think>\na\n</think>\n<answer>\n4\n</answer> and more", false),
        (" <think>\na\n</think>\n<answer>\n4\n</answer>", false),
        ("x\n<think>\na\n</think>\n<answer>\n4\n</answer>", false),
        ("<think>a</think><answer>4</answer>", false),
    ] {
        assert_eq!(pattern.is_match(text), expected, "{text:?}");
    }
}

#[test]
fn a_configuration_that_a_command_names_has_to_be_given() {
    let script = "accelerate launch --num_processes 8 grpo.py --config grpo.yaml --max_steps 10\n";
    let alone = imported(&[("run.sh", script)]);
    let why = gap(&alone, "config");
    assert!(why.contains("import") && why.contains("grpo.yaml"), "{why}");
    let both = imported(&[("recipes/grpo.yaml", "max_steps: 5\nnum_generations: 4\nbeta: 0.04\n"), ("run.sh", script)]);
    assert_eq!(both.gaps().count(), 0, "{:?}", both.rows);
    assert_eq!(at(&both, "trainer.steps"), 10);
    assert_eq!(at(&both, "objective.kl_loss_coef"), 0.04);
    assert_eq!(at(&both, "trainer.train_batch_size"), 16);
}

#[test]
fn reward_functions_of_the_program_are_python_rewards_of_its_file() {
    let program = "from trl import GRPOConfig, GRPOTrainer\n\
                   from functools import partial\n\n\
                   def right(completions, answer, **k):\n    return [float(a in c[0]['content']) for c, a in zip(completions, answer)]\n\n\
                   def near(completions, answer, tolerance, **k):\n    return [0.0 for c in completions]\n\n\
                   def make(limit, hard=False):\n    def short(completions, **k):\n        return [0.0 for c in completions]\n    return short\n\n\
                   if __name__ == '__main__':\n    \
                   GRPOTrainer(model='q/m', args=GRPOConfig(output_dir='o', max_steps=5), reward_funcs=REWARDS).train()\n";
    let with = |rewards: &str| imported(&[("train.py", &program.replace("REWARDS", rewards))]);
    let right = json!({"kind": "python", "file": "train.py", "function": "right"});
    for (written, expected) in [
        ("right", vec![right.clone()]),
        ("[right]", vec![right.clone()]),
        ("[right, 'org/scorer']", vec![right.clone(), json!({"kind": "model", "path": "org/scorer"})]),
        ("[partial(near, tolerance=0.5)]", vec![json!({"function": "near", "kwargs": {"tolerance": 0.5}})]),
        ("[make(limit=100, hard=True)]", vec![json!({"function": "make", "arguments": {"limit": 100, "hard": true}})]),
    ] {
        let found = with(written);
        assert_eq!(found.gaps().count(), 0, "{written}: {:?}", found.rows);
        let rewards = at(&found, "task.rewards");
        assert_eq!(rewards.as_array().map(Vec::len), Some(expected.len()), "{written}: {rewards}");
        for (at, own) in expected.iter().enumerate() {
            for (key, value) in own.as_object().expect("a mapping") {
                assert_eq!(rewards[at][key], *value, "{written}: {rewards}");
            }
        }
    }
    for (written, part) in [
        ("[right, lambda completions, **k: [0.5 / 2 for c in completions]]", "a lambda (train.py:"),
        ("[right, elsewhere]", "no file defines `elsewhere`"),
        ("[right, make(limit=args.limit)]", "only to the running program"),
        ("[REWARDS_BY_NAME[name] for name in names]", "only to the running program"),
    ] {
        let found = with(written);
        let why = gap(&found, "GRPOTrainer.reward_funcs");
        assert!(why.contains(part), "{written}: {why}");
        if written.contains("right") {
            assert_eq!(at(&found, "task.rewards.0.function"), "right", "what is known is set");
        }
    }
}

#[test]
fn an_environment_of_the_program_may_own_its_rows_and_its_reward() {
    let program = "from trl import GRPOConfig, GRPOTrainer\n\
                   class Count:\n    def reset(self, **kwargs):\n        return 'Count.'\n    def get_reward(self):\n        return 1.0\n\
                   GRPOTrainer(model='q/m', args=GRPOConfig(output_dir='o', max_steps=5), environment_factory=Count)\n";
    let found = imported(&[("train.py", program)]);
    assert_eq!(at(&found, "task.environment.file"), "train.py");
    assert_eq!(at(&found, "task.environment.class"), "Count");
    assert_eq!(at(&found, "task.rewards"), json!([]));
    assert_eq!(missing(&found), [""; 0]);
    assert_eq!(found.gaps().count(), 0, "{:?}", found.rows);
}

#[test]
fn defaults_of_parsers_and_dataclasses_are_settings() {
    let parser = "import argparse\nfrom trl import GRPOConfig\np = argparse.ArgumentParser()\n\
                  p.add_argument('--lr', type=float, default=5e-6)\np.add_argument('--n', type=int, default=4)\n\
                  a = p.parse_args()\n\
                  cfg = GRPOConfig(output_dir='o', learning_rate=a.lr, num_generations=a.n, per_device_train_batch_size=8, max_steps=5)\n";
    let found = imported(&[("a.py", parser)]);
    assert_eq!([at(&found, "optim.lr"), at(&found, "rollout.n")], [json!(5e-6), json!(4)]);
    let dataclass = "from dataclasses import dataclass\nfrom trl import BASE, GRPOTrainer, TrlParser\n@dataclass\n\
                     class Args(BASE):\n    beta: float = 0.02\n    learning_rate: float = 3e-6\n    num_generations: int = 4\n\
                     GRPOTrainer(model='q/m', args=TrlParser((Args,)).parse_args_and_config()[0])\n";
    let found = imported(&[("b.py", &dataclass.replace("BASE", "GRPOConfig"))]);
    let keys = ["objective.kl_loss_coef", "optim.lr", "rollout.n"];
    assert_eq!(keys.map(|key| at(&found, key)), [json!(0.02), json!(3e-6), json!(4)]);
    let ppo = "from trl import PPOConfig, TrlParser, ScriptArguments\n\
               parser = TrlParser((ScriptArguments, PPOConfig))\nscript, args = parser.parse_args_into_dataclasses()\n";
    assert_eq!(at(&imported(&[("ppo.py", ppo)]), "objective.name"), "ppo");
}
