//! Predicted and counted bytes of a rank that shares sequences with another one.

use crate::cases::llama;
use crate::measure::{Case, Plans, error, rows};
use crate::own_process::in_own_process;
use crate::{SCRATCH, mib};
use serde_json::{Value, json};
use std::io::Write;

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
        for phase in &row.phases {
            let apart = error(phase.predicted, phase.measured);
            let line = format!(
                "memory: {}, {}: {} predicted {:.1} MiB ({}), counted {:.1} MiB, {:+.1} %",
                row.case,
                row.plan,
                phase.name,
                mib(phase.predicted),
                phase.moment,
                mib(phase.measured),
                100.0 * apart
            );
            writeln!(std::io::stderr(), "{line}").expect("writing to stderr");
            let allowed = TOLERANCE * phase.measured as f64 + SCRATCH as f64;
            if phase.predicted.abs_diff(phase.measured) as f64 > allowed {
                off.push(line);
            }
        }
    });
    assert!(plans >= 4, "only {plans} plans");
    assert!(off.is_empty(), "{}", off.join("\n"));
}
