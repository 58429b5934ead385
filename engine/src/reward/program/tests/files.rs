//! Files that functions are in, and what a name in one stands for.

use super::{Bench, rewards};
use crate::reward::program::Program;
use serde_json::json;

impl Bench {
    /// A folder with several files; none where this machine has no Python.
    fn with(files: &[(&str, &str)]) -> Option<Self> {
        let bench = Self::new("")?;
        for (name, text) in files {
            let path = bench.path(name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            std::fs::write(path, text).expect("written");
        }
        Some(bench)
    }

    fn in_file(&self, file: &str, function: &str) -> Program {
        self.open(function, &json!({"file": self.path(file)}))
    }
}

#[test]
fn a_file_of_a_package_is_a_module_of_it() {
    let length = "def f(completions, **kwargs):\n    return [WEIGHT * len(c) for c in completions]\n";
    let relative = format!("from .text import WEIGHT\n{length}");
    let above = format!("from .. import WEIGHT\n{length}");
    let absolute = format!("from outer.inner.text import WEIGHT\n{length}");
    let neighbour = format!("from text import WEIGHT\n{length}");
    let when_called = "def grade(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n    \
                       from . import rule\n    return rule.score(solution_str)\n";
    let Some(bench) = Bench::with(&[
        ("outer/__init__.py", "WEIGHT = 2\n"),
        ("outer/inner/__init__.py", when_called),
        ("outer/inner/text.py", "WEIGHT = 3\n"),
        ("outer/inner/rule.py", "def score(text):\n    return 5.0 * len(text)\n"),
        ("outer/inner/relative.py", &relative),
        ("outer/inner/above.py", &above),
        ("outer/inner/absolute.py", &absolute),
        ("outer/inner/neighbour.py", &neighbour),
        // a package that needs what is not there, and files of it that do not
        ("heavy/__init__.py", "import no_such_package\n"),
        ("heavy/plain.py", &format!("WEIGHT = 7\n{length}")),
        ("heavy/text.py", "WEIGHT = 6\n"),
        ("heavy/relative.py", &relative),
        ("heavy/asks.py", &format!("from . import NAME\n{length}")),
        ("bare/relative.py", &relative),
        ("bare/text.py", "WEIGHT = 1\n"),
    ]) else {
        return;
    };
    for (file, function, weight) in [
        ("outer/inner/relative.py", "f", 3.0),
        ("outer/inner/above.py", "f", 2.0),
        ("outer/inner/absolute.py", "f", 3.0),
        ("outer/inner/neighbour.py", "f", 3.0),
        ("outer/inner/__init__.py", "grade", 5.0),
        ("heavy/plain.py", "f", 7.0),
        ("heavy/relative.py", "f", 6.0),
    ] {
        let program = bench.in_file(file, function);
        assert_eq!(rewards(&program, &["a", "bb"]), [Some(weight), Some(2.0 * weight)], "{file}");
    }
    for (file, part) in [("heavy/asks.py", "No module named 'no_such_package'"), ("bare/relative.py", "__init__.py")] {
        let message = bench.refused("f", &json!({"file": bench.path(file)}));
        assert!(message.contains(part), "{file}: {message}");
    }
}

#[test]
fn a_function_of_the_training_file_is_used_and_nothing_is_trained() {
    let function = "def right(completions, **kwargs):\n    assert __name__ == 'train'\n    \
                    return [float(len(c)) for c in completions]\n";
    let start = "class GRPOTrainer:\n    def train(self):\n        raise SystemExit('it trains')\n";
    let guarded = format!("{start}{function}if __name__ == '__main__':\n    GRPOTrainer().train()\n");
    let called = format!("{start}{function}def main():\n    GRPOTrainer().train()\n");
    let Some(bench) = Bench::with(&[("train.py", &guarded), ("main/train.py", &called)]) else { return };
    for file in ["train.py", "main/train.py"] {
        let program = bench.in_file(file, "right");
        assert_eq!(rewards(&program, &["a", "bb"]), [Some(1.0), Some(2.0)], "{file}");
    }
    for last in ["GRPOTrainer().train()", "trainer = GRPOTrainer()\nif True:\n    trainer.train()"] {
        std::fs::write(bench.path("train.py"), format!("{start}{function}{last}\n")).expect("written");
        let message = bench.refused("right", &json!({"file": bench.path("train.py")}));
        assert!(message.contains("starts a training when the file is loaded"), "{message}");
    }
}

#[test]
fn what_a_name_makes_is_the_reward_function() {
    let Some(bench) = Bench::new(
        r"
class Scorer:
    def __init__(self, factor=1):
        self.factor = factor
    def __call__(self, completions, **kwargs):
        return [self.factor * len(c) for c in completions]
    def doubled(self, completions, **kwargs):
        return [2 * self.factor * len(c) for c in completions]
    @staticmethod
    def still(completions, **kwargs):
        return [3 * len(c) for c in completions]
class Silent:
    pass
# TRL's and open-r1's, less what they compute
def get_soft_overlong_punishment(max_completion_len, soft_punish_cache):
    def soft_overlong_punishment_reward(completion_ids, **kwargs):
        return [float(max_completion_len - soft_punish_cache) * len(ids) for ids in completion_ids]
    return soft_overlong_punishment_reward
def get_cosine_scaled_reward(min_value_wrong: float = -1.0, max_len: int = 4):
    def cosine_scaled_reward(completions: list, target: list, **kwargs) -> list:
        return [max_len * len(c) for c in completions]
    return cosine_scaled_reward
def three():
    return 3
",
    ) else {
        return;
    };
    for (function, arguments, factor) in [
        ("Scorer", json!(null), 1.0),
        ("Scorer", json!({"factor": 4}), 4.0),
        ("Scorer.doubled", json!({"factor": 4}), 8.0),
        ("Scorer.still", json!(null), 3.0),
        ("get_soft_overlong_punishment", json!({"max_completion_len": 9, "soft_punish_cache": 4}), 5.0),
        ("get_cosine_scaled_reward", json!({}), 4.0),
    ] {
        let program = bench.open(function, &json!({"arguments": arguments}));
        assert_eq!(rewards(&program, &["a", "bb"]), [Some(factor), Some(2.0 * factor)], "{function}");
    }
    for (function, arguments, part) in [
        ("get_soft_overlong_punishment", json!(null), "set `arguments`"),
        ("get_soft_overlong_punishment", json!({"max_completion_len": 9}), "required argument: 'soft_punish_cache'"),
        ("Scorer", json!({"factors": 2}), "unexpected keyword argument 'factors'"),
        ("three", json!({}), "`three` returns int, expected a function"),
        ("Silent", json!(null), "`Silent` returns Silent, expected a function"),
        ("Scorer.none", json!(null), "no function `Scorer.none` in it"),
    ] {
        let message = bench.refused(function, &json!({"arguments": arguments}));
        assert!(message.contains(part), "{function}: {message}");
    }
}

#[test]
fn verls_signature_for_batches_is_asked_about_a_group() {
    let Some(bench) = Bench::new(
        r#"
def lists(data_sources, solution_strs, ground_truths, extra_infos, bonus=0):
    assert data_sources == ["sums"] * len(solution_strs) and ground_truths == [["42", 7]] * len(solution_strs)
    assert all(own["index"] == 3 for own in extra_infos)
    return [len(text) + bonus for text in solution_strs]
async def dicts(solution_strs, ground_truths, **kwargs):
    return [{"score": float(len(text)), "acc": True} for text in solution_strs]
"#,
    ) else {
        return;
    };
    for (function, more, bonus) in [("lists", json!({"kwargs": {"bonus": 1}}), 1.0), ("dicts", json!({}), 0.0)] {
        let program = bench.open(function, &more);
        assert_eq!(rewards(&program, &["a", "bb"]), [Some(1.0 + bonus), Some(2.0 + bonus)], "{function}");
    }
}
