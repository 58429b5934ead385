//! Scripts and configurations of other engines, which are read and never run.

use super::{Bench, Job, Kind, TERMINAL, any, nested, refused, write_sparse};
use std::fmt::Write;

pub(super) const KINDS: &[Kind] = &[
    any("a shell script", Job::Import, |bench, random| {
        let depth = random.power(8, 18);
        let body = match random.below(13) {
            0 => "x={1..1000000000}; for i in {1..1000000000}; do y=$y$i; done".to_owned(),
            1 => "while true; do x=$x$x$x; done".to_owned(),
            2 => "f() { f; f; }; f".to_owned(),
            3 => format!("x={}", nested("$(", "echo 1", ")", depth)),
            4 => format!("x=$(({}))", nested("(", "1", ")", depth)),
            5 => "x=a; for i in $(seq 60); do x=$x$x; done".to_owned(),
            6 => "touch ran; rm -rf /; :(){ :|:& };:".to_owned(),
            7 => format!("{}true{}", "if true; then ".repeat(depth), "; fi".repeat(depth)),
            8 => "x=${x:-${x:-${x}}}; printf '%999999999d' 1; x=$(printf '%999999999d' 1)".to_owned(),
            9 => format!("echo {}", "{a,b}".repeat(64)),
            10 => format!("echo '{TERMINAL}'; x='{TERMINAL}'"),
            11 => format!("echo a,{}", "{".repeat(depth)),
            _ => "x=$((9223372036854775807 + 1)); y=$((1 / 0)); z=$((2 ** 999999))".to_owned(),
        };
        bench.write(
            "script.sh",
            &format!("{body}\npython3 -m verl.trainer.main_ppo data.train_batch_size=$x '{TERMINAL}=1'\n"),
        );
        Vec::new()
    }),
    any("a Python script", Job::Import, |bench, random| {
        let depth = random.power(8, 18);
        let value = match random.below(10) {
            0 => "10 ** 10 ** 10".to_owned(),
            1 => "'a' * 10 ** 12".to_owned(),
            2 => "[0] * 10 ** 12".to_owned(),
            3 => nested("(", "1", ")", depth),
            4 => nested("[", "1", "]", depth),
            5 => "-".repeat(depth) + "1",
            6 => "[x for x in range(10 ** 12)]".to_owned(),
            7 => "__import__('os').system('touch ran')".to_owned(),
            8 => "1 << 10 ** 12".to_owned(),
            _ => format!("'%{}d' % 1", "9".repeat(12)),
        };
        bench.write(
            "script.py",
            &format!("from trl import GRPOConfig\nx = {value}\nconfig = GRPOConfig(per_device_train_batch_size=x, num_generations={value})\n"),
        );
        vec!["script.py".into()]
    }),
    any("YAML of another engine", Job::Import, |bench, random| {
        let mut text = "grpo:\n  num_prompts_per_step: 8\na0: &a0 [lol]\n".to_owned();
        for level in 1..4 + random.below(40) {
            writeln!(text, "a{level}: &a{level} [*a{0}, *a{0}, *a{0}]", level - 1).unwrap();
        }
        match random.below(3) {
            0 => bench.write("script.yaml", &text),
            1 => bench.write("script.yaml", &format!("defaults: script.yaml\n{TERMINAL}: 1\n")),
            _ => bench.write("script.yaml", &format!("grpo: {}\n", nested("[", "", "]", random.power(8, 18)))),
        };
        vec!["script.yaml".into()]
    }),
    refused("size of a script", Job::Import, |bench: &Bench, random| {
        write_sparse(bench, "script.sh", random.power(24, 42) as u64);
        Vec::new()
    }),
];
