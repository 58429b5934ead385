//! A critic whose sequences other devices share than the policy's.

use super::arch;
use crate::estimate::{Axis, CriticWork, EstimatePhase, MessageKind, Parallel, Workload, estimate_parallel};
use crate::test_support::device;
use crate::{Error, MemoryConfig, Zero};
use firebrick_arch::parameters::{chain, unit_specs};
use firebrick_spec::{Backend, Category};

fn workload() -> Workload {
    let policy = arch(500);
    Workload {
        critic: Some(CriticWork { arch: policy.clone().with_value_head(), clips: true, starts_from_policy: true }),
        ..Workload::grpo(policy, [256, 256], 8, 8)
    }
}

fn spread(data: u64, sequence: u64, critic_sequence: Option<u64>) -> Parallel {
    Parallel { data, sequence, critic_sequence, ..Parallel::default() }
}

/// All-to-alls and their bytes in the phases of the policy and in those of the critic, and the graph of each one's
/// backward pass.
fn sequence_traffic(parallel: Parallel) -> [(u64, u64, u64); 2] {
    let (workload, memory) = (workload(), MemoryConfig::default());
    let critic = workload.critic_arch();
    let plan = memory.plans(&workload.arch, false, critic, 8).expect("a plan");
    let estimate = estimate_parallel(&workload, &plan, &device(Backend::Cuda), &parallel);
    [[EstimatePhase::Score, EstimatePhase::Backward], [EstimatePhase::Values, EstimatePhase::CriticBackward]].map(
        |phases| {
            let sent = estimate.communication.iter().filter(|sent| {
                let along = (sent.kind, sent.along) == (MessageKind::AllToAll, Axis::Sequence);
                along && phases.contains(&sent.phase)
            });
            let (messages, bytes) = sent.fold((0, 0), |(n, b), sent| (n + sent.messages, b + sent.bytes));
            let backward = estimate.phases.iter().find(|phase| phase.name == phases[1]);
            let held = &backward.expect("a backward pass").categories;
            (messages, bytes, held[&Category::LiveGraph])
        },
    )
}

#[test]
fn messages_and_bytes_of_the_critic_go_by_its_own_degree_and_the_policys_by_its() {
    for (policy, critic) in [(1, 2), (2, 1), (2, 4), (4, 2)] {
        let usage = sequence_traffic(spread(4 / policy, policy, Some(critic)));
        let alike = |degree| sequence_traffic(spread(4 / degree, degree, None));
        assert_eq!(usage[0], alike(policy)[0], "{policy} and {critic}");
        assert_eq!(usage[1], alike(critic)[1], "{policy} and {critic}");
        assert_ne!(usage[1], alike(policy)[1], "{policy} and {critic}");
        assert_eq!(usage.map(|(messages, _, _)| messages > 0), [policy > 1, critic > 1]);
    }
}

#[test]
fn a_critics_degree_has_to_divide_devices_heads_and_work() {
    let refused = |parallel: Parallel| match parallel.check(&workload()) {
        Err(Error::Config(message)) => message,
        other => panic!("{other:?}"),
    };
    assert!(spread(2, 2, Some(4)).check(&workload()).is_ok());
    for (parallel, part) in [
        (spread(2, 2, Some(3)), "should divide the 4 devices"),
        (spread(2, 2, Some(0)), "should divide the 4 devices"),
        (spread(64, 2, Some(1)), "128 groups of devices are more than the 64 sequences"),
        (spread(64, 1, Some(64)), "the critic's 4 heads"),
    ] {
        let message = refused(parallel);
        assert!(message.contains(part), "{message}");
    }
}

/// A critic that starts from the policy takes a matrix of it at a time from all devices; one with a checkpoint of its
/// own is read in parts. Neither is ever whole where devices share weights out.
#[test]
fn a_critic_that_starts_from_the_policy_is_loaded_beside_one_gathered_matrix() {
    let memory = MemoryConfig { zero_stage: 3, gradient_checkpointing: true, ..MemoryConfig::default() };
    let parallel = Parallel { zero: Zero::Stage3, ..spread(8, 1, None) };
    let loading = |starts_from_policy| {
        let mut workload = workload();
        if let Some(critic) = &mut workload.critic {
            critic.starts_from_policy = starts_from_policy;
        }
        let critic = workload.critic_arch();
        let plan = memory.plans(&workload.arch, false, critic, 8).expect("a plan");
        let estimate = estimate_parallel(&workload, &plan, &device(Backend::Cuda), &parallel);
        let load = estimate.phase(EstimatePhase::Load).expect("loading").clone();
        let bytes = |category| load.categories.get(&category).copied().unwrap_or(0);
        let models = [Category::Parameters, Category::Critic].map(bytes);
        (models, load.host_bytes)
    };
    let ((models, host), (own_models, own_host)) = (loading(true), loading(false));
    assert_eq!(models, own_models);
    let arch = workload().arch;
    let specs = chain(&arch).into_iter().flat_map(|kind| unit_specs(&arch, kind));
    let largest = specs.map(|spec| 4 * spec.numel() as u64).max();
    assert_eq!(Some(host - own_host), largest);
}
