//! Predicted and counted bytes of a rank that shares sequences with another one.

use crate::cases::llama;
use crate::measure::{Case, Plans, rows};
use crate::own_process::in_own_process;
use crate::phases_off;
use serde_json::{Value, json};

/// How far a prediction may be from what was counted, as a share of the latter.
const TOLERANCE: f64 = 0.1;

in_own_process!(
    predictions_for_a_rank_that_shares_sequences_are_within_10_percent_of_what_is_counted,
);

/// Two ranks share the sequences of a model with three key heads, each of which goes twice.
fn shared_cases() -> Vec<(Case, Plans)> {
    let shared = |settings: Value| {
        let mut all = json!({"ulysses_sequence_parallel_size": 2, "head_rows": 64});
        if let (Value::Object(all), Value::Object(own)) = (&mut all, settings) {
            all.extend(own);
        }
        all
    };
    let plans = || {
        vec![
            ("sequence 2, plain", shared(json!({"attention_rows": 0}))),
            (
                "sequence 2, checkpoint_every 1",
                shared(json!({"gradient_checkpointing": true})),
            ),
        ]
    };
    let case = |name, lengths| Case::new(name, &llama(), lengths);
    vec![
        (case("llama, 26 M, 2 x 512 tokens", [256, 256, 2]), plans()),
        (
            case("llama, 26 M, 4 x 1,024 tokens", [512, 512, 4]),
            plans(),
        ),
    ]
}

fn predictions_for_a_rank_that_shares_sequences_are_within_10_percent_of_what_is_counted() {
    let (mut off, mut plans) = (Vec::new(), 0);
    rows(shared_cases(), |row| {
        plans += 1;
        off.extend(phases_off(row, TOLERANCE));
    });
    assert!(plans >= 4, "only {plans} plans");
    assert!(off.is_empty(), "{}", off.join("\n"));
}
