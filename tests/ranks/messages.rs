//! What the ranks of a whole run send in a step, beside what `plan.json` says that they do.

use super::config;
use firebrick_backends::collective::{OperationKind, Settings, Threads, Traffic};
use firebrick_engine::plan::PlanReport;
use firebrick_engine::plan::estimate::MessageKind;
use firebrick_engine::trainer::Trainer;
use std::path::Path;

const KINDS: [(MessageKind, OperationKind); 3] = [
    (MessageKind::AllReduce, OperationKind::AllReduce),
    (MessageKind::ReduceScatter, OperationKind::ReduceScatter),
    (MessageKind::AllGather, OperationKind::AllGather),
];

/// What the first rank of a run of so many steps sends, and what its plan says of one.
fn sent(folder: &Path, size: usize, steps: usize, overrides: &[&str]) -> (Traffic, PlanReport) {
    let own = format!("trainer.steps={steps}");
    let more = [
        "trainer.test_freq=0",
        "trainer.save_freq=0",
        "update.old_log_probs=trainer",
        // as many rounds as sequences a rank, however long they are
        "memory.micro_batch_size=1",
        &own,
    ];
    let config = config(folder, &[overrides, &more].concat());
    let ranks = Threads::run(size, Settings::default(), |rank| {
        let builder = Trainer::builder(config.clone()).world(rank.clone());
        builder.build().unwrap().run().unwrap();
        rank.traffic()
    });
    let text = std::fs::read_to_string(folder.join("plan.json")).unwrap();
    let first = ranks.into_iter().next().unwrap();
    (first.unwrap(), serde_json::from_str(&text).unwrap())
}

#[test]
fn a_step_of_two_and_of_four_ranks_sends_what_its_plan_says() {
    let folders = tempfile::tempdir().unwrap();
    let cases: [(&str, &[&str]); 5] = [
        ("zero 1", &["memory.zero_stage=1"]),
        ("zero 2", &["memory.zero_stage=2"]),
        (
            "zero 3",
            &["memory.zero_stage=3", "memory.gradient_checkpointing=true"],
        ),
        (
            "zero 3 that keeps weights",
            &["memory.zero_stage=3", "memory.reshard_after_forward=false"],
        ),
        (
            "zero 3 with a critic",
            &[
                "objective.name=ppo",
                "memory.zero_stage=3",
                "memory.gradient_checkpointing=true",
            ],
        ),
    ];
    for (name, overrides) in cases {
        for size in [2, 4] {
            let of = |steps: usize| {
                let folder = folders.path().join(format!("{name} {size} {steps}"));
                sent(&folder, size, steps, overrides)
            };
            // a step is what a run of three sends beyond one of two
            let ((two, _), (three, plan)) = (of(2), of(3));
            for (kind, own) in KINDS {
                let said = plan.communication.iter().filter(|t| t.kind == kind);
                let said = said.fold((0, 0), |(n, b), t| (n + t.messages, b + t.bytes));
                let at = own as usize;
                let counted = (
                    three.operations[at] - two.operations[at],
                    three.bytes[at] - two.bytes[at],
                );
                assert_eq!(counted, said, "{} of {name}, {size} ranks", own.name());
            }
            assert!(!plan.communication.is_empty());
        }
    }
}
