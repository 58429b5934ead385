//! Configurations: YAML that grows, nests or lies, numbers without measure, terminal codes, passwords.

use super::{Bench, Job, Kind, Random, TERMINAL, any, link, nested, refused, write_sparse};
use std::fmt::Write;

pub(super) const KINDS: &[Kind] = &[
    refused("aliases of YAML", Job::Check, aliases),
    refused("merge keys of YAML", Job::Check, merge_keys),
    refused("depth of YAML", Job::Check, depth),
    refused("depth of an override", Job::Plan, |_, random| {
        let depth = random.power(6, 16);
        vec![format!("model.chat_template_kwargs={}", nested("[", "", "]", depth))]
    }),
    refused("size of a configuration", Job::Check, |bench, random| {
        write_sparse(bench, "config.yaml", random.power(24, 42) as u64);
        Vec::new()
    }),
    refused("a configuration that is a device", Job::Check, |bench, random| {
        link(bench, "config.yaml", random.pick(&["/dev/zero", "/dev/full", "/dev", "/proc/self/mem"]));
        Vec::new()
    }),
    refused("keys without number", Job::Check, |bench, random| {
        let mut text = bench.read("config.yaml");
        for key in 0..random.power(10, 17) {
            writeln!(text, "k{key}: {{}}").unwrap();
        }
        bench.write("config.yaml", &text);
        Vec::new()
    }),
    refused("long keys in each other", Job::Check, |bench, random| {
        let key = "k".repeat(random.power(10, 20));
        let lines = (0..40).fold(String::new(), |lines, at| lines + &"  ".repeat(at) + &key + ":\n");
        let text = lines.get(..(4 << 20) - 10_000).unwrap_or(&lines).to_owned();
        bench.write("config.yaml", &(bench.read("config.yaml") + &text));
        Vec::new()
    }),
    refused("terminal codes in a configuration", Job::Check, |bench, random| {
        let quoted = serde_json::to_string(TERMINAL).unwrap();
        let line = match random.below(3) {
            0 => format!("{quoted}: 1"),
            1 => format!("objective: {quoted}"),
            _ => format!("optim: {{lr: {quoted}}}"),
        };
        let text = bench.read("config.yaml").replace("optim: {lr: 1.0e-3}", "");
        bench.write("config.yaml", &format!("{text}\n{line}\n"));
        Vec::new()
    }),
    any("numbers of a configuration", Job::Plan, |_, random| {
        let key = random.pick(&NUMBERS);
        vec![format!("{key}={}", random.number())]
    }),
    any("numbers of an architecture", Job::Plan, |_, random| {
        let key = random.pick(&[
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "rope_theta",
            "rms_norm_eps",
            "initializer_range",
            "vocab_size",
        ]);
        vec![format!("model.arch.{key}={}", random.number())]
    }),
    refused("a password in a path", Job::Plan, |_, random| {
        let key = random.pick(&["model.path", "model.tokenizer", "task.train", "memory.plan"]);
        vec!["model.arch=null".into(), format!("{key}=https://user:{}@host.invalid/x", super::SECRET)]
    }),
];

const NUMBERS: [&str; 21] = [
    "rollout.n",
    "rollout.prompt_length",
    "rollout.response_length",
    "rollout.temperature",
    "rollout.top_k",
    "rollout.max_num_seqs",
    "optim.lr",
    "optim.weight_decay",
    "trainer.steps",
    "trainer.train_batch_size",
    "trainer.seed",
    "trainer.save_freq",
    "trainer.val_max_samples",
    "update.ppo_mini_batch_size",
    "update.ppo_epochs",
    "memory.train_tokens",
    "memory.budget",
    "memory.limit",
    "memory.margin",
    "task.difficulty",
    "task.validation_size",
];

/// Each list has the one before several times.
fn aliases(bench: &Bench, random: &mut Random) -> Vec<String> {
    let (levels, width) = (8 + random.below(40), 2 + random.below(14));
    let mut text = "a0: &a0 [lol, lol]\n".to_owned();
    for level in 1..levels {
        let before = vec![format!("*a{}", level - 1); width as usize];
        writeln!(text, "a{level}: &a{level} [{}]", before.join(", ")).unwrap();
    }
    bench.write("config.yaml", &(text + &bench.read("config.yaml")));
    Vec::new()
}

fn merge_keys(bench: &Bench, random: &mut Random) -> Vec<String> {
    let levels = 8 + random.below(40);
    let mut text = "m0: &m0 {k: v}\n".to_owned();
    for level in 1..levels {
        let before = level - 1;
        writeln!(text, "m{level}: &m{level} {{<<: [*m{before}, *m{before}], k{level}: *m{before}}}").unwrap();
    }
    bench.write("config.yaml", &(text + &bench.read("config.yaml")));
    Vec::new()
}

fn depth(bench: &Bench, random: &mut Random) -> Vec<String> {
    let depth = random.power(6, 20);
    let value = match random.below(4) {
        0 => nested("[", "", "]", depth),
        1 => "[".repeat(depth),
        2 => nested("{a: ", "1", "}", depth),
        _ => format!("\n  {}1", "- ".repeat(depth)),
    };
    bench.write("config.yaml", &format!("{}\nextra: {value}\n", bench.read("config.yaml")));
    Vec::new()
}
