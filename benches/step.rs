//! Gradients of an optimizer step of a small decoder on the CPU, for sequences of different lengths.
//!
//! `cargo bench --no-default-features --bench step [-- FILTER]`

#[path = "support/settings.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod settings;
#[path = "support/workload.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod workload;

use criterion::{Criterion, SamplingMode, Throughput};
use firebrick::engine::batch::Batch;
use firebrick::engine::executor::{Executor, Gradients, Runtime};
use firebrick::engine::learner::train_cut;
use firebrick::engine::objective::sft::Nll;
use firebrick::engine::plan::{MemoryConfig, ModelPlan};
use workload::{VOCAB, sequences, word_problems};

/// Forward and backward over 16 word problems, with all activations kept and with every layer recomputed.
fn gradients(c: &mut Criterion) {
    let mut decoder = workload::small();
    let sequences = sequences(word_problems(16), VOCAB);
    let tokens: usize = sequences.iter().map(|s| s.tokens.len()).sum();
    let runtime = Runtime::new(decoder.device());
    let memory = MemoryConfig {
        train_tokens: 4096,
        ..MemoryConfig::default()
    };
    let plans = [
        ("plain", ModelPlan::plain(decoder.arch(), &memory)),
        (
            "every layer checkpointed",
            ModelPlan::checkpoint_every(decoder.arch(), &memory, 1),
        ),
    ];
    let mut group = c.benchmark_group("step/gradients");
    group.sampling_mode(SamplingMode::Flat);
    group.throughput(Throughput::Elements(tokens as u64));
    for (name, plan) in plans {
        let cut = train_cut(&plan, decoder.arch());
        group.bench_function(name, |b| {
            b.iter(|| {
                let batch = Batch::pack(&sequences, cut).expect("micro-batches");
                let mut gradients = Gradients::new(decoder.specs().count());
                Executor::new(&plan, &runtime, 1.0)
                    .backward(&mut decoder, &batch.micros(), &Nll, &mut gradients, None)
                    .expect("a backward pass");
                gradients
            });
        });
    }
    group.finish();
}

fn main() {
    let mut criterion = settings::criterion();
    gradients(&mut criterion);
    criterion.final_summary();
}
