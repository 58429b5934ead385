//! Gradients of an optimizer step of a small decoder on the CPU, for sequences of different lengths.
//!
//! `cargo bench --no-default-features --bench step [-- FILTER]`

#[path = "support/allocator.rs"]
mod allocator;
#[path = "support/settings.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod settings;
#[path = "support/workload.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod workload;

use criterion::{Criterion, SamplingMode, Throughput};
use firebrick::backends::allocation_trace::{AllocationTrace, TraceSource};
use firebrick::engine::batch::Batch;
use firebrick::engine::executor::{Boundary, BoundaryKind, BoundaryLog, Executor, Gradients, Runtime};
use firebrick::engine::learner::train_cut;
use firebrick::engine::objective::sft::Nll;
use firebrick::engine::plan::MemoryConfig;
use workload::{VOCAB, sequences, word_problems};

/// Allocations that are traced, of which a pass makes some thousand.
const TRACED: usize = 100_000;

/// What is recorded beside the work.
#[derive(Clone, Copy)]
enum Recorded {
    Nothing,
    Timeline,
    TimelineAndTrace,
}

/// Forward and backward over 16 word problems, with all activations kept and with every layer recomputed: as they are,
/// with a row of the memory timeline at every boundary (the program always has one), and with a trace of allocations
/// too (`memory.trace`).
fn gradients(c: &mut Criterion) {
    let mut decoder = workload::small();
    let sequences = sequences(word_problems(16), VOCAB);
    let tokens: usize = sequences.iter().map(|s| s.tokens.len()).sum();
    let memory = MemoryConfig { train_tokens: 4096, ..MemoryConfig::default() };
    let plans = [
        ("plain", memory.clone()),
        ("every layer checkpointed", MemoryConfig { gradient_checkpointing: true, ..memory }),
    ]
    .map(|(name, memory)| (name, memory.plan(decoder.arch()).expect("a plan")));
    let recorded = [
        ("", Recorded::Nothing),
        (", timeline", Recorded::Timeline),
        (", timeline and trace", Recorded::TimelineAndTrace),
    ];
    let mut group = c.benchmark_group("step/gradients");
    group.sampling_mode(SamplingMode::Flat);
    group.throughput(Throughput::Elements(tokens as u64));
    for (name, plan) in plans {
        let cut = train_cut(&plan, &decoder);
        for (with, recorded) in recorded {
            group.bench_function(format!("{name}{with}"), |b| {
                let runtime = recording(Runtime::new(decoder.device()), recorded);
                b.iter(|| {
                    let batch = Batch::pack(&sequences, cut).expect("micro-batches");
                    let mut gradients = Gradients::planned(decoder.specs().count(), &plan, &runtime);
                    Executor::new(&plan, &runtime, 1.0)
                        .backward(&mut decoder, &batch.micros(), &Nll, &mut gradients, None)
                        .expect("a backward pass");
                    gradients
                });
            });
        }
    }
    group.finish();
}

/// A row of the timeline by itself: a reading of the memory, and what is noted of it. A pass over the 16 problems takes
/// one at each of its boundaries.
fn timeline(c: &mut Criterion) {
    let decoder = workload::small();
    let runtime = recording(Runtime::new(decoder.device()), Recorded::Timeline);
    let mut group = c.benchmark_group("step/timeline");
    group.bench_function("a row", |b| {
        b.iter(|| runtime.record(Boundary::at(BoundaryKind::Forward, 1)));
    });
    group.finish();
}

fn recording(runtime: Runtime, recorded: Recorded) -> Runtime {
    let trace = match recorded {
        Recorded::Nothing => return runtime,
        Recorded::Timeline => None,
        Recorded::TimelineAndTrace => Some(AllocationTrace::start(TraceSource::Heap, TRACED)),
    };
    let log = BoundaryLog::new(&runtime.accounts, trace);
    log.begin_step(1, false);
    log.begin_phase(1, "update_actor", None);
    runtime.with_log(log)
}

fn main() {
    allocator::as_in_the_program();
    let mut criterion = settings::criterion();
    gradients(&mut criterion);
    timeline(&mut criterion);
    criterion.final_summary();
}
