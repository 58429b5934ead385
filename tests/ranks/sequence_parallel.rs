//! Runs whose sequences ranks share (Ulysses), and what of that is refused.

use super::{EXPERTS, Ran, TINY, config, run, same_on_all, world};
use firebrick_backends::collective::{Settings, Threads};
use firebrick_engine::config::parse;
use firebrick_engine::trainer::Start;
use std::collections::BTreeMap;

const SHARED: &str = "memory.ulysses_sequence_parallel_size=2";

/// The metrics of the first update.
fn first(ran: &Ran) -> BTreeMap<String, u64> {
    let mut steps = ran.metrics.iter().cloned().map(BTreeMap::from_iter);
    let step = steps.find(|step| step.contains_key("actor/pg_loss"));
    step.expect("an update")
}

#[test]
fn runs_that_share_sequences_begin_as_one_rank_does_and_repeat_to_the_bit() {
    let folders = tempfile::tempdir().unwrap();
    let experts = [&EXPERTS[..], &["memory.zero_stage=2"]].concat();
    let cases: [(&str, usize, &[&str]); 5] = [
        ("grpo", 2, &[]),
        (
            "two groups, kl, weights shared out",
            4,
            &[
                "objective.kl_loss_coef=0.1",
                "update.old_log_probs=trainer",
                "memory.zero_stage=3",
                "memory.gradient_checkpointing=true",
            ],
        ),
        ("a critic", 2, &["objective.name=ppo"]),
        ("a loss of sequences", 2, &["objective.name=gspo", "memory.packing=padded"]),
        ("experts", 2, &experts),
    ];
    for (name, size, overrides) in cases {
        let config = |folder: &str, more: &[&str]| {
            let overrides = [overrides, more].concat();
            config(&folders.path().join(format!("{name} {folder}")), &overrides)
        };
        let alone = first(&world(1, &config("alone", &[]), Start::Fresh)[0]);
        let runs = ["a", "b"].map(|folder| world(size, &config(folder, &[SHARED]), Start::Fresh));
        same_on_all(&runs[0]);
        assert_eq!(runs[0], runs[1], "{name}: a rerun");
        let found = first(&runs[0][0]);
        for key in ["actor/pg_loss", "actor/grad_norm", "critic/rewards/mean"] {
            let [found, alone] = [&found, &alone].map(|step| f64::from_bits(step[key]));
            let near = (found - alone).abs() <= 1e-5 * alone.abs().max(1e-2);
            assert!(near, "{name}: {key} on {size} ranks: {found} instead of {alone}");
        }
    }
}

#[test]
fn a_critic_with_a_degree_of_its_own_begins_as_on_one_rank_and_repeats_to_the_bit() {
    const CRITIC: &str = "critic.ulysses_sequence_parallel_size";
    let folders = tempfile::tempdir().unwrap();
    let config = |folder: &str, more: &[&str]| {
        let overrides = [&["objective.name=ppo", "critic.warmup=0"], more].concat();
        config(&folders.path().join(folder), &overrides)
    };
    let alone = first(&world(1, &config("alone", &[]), Start::Fresh)[0]);
    for (size, policy, critic, zero) in [(2, 1, 2, 0), (2, 2, 1, 3), (4, 2, 1, 1), (4, 1, 2, 0)] {
        let label = format!("{size} ranks, {policy} and {critic}, ZeRO-{zero}");
        let degrees = [
            format!("memory.ulysses_sequence_parallel_size={policy}"),
            format!("{CRITIC}={critic}"),
            format!("memory.zero_stage={zero}"),
            format!("memory.gradient_checkpointing={}", zero == 3),
        ];
        let degrees = degrees.each_ref().map(String::as_str);
        let runs = ["a", "b"].map(|run| {
            let folder = format!("{label} {run}");
            world(size, &config(&folder, &degrees), Start::Fresh)
        });
        same_on_all(&runs[0]);
        assert_eq!(runs[0], runs[1], "{label}: a rerun");
        let found = first(&runs[0][0]);
        for key in ["actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "critic/values/mean"] {
            let [found, alone] = [&found, &alone].map(|step| f64::from_bits(step[key]));
            let near = (found - alone).abs() <= 5e-5 * alone.abs().max(1e-2);
            assert!(near, "{label}: {key}: {found} instead of {alone}");
        }
    }
}

#[test]
fn a_critics_degree_that_cannot_be_is_refused_before_anything_is_loaded() {
    let refused = |size, more: &[&str]| refused(size, &[&["objective.name=ppo"], more].concat());
    let own = |degree: usize| format!("critic.ulysses_sequence_parallel_size={degree}");
    let message = refused(3, &[&own(2)]);
    let key = "critic.ulysses_sequence_parallel_size is 2";
    assert!(message.contains(key) && message.contains("3 ranks"), "{message}");
    let message = refused(4, &[&own(4)]);
    let key = "critic.ulysses_sequence_parallel_size: 4";
    assert!(message.contains(key) && message.contains("the critic has 2 of them"), "{message}");
    for other in ["memory.tensor_model_parallel_size", "memory.pipeline_model_parallel_size"] {
        let message = refused(2, &[&own(2), &format!("{other}=2")]);
        let parts = ["critic.ulysses_sequence_parallel_size: 2", other, "to 1"];
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    let shared = ["objective.name=ppo".into(), own(2), "critic.shared_trunk=true".into()];
    let message = parse(TINY, &shared).unwrap_err().to_string();
    assert!(message.contains("critic.shared_trunk: true uses the policy's"), "{message}");
    let folders = tempfile::tempdir().unwrap();
    let two = own(2);
    let made = config(&folders.path().join("made"), &["objective.name=ppo", "memory.zero_stage=1", &two]);
    world(2, &made, Start::Fresh);
    let plan = format!("memory.plan={}", made.output.join("plan.json").display());
    let message = refused(2, &[&plan]);
    let set = "critic.ulysses_sequence_parallel_size is 1; set it to 2";
    assert!(message.contains("sequence 2 of the critic") && message.contains(set), "{message}");
}

/// What the first of so many ranks says of a run that is refused.
fn refused(size: usize, overrides: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let config = config(&folder.path().join("run"), overrides);
    let said = Threads::run(size, Settings::default(), |rank| {
        run(config.clone(), Start::Fresh, rank).unwrap_err().to_string()
    });
    said.into_iter().next().unwrap().unwrap()
}

#[test]
fn degrees_that_divide_neither_ranks_nor_heads_are_refused_before_anything_is_loaded() {
    let key = |degree: usize| format!("memory.ulysses_sequence_parallel_size={degree}");
    let message = refused(3, &[&key(2)]);
    assert!(message.contains("this run's 3 ranks"), "{message}");
    let message = refused(1, &[&key(2)]);
    assert!(message.contains("this run's 1 ranks"), "{message}");
    let message = refused(4, &[&key(4)]);
    assert!(message.contains("the policy has 2 of them"), "{message}");
    let balanced = [&EXPERTS[..], &[SHARED, "model.router_aux_loss_coef=0.01"]].concat();
    let message = refused(2, &balanced);
    assert!(message.contains("set model.router_aux_loss_coef to 0"), "{message}");
    let message = refused(2, &[SHARED, "memory.step_in_backward=true", "optim.clip_grad=null"]);
    assert!(message.contains("memory.step_in_backward"), "{message}");
}

#[test]
fn a_plan_for_ranks_that_share_sequences_runs_on_such_alone() {
    let folders = tempfile::tempdir().unwrap();
    let made = config(&folders.path().join("made"), &[SHARED, "memory.zero_stage=1"]);
    let ran = world(2, &made, Start::Fresh);
    let plan = format!("memory.plan={}", made.output.join("plan.json").display());
    let again = config(&folders.path().join("again"), &[&plan, SHARED]);
    assert!(world(2, &again, Start::Fresh)[1].weights == ran[0].weights);
    let message = refused(2, &[&plan]);
    assert!(
        message.contains("was made for 2 devices: sequence 2")
            && message.contains("memory.ulysses_sequence_parallel_size is 1; set it to 2"),
        "{message}"
    );
    let message = refused(4, &[&plan, SHARED]);
    assert!(message.contains("mpirun -n 2"), "{message}");
}
