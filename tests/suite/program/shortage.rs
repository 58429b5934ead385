//! Memory that runs out: a run continues under a cheaper plan, or ends and says what to do. On the stand-in for a CUDA card
//! (`tests/cuda`), which refuses allocations when it is told to, as a real card cannot be told; on wgpu by `memory.limit`.

use super::runs::metrics;
use super::{Bench, stderr, succeeded};
use serde_json::Value;
use std::io::Write;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

/// PPO with a critic and a reference policy. The model is large enough for some dozens of allocations: `CubeCL` asks the driver for
/// pages.
const RUN: [&str; 7] = [
    "model={arch: {model_type: llama, hidden_size: 256, intermediate_size: 512, num_hidden_layers: 3, num_attention_heads: 4, \
     max_position_embeddings: 32}}",
    "trainer.train_batch_size=4",
    "trainer.test_freq=0",
    "rollout.n=1",
    "objective={name: ppo, kl_loss_coef: 0.01}",
    "critic={optim: {lr: 0.01}}",
    "optim.lr_scheduler={lr_scheduler_type: constant}",
];

/// Refused allocations, and limits, are chosen from this seed.
const SEED: u64 = 17;

/// A run takes seconds. One that takes this long hangs.
const HANGS: Duration = Duration::from_mins(5);

/// Runs the configuration to its end, in the folder `name`.
fn run(bench: &Bench, name: &str, settings: &[&str], environment: &[(&str, String)]) -> Output {
    let output = format!("output={}", bench.path(name).display());
    let steps = format!("trainer.steps={}", steps());
    let mut child = bench
        .command("train", &[&RUN[..], settings, &[&output, &steps]].concat())
        .envs(environment.iter().map(|(key, value)| (key, value)))
        .env("FIREBRICK_LOG", "warn")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let began = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        if began.elapsed() > HANGS {
            child.kill().expect("a child that runs");
            panic!("{name} hangs: {settings:?}, {environment:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().expect("a child that ended")
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

fn summary(bench: &Bench, name: &str) -> Value {
    serde_json::from_str(&bench.read(&format!("{name}/summary.json"))).expect("JSON")
}

/// A number below `below`, by splitmix64.
fn random(index: u64, below: u64) -> u64 {
    let mut x = (SEED + index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)) % below
}

/// How many runs there are, each of which is disturbed once: `FIREBRICK_CAMPAIGN_POINTS`, or a few.
fn points(few: u64) -> u64 {
    let set = std::env::var("FIREBRICK_CAMPAIGN_POINTS").ok();
    set.map_or(few, |points| points.parse().expect("a number of points"))
}

fn steps() -> usize {
    let campaign = std::env::var_os("FIREBRICK_CAMPAIGN").is_some();
    if campaign { 12 } else { 3 }
}

/// How runs went whose memory ran out.
#[derive(Default)]
struct Outcomes {
    recovered: u64,
    ended: u64,
    /// Without a cheaper plan.
    undisturbed: u64,
}

impl Outcomes {
    /// A run that learnt what the undisturbed one did, or ended as the documents say. Anything else fails.
    fn add(&mut self, bench: &Bench, name: &str, output: &Output, place: &str) {
        let said = stderr(output);
        if !output.status.success() {
            assert!(
                said.contains("out of memory"),
                "{place} ended without saying so: {said}"
            );
            assert!(!said.contains("panicked at"), "{place} panicked: {said}");
            self.ended += 1;
            return;
        }
        let (learnt, expected) = (learnt(bench, name), learnt(bench, UNDISTURBED));
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
        match summary(bench, name)["replans"].as_u64() {
            Some(0) => self.undisturbed += 1,
            _ => self.recovered += 1,
        }
    }
}

/// The run that the others are compared with.
const UNDISTURBED: &str = "undisturbed";

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;

    /// What the stand-in counted: allocations that a run asked the driver for, and those that were refused.
    fn counts(output: &Output) -> (u64, u64) {
        let said = stderr(output);
        let counts = said.lines().find_map(|line| {
            let (asked, refused) = line
                .strip_prefix("stand-in: ")?
                .split_once(" allocations, ")?;
            let refused = refused.strip_suffix(" refused")?;
            Some((asked.parse().ok()?, refused.parse().ok()?))
        });
        counts.unwrap_or_else(|| panic!("no count of allocations in: {said}"))
    }

    /// A run whose allocations are refused from the `from`-th on, until `until` bytes have been given back.
    fn refused(bench: &Bench, name: &str, from: u64, until: u64) -> Output {
        let refuse = ("STAND_IN_REFUSE", format!("{from}:{until}"));
        run(bench, name, &["device=cuda"], &[refuse])
    }

    #[test]
    fn a_run_that_is_refused_memory_learns_the_same_or_says_what_to_do() {
        if std::env::var_os("FIREBRICK_STAND_IN").is_none() {
            let what = "no allocation is refused: this device is not the stand-in of tests/cuda";
            writeln!(std::io::stderr(), "{what}").expect("writing to stderr");
            return;
        }
        let bench = Bench::new();
        let undisturbed = refused(&bench, UNDISTURBED, u64::MAX, 1);
        succeeded(&undisturbed);
        assert_eq!(learnt(&bench, UNDISTURBED).len(), steps());
        let (asked, _) = counts(&undisturbed);
        let mut outcomes = Outcomes::default();
        for point in 0..points(3) {
            let name = format!("point-{point}");
            let from = 1 + random(2 * point, asked);
            // more than what CubeCL frees by itself before it tries again, or what it may
            let until = 1 << [40, 24, 20, 12][(point % 4) as usize];
            let disturbed = refused(&bench, &name, from, until);
            let (_, refused) = counts(&disturbed);
            let place = format!(
                "allocation {from} of {asked}, until {until} bytes are free, {refused} refused"
            );
            assert!(refused > 0, "{place}: nothing was refused");
            outcomes.add(&bench, &name, &disturbed, &place);
        }
        let Outcomes {
            recovered,
            ended,
            undisturbed,
        } = outcomes;
        writeln!(
            std::io::stderr(),
            "memory: of {} runs {recovered} went on under a cheaper plan, {ended} ended and said what to do, {undisturbed} were helped by \
             what CubeCL frees; {asked} allocations each",
            points(3),
        )
        .expect("writing to stderr");
        assert!(
            recovered + ended > 0,
            "no refused allocation reached the program"
        );
    }
}

#[cfg(feature = "wgpu")]
mod wgpu {
    use super::*;

    /// `memory.limit` at random shares of what the undisturbed run needs.
    #[test]
    fn a_run_under_any_limit_learns_the_same_or_says_what_to_do() {
        let Some((_device, alone)) = crate::devices::gpu("wgpu") else {
            return;
        };
        let bench = Bench::new();
        succeeded(&run(&bench, UNDISTURBED, &["device=wgpu"], &[]));
        assert_eq!(learnt(&bench, UNDISTURBED).len(), steps());
        let peak = summary(&bench, UNDISTURBED)["measured_peak_bytes"]
            .as_u64()
            .expect("a peak of the pools");
        let mut outcomes = Outcomes::default();
        for point in 0..points(2) {
            let name = format!("point-{point}");
            let limit = peak * (300 + random(2 * point, 700)) / 1000;
            let setting = format!("memory.limit={limit}");
            let limited = run(&bench, &name, &["device=wgpu", &setting], &[]);
            let place = format!("a limit of {limit} bytes, where {peak} are used without one");
            outcomes.add(&bench, &name, &limited, &place);
        }
        drop(alone);
        let Outcomes {
            recovered,
            ended,
            undisturbed,
        } = outcomes;
        writeln!(
            std::io::stderr(),
            "memory.limit: of {} runs {recovered} went on under a cheaper plan, {ended} ended and said what to do, {undisturbed} stayed \
             below their limit",
            points(2),
        )
        .expect("writing to stderr");
        assert!(recovered > 0, "no run went on under a cheaper plan");
    }
}
