//! Python programs: what Python would pass, and what only a run decides.

use super::{environment, imported};
use crate::SourceFile;
use crate::entry::{Entry, ParsedSource, SourceValue};
use serde_json::Value;

fn read(program: &str) -> ParsedSource {
    let file = SourceFile::new("train.py", program);
    file.read(&[], &environment).unwrap_or_else(|e| panic!("{program}: {e}"))
}

fn shown(entry: &Entry) -> String {
    match &entry.value {
        SourceValue::Known(Value::String(text)) => text.clone(),
        SourceValue::Known(value) => value.to_string(),
        SourceValue::Unresolved { text, .. } => format!("?{text}"),
    }
}

fn value(program: &str, key: &str) -> String {
    let reading = read(program);
    let entry = reading.entries.iter().rfind(|entry| entry.key == key);
    entry.map_or_else(|| format!("{:?}", reading.entries), shown)
}

#[test]
fn values_are_those_of_python() {
    for (before, expression, expected) in [
        ("", "2**15", "32768"),
        ("", "7 // 2", "3"),
        ("", "-7 // 2", "-4"),
        ("", "8 / 4", "2.0"),
        ("", "1e-6 * 4", "4e-6"),
        ("A = 4", "A * 2 + 1", "9"),
        ("A, B = 1, 2", "A + B", "3"),
        ("A = 1\nA += 2", "A", "3"),
        ("A: int = 5", "A", "5"),
        ("N = 'q/m'\nS = 3", "f\"runs/{N}-{S}\"", "runs/q/m-3"),
        ("", "f\"{1e-6}\"", "?f\"{1e-6}\""),
        ("D = {'a': 1}\nD['b'] = 2", "D['b']", "2"),
        ("D = dict(a=3)", "D['a']", "3"),
        ("import os", "os.environ.get('NOT_SET', 'x')", "x"),
        ("import os", "os.environ['HOME'] + '/m'", "/srv/m"),
        ("import os", "int(os.getenv('NOT_SET', '4')) * 2", "8"),
        ("from pathlib import Path", "str(Path('a') / 'b')", "a/b"),
        ("T = True", "1 if T else 2", "1"),
        ("T = None", "T or 5", "5"),
        ("def f(n=2):\n    return n * 3", "f()", "6"),
        ("def f(n, m):\n    return n - m", "f(5, m=2)", "3"),
        ("L = [1, 2]", "len(L + [3])", "3"),
        ("N = 0\nfor i in range(3):\n    N += i", "N", "3"),
        ("if False:\n    N = 1\nelse:\n    N = 2", "N", "2"),
        ("DEBUG = 'a' in ['a', 'b']\nN = 1\nif DEBUG:\n    N = 2", "N", "2"),
        ("import sys\nif len(sys.argv) > 9:\n    sys.exit(1)\nN = 2", "N", "2"),
        ("if torch.cuda.is_available():\n    N = 1\nelse:\n    N = 2", "N", "?1 | 2"),
        ("try:\n    import x\n    N = 1\nexcept ImportError:\n    N = 2", "N", "?1 | 2"),
        ("N = 1 if probe() else 2", "N", "?1 | 2"),
        ("", "compute(3)", "?compute(3)"),
        // Python 3.11's
        ("", "min(8, 3 * 2) + max([1, 2]) + sum((1, 2)) + abs(-1) + round(2.5)", "14"),
        ("class C:\n    n = 4", "C.n", "4"),
        ("D = {'a': 1}\nD.update(b=2)\nD.update({'a': 5})", "D['a'] + D['b']", "7"),
        ("D = {'a': 1}\nE = D.copy()\nE.setdefault('b', 3)\nD |= {'a': 2}", "D.get('a') + E['a'] + E.pop('b', 0)", "6"),
        ("L = [1]\nL.append(2)\nL.extend([3])\nN = 0\nfor i in L:\n    N += i", "N + len(L)", "9"),
        ("N = 0\nfor k, v in {'a': 2, 'b': 3}.items():\n    N += v", "N", "5"),
        ("def f(*a, **k):\n    return a[1] + k['n']", "f(1, 2, n=3)", "5"),
        ("L = [1, 2]\nL.reverse()", "L[0]", "?L[0]"),
    ] {
        let program = format!("{before}\nargs = GRPOConfig(max_steps={expression})\n");
        assert_eq!(value(&program, "max_steps"), expected, "{before}: {expression}");
    }
}

#[test]
fn defaults_of_argparse_and_dataclasses_are_values() {
    let argparse = "import argparse\nparser = argparse.ArgumentParser()\ngroup = parser.add_argument_group('x')\n\
                    group.add_argument('--lr', '-l', type=float, default=2e-6)\nparser.add_argument('--num-generations', default='6', type=int)\n\
                    parser.add_argument('--vllm', action='store_true')\nparser.add_argument('--model', required=True)\n\
                    args = parser.parse_args()\nGRPOTrainer(model=args.model, args=GRPOConfig(learning_rate=args.lr, \
                    num_generations=args.num_generations, use_vllm=args.vllm, beta=args.beta))\n";
    for (key, expected) in [
        ("learning_rate", "2e-6"),
        ("num_generations", "6"),
        ("use_vllm", "false"),
        ("beta", "?args.beta"),
        ("GRPOTrainer.model", "args.model"),
    ] {
        assert_eq!(value(argparse, key), expected, "{key}");
    }
    let classes = "from dataclasses import dataclass, field\n@dataclass\nclass MyConfig(GRPOConfig):\n    num_generations: int = 6\n    \
                   lists: list[str] = field(default_factory=lambda: ['a'])\n@dataclass\nclass Script:\n    \
                   dataset_name: str = field(default='d', metadata={'help': 'x'})\n    extra: float = 0.5\n\
                   parser = TrlParser((Script, MyConfig, ModelConfig))\nscript, training, model = parser.parse_args_and_config()\n\
                   training.learning_rate = 1e-5\nif script.extra > 0:\n    training.beta = script.extra\n\
                   GRPOTrainer(args=training, train_dataset=load_dataset(script.dataset_name))\n";
    for (key, expected) in [
        ("(class)", "GRPOConfig"),
        ("num_generations", "6"),
        ("dataset_name", "d"),
        ("learning_rate", "0.00001"),
        ("beta", "0.5"),
        ("load_dataset.argument_1", "d"),
    ] {
        assert_eq!(value(classes, key), expected, "{key}");
    }
    let parser = "parser = TrlParser((ScriptArguments, trl.PPOConfig))\n_, args = parser.parse_args_and_config()\n";
    assert_eq!(value(parser, "(class)"), "PPOConfig");
}

#[test]
fn functions_that_run_are_followed_and_a_program_has_one_configuration() {
    let main = "LR = 1e-6\ndef other():\n    return GRPOConfig(max_steps=1)\ndef main(steps=5):\n    \
                return GRPOConfig(learning_rate=LR, max_steps=steps)\nif __name__ == '__main__':\n    main()\n";
    // a function that nothing calls may be called by a library of command lines; two of them are two runs
    let refused = super::refusal("train.py", main);
    assert!(refused.contains("train.py:3"), "{refused}");
    let fire =
        main.replace("    return GRPOConfig(max_steps=1)", "    pass").replace("    main()", "    fire.Fire(main)");
    assert_eq!(value(&fire, "max_steps"), "5");
    let either = "if probe():\n    args = GRPOConfig(max_steps=1, beta=0.1)\nelse:\n    args = GRPOConfig(max_steps=2, beta=0.1)\n";
    assert_eq!(value(either, "max_steps"), "?1 | 2");
    assert_eq!(value(either, "beta"), "0.1");
    let turns = "for lr in [1e-6, 2e-6]:\n    GRPOTrainer(args=GRPOConfig(learning_rate=lr)).train()\n";
    assert_eq!(value(turns, "learning_rate"), "?1e-6 | 2e-6");
}

#[test]
fn a_configuration_is_what_its_mappings_and_later_changes_make_of_it() {
    for (program, key, expected) in [
        ("D = dict(beta=0.1)\nD.update(max_steps=3)\nD['seed'] = 5\nGRPOConfig('o', **D)", "max_steps", "3"),
        ("D = {}\nD['seed'] = 5\nGRPOConfig('o', **{**D, 'top_k': 2})", "seed", "5"),
        ("GRPOConfig('o', beta=0.1)", "output_dir", "o"),
        ("c = GRPOConfig(beta=0.1)\nsetattr(c, 'beta', 0.2)", "beta", "0.2"),
        ("c = GRPOConfig(beta=0.1)\nd = dataclasses.replace(c, beta=0.3)", "beta", "0.3"),
        ("c = GRPOConfig(beta=0.1)\nfor k, v in {'beta': 0.4}.items():\n    setattr(c, k, v)", "beta", "0.4"),
        ("def f(**k):\n    d = {'beta': 0.1}\n    d.update(k)\n    return GRPOConfig(**d)\nf(beta=0.5)", "beta", "0.5"),
        ("GRPOConfig(model_init_kwargs=dict(dtype='x', revision=r))", "model_init_kwargs.dtype", "x"),
        ("GRPOTrainer('q/m', 'org/rm', GRPOConfig(beta=0.1))", "GRPOTrainer.model", "q/m"),
    ] {
        assert_eq!(value(program, key), expected, "{program}");
    }
    // what may have any setting leaves no default certain
    for program in
        ["GRPOConfig(max_steps=1, **load())", "c = GRPOConfig(max_steps=1)\nfor k, v in load():\n    setattr(c, k, v)"]
    {
        let result = imported("train.py", program);
        assert!(result.missing.iter().any(|own| own.key == "optim.lr"), "{program}: {:?}", result.missing);
    }
}

#[test]
fn reward_functions_are_named_and_those_of_the_file_have_their_lines() {
    let program = "from trl.rewards import accuracy_reward\n\ndef right(completions, **k):\n    return [1.0]\n\nFUNCS = [right, accuracy_reward]\n\
                   GRPOTrainer(model='q/m', args=GRPOConfig(max_steps=5), reward_funcs=FUNCS)\n";
    let reading = read(program);
    let funcs = reading.entries.iter().find(|entry| entry.key == "GRPOTrainer.reward_funcs").expect("rewards");
    assert_eq!(funcs.value, SourceValue::Known(serde_json::json!(["right", "accuracy_reward"])));
    let right = reading.definitions.iter().find(|(name, _)| name == "right").expect("a definition");
    assert_eq!(right.1.line, Some(3));
    assert!(!reading.definitions.iter().any(|(name, _)| name == "accuracy_reward"));
    let lambda = program.replace("FUNCS)", "[lambda completions, **k: [0.5]])");
    assert_eq!(value(&lambda, "GRPOTrainer.reward_funcs"), "[\"lambda completions, **k: [0.5]\"]");
}

#[test]
fn a_value_of_a_branch_is_to_be_replaced_with_its_lines() {
    let program = "steps = 10\nif torch.cuda.is_available():\n    steps = 20\nargs = GRPOConfig(max_steps=steps)\n";
    let result = imported("train.py", program);
    let missing = result.missing.iter().find(|missing| missing.key == "trainer.steps").expect("steps");
    assert!(missing.what.contains("10 (line 1)") && missing.what.contains("20 (line 3)"), "{}", missing.what);
}
