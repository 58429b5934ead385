//! Memory that runs out: a run continues under a cheaper plan, or ends and says what to do. On the stand-in for a CUDA
//! card (`tests/cuda`), which refuses allocations when it is told to, as a real card cannot be told; on wgpu by
//! `memory.limit`.

use super::Bench;
use super::runs::metrics;
use crate::support::campaign_points;
use serde_json::Value;
use std::io::Write;
use std::ops::Range;
use std::time::Duration;

/// PPO with a critic and a reference policy. A campaign has hundreds of runs on the stand-in, so they are small. Pools
/// ask the driver for pages of megabytes: free ones are given back after every step, so that all steps ask for some.
const RUN: [&str; 11] = [
    "model={arch: {model_type: llama, hidden_size: 128, intermediate_size: 512, num_hidden_layers: 3, num_attention_heads: 4, \
     max_position_embeddings: 32}}",
    "trainer.train_batch_size=2",
    "trainer.test_freq=0",
    "trainer.val_max_samples=1",
    "trainer.save_freq=1",
    "memory.cleanup_every=1",
    "rollout.n=1",
    "rollout.response_length=2",
    "objective={name: ppo, kl_loss_coef: 0.01}",
    "critic={optim: {lr: 0.01}}",
    "optim.lr_scheduler={lr_scheduler_type: constant}",
];

/// Refused allocations, and limits, are chosen from this seed.
const SEED: u64 = 17;

/// A run takes seconds. One that takes this long hangs.
const HANGS: Duration = Duration::from_mins(5);

/// What a run learnt from, by step.
fn learnt(bench: &Bench, name: &str) -> Vec<[f64; 6]> {
    let keys = [
        "actor/pg_loss",
        "actor/kl_loss",
        "actor/grad_norm",
        "critic/vf_loss",
        "critic/grad_norm",
        "critic/rewards/mean",
    ];
    let lines = metrics(bench, name).into_iter();
    let steps = lines.filter(|line| line["training/global_step"] != 0);
    steps.map(|line| keys.map(|key| line[key].as_f64().unwrap_or_else(|| panic!("{key}")))).collect()
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

/// Runs, each of which is disturbed once: those of a campaign, or a few.
fn points(few: u64) -> Range<u64> {
    campaign_points().unwrap_or(0..few)
}

/// Steps of a run: so many in a campaign, or three.
fn steps(campaign: usize) -> usize {
    match std::env::var_os("FIREBRICK_CAMPAIGN") {
        Some(_) => campaign,
        None => 3,
    }
}

/// How runs went whose memory ran out.
#[derive(Default)]
struct Outcomes {
    recovered: u64,
    ended: u64,
    /// Of those that ended, from their last checkpoint to their end.
    resumed: u64,
    /// Without a cheaper plan.
    undisturbed: u64,
    /// Neither of these.
    wrong: Vec<String>,
}

impl Outcomes {
    /// A run that learnt what the undisturbed one did, or ended, with these words, as the documents say. Anything else
    /// is wrong.
    fn add(&mut self, bench: &Bench, name: &str, ended: Result<(), String>, place: &str) {
        match ended {
            Err(said) if !is_documented(&said) => {
                self.wrong.push(format!("{place} ended with: {said}"));
            }
            Err(_) => self.ended += 1,
            Ok(()) => match difference(bench, name) {
                Some(difference) => self.wrong.push(format!("{place}: {difference}")),
                None if summary(bench, name)["replans"] == 0 => self.undisturbed += 1,
                None => self.recovered += 1,
            },
        }
    }

    /// A run that ended and was resumed as its message says, to its end: it has learnt what the undisturbed one did.
    #[cfg(feature = "cuda")]
    fn add_resumed(&mut self, bench: &Bench, name: &str, place: &str) {
        match difference(bench, name) {
            Some(difference) => self.wrong.push(format!("{place}, resumed: {difference}")),
            None => self.resumed += 1,
        }
    }

    /// Says how many runs went how; fails where one was wrong, or no shortage reached the program.
    fn close(&self, what: &str) {
        let Self { recovered, ended, resumed, undisturbed, wrong } = self;
        writeln!(
            std::io::stderr(),
            "memory, {what}: {recovered} runs went on under a cheaper plan, {ended} ended and said what to do ({resumed} were \
             resumed), {undisturbed} had enough, {} were wrong",
            wrong.len()
        )
        .expect("writing to stderr");
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(recovered + ended > 0, "no shortage reached the program");
    }
}

/// Whether a run ended as the documents say: by an error that names memory, and what to do.
fn is_documented(said: &str) -> bool {
    let advises = ["next_plan.json", "memory.", "rollout.", "trainer.", "choose another `device`"];
    said.contains("out of memory")
        && !said.contains("panicked at")
        && advises.iter().any(|advice| said.contains(advice))
}

/// Where a run learnt something else than the undisturbed one.
fn difference(bench: &Bench, name: &str) -> Option<String> {
    let (learnt, expected) = (learnt(bench, name), learnt(bench, UNDISTURBED));
    if learnt.len() != expected.len() {
        return Some(format!("{} steps", learnt.len()));
    }
    let differs = |(a, b): (&f64, &f64)| {
        let within = (a - b).abs() <= 1e-4 * b.abs().max(1e-2);
        !within
    };
    let mut steps = learnt.iter().zip(&expected).enumerate();
    let (step, (found, expected)) = steps.find(|(_, (found, expected))| found.iter().zip(*expected).any(differs))?;
    Some(format!("step {}: {found:?} instead of {expected:?}", step + 1))
}

/// The run that the others are compared with.
const UNDISTURBED: &str = "undisturbed";

#[cfg(feature = "cuda")]
mod cuda {
    use super::super::{stderr, succeeded};
    use super::*;
    use std::process::{Output, Stdio};
    use std::time::Instant;

    const STEPS: usize = 12;

    /// Runs the program to its end, in the folder `name`. Allocations are refused from the `from`-th on, until `until`
    /// bytes have been given back.
    fn run(bench: &Bench, name: &str, from: u64, until: u64) -> Output {
        run_with(bench, name, &[], [DEVICE, &format!("{from}:{until}")])
    }

    /// Goes on with a run that ended, from its last checkpoint and under the plan to try next; nothing where it had no
    /// checkpoint yet.
    fn resume(bench: &Bench, name: &str) -> Option<Output> {
        let folder = bench.path(name);
        let saved = std::fs::read_dir(folder.join("checkpoints"));
        saved.ok()?.next()?.ok()?;
        let plan = folder.join("next_plan.json");
        let mut more = vec!["--resume"];
        if plan.exists() {
            more.extend(["--plan", plan.to_str().expect("a path")]);
        }
        // nothing is refused any more
        Some(run_with(bench, name, &more, [DEVICE, NEVER]))
    }

    /// Variables of the stand-in that say which memory is refused: the card's, and what the driver pins of the host's.
    const DEVICE: &str = "STAND_IN_REFUSE";
    const PINNED: &str = "STAND_IN_REFUSE_PINNED";

    /// Nothing is refused, and allocations are counted.
    const NEVER: &str = "18446744073709551615:1";

    /// `refused` is a variable of the stand-in, and its value.
    fn run_with(bench: &Bench, name: &str, more: &[&str], refused: [&str; 2]) -> Output {
        let output = format!("output={}", bench.path(name).display());
        let steps = format!("trainer.steps={}", steps(STEPS));
        let settings = [&RUN[..], &["device=cuda", &output, &steps], more].concat();
        // a pipe that nobody reads holds up who says more than it has room for
        let said = bench.path(&format!("{name}.stderr"));
        let log = std::fs::File::create(&said).expect("a file");
        let mut child = bench
            .command("train", &settings)
            .env(refused[0], refused[1])
            .env("FIREBRICK_LOG", "warn")
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("the program starts");
        let began = Instant::now();
        while child.try_wait().expect("a child").is_none() {
            if began.elapsed() > HANGS {
                child.kill().expect("a child that runs");
                panic!("{name} hangs: {refused:?}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let ended = child.wait_with_output().expect("a child that ended");
        Output { stderr: std::fs::read(said).expect("what it said"), ..ended }
    }

    /// What the stand-in counted: allocations that a run asked the driver for, and those that were refused.
    fn counts(output: &Output) -> (u64, u64) {
        counts_of(output, " allocations, ")
    }

    fn counts_of(output: &Output, what: &str) -> (u64, u64) {
        let said = stderr(output);
        let counts = said.lines().find_map(|line| {
            let (asked, refused) = line.strip_prefix("stand-in: ")?.split_once(what)?;
            let refused = refused.strip_suffix(" refused")?;
            Some((asked.parse().ok()?, refused.parse().ok()?))
        });
        counts.unwrap_or_else(|| panic!("no count of allocations in: {said}"))
    }

    /// State on the host, from where the driver copies it.
    const ON_THE_HOST: [&str; 4] = [
        "memory.gradient_checkpointing=true",
        "memory.activation_offload=true",
        "memory.param_offload=streamed",
        "memory.optimizer_offload=idle",
    ];

    #[test]
    fn a_run_that_is_refused_pinned_memory_copies_from_other_memory_and_learns_the_same() {
        if std::env::var_os("FIREBRICK_STAND_IN").is_none() {
            return;
        }
        let bench = Bench::new();
        let undisturbed = run_with(&bench, UNDISTURBED, &ON_THE_HOST, [PINNED, NEVER]);
        succeeded(&undisturbed);
        let (asked, _) = counts_of(&undisturbed, " pinned allocations, ");
        assert!(asked > 1, "nothing was pinned");
        let mut outcomes = Outcomes::default();
        for point in 0..2 {
            let name = format!("pinned-{point}");
            let from = 1 + random(2 * point, asked);
            let until = [1_u64 << 40, 1][(point % 2) as usize];
            let refused = format!("{from}:{until}");
            let disturbed = run_with(&bench, &name, &ON_THE_HOST, [PINNED, &refused]);
            let (_, refused) = counts_of(&disturbed, " pinned allocations, ");
            let place = format!("{name}: pinned allocation {from} of {asked}, {refused} refused");
            assert!(refused > 0, "{place}: nothing was refused");
            succeeded(&disturbed);
            outcomes.add(&bench, &name, Ok(()), &place);
        }
        assert!(outcomes.wrong.is_empty(), "{}", outcomes.wrong.join("\n"));
        assert_eq!(outcomes.undisturbed, 2, "no other plan was taken");
    }

    #[test]
    fn a_card_that_others_have_filled_is_said_to_be_full_and_what_to_do() {
        if std::env::var_os("FIREBRICK_STAND_IN").is_none() {
            return;
        }
        let bench = Bench::new();
        let refused = run(&bench, "full", 1, 1 << 40);
        assert!(!refused.status.success());
        let said = stderr(&refused);
        assert!(is_documented(&said), "{said}");
        assert!(said.contains("while opening cuda:0") && said.contains("`nvidia-smi`"), "{said}");
        assert!(!bench.path("full").exists(), "a folder of no run");
    }

    #[test]
    fn a_run_that_is_refused_memory_learns_the_same_or_says_what_to_do() {
        if std::env::var_os("FIREBRICK_STAND_IN").is_none() {
            let what = "no allocation is refused: this device is not the stand-in of tests/cuda";
            writeln!(std::io::stderr(), "{what}").expect("writing to stderr");
            return;
        }
        let bench = Bench::new();
        let undisturbed = run(&bench, UNDISTURBED, u64::MAX, 1);
        succeeded(&undisturbed);
        assert_eq!(learnt(&bench, UNDISTURBED).len(), steps(STEPS));
        let (asked, _) = counts(&undisturbed);
        let mut outcomes = Outcomes::default();
        for point in points(3) {
            let name = format!("point-{point}");
            let from = 1 + random(2 * point, asked);
            // more than what CubeCL frees by itself before it tries again, or what it may: pages have 2 and 8 MiB
            let until = [1 << 40, 20 << 20, 8 << 20, 1][(point % 4) as usize];
            let disturbed = run(&bench, &name, from, until);
            let (_, refused) = counts(&disturbed);
            let place =
                format!("{name}: allocation {from} of {asked}, until {until} bytes are free, {refused} refused");
            assert!(refused > 0, "{place}: nothing was refused");
            let ended = if disturbed.status.success() { Ok(()) } else { Err(stderr(&disturbed)) };
            let ends = ended.is_err();
            outcomes.add(&bench, &name, ended, &place);
            if ends && let Some(resumed) = resume(&bench, &name) {
                let said = stderr(&resumed);
                assert!(resumed.status.success(), "{place}, resumed: {said}");
                outcomes.add_resumed(&bench, &name, &place);
            }
        }
        assert_eq!(outcomes.undisturbed, 0, "a refusal that nothing came to");
        outcomes.close(&format!("one of {asked} allocations refused, and later ones"));
    }
}

#[cfg(feature = "wgpu")]
mod wgpu {
    use super::*;
    use burn::tensor::Device;
    use firebrick_backends::memory::read;
    use firebrick_engine::config::parse;
    use firebrick_engine::executor::Runtime;
    use firebrick_engine::trainer::Trainer;
    use std::sync::mpsc::channel;

    /// All state exists from the second step on; a software driver takes seconds for one.
    const STEPS: usize = 4;

    /// A run in this process, where kernels are compiled once, on a thread of its own, which has a stream and pools of
    /// its own.
    fn run(bench: &Bench, name: &str, device: &Device, limit: Option<u64>) -> Result<(), String> {
        let of_run = [
            "device=wgpu".to_owned(),
            format!("output={}", bench.path(name).display()),
            format!("trainer.steps={}", steps(STEPS)),
        ];
        let settings = RUN.iter().map(|setting| (*setting).to_owned());
        let limit = limit.map(|bytes| format!("memory.limit={bytes}"));
        let settings: Vec<String> = settings.chain(of_run).chain(limit).collect();
        let config = parse(&bench.read("config.yaml"), &settings).expect("a configuration");
        let (done, ended) = channel();
        let own = device.clone();
        let thread = std::thread::spawn(move || {
            let made = Trainer::builder(config).build();
            let ran = made.and_then(|mut trainer| trainer.run().map(drop));
            Runtime::new(&own).forget_graphs();
            done.send(ran.map_err(|error| error.to_string())).expect("somebody waits");
        });
        let ended = ended.recv_timeout(HANGS);
        let ended = ended.unwrap_or_else(|error| panic!("{name} hangs or panicked: {error}"));
        thread.join().expect("a thread that ends well");
        device.memory_cleanup();
        ended
    }

    /// `memory.limit` at random shares of what the undisturbed run needs.
    #[test]
    fn a_run_under_any_limit_learns_the_same_or_says_what_to_do() {
        let Some((device, _alone)) = crate::devices::gpu("wgpu") else {
            return;
        };
        let bench = Bench::new();
        let before = read(&device).in_use_bytes;
        run(&bench, UNDISTURBED, &device, None).expect("a run without a limit");
        assert_eq!(learnt(&bench, UNDISTURBED).len(), steps(STEPS));
        let readings = bench.read(&format!("{UNDISTURBED}/memory.jsonl"));
        let peak_of = |line: &str| {
            let line: Value = serde_json::from_str(line).expect("JSON");
            line["peak_bytes"].as_u64().expect("a peak of the pools")
        };
        let peak = readings.lines().map(peak_of).max().expect("readings");
        let mut outcomes = Outcomes::default();
        for point in points(2) {
            let name = format!("point-{point}");
            let limit = peak * (300 + random(2 * point, 700)) / 1000;
            let place = format!("{name}: a limit of {limit} bytes, where {peak} are used without one");
            let ended = run(&bench, &name, &device, Some(limit));
            outcomes.add(&bench, &name, ended, &place);
            // what a run leaves would count against the next one's limit
            let left = read(&device).in_use_bytes.saturating_sub(before);
            assert!(left < peak / 100, "{place} leaves {left} bytes");
        }
        outcomes.close(&format!("limits of 30 to 100 % of {peak} bytes"));
    }
}
