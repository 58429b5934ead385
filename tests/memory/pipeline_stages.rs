//! Predicted and counted bytes of a rank that has a stage of the layers.

use crate::measure::{Case, Plans, rows};
use crate::own_process::in_own_process;
use crate::{phases_off, sample};
use serde_json::{Value, json};

/// How far a prediction may be from what was counted, as a share of the latter.
const TOLERANCE: f64 = 0.1;

in_own_process!(predictions_for_a_rank_of_every_stage_are_within_10_percent_of_what_is_counted,);

fn llama(tied: bool) -> Value {
    json!({
        "model_type": "llama", "vocab_size": 32768, "hidden_size": 384, "intermediate_size": 1024,
        "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": 4096, "tie_word_embeddings": tied
    })
}

/// Settings of so many stages, a sequence a micro-batch.
fn stages(count: usize, settings: Value) -> Value {
    let mut all = json!({
        "pipeline_model_parallel_size": count, "head_rows": 64, "attention_rows": 0, "micro_batch_size": 1
    });
    if let (Value::Object(all), Value::Object(own)) = (&mut all, settings) {
        all.extend(own);
    }
    all
}

fn staged_cases() -> Vec<(Case, Plans)> {
    let case = |name, tied, lengths| Case::new(name, &llama(tied), lengths);
    vec![
        (
            case("llama, 26 M, tied, 4 x 512 tokens", true, [256, 256, 4]),
            vec![
                ("pipeline 2, plain", stages(2, json!({}))),
                ("pipeline 2, checkpoint_every 1", stages(2, json!({"gradient_checkpointing": true}))),
                ("pipeline 2, data 2, ZeRO-1, plain", stages(2, json!({"zero_stage": 1}))),
            ],
        ),
        (
            case("llama, 38 M, untied, 6 x 512 tokens", false, [256, 256, 6]),
            vec![
                (
                    "pipeline 2, inputs on the host",
                    stages(2, json!({"gradient_checkpointing": true, "activation_offload": true})),
                ),
                ("pipeline 4, plain", stages(4, json!({}))),
                (
                    "pipeline 2, data 2, ZeRO-1, checkpoint_every 1",
                    stages(2, json!({"zero_stage": 1, "gradient_checkpointing": true})),
                ),
            ],
        ),
        (
            case("llama, 38 M, with a critic, 4 x 512 tokens", false, [256, 256, 4]).criticised(),
            vec![
                (
                    "pipeline 2, checkpoint_every 2",
                    stages(2, json!({"gradient_checkpointing": true, "checkpoint_every": 2})),
                ),
                (
                    "pipeline 2, data 2, ZeRO-1, gradients on the host",
                    stages(2, json!({"zero_stage": 1, "gradient_checkpointing": true, "grad_offload": true})),
                ),
            ],
        ),
    ]
}

fn predictions_for_a_rank_of_every_stage_are_within_10_percent_of_what_is_counted() {
    let (mut off, mut ranks) = (Vec::new(), 0);
    rows(sample(staged_cases(), 3), |row| {
        ranks += 1;
        off.extend(phases_off(row, TOLERANCE));
    });
    assert!(ranks >= 6, "only {ranks} ranks");
    assert!(off.is_empty(), "{}", off.join("\n"));
}
