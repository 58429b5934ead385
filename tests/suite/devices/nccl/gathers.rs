//! What a step with `ZeRO`'s third stage copies between cards and host, over NCCL and without it.

use super::{RECORD, config, in_part, is, settings};
use crate::support::checked;
use firebrick_backends::collective::Threads;
use firebrick_engine::metrics::{Event, Observer, Phase};
use firebrick_engine::trainer::Trainer;
use std::sync::{Arc, Mutex};

/// Larger than all of a step but shards of matrices: ids, columns, norms.
const LARGE: u64 = 8 << 10;

/// Calls on record when the second step's update began, and when the step ended.
#[derive(Clone, Default)]
struct Marks(Arc<Mutex<Vec<usize>>>);

fn record() -> String {
    let path = std::env::var(RECORD).expect("the outer process sets it");
    std::fs::read_to_string(path).expect("a record")
}

impl Observer for Marks {
    fn event(&mut self, event: Event<'_>) {
        let of_second =
            matches!(event, Event::Phase { step: 2, phase: Phase::UpdateActor } | Event::Step { step: 2, .. });
        if of_second {
            self.0.lock().expect("marks").push(record().lines().count());
        }
    }
}

/// Copies between cards and host of an update, of a matrix or more.
fn large_copies(backend: &str) -> usize {
    let folder = tempfile::tempdir().expect("a folder");
    let overrides = [
        "model.arch.hidden_size=64",
        "model.arch.intermediate_size=128",
        "model.arch.head_dim=32",
        "memory.zero_stage=3",
        "memory.gradient_checkpointing=true",
        "trainer.test_freq=0",
        "trainer.save_freq=-1",
    ];
    let config = config(folder.path(), &overrides);
    let marks = Marks::default();
    let ranks = Threads::run(2, settings(), |rank| {
        let mut config = config.clone();
        config.device = format!("cuda:{}", rank.rank()).parse().expect("a name");
        config.trainer.ddp_backend = serde_json::from_value(backend.into()).expect("a backend");
        let mut builder = Trainer::builder(config);
        if rank.rank() == 0 {
            builder = builder.observer(marks.clone());
        }
        let built = builder.world(rank).build();
        let ran = built.and_then(|mut trainer| trainer.run());
        ran.unwrap_or_else(|error| panic!("{backend}: {error}"));
    });
    for rank in ranks {
        rank.unwrap_or_else(|panic| panic!("{panic}"));
    }
    let marks = marks.0.lock().expect("marks").clone();
    let [from, until] = marks[..] else { panic!("{marks:?}") };
    let text = record();
    let calls = text.lines().skip(from).take(until - from);
    let copied = calls.filter(|line| {
        let mut words = line.split(' ');
        let host = matches!(words.next(), Some("up" | "down"));
        let bytes = words.next().and_then(|word| word.parse::<u64>().ok());
        host && bytes.is_some_and(|bytes| bytes >= LARGE)
    });
    copied.count()
}

pub(super) fn weights_that_ranks_share_out_stay_on_the_cards(test: &str) {
    for (backend, stays) in [("nccl", true), ("mpi", false)] {
        if is(backend) {
            let copies = large_copies(backend);
            assert_eq!(copies == 0, stays, "{backend}: {copies} copies");
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("record");
        in_part(test, backend, &[(RECORD, path.to_str().expect("a path"))]);
    }
    checked("backends that gather weights", 2);
}
