//! Ranks whose values NCCL moves, beside the same ranks through host memory: on the stand-ins for two cards and for
//! libnccl (`tests/cuda`), where ranks are threads, and on as many cards as a machine has.
//!
//! The stand-in reads its settings when a process first uses CUDA, so each test runs itself again in a process of its
//! own.

use super::stand_in::is_stand_in;
use crate::devices::gpu;
use crate::support::{checked, report};
use burn::tensor::Device;
use firebrick_backends::collective::{
    Collective, CollectiveError, Element, Nccl, OperationKind, Settings, Threads, Traffic,
};
use firebrick_backends::device::open;
use firebrick_engine::config::{RunConfig, parse};
use firebrick_engine::trainer::Trainer;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use gathers::weights_that_ranks_share_out_stay_on_the_cards;
use operations::{
    at_twenty_lengths_nccl_gives_the_bits_that_threads_give, one_rank_alone_gets_from_nccl_what_it_gets_without,
    tensors_give_the_bits_of_their_values_and_keep_their_own, values, values_of_tensors_are_never_copied_to_the_host,
};
use plans::plans_count_what_nccl_needs_on_a_card;

mod gathers;
mod operations;
mod plans;

/// Says that a process is a test's own.
const INNER: &str = "FIREBRICK_TEST_OF_NCCL";
const DEVICES: &str = "STAND_IN_DEVICES";
const FAULT: &str = "STAND_IN_NCCL";
const RECORD: &str = "STAND_IN_RECORD";
const REFUSE: &str = "STAND_IN_REFUSE";
/// Refuses no allocation, and says in the end how many were asked for.
const COUNT: &str = "1000000000:1";

const TINY: &str = "
model:
  arch: {model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2,
         num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 32}
task: {kind: arithmetic, difficulty: 1, partial: true, validation_size: 5}
output: run
device: cuda
rollout: {n: 4, prompt_length: 6, response_length: 4, pack_weights: false}
update: {ppo_mini_batch_size: 2}
optim: {lr: 1e-2}
trainer: {steps: 2, train_batch_size: 4, seed: 5}
";

mod cuda {
    use super::{Nccl, gpu, report};

    macro_rules! tests {
        ($($test:ident),* $(,)?) => {$(
            #[test]
            fn $test() {
                super::alone(stringify!($test), super::$test);
            }
        )*};
    }

    tests!(
        at_twenty_lengths_nccl_gives_the_bits_that_threads_give,
        tensors_give_the_bits_of_their_values_and_keep_their_own,
        values_of_tensors_are_never_copied_to_the_host,
        weights_that_ranks_share_out_stay_on_the_cards,
        plans_count_what_nccl_needs_on_a_card,
        a_run_over_nccl_learns_to_the_bit_what_it_learns_through_host_memory,
        what_goes_wrong_in_nccl_ends_all_ranks_and_names_the_one,
        a_rank_that_never_comes_to_an_operation_is_waited_for_until_the_deadline,
        memory_that_runs_out_before_an_operation_is_every_ranks_failure_and_the_group_continues,
        ranks_that_cannot_use_nccl_say_why_and_a_run_that_asks_for_it_is_refused,
    );

    #[test]
    fn one_rank_alone_gets_from_nccl_what_it_gets_without() {
        if let Some((_, _alone)) = gpu("cuda") {
            match Nccl::installation() {
                Ok(_) => super::one_rank_alone_gets_from_nccl_what_it_gets_without(),
                Err(why) => report(&format!("not checked: {why}")),
            }
        }
    }
}

/// Runs a test in a process of its own, on two cards of the stand-in.
fn alone(test: &str, body: fn(&str)) {
    if std::env::var_os(INNER).is_some() {
        body(test);
    } else if let Some((_, _alone)) = gpu("cuda")
        && is_stand_in()
    {
        let said = again(test, &[]);
        report(said.trim());
    }
}

/// Runs a test of this file again; gives what it wrote to stderr.
fn again(test: &str, settings: &[(&str, &str)]) -> String {
    let program = std::env::current_exe().expect("this test's program");
    let mut command = Command::new(program);
    command.args([&format!("devices::nccl::cuda::{test}"), "--exact", "--nocapture"]);
    for setting in [FAULT, REFUSE, RECORD] {
        command.env_remove(setting);
    }
    command.env(INNER, test).env(DEVICES, "2");
    command.envs(settings.iter().copied());
    let output = command.output().expect("the test's program runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let passed = output.status.success() && said.contains("1 passed");
    assert!(passed, "{test}, {settings:?}:\n{said}\n{errors}");
    errors
}

/// Whether this process was started for one of the things that a test does in several processes.
fn is(part: &str) -> bool {
    std::env::var("FIREBRICK_TEST_PART").is_ok_and(|own| own == part)
}

fn in_part(test: &str, part: &str, settings: &[(&str, &str)]) -> String {
    again(test, &[&[("FIREBRICK_TEST_PART", part)], settings].concat())
}

fn settings() -> Settings {
    Settings { deadline: Duration::from_mins(1), frame: 1 << 12 }
}

fn card(index: usize) -> Device {
    open(format!("cuda:{index}").parse().expect("a name")).expect("a card").0
}

/// The ranks of a world over NCCL, each with a card of its own, or why not.
fn joined(rank: &Arc<dyn Collective>, card: usize) -> Result<Result<Arc<dyn Collective>, String>, CollectiveError> {
    Nccl::join(rank, &self::card(card))
}

/// What each rank of a world makes of `work` over NCCL.
fn over_nccl<T: Send>(size: usize, settings: Settings, work: impl Fn(&dyn Collective) -> T + Sync) -> Vec<T> {
    let ranks = Threads::run(size, settings, |rank| {
        let card = rank.rank();
        let nccl = joined(&rank, card).unwrap_or_else(|error| panic!("{error}"));
        work(nccl.unwrap_or_else(|why| panic!("{why}")).as_ref())
    });
    let ranks = ranks.into_iter();
    ranks.map(|rank| rank.unwrap_or_else(|panic| panic!("{panic}"))).collect()
}

/// What a rank has learnt: its weights' bits, its metrics', and what it sent.
type Learnt = (BTreeMap<String, Vec<u64>>, Traffic);

fn run(config: &RunConfig, rank: &Arc<dyn Collective>, backend: &str) -> firebrick::Result<Learnt> {
    let mut config = config.clone();
    config.device = format!("cuda:{}", rank.rank()).parse().expect("a name");
    config.trainer.ddp_backend = serde_json::from_value(backend.into()).expect("a backend");
    config.output = config.output.join(backend);
    let builder = Trainer::builder(config).world(Arc::clone(rank));
    let mut trainer = builder.build()?;
    trainer.run()?;
    let policy = trainer.whole_policy()?;
    let weights = policy.params().map(|(spec, value)| {
        let values = value.download().expect("weights").to_f64();
        (spec.name.clone(), values.into_iter().map(f64::to_bits).collect())
    });
    Ok((weights.collect(), rank.traffic()))
}

fn config(folder: &Path, overrides: &[&str]) -> RunConfig {
    let overrides: Vec<String> = overrides.iter().map(|o| (*o).to_owned()).collect();
    let mut config = parse(TINY, &overrides).expect("a configuration");
    folder.clone_into(&mut config.output);
    config
}

fn a_run_over_nccl_learns_to_the_bit_what_it_learns_through_host_memory(_: &str) {
    let folders = tempfile::tempdir().expect("a folder");
    let checkpointed = "memory.gradient_checkpointing=true";
    let cases: [(&str, &[&str]); 7] = [
        ("data parallel", &[]),
        ("zero 1", &["memory.zero_stage=1"]),
        ("zero 3", &["memory.zero_stage=3", checkpointed]),
        (
            "zero 3 with gathers ahead and shards that stay",
            &["memory.zero_stage=3", checkpointed, "memory.prefetch=2", "memory.reshard_after_forward=false"],
        ),
        ("tensor 2", &["memory.tensor_model_parallel_size=2"]),
        ("tensor 2 in sampling", &["rollout.tensor_model_parallel_size=2"]),
        ("ulysses 2", &["memory.ulysses_sequence_parallel_size=2"]),
    ];
    let mut count = 0;
    for (name, overrides) in cases {
        let config = config(&folders.path().join(name), overrides);
        let [nccl, host] = ["nccl", "mpi"].map(|backend| {
            let ranks = Threads::run(2, settings(), |rank| {
                run(&config, &rank, backend).unwrap_or_else(|error| panic!("{name}: {error}"))
            });
            let ranks = ranks.into_iter().map(|rank| rank.unwrap_or_else(|panic| panic!("{panic}")));
            ranks.collect::<Vec<Learnt>>()
        });
        assert!(nccl[0].0 == nccl[1].0, "{name}");
        for rank in 0..2 {
            assert!(nccl[rank].0 == host[rank].0, "{name}: weights of rank {rank}");
        }
        for kind in OperationKind::ALL {
            let sent = |learnt: &Learnt| (learnt.1.operations[kind as usize], learnt.1.bytes[kind as usize]);
            // that NCCL is agreed on, and its id, are exchanged
            if kind != OperationKind::Exchange {
                assert_eq!(sent(&nccl[0]), sent(&host[0]), "{name}: {}", kind.name());
            }
        }
        count += 1;
    }
    checked("runs over NCCL", count);
}

/// What each rank is told where they sum until one fails.
fn sums_until_an_error(seconds: u64) -> Vec<(usize, CollectiveError)> {
    let deadline = Duration::from_secs(seconds);
    let settings = Settings { deadline, ..settings() };
    let ranks = Threads::run(2, settings, |rank| {
        let own = rank.rank();
        let failed = (|| loop {
            let nccl = joined(&rank, own)?.unwrap_or_else(|why| panic!("{why}"));
            for _ in 0..4 {
                let sum = nccl.all_reduce(values(Element::F32, own, 100))?;
                assert_eq!(sum.len(), 100);
            }
        })();
        let failed: Result<(), CollectiveError> = failed;
        (own, failed.expect_err("an error"))
    });
    ranks.into_iter().map(|rank| rank.unwrap_or_else(|panic| panic!("{panic}"))).collect()
}

fn what_goes_wrong_in_nccl_ends_all_ranks_and_names_the_one(test: &str) {
    // an all-reduce is two operations of NCCL's
    let cases = [
        ("error:1:3", "rank 1: all_reduce of 100 f32 (operation", "Connection closed by remote peer"),
        ("refuse:0:2", "rank 0: all_reduce of 100 f32 (operation", "no channel is left"),
        ("init:1", "rank 1: joining a group over NCCL", "bootstrapInit: Connection refused"),
    ];
    if let Some((fault, who, why)) = cases.into_iter().find(|(fault, ..)| is(fault)) {
        for (rank, error) in sums_until_an_error(60) {
            let said = error.to_string();
            assert!(said.contains(who) && said.contains(why), "{fault}: rank {rank} is told: {said}");
        }
        return;
    }
    for (fault, ..) in cases {
        in_part(test, fault, &[(FAULT, fault)]);
    }
    checked("faults of NCCL", cases.len());
}

fn a_rank_that_never_comes_to_an_operation_is_waited_for_until_the_deadline(test: &str) {
    if !is("silent") {
        in_part(test, "silent", &[(FAULT, "silent:1:2")]);
        return;
    }
    let all = sums_until_an_error(2);
    let late = all.iter().filter(|(_, error)| {
        let said = error.to_string();
        said.contains("has not ended after 2 s") && said.contains("NCCL_DEBUG=INFO")
    });
    assert!(late.count() > 0, "{all:?}");
    for (rank, error) in &all {
        let told = matches!(error, CollectiveError::Nccl { .. } | CollectiveError::Lost { .. });
        assert!(told, "rank {rank}: {error}");
    }
}

fn memory_that_runs_out_before_an_operation_is_every_ranks_failure_and_the_group_continues(test: &str) {
    let first = |rank: &dyn Collective| {
        let small = rank.all_reduce(values(Element::F32, rank.rank(), 10)).expect("a sum");
        // the pages of small buffers have been asked for, those of large ones not
        assert_eq!(small.len(), 10);
    };
    if is("count") {
        over_nccl(2, settings(), first);
        return;
    }
    if is("refuse") {
        over_nccl(2, settings(), |rank| {
            first(rank);
            let large = rank.all_gather(values(Element::F32, rank.rank(), 10 << 20));
            let Err(error @ CollectiveError::Failed(_)) = large else {
                panic!("{:?}", large.map(|values| values.len()))
            };
            let failure = error.failure().expect("a failure");
            assert!(failure.out_of_memory && failure.memory().is_some(), "{error}");
            rank.agree(None).expect("the group continues");
            let own = vec![rank.rank() as u8];
            assert_eq!(rank.exchange(own).expect("exchanged").concat(), [0, 1]);
        });
        return;
    }
    let said = in_part(test, "count", &[(REFUSE, COUNT)]);
    let count = said.lines().find_map(|line| {
        let (count, _) = line.strip_prefix("stand-in: ")?.split_once(" allocations")?;
        count.parse::<u64>().ok()
    });
    let from = count.expect("a count of allocations") + 1;
    let refuse = format!("{from}:{}", 1_u64 << 40);
    in_part(test, "refuse", &[(REFUSE, &refuse)]);
}

fn ranks_that_cannot_use_nccl_say_why_and_a_run_that_asks_for_it_is_refused(test: &str) {
    let why = |cards: fn(usize) -> usize| {
        let ranks = Threads::run(2, settings(), |rank| {
            let answer = joined(&rank, cards(rank.rank())).expect("agreed");
            answer.map(|_| ()).expect_err("refused")
        });
        let ranks: Vec<String> = ranks.into_iter().map(|rank| rank.expect("a rank")).collect();
        assert_eq!(ranks[0], ranks[1]);
        ranks[0].clone()
    };
    if is("old") {
        let said = why(|rank| rank);
        assert!(said.contains("NCCL 2.10.3 is too old"), "{said}");
        return;
    }
    if is("none") {
        let said = why(|rank| rank);
        for words in ["libnccl.so.2", "apt-get install libnccl2", "LD_LIBRARY_PATH"] {
            assert!(said.contains(words), "{said}");
        }
        let folder = tempfile::tempdir().expect("a folder");
        for (backend, refused) in [("nccl", true), ("auto", false)] {
            let config = config(folder.path(), &["trainer.steps=1"]);
            let ranks =
                Threads::run(2, settings(), |rank| run(&config, &rank, backend).map(|_| ()).map_err(|e| e.to_string()));
            for rank in ranks {
                let ended = rank.expect("a rank");
                assert_eq!(ended.is_err(), refused, "{backend}: {ended:?}");
                if let Err(said) = ended {
                    assert!(said.contains("trainer.ddp_backend: nccl is unavailable"), "{said}");
                }
            }
        }
        return;
    }
    let said = why(|_| 0);
    assert!(said.contains("ranks 0 and 1 have the same GPU"), "{said}");
    in_part(test, "old", &[(FAULT, "version:21003")]);
    let libraries = std::env::var("LD_LIBRARY_PATH").expect("the stand-in's folders");
    let without: Vec<&str> = libraries.split(':').filter(|folder| !folder.ends_with("/nccl")).collect();
    in_part(test, "none", &[("LD_LIBRARY_PATH", &without.join(":"))]);
}
