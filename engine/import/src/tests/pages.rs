//! Pages of documentation, lines of YAML, and what runs are called.

use super::{SourceFile, environment, imported, outcome};
use crate::{Engine, ImportError, Imported, KeyOutcome, Options, import};
use serde_json::json;

const PAGE: &str = "# Memory

Lower these:

```yaml
actor_rollout_ref:
  rollout:
    n: 4
```

Or on the command line, ```in one go```:

   ```bash
   python3 -m verl.trainer.main_ppo \\
       data.train_batch_size=64
   ```

A file that is no configuration:

```yaml
services: {db: {image: postgres}}
```

```
$ nvidia-smi
```
";

fn page(name: &str, text: &str, line: Option<usize>) -> Result<Imported, ImportError> {
    let mut file = SourceFile::new(name, text);
    file.line = line;
    import(&[file], &Options::default(), &environment)
}

#[test]
fn of_a_page_the_block_at_a_line_is_read_and_several_are_refused_with_their_lines() {
    let refused = page("guide.md", PAGE, None).unwrap_err().to_string();
    for part in ["2 code blocks", "guide.md:5", "lines 5 (yaml), 13 (bash)"] {
        assert!(refused.contains(part), "{part:?} is not in: {refused}");
    }
    for (line, key, at) in [
        (5, "actor_rollout_ref.rollout.n", 8),
        (7, "actor_rollout_ref.rollout.n", 8),
        (15, "data.train_batch_size", 14),
    ] {
        let imported = page("guide.md", PAGE, Some(line)).unwrap();
        assert_eq!(imported.engine, Engine::Verl);
        assert_eq!(imported.rows.len(), 1, "{:?}", imported.rows);
        assert_eq!(imported.rows[0].key, key);
        let place = imported.rows[0].place.as_ref().unwrap();
        assert_eq!(place.line, Some(at), "{key}");
    }
    let refused = page("guide.md", PAGE, Some(2)).unwrap_err().to_string();
    assert!(refused.contains("guide.md:2") && refused.contains("5 (yaml)"), "{refused}");
}

#[test]
fn the_only_block_of_a_page_is_read_and_its_mistakes_have_the_pages_lines() {
    let one = PAGE.split("Or on").next().unwrap();
    for name in ["guide.md", "guide.txt", "README"] {
        let imported = page(name, one, None).unwrap();
        assert_eq!(imported.rows[0].key, "actor_rollout_ref.rollout.n", "{name}");
    }
    let rst = "Title\n=====\n\n.. code-block:: yaml\n\n   data:\n     train_batch_size: 8\n\nText.\n";
    let imported = page("guide.rst", rst, None).unwrap();
    assert_eq!(imported.rows[0].key, "data.train_batch_size");
    assert_eq!(imported.rows[0].place.as_ref().unwrap().line, Some(7));
    let none = page("guide.md", "# Title\n\n```\nls\n```\n", None).unwrap_err();
    assert!(none.to_string().contains("none of its code blocks"), "{none}");
    let broken = one.replace("n: 4", "n: [4");
    let error = page("guide.md", &broken, Some(5)).unwrap_err().to_string();
    assert!(error.contains("guide.md:8") && error.contains("never closed"), "{error}");
    let error = page("a.yaml", "data: {seed: 1}\n", Some(1)).unwrap_err();
    assert!(error.to_string().contains("has none"), "{error}");
}

#[test]
fn keys_of_yaml_and_json_have_their_lines() {
    let yaml = "grpo:\n  num_prompts_per_step: 8\n  \"max_num_steps\": 3\npolicy: {model_name: m, train_micro_batch_size: 1}\n";
    let json = "{\n  \"data.train_batch_size\": 8,\n  \"trainer\": {\n    \"total_training_steps\": 3\n  }\n}\n";
    for (name, text, lines) in [
        (
            "grpo.yaml",
            yaml,
            &[("grpo.num_prompts_per_step", 2), ("grpo.max_num_steps", 3), ("policy.train_micro_batch_size", 4)][..],
        ),
        ("run.json", json, &[("data.train_batch_size", 2), ("trainer.total_training_steps", 4)][..]),
    ] {
        let imported = page(name, text, None).unwrap();
        for (key, line) in lines {
            let row = imported.rows.iter().find(|row| row.key == *key).unwrap();
            assert_eq!(row.place.as_ref().unwrap().line, Some(*line), "{key}");
        }
    }
}

#[test]
fn what_trackers_call_a_run_and_its_project_is_kept() {
    for (name, text, project, run) in [
        (
            "run.sh",
            "python3 -m verl.trainer.main_ppo trainer.project_name=sums trainer.experiment_name=7\n",
            "trainer.project_name",
            "trainer.experiment_name",
        ),
        (
            "run.json",
            "{\"run_name\": \"7\", \"project\": \"sums\", \"num_generations\": 4, \"learning_rate\": 1e-6}",
            "project",
            "run_name",
        ),
        (
            "ppo.json",
            "{\"exp_name\": \"7\", \"project\": \"sums\", \"num_ppo_epochs\": 1, \"kl_coef\": 0.05}",
            "project",
            "exp_name",
        ),
        (
            "run.yaml",
            "logger: {wandb: {project: sums, name: '7'}}\ngrpo: {num_prompts_per_step: 8}\n",
            "logger.wandb.project",
            "logger.wandb.name",
        ),
    ] {
        let imported = imported(name, text);
        for (key, ours, value) in
            [(project, "trainer.project_name", json!("sums")), (run, "trainer.experiment_name", json!("7"))]
        {
            let KeyOutcome::Mapped { settings, .. } = outcome(&imported, key) else {
                panic!("{key}: {:?}", outcome(&imported, key));
            };
            assert_eq!(settings[0].key, ours);
            assert_eq!(settings[0].value, value, "{key}");
        }
        assert_eq!(imported.problem, None, "{}", imported.config);
    }
}
