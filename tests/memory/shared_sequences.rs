//! Predicted and counted bytes of a rank that shares sequences with another one.

use crate::cases::llama;
use crate::measure::{Case, Plans, rows};
use crate::own_process::in_own_process;
use crate::{phases_off, sample};
use serde_json::{Value, json};

/// How far a prediction may be from what was counted, as a share of the latter.
const TOLERANCE: f64 = 0.1;

in_own_process!(predictions_for_a_rank_that_shares_sequences_are_within_10_percent_of_what_is_counted,);

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
            ("sequence 2, checkpoint_every 1", shared(json!({"gradient_checkpointing": true}))),
        ]
    };
    let case = |name, lengths| Case::new(name, &llama(), lengths);
    let critics = |ranks| {
        let case = case("llama, 26 M, and a critic, 4 x 512 tokens", [256, 256, 4]);
        case.criticised_by(ranks)
    };
    let alone = json!({"gradient_checkpointing": true, "head_rows": 64});
    vec![
        (critics(2), vec![("sequence 1, the critic's 2, checkpoint_every 1", alone)]),
        (
            critics(1),
            vec![("sequence 2, the critic's 1, checkpoint_every 1", shared(json!({"gradient_checkpointing": true})))],
        ),
        (case("llama, 26 M, 2 x 512 tokens", [256, 256, 2]), plans()),
        (case("llama, 26 M, 4 x 1,024 tokens", [512, 512, 4]), plans()),
    ]
}

fn predictions_for_a_rank_that_shares_sequences_are_within_10_percent_of_what_is_counted() {
    let (mut off, mut plans) = (Vec::new(), 0);
    rows(sample(shared_cases(), 3), |row| {
        plans += 1;
        off.extend(phases_off(row, TOLERANCE));
    });
    assert!(plans >= 2, "only {plans} plans");
    assert!(off.is_empty(), "{}", off.join("\n"));
}
