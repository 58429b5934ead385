//! Gradients over packed rows and over padded rows, on the CPU, for sequences of the lengths of two tasks.
//!
//! `cargo bench --no-default-features --bench packing [-- FILTER]`; it also prints each layout's padding and
//! micro-batches.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

#[path = "support/allocator.rs"]
mod allocator;
#[path = "support/settings.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod settings;
#[path = "support/workload.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod workload;

use criterion::{Criterion, SamplingMode, Throughput};
use firebrick::engine::batch::{Batch, grouping};
use firebrick::engine::executor::{Executor, Gradients, Runtime};
use firebrick::engine::learner::train_cut;
use firebrick::engine::objective::sft::Nll;
use firebrick::engine::plan::{MemoryConfig, ModelPlan, Packing};
use firebrick::engine::sequence::Sequence;
use firebrick::engine::world::World;
use firebrick::models::Decoder;
use firebrick::models::random::Stream;
use workload::{VOCAB, arithmetic, sequences, small, word_problems};

/// Packs the sequences and runs forward and backward over all micro-batches.
fn gradients(decoder: &mut Decoder, sequences: &[Sequence], plan: &ModelPlan, runtime: &Runtime) -> Gradients {
    let batch = Batch::pack(sequences, train_cut(plan, decoder)).expect("micro-batches");
    let mut gradients = Gradients::new(decoder.specs().count());
    Executor::new(plan, runtime, 1.0)
        .backward(decoder, &batch.micros(), &Nll, &mut gradients, None)
        .expect("a backward pass");
    gradients
}

/// Both layouts of one case, whose gradients have to agree.
fn compare(c: &mut Criterion, name: &str, decoder: &mut Decoder, sequences: &[Sequence], memory: &MemoryConfig) {
    let runtime = Runtime::new(decoder.device());
    let tokens: usize = sequences.iter().map(|s| s.tokens.len()).sum();
    let mut group = c.benchmark_group(format!("packing/{name}"));
    group.sampling_mode(SamplingMode::Flat);
    group.throughput(Throughput::Elements(tokens as u64));
    let mut first: Option<f64> = None;
    for (layout, packing) in [("padded", Packing::Padded), ("packed", Packing::Packed)] {
        let memory = MemoryConfig { packing, ..memory.clone() };
        let plan = memory.plan(decoder.arch()).expect("a plan");
        let batch = Batch::pack(sequences, train_cut(&plan, decoder)).expect("a batch");
        let stats = batch.stats(grouping(plan.attention_rows, decoder.device()));
        println!("{name}, {layout}: {:.1} % padding, {} micro-batches", 100.0 * stats.padding(), stats.micro_batches);
        let norm = gradients(decoder, sequences, &plan, &runtime).global_norm(&World::default());
        let norm = norm.expect("a norm");
        let expected = *first.get_or_insert(norm);
        assert!((norm / expected - 1.0).abs() < 1e-4, "{norm} and {expected}");
        group.bench_function(layout, |b| {
            b.iter(|| gradients(decoder, sequences, &plan, &runtime));
        });
    }
    group.finish();
}

fn main() {
    allocator::as_in_the_program();
    let mut criterion = settings::criterion();
    let c = &mut criterion;
    let budget = |train_tokens| MemoryConfig { train_tokens, ..MemoryConfig::default() };
    let mut model = arithmetic();
    let mut random = Stream::new(2, 0);
    let equal = sequences(std::iter::repeat_n(10, 768), 16);
    let spread = sequences((0..768).map(|_| 6 + random.below(15) as usize), 16);
    let whole = budget(16_384);
    compare(c, "arithmetic, 768 of 10", &mut model, &equal, &whole);
    compare(c, "arithmetic, 768 of 6 to 20", &mut model, &spread, &whole);
    let few = budget(1024);
    compare(c, "arithmetic, 768 of 6 to 20, 1024 at a time", &mut model, &spread, &few);

    let mut model = small();
    let words = sequences(word_problems(32), VOCAB);
    for train_tokens in [16_384, 4096, 1024] {
        let name = format!("word problems, {train_tokens} at a time");
        compare(c, &name, &mut model, &words, &budget(train_tokens));
    }
    let checkpointed = MemoryConfig { gradient_checkpointing: true, ..budget(4096) };
    compare(c, "word problems, 4096 at a time, checkpointed", &mut model, &words, &checkpointed);
    criterion.final_summary();
}
