//! Launch scripts: what bash would pass, and what only a run decides.

use super::{at, environment, imported, outcome, refusal};
use crate::entry::{Entry, PROGRAM, SourceValue};
use crate::{Imported, ImportedKey, KeyOutcome, Missing, Options, SourceFile, import};
use serde_json::{Value, json};

/// Settings of a script's launch, with `?` before unknown values.
fn launched(script: &str) -> Vec<(String, String)> {
    let file = SourceFile::new("run.sh", script);
    let lookup = |name: &str| match name {
        "HOME" => Some("/srv".to_owned()),
        "PWD" => Some("/work/dir".to_owned()),
        _ => None,
    };
    let reading = file.read(std::slice::from_ref(&file), &lookup).unwrap_or_else(|e| panic!("{script}: {e}"));
    let shown = |entry: &Entry| match &entry.value {
        SourceValue::Known(Value::String(text)) => text.clone(),
        SourceValue::Known(value) => value.to_string(),
        SourceValue::Unresolved { text, .. } => format!("?{text}"),
    };
    let settings = reading.entries.iter().filter(|entry| entry.key != PROGRAM);
    settings.map(|entry| (entry.key.clone(), shown(entry))).collect()
}

/// The value of `a.b` at the end of a script that begins so.
fn value(script: &str, word: &str) -> String {
    let result = launched(&format!("{script}\npython3 -m x {word}\n"));
    result.iter().rfind(|(key, _)| key == "a.b").map_or_else(|| format!("{result:?}"), |(_, value)| value.clone())
}

fn missing<'i>(imported: &'i Imported, key: &str) -> &'i Missing {
    let missing = imported.missing.iter().find(|missing| missing.key == key);
    missing.unwrap_or_else(|| panic!("{key} is not to be replaced: {:?}", imported.missing))
}

#[test]
fn expansions_are_those_of_bash() {
    for (script, word, expected) in [
        // the right values are bash 5.2's
        ("A=(0 1 2 3)", "a.b=[\"${A[*]}\"]", "[\"0 1 2 3\"]"),
        ("A=(x y z)", "a.b=${#A[@]}", "3"),
        ("A=(x y z)", "a.b=${A[1]}${A[-1]}", "yz"),
        ("A=(x y); A+=(z)", "a.b=\"${A[*]}\"", "x y z"),
        ("A=(x y z); IFS=,", "a.b=\"${A[*]}\"", "x,y,z"),
        ("P=/data/m/q.tar.gz", "a.b=${P##*/}", "q.tar.gz"),
        ("P=/data/m/q.tar.gz", "a.b=${P#*/}", "data/m/q.tar.gz"),
        ("P=/data/m/q.tar.gz", "a.b=${P%.*}", "/data/m/q.tar"),
        ("P=/data/m/q.tar.gz", "a.b=${P%%.*}", "/data/m/q"),
        ("P=a-b-c", "a.b=${P/-/_}", "a_b-c"),
        ("P=a-b-c", "a.b=${P//-/_}", "a_b_c"),
        ("P=QwEn", "a.b=${P,,}.${P^^}", "qwen.QWEN"),
        ("P=abcdef", "a.b=${P:1:3}.${P: -2}", "bcd.ef"),
        ("N=3", "a.b=$((N * 2 + 1))", "7"),
        ("N=3; ((N++)); let N+=2", "a.b=$N", "6"),
        ("N=8", "a.b=$(expr $N \\* 4)", "32"),
        ("", "a.b=$(pwd)/x", "/work/dir/x"),
        ("cd /data/y/..", "a.b=$PWD/x", "/data/x"),
        ("D=$(cd \"$(dirname \"$0\")\" && pwd)", "a.b=$D", "/work/dir"),
        ("D=$(cd -P -- \"$(dirname -- \"$0\")/..\" > /dev/null 2>&1 && pwd)", "a.b=$D", "/work"),
        ("M=q/Qwen3-8B", "a.b=$(basename $M)", "Qwen3-8B"),
        ("N=$(echo 5)", "a.b=$N", "5"),
        ("X=$(cat <<E\n8\nE\n)", "a.b=$X", "8"),
        ("X=; Y=${X:-4}; Z=${X-5}", "a.b=$Y$Z", "4"),
        ("X=1", "a.b=${X:+on}${Y:+off}", "on"),
        (": ${X:=7}", "a.b=$X", "7"),
        ("name=X; X=9", "a.b=${!name}", "9"),
        ("declare -A M=([p]=1 [q]=2); k=q", "a.b=${M[$k]}", "2"),
        ("f() { local n=$1; echo \"$((n * 2))\"; }", "a.b=$(f 4)", "8"),
        ("f() { V=2; }; V=1; (V=3); f", "a.b=$V", "2"),
        ("f() { V=2; }; V=1", "a.b=$V", "1"),
        ("set -- p q; X=$2; shift", "a.b=$X$1$#", "qq1"),
        ("S=0; for i in 1 2 3; do S=$((S + i)); done", "a.b=$S", "6"),
        ("S=; for i in {1..3}; do S+=$i; done", "a.b=$S", "123"),
        ("S=; for ((i = 0; i < 3; i++)); do [ $i = 1 ] && continue; S=$S$i; done", "a.b=$S", "2"),
        ("i=0; while [ $i -lt 5 ]; do i=$((i+1)); if [ $i -eq 3 ]; then break; fi; done", "a.b=$i", "3"),
        ("X=cpu; case $X in gpu) N=1 ;; c*|n*) N=2 ;; *) N=3 ;; esac", "a.b=$N", "2"),
        ("X=a; [[ $X == a* && ! -z $X ]] && N=1 || N=2", "a.b=$N", "1"),
        ("if [ -z \"$NOT_SET\" ]; then N=1; else N=2; fi", "a.b=$N", "1"),
        ("read -r A B <<< \"p q r\"", "a.b=\"$B\"", "q r"),
        ("IFS=, read -ra A <<< \"p,q\"", "a.b=${A[1]}", "q"),
        ("printf -v X %s 1; X=$(printf '%s-%d' p 3)", "a.b=$X", "p-3"),
        ("printf -v X '%s-%d' q 4", "a.b=$X", "q-4"),
        ("declare -A M=([p]=3)", "a.b=$((M[p] * 2))", "6"),
        ("eval \"N=4\"", "a.b=$N", "4"),
        ("X='[{\"a\": 1}]'", "a.b=\"$X\"", "[{\"a\":1}]"),
        ("unset X; X+=p; X+=q", "a.b=$X", "pq"),
        ("", "a.b='it'\"'\"'s'", "it's"),
        ("", "a.b=${1:-d}$#$*", "d0"),
    ] {
        assert_eq!(value(script, word), expected, "{script} … {word}");
    }
}

#[test]
fn what_only_running_decides_has_all_candidates() {
    for (script, word, expected) in [
        ("if [ -f x ]; then N=1; else N=2; fi", "a.b=$N", "?1 | 2"),
        ("N=1\n[ -d x ] && N=2", "a.b=$N", "?1 | 2"),
        ("N=1; nvidia-smi || N=2", "a.b=$N", "?1 | 2"),
        ("N=1; if check; then :; elif other; then N=2; else N=3; fi", "a.b=$N", "?1 | 2 | 3"),
        ("case $(uname) in Linux) N=1 ;; Darwin) N=2 ;; *) N=3 ;; esac", "a.b=$N", "?1 | 2 | 3"),
        (
            "D=$(python3 -c 'import torch_npu' && echo npu || echo gpu)\ncase $D in\nnpu) N=1 ;;\n*) N=2 ;; esac",
            "a.b=$N",
            "?1 | 2",
        ),
        ("E=(); if probe; then E+=(a.b=2); fi", "a.b=1 \"${E[@]}\"", "?2 | 1"),
        ("E=''; if probe; then E+=' a.b=2'; fi", "a.b=1 $E", "?2 | 1"),
        ("N=1\nwhile read -r l; do N=2; done < f", "a.b=$N", "?1 | 2"),
        ("", "a.b=$NOT_SET", "?$NOT_SET"),
        ("", "a.b=$1", "?$1"),
        ("N=$(nproc)", "a.b=$((N * 2))", "?$((N * 2))"),
        ("N=$(nproc)\nbash -c \"python3 -m x a.b=$N\"\nexit", "", "?$(nproc)"),
        ("bash <<E\npython3 -m x a.b=p$NOT_SET\nE\nexit", "", "?p$NOT_SET"),
        ("export $(grep -v '#' .env | xargs)", "a.b=${N:-8}", "?8 | an unknown value"),
        ("P=$NOT_SET/q", "a.b=${P%/q}", "?${P%/q}"),
        // the same question has the same answer, and a branch that leaves is none of a run
        ("if [ -f x ]; then N=1; else N=2; fi\nif [ -f x ]; then M=1; else M=2; fi", "a.b=$((N - M))", "0"),
        ("N=1; if probe; then echo no; exit 1; fi; cd /tmp || exit 1", "a.b=$N", "1"),
        ("if [ $# -lt 1 ]; then echo usage; exit 1; fi; N=1", "a.b=$N", "1"),
        ("if ! [ -d x ]; then mkdir -p x; fi; N=1", "a.b=$N", "1"),
    ] {
        assert_eq!(value(script, word), expected, "{script}");
    }
}

#[test]
fn a_branch_that_is_not_taken_sets_nothing() {
    let script = "DEVICE=${DEVICE:-gpu}\ncase \"$DEVICE\" in\n  gpu) batch=1024; length=2048; mini=256 ;;\n  npu)\n    batch=16\n    length=32768\n    \
                  mini=16\n    EXTRA+=(actor_rollout_ref.rollout.enforce_eager=True)\n    ;;\nesac\npython3 -m verl.trainer.main_ppo \
                  algorithm.adv_estimator=grpo data.train_batch_size=$batch data.max_response_length=$length \\\n  \
                  actor_rollout_ref.actor.ppo_mini_batch_size=$mini \"${EXTRA[@]}\"\n";
    let result = imported("run.sh", script);
    assert_eq!(at(&result, "/trainer/train_batch_size"), 1024);
    assert_eq!(at(&result, "/rollout/response_length"), 2048);
    assert_eq!(at(&result, "/update/ppo_mini_batch_size"), 256);
    assert!(!result.config.contains("enforce_eager"), "{}", result.config);
    // the same, where only the machine decides: every key of both branches is to be replaced
    let probed = script.replace("${DEVICE:-gpu}", "$(probe)").replace("total", "");
    let result = imported("run.sh", &probed);
    for (key, parts) in [
        ("trainer.train_batch_size", ["1024 (line 3)", "16 (line 5)"]),
        ("rollout.response_length", ["2048 (line 3)", "32768 (line 6)"]),
        ("update.ppo_mini_batch_size", ["256 (line 3)", "16 (line 7)"]),
        ("rollout.enforce_eager", ["true (line 8)", "none"]),
    ] {
        let what = &missing(&result, key).what;
        assert!(parts.iter().all(|part| what.contains(part)), "{key}: {what}");
    }
    assert!(matches!(outcome(&result, "data.train_batch_size"), KeyOutcome::Cannot { .. }));
}

#[test]
fn what_follows_from_a_key_without_a_value_is_to_be_replaced_too() {
    let script = "if probe; then batch=64; else batch=32; fi\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
                  data.train_batch_size=$batch trainer.total_epochs=2\n";
    let files = [SourceFile::new("run.sh", script)];
    let options = Options { rows: Some(640), ..Options::default() };
    let result = import(&files, &options, &environment).expect("a script");
    let steps = missing(&result, "trainer.steps");
    assert_eq!(steps.stands_in, 20, "2 epochs of 10 steps of 64 prompts");
    assert!(steps.what.contains("data.train_batch_size"), "{}", steps.what);
}

#[test]
fn of_a_string_of_settings_the_others_survive_an_unset_variable() {
    let script = "ACTOR=\"\n  actor_rollout_ref.model.path=${MODEL_ROOT}/q \\\n  actor_rollout_ref.actor.optim.lr=3e-6 \\\n  \
                  actor_rollout_ref.actor.use_kl_loss=True \\\n  actor_rollout_ref.actor.kl_loss_coef=0.01 \\\n  \
                  actor_rollout_ref.actor.ppo_mini_batch_size=64\"\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
                  data.train_batch_size=128 $ACTOR\n";
    let result = imported("run.sh", script);
    assert_eq!(at(&result, "/optim/lr"), 3e-6);
    assert_eq!(at(&result, "/objective/kl_loss_coef"), 0.01);
    assert_eq!(at(&result, "/update/ppo_mini_batch_size"), 64);
    assert_eq!(at(&result, "/trainer/train_batch_size"), 128);
    let KeyOutcome::Cannot { why } = outcome(&result, "actor_rollout_ref.model.path") else {
        panic!("a path without a variable");
    };
    assert!(why.contains("MODEL_ROOT"), "{why}");
    missing(&result, "model.path");
}

#[test]
fn a_loop_over_options_leaves_the_defaults_and_names_the_options() {
    let script = "LR=2e-6\nN=6\nwhile [ $# -gt 0 ]; do\n  case \"$1\" in\n    --lr) LR=\"$2\"; shift 2 ;;\n    --n) N=\"$2\"; shift 2 ;;\n    \
                  *) echo \"unknown $1\"; exit 1 ;;\n  esac\ndone\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
                  actor_rollout_ref.actor.optim.lr=$LR actor_rollout_ref.rollout.n=$N\n";
    let result = imported("run.sh", script);
    assert_eq!(at(&result, "/optim/lr"), 2e-6);
    assert_eq!(at(&result, "/rollout/n"), 6);
    assert!(
        result.notes.iter().any(|note| note.contains("run.sh:3") && note.contains("--lr, --n")),
        "{:?}",
        result.notes
    );
    for (head, tail) in
        [("while (( $# )); do", "done"), ("until [[ -z \"$1\" ]]; do", "done"), ("for arg in \"$@\"; do", "done")]
    {
        let text = format!("N=6\n{head}\ncase $1 in\n-n) N=$2; shift ;;\nesac\nshift\n{tail}");
        assert_eq!(value(&text, "a.b=$N"), "6", "{head}");
    }
    assert_eq!(value("N=6; while getopts n: o; do case $o in n) N=$OPTARG ;; esac; done", "a.b=$N"), "6");
}

#[test]
fn a_script_that_another_calls_or_sources_is_read_with_it_or_named() {
    let run =
        SourceFile::new("run.sh", "exec bash base/run_base.sh actor_rollout_ref.rollout.n=4 trainer.total_epochs=3\n");
    let base = "MODEL=${MODEL:-q/m}\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=16 \
                actor_rollout_ref.model.path=$MODEL \"$@\"\n";
    let base = SourceFile::new("somewhere/run_base.sh", base);
    let alone = import(std::slice::from_ref(&run), &Options::default(), &environment).expect("a script");
    let KeyOutcome::Cannot { why } = outcome(&alone, "bash") else {
        panic!("a script that is not given");
    };
    assert!(why.contains("base/run_base.sh"), "{why}");
    assert_eq!(at(&alone, "/rollout/n"), 4);
    // verl's defaults are none of that script's
    assert!(missing(&alone, "trainer.train_batch_size").what.contains("base/run_base.sh"));
    assert!(missing(&alone, "objective.adv_estimator").what.contains("base/run_base.sh"));
    for files in [[run.clone(), base.clone()], [base, run]] {
        let together = import(&files, &Options::default(), &environment).expect("two scripts");
        assert_eq!(at(&together, "/rollout/n"), 4);
        assert_eq!(at(&together, "/trainer/train_batch_size"), 16);
        assert_eq!(at(&together, "/model/path"), "q/m");
        assert!(!together.missing.iter().any(|entry| entry.key == "trainer.train_batch_size"));
    }
    let sources = "LR=1e-6\nsource conf/env.sh\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
                   actor_rollout_ref.actor.optim.lr=$LR actor_rollout_ref.rollout.n=${N:-2} data.seed=1\n";
    let alone = imported("run.sh", sources);
    assert!(matches!(outcome(&alone, "source"), KeyOutcome::Cannot { why } if why.contains("conf/env.sh")));
    for (key, value) in [("optim.lr", "1e-6 (line 1)"), ("rollout.n", "2")] {
        let what = &missing(&alone, key).what;
        assert!(what.contains(value) && what.contains("an unknown one"), "{key}: {what}");
    }
    assert!(alone.rows.iter().any(|row| row.key == "data.seed" && !row.open), "{:?}", alone.rows);
    let files = [SourceFile::new("run.sh", sources), SourceFile::new("env.sh", "LR=2e-6\nexport N=5\n")];
    let together = import(&files, &Options::default(), &environment).expect("a script and what it sources");
    assert_eq!(at(&together, "/optim/lr"), 2e-6);
    assert_eq!(at(&together, "/rollout/n"), 5);
    let sees = [
        SourceFile::new("run.sh", "A=1\nexport B=2\nC=3 bash in.sh\n"),
        SourceFile::new("in.sh", "python3 -m x a.b=${A:-0}$B$C\n"),
    ];
    let reading = sees[0].read(&sees, &environment).expect("a script");
    let entry = reading.entries.iter().find(|entry| entry.key == "a.b").expect("a.b");
    assert_eq!(entry.value, SourceValue::Known(json!(23)), "A is not exported");
}

#[test]
fn launchers_and_wrappers_are_passed_and_their_options_kept() {
    let flags = "--per_device_train_batch_size 4 --max_steps 10";
    for (command, key, expected) in [
        (format!("torchrun --nproc_per_node=8 grpo.py {flags}"), "nproc_per_node", "8"),
        (format!("torchrun --nproc-per-node 8 --nnodes 2 -m pkg.grpo {flags}"), "nproc_per_node", "8"),
        (format!("python3 -m torch.distributed.run --nproc_per_node 8 grpo.py {flags}"), "nproc_per_node", "8"),
        (format!("accelerate launch --multi_gpu --num_processes 8 -m pkg.grpo {flags}"), "num_processes", "8"),
        (format!("accelerate launch --num_processes=8 train.py {flags}"), "num_processes", "8"),
        (format!("deepspeed --num_gpus 4 --num_nodes 2 grpo.py {flags}"), "num_gpus", "4"),
        (format!("nohup torchrun --nproc_per_node 2 grpo.py {flags} > log 2>&1 &"), "nproc_per_node", "2"),
    ] {
        let result = launched(&format!("{command}\n"));
        for (key, expected) in [(key, expected), ("per_device_train_batch_size", "4"), ("max_steps", "10")] {
            assert!(result.contains(&(key.to_owned(), expected.to_owned())), "{command}: {result:?}");
        }
    }
    for (command, program) in [
        ("trl rloo --max-steps 5", "rloo"),
        ("python3 examples/ppo/ppo.py --max_steps 5", "examples/ppo/ppo.py"),
        ("accelerate launch --num_processes 2 -m trl.scripts.rloo --max_steps 5", "trl.scripts.rloo"),
        ("uv run --extra vllm python3 -u -m trl.scripts.grpo --max_steps 5", "trl.scripts.grpo"),
    ] {
        let file = SourceFile::new("run.sh", format!("{command}\n"));
        let entries = file.read(&[], &environment).expect("a script").entries;
        for (key, expected) in [(PROGRAM, json!(program)), ("max_steps", json!(5))] {
            let entry = entries.iter().find(|entry| entry.key == key).unwrap_or_else(|| panic!("{command}: {key}"));
            assert_eq!(entry.value, SourceValue::Known(expected), "{command}");
        }
    }
    let run = "python3 -m verl.trainer.main_ppo data.seed=1";
    for script in [
        format!("bash -c \"{run}\""),
        format!("bash -lc 'cd /x && {run}'"),
        format!("srun --nodes=1 -w \"$HOST\" bash -c \"{run}\""),
        format!("srun --overlap --container-image=i.sqsh {run}"),
        format!("ray job submit --address http://a:1 --runtime-env=e.yaml -- {run}"),
        format!("CUDA_VISIBLE_DEVICES=0 nohup {run} > log.txt 2>&1 &"),
        format!("{run} 2>&1 | tee log.txt"),
        format!("env A=1 timeout 3h {run}"),
        format!("time {run} || exit 1"),
        format!("uv run --extra vllm {run}"),
        format!("ssh host \"cd x; {run}\""),
        format!("main() {{\n  {run} \"$@\"\n}}\nhelp() {{ python3 -m x a.b=1; }}\nmain \"$@\""),
        format!("bash <<EOF\n{run}\nEOF"),
        format!("sbatch --job-name=x --wrap=\"{run}\""),
        format!("sbatch -N 1 --wrap '{run}'"),
        format!("if [ -f x ]; then\n{run}\nelse\n{run}\nfi"),
        "CMD=(python3 -m verl.trainer.main_ppo)\nCMD+=(data.seed=1)\n\"${CMD[@]}\"".to_owned(),
        format!("CMD=\"{run}\"\necho $CMD\neval $CMD"),
        format!("echo \"{run} data.seed=2\"\ncat > x.sh <<EOF\n{run} data.seed=3\nEOF\n{run}"),
    ] {
        assert_eq!(launched(&script), [("data.seed".to_owned(), "1".to_owned())], "{script}");
    }
}

#[test]
fn runs_of_a_loop_are_one_with_candidates_and_two_commands_are_refused() {
    let script = "for seed in 1 2 3; do\n  python3 -m x a.b=$seed a.c=7\ndone\n";
    assert_eq!(launched(script), [("a.b".to_owned(), "?1 | 2 | 3".to_owned()), ("a.c".to_owned(), "7".to_owned())]);
    let twice = "run() {\n  python3 -m x a.b=$1\n}\nrun 1\nrun 2\n";
    let refused = refusal("run.sh", twice);
    assert!(refused.contains("run.sh:5") && refused.contains("line 4"), "{refused}");
}

#[test]
fn flags_are_read_as_parsers_of_dataclasses_read_them() {
    let result = launched(
        "cat > conf.yaml <<EOF\nbeta: 0.5\nmax_steps: 7\nEOF\n\
         trl grpo --config conf.yaml --max_steps 9 --lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}' --no_bf16 --use_vllm\n",
    );
    for own in ["beta=0.5", "max_steps=9", "lr_scheduler_kwargs.min_lr_rate=0.1", "bf16=false", "use_vllm=true"] {
        let (key, value) = own.split_once('=').expect("a key and a value");
        let last = result.iter().rfind(|(own, _)| own == key);
        assert_eq!(last.map(|(_, value)| value.as_str()), Some(value), "{result:?}");
    }
}

#[test]
fn a_configuration_that_a_command_names_is_read_with_it_or_named() {
    for (script, by, config) in [
        (
            "accelerate launch --num_processes 8 grpo.py --config conf/grpo.yaml --max_steps 10\n",
            "config",
            "max_steps: 20\nlearning_rate: 3e-6\n",
        ),
        (
            "uv run examples/run_grpo.py --config conf/grpo.yaml policy.model_name=q/m grpo.max_num_steps=10\n",
            "--config",
            "grpo: {max_num_steps: 20, num_prompts_per_step: 8}\n",
        ),
    ] {
        let run = SourceFile::new("run.sh", script);
        let alone = import(std::slice::from_ref(&run), &Options::default(), &environment).expect("a script");
        let KeyOutcome::Cannot { why } = outcome(&alone, by) else {
            panic!("{by} is not given");
        };
        assert!(why.contains("grpo.yaml"), "{why}");
        let together = import(&[run, SourceFile::new("grpo.yaml", config)], &Options::default(), &environment);
        let together = together.expect("a script and its configuration");
        assert_eq!(at(&together, "/trainer/steps"), 10, "the command's own goes over the file's: {}", together.config);
        let is_lacking = |row: &ImportedKey| row.key == by && matches!(row.outcome, KeyOutcome::Cannot { .. });
        assert!(!together.rows.iter().any(is_lacking), "{:?}", together.rows);
    }
}
