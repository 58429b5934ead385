//! A card that has no memory for a while: a run continues under a cheaper plan, or ends and says what to do. On the stand-in for a card
//! (`tests/cuda`), which refuses allocations when it is told to; a real card cannot be told.

use super::runs::metrics;
use super::{Bench, stderr};
use serde_json::Value;
use std::io::Write;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

/// PPO with a critic and a reference policy, on the stand-in. The model is large enough for some dozens of allocations: `CubeCL` asks the
/// driver for pages.
const RUN: [&str; 8] = [
    "device=cuda",
    "model={arch: {model_type: llama, hidden_size: 256, intermediate_size: 512, num_hidden_layers: 3, num_attention_heads: 4, \
     max_position_embeddings: 32}}",
    "trainer.train_batch_size=4",
    "trainer.test_freq=0",
    "rollout.n=1",
    "objective={name: ppo, kl_loss_coef: 0.01}",
    "critic={optim: {lr: 0.01}}",
    "optim.lr_scheduler={lr_scheduler_type: constant}",
];

/// Refused allocations are chosen from this seed.
const SEED: u64 = 17;

/// A run takes seconds. One that takes this long hangs.
const HANGS: Duration = Duration::from_mins(5);

/// What a run did.
struct Ended {
    output: Output,
    /// Allocations that it asked the driver for, and those that were refused.
    asked: u64,
    refused: u64,
}

/// A run whose allocations are refused from the `from`-th on, until `until` bytes have been given back.
fn run(bench: &Bench, name: &str, from: u64, until: u64) -> Ended {
    let output = format!("output={}", bench.path(name).display());
    let steps = format!("trainer.steps={}", steps());
    let mut child = bench
        .command("train", &[&RUN[..], &[&output, &steps]].concat())
        .env("STAND_IN_REFUSE", format!("{from}:{until}"))
        .env("FIREBRICK_LOG", "warn")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let began = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        if began.elapsed() > HANGS {
            child.kill().expect("a child that runs");
            panic!(
                "the run hangs where allocation {from} and later ones are refused until {until} bytes are free"
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().expect("a child that ended");
    let said = stderr(&output);
    let counts = said.lines().find_map(|line| {
        let (asked, refused) = line
            .strip_prefix("stand-in: ")?
            .split_once(" allocations, ")?;
        let refused = refused.strip_suffix(" refused")?;
        Some((asked.parse().ok()?, refused.parse().ok()?))
    });
    let (asked, refused) = counts.unwrap_or_else(|| panic!("no count of allocations in: {said}"));
    Ended {
        output,
        asked,
        refused,
    }
}

/// What a run learnt from, by step.
fn learnt(bench: &Bench, name: &str) -> Vec<[f64; 4]> {
    let keys = [
        "actor/pg_loss",
        "actor/kl_loss",
        "critic/vf_loss",
        "critic/rewards/mean",
    ];
    let lines = metrics(bench, name).into_iter();
    let steps = lines.filter(|line| line["training/global_step"] != 0);
    steps
        .map(|line| keys.map(|key| line[key].as_f64().unwrap_or_else(|| panic!("{key}"))))
        .collect()
}

fn replans(bench: &Bench, name: &str) -> u64 {
    let summary: Value =
        serde_json::from_str(&bench.read(&format!("{name}/summary.json"))).expect("JSON");
    summary["replans"].as_u64().expect("a number")
}

/// A number below `below`, by splitmix64.
fn random(index: u64, below: u64) -> u64 {
    let mut x = (SEED + index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)) % below
}

/// How many allocations are refused, one in each run: `FIREBRICK_CAMPAIGN_POINTS`, or a few.
fn points() -> u64 {
    let set = std::env::var("FIREBRICK_CAMPAIGN_POINTS").ok();
    set.map_or(3, |points| points.parse().expect("a number of points"))
}

fn steps() -> usize {
    let campaign = std::env::var_os("FIREBRICK_CAMPAIGN").is_some();
    if campaign { 12 } else { 3 }
}

mod cuda {
    use super::*;

    #[test]
    fn a_run_that_is_refused_memory_learns_the_same_or_says_what_to_do() {
        if std::env::var_os("FIREBRICK_STAND_IN").is_none() {
            let what = "no allocation is refused: this device is not the stand-in of tests/cuda";
            writeln!(std::io::stderr(), "{what}").expect("writing to stderr");
            return;
        }
        let bench = Bench::new();
        let undisturbed = run(&bench, "undisturbed", u64::MAX, 1);
        assert!(
            undisturbed.output.status.success(),
            "{}",
            stderr(&undisturbed.output)
        );
        let expected = learnt(&bench, "undisturbed");
        assert_eq!(expected.len(), steps());
        let (mut recovered, mut ended, mut unnoticed) = (0, 0, 0);
        for point in 0..points() {
            let name = format!("point-{point}");
            let from = 1 + random(2 * point, undisturbed.asked);
            // more than what CubeCL frees by itself before it tries again, or what it may
            let until = 1 << [40, 24, 20, 12][(point % 4) as usize];
            let disturbed = run(&bench, &name, from, until);
            let said = stderr(&disturbed.output);
            let place = format!(
                "allocation {from} of {}, until {until} bytes are free, {} refused",
                undisturbed.asked, disturbed.refused
            );
            assert!(disturbed.refused > 0, "{place}: nothing was refused");
            if !disturbed.output.status.success() {
                assert!(
                    said.contains("out of memory"),
                    "{place} ended without saying so: {said}"
                );
                assert!(!said.contains("panicked at"), "{place} panicked: {said}");
                ended += 1;
                continue;
            }
            let learnt = learnt(&bench, &name);
            assert_eq!(learnt.len(), expected.len(), "{place}");
            for (step, (a, b)) in learnt.iter().zip(&expected).enumerate() {
                for (a, b) in a.iter().zip(b) {
                    assert!(
                        (a - b).abs() <= 1e-4 * b.abs().max(1e-2),
                        "{place}, step {}: {a} instead of {b}",
                        step + 1
                    );
                }
            }
            match replans(&bench, &name) {
                0 => unnoticed += 1,
                _ => recovered += 1,
            }
        }
        writeln!(
            std::io::stderr(),
            "memory: of {} runs {recovered} went on under a cheaper plan, {ended} ended and said what to do, {unnoticed} were helped by \
             what CubeCL frees; {} allocations each",
            points(),
            undisturbed.asked
        )
        .expect("writing to stderr");
        assert!(
            recovered + ended > 0,
            "no refused allocation reached the program"
        );
    }
}
