use crate::estimate::{
    Axis, Estimate, EstimatePhase, MessageKind, Parallel, Sizes, Workload, Zero, estimate, estimate_parallel,
    estimate_stages,
};
use crate::test_support::device;
use crate::{MemoryConfig, Plan};
use firebrick_arch::{Arch, PipelineStage};
use firebrick_spec::{Backend, Category};
use serde_json::{Value, json};
use std::path::Path;

fn arch(tied: bool) -> Arch {
    with_vocabulary(512, tied)
}

fn with_vocabulary(vocab: usize, tied: bool) -> Arch {
    let Value::Object(config) = json!({
        "model_type": "llama", "vocab_size": vocab, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 10, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied
    }) else {
        unreachable!("an object")
    };
    Arch::from_config(&config, Path::new("test")).expect("an architecture")
}

/// 16 sequences of 512 tokens, one a micro-batch.
fn workload(tied: bool) -> Workload {
    Workload::grpo(arch(tied), [256, 256], 4, 4)
}

fn checkpointed() -> MemoryConfig {
    MemoryConfig { gradient_checkpointing: true, train_tokens: 512, score_tokens: 512, ..MemoryConfig::default() }
}

fn plan(workload: &Workload) -> Plan {
    let plan = checkpointed().plans(&workload.arch, workload.reference, None, 16);
    plan.expect("a plan")
}

fn in_stages(pipeline: u64) -> Parallel {
    Parallel { pipeline, ..Parallel::default() }
}

fn stage_estimates(workload: &Workload, parallel: &Parallel) -> Vec<Estimate> {
    let profile = device(Backend::Cuda);
    estimate_stages(workload, &plan(workload), &profile, parallel)
}

fn held(estimate: &Estimate, phase: EstimatePhase, category: Category) -> u64 {
    estimate.phase(phase).expect("a phase").categories.get(&category).copied().unwrap_or(0)
}

#[test]
fn stages_have_all_parameters_between_them_and_tied_ends_twice() {
    for tied in [false, true] {
        let arch = arch(tied);
        let whole = Sizes::new(&arch, None);
        for stages in [1, 2, 3, 7, 10] {
            let stage_sizes = (0..stages).map(|stage| {
                let stage = PipelineStage::new(stage, stages);
                Sizes::for_stage(&arch, None, Some(stage))
            });
            let stage_sizes: Vec<Sizes> = stage_sizes.collect();
            let sum = |of: fn(&Sizes) -> u64| stage_sizes.iter().map(of).sum::<u64>();
            let twice = if tied && stages > 1 { whole.embedding } else { 0 };
            assert_eq!(sum(Sizes::total), whole.total() + twice);
            assert_eq!(sum(|sizes| sizes.layers), whole.layers);
            assert_eq!(sum(|sizes| sizes.projection), whole.projection);
            assert_eq!(stage_sizes[stages - 1].is_tied(), tied);
        }
    }
}

#[test]
fn a_stage_holds_its_layers_state_in_passes_and_the_whole_policy_while_it_samples() {
    let workload = workload(false);
    let alone = estimate(&workload, &plan(&workload), &device(Backend::Cuda));
    let stages = stage_estimates(&workload, &in_stages(5));
    for (category, phase) in [
        (Category::Parameters, EstimatePhase::Backward),
        (Category::Moments, EstimatePhase::Optimizer),
        (Category::Gradients, EstimatePhase::Optimizer),
    ] {
        let parts = stages.iter().map(|stage| held(stage, phase, category));
        assert_eq!(parts.sum::<u64>(), held(&alone, phase, category), "{phase}");
    }
    let parameters = |estimate, phase| held(estimate, phase, Category::Parameters);
    let whole = parameters(&alone, EstimatePhase::Backward);
    for stage in &stages {
        assert_eq!(parameters(stage, EstimatePhase::Rollout), whole);
        let bytes = parameters(stage, EstimatePhase::Backward);
        assert_eq!(parameters(stage, EstimatePhase::Save), bytes);
        // a unit is whole before what is another stage's is let go
        let read = parameters(stage, EstimatePhase::Load);
        assert!(bytes < read && read < whole, "{bytes} {read} {whole}");
    }
}

#[test]
fn a_stage_keeps_inputs_of_as_many_micro_batches_as_there_are_stages_from_it_on() {
    let workload = workload(false);
    let kept = |estimate: &Estimate| held(estimate, EstimatePhase::Backward, Category::KeptInputs);
    let row = 4 * 512 * 128;
    // in the last layer's backward, whose own input is still there
    let alone = kept(&estimate(&workload, &plan(&workload), &device(Backend::Cuda)));
    assert_eq!(alone, 10 * row);
    let kept: Vec<u64> = stage_estimates(&workload, &in_stages(5)).iter().map(kept).collect();
    assert_eq!(kept, [5, 4, 3, 2, 1].map(|in_flight| in_flight * 2 * row));
    // and no more than there are micro-batches; gradients are elsewhere, so that the first backward pass has the peak
    let few = Workload::grpo(arch(false), [256, 256], 1, 2);
    let memory = MemoryConfig { grad_offload: true, ..checkpointed() };
    let plan = memory.plans(&few.arch, false, None, 2).expect("a plan");
    let profile = device(Backend::Cuda);
    let first = estimate_stages(&few, &plan, &profile, &in_stages(5)).swap_remove(0);
    let kept = held(&first, EstimatePhase::Backward, Category::KeptInputs);
    assert_eq!(kept, 2 * 2 * row);
}

#[test]
fn the_head_is_on_the_last_stage_alone() {
    let arch = with_vocabulary(32_768, true);
    let workload = Workload::grpo(arch, [256, 256], 4, 4);
    let stages = stage_estimates(&workload, &in_stages(4));
    for (place, stage) in stages.iter().enumerate() {
        let logits = held(stage, EstimatePhase::Score, Category::Head);
        assert_eq!(logits > 0, place == 3, "{place}");
        let is_named = stage.phases.iter().all(|phase| phase.stage == Some(place));
        assert!(is_named);
    }
}

#[test]
fn an_estimate_is_that_of_the_stage_that_binds_whichever_stages_are_alike() {
    for (tied, pipeline) in [(false, 2), (true, 2), (false, 4), (true, 10)] {
        let workload = workload(tied);
        let parallel = in_stages(pipeline);
        let profile = device(Backend::Cuda);
        let slowest = estimate_parallel(&workload, &plan(&workload), &profile, &parallel);
        let stages = stage_estimates(&workload, &parallel);
        assert_eq!(stages.len() as u64, pipeline);
        let most = |of: fn(&Estimate) -> u64| stages.iter().map(of).max();
        assert_eq!(Some(slowest.peak_bytes), most(|estimate| estimate.peak_bytes));
        assert_eq!(Some(slowest.host_peak_bytes), most(|estimate| estimate.host_peak_bytes));
        for phase in &slowest.phases {
            let place = phase.stage.expect("a stage");
            let stage_phase = stages[place].phase(phase.name).expect("a phase");
            assert_eq!(phase.total_bytes, stage_phase.total_bytes, "{}", phase.name);
            let theirs = stages.iter().filter_map(|estimate| estimate.phase(phase.name));
            assert_eq!(Some(phase.total_bytes), theirs.map(|phase| phase.total_bytes).max());
        }
        for seconds in &slowest.seconds.by_phase() {
            let each = stages.iter().map(|estimate| estimate.seconds.by_phase());
            let most = each.flatten().filter(|(phase, _)| *phase == seconds.0).map(|(_, s)| s).fold(0.0, f64::max);
            assert!((seconds.1 - most).abs() <= 1e-12 * most);
        }
    }
}

/// Messages and bytes of a kind and phase along the stages.
fn sent(estimate: &Estimate, kind: MessageKind, phase: EstimatePhase) -> [u64; 2] {
    let traffic = estimate.communication.iter();
    let selected = traffic.filter(|t| (t.kind, t.phase, t.along) == (kind, phase, Axis::Pipeline));
    selected.fold([0; 2], |[n, b], t| [n + t.messages, b + t.bytes])
}

#[test]
fn stages_send_rows_forward_gradients_back_and_their_units_before_sampling() {
    let (rows, micros) = (4 * 512 * 128, 16);
    for tied in [false, true] {
        let workload = workload(tied);
        let stages = stage_estimates(&workload, &in_stages(4));
        let send = |place: usize, phase| sent(&stages[place], MessageKind::Send, phase);
        let ends = u64::from(tied);
        let table = 4 * 512 * 128;
        for (place, directions) in [(0, 1), (1, 2), (2, 2), (3, 1)] {
            let tie = if place % 3 == 0 { ends } else { 0 };
            assert_eq!(
                send(place, EstimatePhase::Backward),
                [directions * micros + tie, directions * micros * rows + tie * table]
            );
        }
        // empty messages say that rows were taken
        assert_eq!(send(0, EstimatePhase::Score), [micros, micros * rows]);
        assert_eq!(send(1, EstimatePhase::Score), [2 * micros - 1, micros * rows]);
        assert_eq!(send(3, EstimatePhase::Score), [micros - 1, 0]);
        let whole = Sizes::new(&workload.arch, None);
        let gathered = stages.iter().map(|stage| sent(stage, MessageKind::Exchange, EstimatePhase::Rollout));
        let gathered: Vec<[u64; 2]> = gathered.collect();
        assert!(gathered.iter().all(|traffic| traffic[0] == 22));
        let bytes = gathered.iter().map(|traffic| traffic[1]).sum::<u64>();
        assert_eq!(bytes, 3 * whole.bytes());
    }
}

#[test]
fn replicas_of_a_stage_share_out_the_state_of_its_layers() {
    let workload = workload(false);
    let of = |zero| {
        let parallel = Parallel { data: 2, zero, ..in_stages(2) };
        stage_estimates(&workload, &parallel).swap_remove(0)
    };
    let [all, shared] =
        [Zero::Off, Zero::Stage1].map(|zero| held(&of(zero), EstimatePhase::Optimizer, Category::Moments));
    assert_eq!(shared, all / 2);
}
