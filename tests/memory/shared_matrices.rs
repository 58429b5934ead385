//! Predicted and counted bytes of a rank that shares every matrix with another one.

use crate::measure::{Case, Plans, rows};
use crate::own_process::in_own_process;
use crate::{phases_off, sample};
use serde_json::{Value, json};

/// How far a prediction may be from what was counted, as a share of the latter.
const TOLERANCE: f64 = 0.1;

in_own_process!(predictions_for_a_rank_that_shares_matrices_are_within_10_percent_of_what_is_counted,);

fn llama(tied: bool) -> Value {
    json!({
        "model_type": "llama", "vocab_size": 32768, "hidden_size": 384, "intermediate_size": 1024,
        "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": 4096, "tie_word_embeddings": tied
    })
}

fn shared_cases() -> Vec<(Case, Plans)> {
    let shared = |settings: Value| {
        let mut all = json!({"tensor_model_parallel_size": 2, "head_rows": 64});
        if let (Value::Object(all), Value::Object(own)) = (&mut all, settings) {
            all.extend(own);
        }
        all
    };
    let plans = || {
        vec![
            ("tensor 2, plain", shared(json!({"attention_rows": 0}))),
            ("tensor 2, checkpoint_every 1", shared(json!({"gradient_checkpointing": true}))),
        ]
    };
    let case = |name, tied, lengths| Case::new(name, &llama(tied), lengths);
    vec![
        (case("llama, 26 M, 2 x 512 tokens", true, [256, 256, 2]), plans()),
        (case("llama, 38 M, 4 x 1,024 tokens", false, [512, 512, 4]), plans()),
    ]
}

fn predictions_for_a_rank_that_shares_matrices_are_within_10_percent_of_what_is_counted() {
    let (mut off, mut plans) = (Vec::new(), 0);
    rows(sample(shared_cases(), 3), |row| {
        plans += 1;
        off.extend(phases_off(row, TOLERANCE));
    });
    assert!(plans >= 2, "only {plans} plans");
    assert!(off.is_empty(), "{}", off.join("\n"));
}
