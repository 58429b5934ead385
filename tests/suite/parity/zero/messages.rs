//! What ranks send in an optimizer step beside what a plan says of it, to the byte.

use crate::support::checked;
use crate::support::fixtures;
use crate::support::model::Model;
use crate::support::techniques::Technique;
use crate::support::zero::{STAGES, UPDATES, on_ranks, rows, settings, with_adapters};
use firebrick_backends::collective::OperationKind;
use firebrick_engine::plan::Order;
use firebrick_engine::plan::estimate::messages::weights;
use firebrick_engine::plan::estimate::{Axis, MessageKind};

/// What a plan predicts, beside the trainer's words for it.
const KINDS: [(MessageKind, OperationKind); 5] = [
    (MessageKind::AllReduce, OperationKind::AllReduce),
    (MessageKind::ReduceScatter, OperationKind::ReduceScatter),
    (MessageKind::AllGather, OperationKind::AllGather),
    (MessageKind::AllToAll, OperationKind::AllToAll),
    (MessageKind::Send, OperationKind::Send),
];

const REPLICATED: Technique = ("no ZeRO", |_| {});

/// Compares them for a model under every stage, on two and four ranks.
fn compare(model: &Model) -> usize {
    let (rows, mut cases) = (rows(model), 0);
    for (stage, share_out) in [REPLICATED].into_iter().chain(STAGES) {
        for order in [Order::MicroMajor, Order::SegmentMajor] {
            let mut memory = settings(share_out);
            if order == Order::SegmentMajor && memory.zero_stage < 3 {
                continue;
            }
            memory.order = order;
            let plan = memory.plan(model.decoder.arch()).unwrap();
            for size in [2, 4] {
                let found = on_ranks(model, &rows, &memory, None, size).swap_remove(0);
                // without ZeRO nothing is exchanged in rounds
                let rounds = found.rounds.max(1) as u64;
                let expected =
                    weights::update_traffic(model.decoder.arch(), model.decoder.lora(), &plan, size as u64, rounds);
                for (kind, own) in KINDS {
                    let expected = expected.get(kind, Axis::Data);
                    let label = format!("{} of {}, {stage}, {order:?}, {size} ranks", own.name(), model.name);
                    assert_eq!(own.name(), kind.name());
                    let updates = UPDATES as u64;
                    assert_eq!(found.operations[own as usize], updates * expected.messages, "{label}");
                    assert_eq!(found.bytes[own as usize], updates * expected.bytes, "bytes: {label}");
                }
                cases += 1;
            }
        }
    }
    cases
}

#[test]
fn ranks_send_the_messages_and_bytes_that_a_plan_predicts() {
    let mut cases = 0;
    for name in ["llama-gqa", "qwen2-tied", "qwen3-moe"] {
        let model = || Model::load(&fixtures().join("models").join(name));
        cases += compare(&model());
        if name == "qwen2-tied" {
            cases += compare(&with_adapters(model()));
        }
    }
    checked("runs whose messages were predicted", cases);
}
