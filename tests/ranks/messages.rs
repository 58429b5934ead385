//! What the ranks of a whole run send in a step, beside what `plan.json` says that they do.

use super::config;
use burn::tensor::Device;
use firebrick_arch::Arch;
use firebrick_backends::accounts::Accounts;
use firebrick_backends::collective::{OperationKind, Settings, Threads, Traffic};
use firebrick_engine::executor::{Residency, ResidentModel, Runtime};
use firebrick_engine::learner::Learner;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::plan::estimate::{
    Axis, Estimate, EstimatePhase, MessageKind, Parallel, PhaseTraffic, Workload, estimate_stages,
};
use firebrick_engine::plan::planner::Request;
use firebrick_engine::plan::{MemoryConfig, PlanReport, Role, Zero};
use firebrick_engine::sequence::{Sequence, TokenColumns};
use firebrick_engine::trainer::Trainer;
use firebrick_engine::world::World;
use firebrick_models::Decoder;
use firebrick_models::random::DrawKey;
use firebrick_sampler::{GenerationRequest, Generator, SamplingParams};
use firebrick_spec::{Backend, DeviceProfile};
use std::collections::BTreeMap;
use std::path::Path;

const KINDS: [(MessageKind, OperationKind); 3] = [
    (MessageKind::AllReduce, OperationKind::AllReduce),
    (MessageKind::ReduceScatter, OperationKind::ReduceScatter),
    (MessageKind::AllGather, OperationKind::AllGather),
];

/// What the first rank of a run of so many steps sends, and what its plan says of one.
fn sent(folder: &Path, size: usize, steps: usize, overrides: &[&str]) -> (Traffic, PlanReport) {
    let own = format!("trainer.steps={steps}");
    let more = [
        "trainer.test_freq=0",
        "trainer.save_freq=0",
        "update.old_log_probs=trainer",
        // as many rounds as sequences a rank, however long they are
        "memory.micro_batch_size=1",
        &own,
    ];
    let config = config(folder, &[overrides, &more].concat());
    let ranks = Threads::run(size, Settings::default(), |rank| {
        let builder = Trainer::builder(config.clone()).world(rank.clone());
        let mut trainer = builder.build().unwrap();
        trainer.run().unwrap();
        let world = trainer.world();
        let groups = sum(world.parts_traffic(), world.sequence_traffic());
        sum(rank.traffic(), groups)
    });
    let text = std::fs::read_to_string(folder.join("plan.json")).unwrap();
    let first = ranks.into_iter().next().unwrap();
    (first.unwrap(), serde_json::from_str(&text).unwrap())
}

/// What was sent in two kinds of groups.
fn sum(mut all: Traffic, more: Traffic) -> Traffic {
    for kind in 0..OperationKind::COUNT {
        all.operations[kind] += more.operations[kind];
        all.bytes[kind] += more.bytes[kind];
    }
    all
}

/// Two ranks share every matrix, in training and while they sample.
const TENSOR: [&str; 2] = ["memory.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2"];

#[test]
fn a_step_of_two_and_of_four_ranks_sends_what_its_plan_says() {
    let folders = tempfile::tempdir().unwrap();
    let cases: [(&str, &[&str]); 9] = [
        ("zero 1", &["memory.zero_stage=1"]),
        ("zero 2", &["memory.zero_stage=2"]),
        ("zero 3", &["memory.zero_stage=3", "memory.gradient_checkpointing=true"]),
        ("zero 3 that keeps weights", &["memory.zero_stage=3", "memory.reshard_after_forward=false"]),
        (
            "zero 3 with a reference policy",
            &[
                "objective.kl_loss_coef=0.1",
                "update.old_log_probs=trainer",
                "memory.zero_stage=3",
                "memory.gradient_checkpointing=true",
            ],
        ),
        ("zero 3 with a critic", &["objective.name=ppo", "memory.zero_stage=3", "memory.gradient_checkpointing=true"]),
        ("matrices shared", &TENSOR),
        (
            "matrices shared, a norm of each head",
            &[
                TENSOR[0],
                TENSOR[1],
                "model.arch={model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, \
                 num_attention_heads: 4, num_key_value_heads: 2, head_dim: 4, max_position_embeddings: 32}",
                "memory.gradient_checkpointing=true",
            ],
        ),
        (
            "matrices shared, zero 3",
            &[TENSOR[0], TENSOR[1], "memory.zero_stage=3", "memory.gradient_checkpointing=true"],
        ),
    ];
    for (name, overrides) in cases {
        for size in [2, 4] {
            sends_what_its_plan_says(folders.path(), name, size, overrides);
        }
    }
}

/// Each rank judges what it sampled, so their rows are dealt out anew where all gather the judge's weights.
#[test]
fn ranks_that_share_out_a_reward_model_gather_it_as_often_as_their_plan_says() {
    let folders = tempfile::tempdir().unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let under = |path: &str| fixtures.join(path).display().to_string();
    let model = format!("model={{path: {}}}", under("models/qwen2-tied"));
    let task = format!(
        "task={{kind: jsonl, train: {}, validation: {}, limit: 64, messages: [{{role: user, content: '{{question}}'}}], \
         rewards: [{{kind: model, name: helpful, path: {}, input: chat, score_tokens: 4096}}]}}",
        under("gsm8k/train.jsonl"),
        under("gsm8k/test.jsonl"),
        under("reward_models/qwen2-chat"),
    );
    let overrides =
        [&*model, &*task, "rollout.prompt_length=160", "memory.zero_stage=3", "memory.gradient_checkpointing=true"];
    sends_what_its_plan_says(folders.path(), "zero 3 with a reward model", 2, &overrides);
}

/// A step of a run counts the messages and bytes that its plan predicts: what a run of three sends beyond one of two.
fn sends_what_its_plan_says(folders: &Path, name: &str, size: usize, overrides: &[&str]) {
    let of = |steps: usize| {
        let folder = folders.join(format!("{name} {size} {steps}"));
        sent(&folder, size, steps, overrides)
    };
    let ((two, _), (three, plan)) = (of(2), of(3));
    for (kind, own) in KINDS {
        // what groups send while they sample ends with the completions
        let sampled = |t: &PhaseTraffic| t.phase == EstimatePhase::Rollout && t.along == Axis::Tensor;
        let said = plan.communication.iter();
        let said = said.filter(|t| t.kind == kind && !sampled(t));
        let said = said.fold((0, 0), |(n, b), t| (n + t.messages, b + t.bytes));
        let at = own as usize;
        let counted = (three.operations[at] - two.operations[at], three.bytes[at] - two.bytes[at]);
        let label = format!("{} of {name}, {size} ranks", own.name());
        if overrides.contains(&TENSOR[0]) {
            // sums of activations are as long as sequences, which may end early
            assert_eq!(counted.0, said.0, "{label}");
            assert!(counted.1 <= said.1, "{label}: {counted:?} {said:?}");
            assert!(4 * counted.1 >= 3 * said.1, "{label}: {counted:?} {said:?}");
        } else {
            assert_eq!(counted, said, "{label}");
        }
    }
    assert!(!plan.communication.is_empty());
}

#[test]
fn ranks_that_share_sequences_exchange_as_often_as_their_plan_says_of_policy_and_critic() {
    let folders = tempfile::tempdir().unwrap();
    let heads = "model.arch={model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, \
                 num_attention_heads: 4, num_key_value_heads: 2, head_dim: 4, max_position_embeddings: 32}";
    for (size, policy, critic) in [(2, 2, 2), (2, 1, 2), (2, 2, 1), (4, 2, 4), (4, 1, 2)] {
        let degrees = [
            format!("memory.ulysses_sequence_parallel_size={policy}"),
            format!("critic.ulysses_sequence_parallel_size={critic}"),
        ];
        let overrides = [heads, "objective.name=ppo", &degrees[0], &degrees[1]];
        let of = |steps: usize| {
            let folder = format!("{size} {policy} {critic} {steps}");
            sent(&folders.path().join(folder), size, steps, &overrides)
        };
        let ((two, _), (three, plan)) = (of(2), of(3));
        let said = plan.communication.iter();
        let said = said.filter(|t| t.kind == MessageKind::AllToAll && t.along == Axis::Sequence);
        let said = said.fold((0, 0), |(n, b), t| (n + t.messages, b + t.bytes));
        let at = OperationKind::AllToAll as usize;
        let (times, bytes) = (three.operations[at] - two.operations[at], three.bytes[at] - two.bytes[at]);
        let label = format!("{size} ranks, {policy} share the policy's and {critic} the critic's");
        assert_eq!(times, said.0, "{label}");
        // sequences may end early, and a rank's part is padded to whole rows
        assert!(2 * bytes >= said.1 && 5 * bytes <= 6 * said.1, "{label}: {bytes} {said:?}");
        assert!(times > 0, "{label}");
    }
}

/// What the first rank of a group sends while it samples from weights that all ranks share out, and what an estimate
/// says of it.
#[test]
fn a_group_that_samples_sends_what_is_predicted() {
    let config = serde_json::json!({"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2});
    let arch = Arch::from_config(config.as_object().unwrap(), Path::new("config.json")).unwrap();
    let (prompt, response, prompts, group) = (6, 5, 4, 3);
    for size in [2, 4] {
        let memory = MemoryConfig { zero_stage: 3, gradient_checkpointing: true, ..MemoryConfig::default() };
        let plan = memory.plan(&arch).unwrap();
        let ranks = Threads::run(size, Settings::default(), |rank| {
            let world = World::new(rank).with_rollout_tensor_parallel(size).unwrap();
            let decoder = Decoder::random(arch.clone(), 1, &Device::flex());
            let accounts = Accounts::new();
            let model = ResidentModel::new(decoder, plan.clone(), Role::Policy, &accounts);
            let mut model = model.shared_by(&world);
            model.set_residency(Residency::Idle).unwrap();
            let before = world.traffic();
            let own = world.tensor_group().unwrap();
            let own = model.sampling_shard(&own, arch.precision).unwrap();
            let gathered = world.traffic();
            let sampling = SamplingParams { max_new_tokens: response, ..SamplingParams::default() };
            let requests: Vec<GenerationRequest> = (0..prompts as u32)
                .map(|i| GenerationRequest {
                    tokens: (0..prompt as u32).map(|t| (7 * i + t) % 64).collect(),
                    key: DrawKey { seed: 1, step: 0, prompt_index: i, sample: 0 },
                    max_new_tokens: None,
                })
                .collect();
            let generator = Generator::new(&own, None, &sampling).unwrap();
            generator.run(&requests, group, prompts * group).unwrap();
            let at = OperationKind::AllGather as usize;
            let weights = (gathered.operations[at] - before.operations[at], gathered.bytes[at] - before.bytes[at]);
            (weights, world.sampling_traffic())
        });
        let (weights, sent) = ranks.into_iter().next().unwrap().unwrap();
        let request = Request {
            workload: Workload {
                reference: false,
                ..Workload::grpo(arch.clone(), [prompt as u64, response as u64], prompts as u64, group as u64)
            },
            memory: memory.clone(),
            max_num_seqs: prompts * group,
            profile: DeviceProfile::assumed(Backend::Cpu),
            budget: None,
            host_budget: None,
            phase_limits: BTreeMap::new(),
            parallel: Parallel::default(),
            ranks: 1,
        };
        let parallel = Parallel {
            data: size as u64,
            zero: Zero::Stage3,
            rollout_tensor: Some(size as u64),
            ..Parallel::default()
        };
        let fit = request.spread(parallel).unwrap().as_configured().unwrap();
        let said = |kind: MessageKind, along: Axis| {
            let all = fit.estimate.communication.iter();
            let own = all.filter(|t| t.phase == EstimatePhase::Rollout && t.kind == kind && t.along == along);
            own.fold((0, 0), |(n, b), t| (n + t.messages, b + t.bytes))
        };
        let counted = |kind: OperationKind| (sent.operations[kind as usize], sent.bytes[kind as usize]);
        let label = format!("{size} ranks");
        assert_eq!(weights, said(MessageKind::AllGather, Axis::Data), "{label}");
        assert_eq!(counted(OperationKind::AllReduce), said(MessageKind::AllReduce, Axis::Tensor), "{label}");
        assert_eq!(counted(OperationKind::AllGather), said(MessageKind::AllGather, Axis::Tensor), "{label}");
    }
}

/// Sequences of one length, a micro-batch each.
fn sequences(count: usize, [prompt, response]: [usize; 2]) -> Vec<Sequence> {
    let sequence = |salt: usize| {
        let tokens: Vec<u32> = (0..prompt + response).map(|i| ((7 * i + 13 * salt) % 64) as u32).collect();
        let mut sequence = Sequence::completion(&tokens[..prompt], &tokens[prompt..]);
        sequence.columns = TokenColumns { weight: Some(vec![1e-2; response]), ..TokenColumns::default() };
        sequence
    };
    (0..count).map(sequence).collect()
}

/// What a rank of so many stages has sent: while it scored, updated, and made its model whole.
fn sent_by_a_stage(world: &World, arch: &Arch, memory: &MemoryConfig) -> [Traffic; 3] {
    let device = Device::flex();
    let stage = world.pipeline_stage().unwrap();
    let decoder = Decoder::random(arch.clone(), 1, &device);
    let decoder = decoder.with_stage(stage).unwrap();
    let runtime = Runtime::new(&device).with_world(world.clone());
    let plan = memory.plan(arch).unwrap();
    let mut learner = Learner::new(decoder, plan, OptimConfig::default(), runtime);
    learner.model.set_residency(Residency::Pass).unwrap();
    let sequences = sequences(8, [6, 5]);
    let mut before = world.parts_traffic();
    let mut since = || {
        let now = world.parts_traffic();
        let sent = Traffic {
            operations: std::array::from_fn(|k| now.operations[k] - before.operations[k]),
            bytes: std::array::from_fn(|k| now.bytes[k] - before.bytes[k]),
        };
        before = now;
        sent
    };
    learner.score(&sequences, 1.0).unwrap();
    let scored = since();
    learner.update(&sequences, 1.0, &Nll, 1e-3).unwrap();
    let updated = since();
    learner.model.make_whole().unwrap();
    [scored, updated, since()]
}

#[test]
fn stages_send_the_messages_and_bytes_that_are_predicted() {
    let cases = [
        (true, 2, 2, Zero::Off),
        (false, 2, 2, Zero::Off),
        (true, 4, 4, Zero::Off),
        (false, 4, 2, Zero::Off),
        (true, 4, 2, Zero::Stage1),
        (false, 4, 2, Zero::Stage1),
    ];
    for (tied, size, stages, zero) in cases {
        let config = serde_json::json!({"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
            "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied});
        let arch = config.as_object().unwrap();
        let arch = Arch::from_config(arch, Path::new("config.json")).unwrap();
        let memory = MemoryConfig {
            pipeline_model_parallel_size: stages,
            zero_stage: zero.number(),
            micro_batch_size: Some(1),
            ..MemoryConfig::default()
        };
        let ranks = Threads::run(size, Settings::default(), |rank| {
            let world = World::new(rank).with_pipeline_stages(stages).unwrap();
            let stage = world.pipeline_stage().unwrap().stage();
            (stage, sent_by_a_stage(&world, &arch, &memory))
        });
        let workload = Workload::grpo(arch.clone(), [6, 5], 8, 1);
        let plan = memory.plans(&arch, false, None, 8).unwrap();
        let parallel = Parallel { data: (size / stages) as u64, pipeline: stages as u64, zero, ..Parallel::default() };
        let profile = DeviceProfile::assumed(Backend::Cpu);
        let predicted = estimate_stages(&workload, &plan, &profile, &parallel);
        for rank in ranks {
            let (stage, [scored, updated, gathered]) = rank.unwrap();
            let said = |phases: &[EstimatePhase], kind| said(&predicted[stage], phases, kind);
            let label = format!("stage {stage} of {stages}, {size} ranks, tied {tied}, {zero:?}");
            let counted = |of: &Traffic, kind: OperationKind| [of.operations[kind as usize], of.bytes[kind as usize]];
            let send = (MessageKind::Send, OperationKind::Send);
            for (kind, own) in KINDS.into_iter().chain([send]) {
                let score = said(&[EstimatePhase::Score], kind);
                assert_eq!(counted(&scored, own), score, "{label}: {}", kind.name());
                let update = said(&[EstimatePhase::Backward, EstimatePhase::Optimizer], kind);
                assert_eq!(counted(&updated, own), update, "{label}: {}", kind.name());
            }
            // before the units each says which of the 12 it lacks, a byte each
            let [messages, bytes] = said(&[EstimatePhase::Rollout], MessageKind::Exchange);
            let flags = 12 * (stages - 1) as u64;
            assert_eq!(counted(&gathered, OperationKind::Exchange), [messages + 1, bytes + flags], "{label}");
        }
    }
}

/// Messages and bytes of a kind in some phases.
fn said(estimate: &Estimate, phases: &[EstimatePhase], kind: MessageKind) -> [u64; 2] {
    let all = estimate.communication.iter();
    let own = all.filter(|t| t.kind == kind && phases.contains(&t.phase));
    own.fold([0; 2], |[n, b], t| [n + t.messages, b + t.bytes])
}
