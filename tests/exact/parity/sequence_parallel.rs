//! Ranks that share the rows of every micro-batch (Ulysses) against one rank that has all of them, in f64.

use std::collections::BTreeMap;
use std::sync::Arc;

use firebrick_backends::collective::{Collective, Settings, Solo, Threads};
use firebrick_engine::executor::{HeadLoss, Residency, Runtime};
use firebrick_engine::learner::Learner;
use firebrick_engine::objective::value::ValueLoss;
use firebrick_engine::objective::{ObjectiveConfig, PolicyGradient};
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::plan::{MemoryConfig, Packing, Role};
use firebrick_engine::sequence::Sequence;
use firebrick_engine::world::World;
use firebrick_models::arch::Mixer;

use super::critic::critics;
use super::plans::{TEMPERATURE, TOLERANCE, models as with_rows, objective};
use crate::support::meshes::{SHARED_SEQUENCES, SharedSequences};
use crate::support::model::Model;
use crate::support::techniques::Technique;
use crate::support::zero::{
    TECHNIQUES, UPDATES, alone, assert_same, groups, on_ranks, own_share, packed, rows, settings, whole_weights,
    with_dropped_adapters,
};
use crate::support::{assert_close, assert_gradient, checked, folders};

/// The model with sinks.
const SINKS: &str = "gpt-oss";

/// How rows are cut and attended to, beside what state can be shared.
pub(super) const CUTS: [Technique; 3] = [
    ("padded rows", |m| m.packing = Packing::Padded),
    ("three queries at a time", |m| m.attention_rows = 3),
    ("a head of five rows", |m| m.head_rows = 5),
];

/// Whether all there is to compare is compared: `tests/campaigns/run zero`.
pub(super) fn is_campaign() -> bool {
    std::env::var("FIREBRICK_CAMPAIGN").is_ok_and(|name| name == "zero")
}

/// Models without linear attention, whose heads all degrees divide: CI takes one of grouped key heads, one with a
/// window and one key head, one with experts, and one with sinks; the campaign all.
fn models() -> Vec<Model> {
    let dirs = folders("models").into_iter();
    let dirs = dirs.filter(|dir| dir.join("golden/grads.safetensors").is_file());
    let models = dirs.map(|dir| Model::load(&dir)).filter(|model| {
        let arch = model.decoder.arch();
        let sample = ["llama-gqa", "mistral-window", "qwen3-moe", SINKS];
        let sample = sample.contains(&model.name.as_str());
        let local = is_campaign() && model.manifest.is_local();
        (local || sample) && arch.count(Mixer::GatedDeltaNet) == 0 && arch.num_heads.is_multiple_of(4)
    });
    let mut models: Vec<Model> = models.collect();
    // the first one is what single tests take
    models.sort_by_key(|model| model.name == SINKS);
    models
}

/// How many runs are as one rank's.
fn compare(model: &Model, name: &str, sample: &[&str]) -> usize {
    let rows = rows(model);
    let mut cases = 0;
    for (technique, turn_on) in TECHNIQUES.into_iter().chain(CUTS) {
        if !is_campaign() && !sample.contains(&technique) {
            continue;
        }
        let plain = packed(turn_on);
        let expected = alone(model, &rows, &plain, Some(1.0));
        for (ranks, size, share) in SHARED_SEQUENCES {
            let mut memory = plain.clone();
            share(&mut memory);
            let label = format!("{}{name}, {technique}, {ranks}", model.name);
            let found = on_ranks(model, &rows, &memory, Some(1.0), size);
            assert_same(&label, &memory, &found, &expected, TOLERANCE);
            cases += 1;
        }
    }
    cases
}

#[test]
fn ranks_that_share_sequences_train_what_one_rank_trains() {
    let mut cases = 0;
    for (i, model) in models().into_iter().enumerate() {
        let sample = [
            &["plain", "padded rows", "weights streamed, segment by segment"][..],
            &["inputs on the host", "three queries at a time"],
            &["plain", "a head of five rows"],
            &["plain", "padded rows"],
        ];
        cases += compare(&model, "", sample[i % sample.len()]);
        if i == 0 || is_campaign() {
            let adapted = with_dropped_adapters(model, 0.1);
            cases += compare(&adapted, " with adapters that drop inputs", &["plain"]);
        }
    }
    checked("runs that share sequences", cases);
}

#[test]
fn rows_that_are_fewer_than_the_ranks_are_shared_all_the_same() {
    let model = models().swap_remove(0);
    let mut one = rows(&model).swap_remove(0);
    one.tokens.truncate(3);
    one.positions = vec![0, 1];
    one.columns = one.columns.map(|column| column[..2].to_vec());
    let (one, memory) = ([one], packed(|_| {}));
    let expected = alone(&model, &one, &memory, None);
    for (ranks, size, share) in SHARED_SEQUENCES {
        let mut memory = memory.clone();
        share(&mut memory);
        let found = on_ranks(&model, &one, &memory, None, size);
        let label = format!("three tokens, {ranks}");
        assert_same(&label, &memory, &found, &expected, TOLERANCE);
    }
}

#[test]
fn a_rerun_on_ranks_that_share_sequences_is_the_same_to_the_bit() {
    let model = models().swap_remove(0);
    let rows = rows(&model);
    for (ranks, size, share) in SHARED_SEQUENCES {
        let mut memory = packed(|_| {});
        share(&mut memory);
        let [found, again] = [(); 2].map(|()| on_ranks(&model, &rows, &memory, None, size).swap_remove(0));
        assert!(found.weights == again.weights, "{ranks}");
        assert!(found.steps == again.steps, "{ranks}");
    }
}

#[test]
fn attention_takes_four_messages_and_six_where_it_is_recomputed() {
    let model = models().swap_remove(0);
    let (rows, arch) = (rows(&model), model.decoder.arch());
    for recomputed in [false, true] {
        for degree in [2, 4] {
            let mut memory = settings(|_| {});
            memory.gradient_checkpointing = recomputed;
            memory.ulysses_sequence_parallel_size = degree;
            // a width of all heads, and one of the key heads that every rank needs
            let (queries, keys) = (arch.num_heads, arch.num_kv_heads.max(degree));
            let parts: u64 = rows.iter().map(|row| row.tokens.len().div_ceil(degree) as u64).sum();
            let there = (queries + 2 * keys) as u64;
            let passes = if recomputed { 3 } else { 2 };
            let numbers = parts * passes * (there + queries as u64) * arch.head_dim as u64;
            for rank in on_ranks(&model, &rows, &memory, None, degree) {
                let (updates, layers) = (UPDATES as u64, arch.num_layers as u64);
                let attentions = updates * layers * rank.micro_batches as u64;
                assert_eq!(rank.micro_batches, rows.len());
                let label = format!("{degree} ranks, recomputed: {recomputed}");
                assert_eq!(rank.exchanges[0], 2 * passes * attentions, "{label}");
                // what goes to the others, in f64
                let sent = updates * layers * 8 * numbers * (degree as u64 - 1) / degree as u64;
                assert_eq!(rank.exchanges[1], sent, "{label}");
            }
        }
    }
}

/// What is learnt, and by which loss.
pub(super) enum Task {
    Policy(PolicyGradient),
    Critic(ValueLoss),
}

/// Losses, norms and metrics of some updates, the weights after them, and scores or values under these.
#[derive(Clone, PartialEq)]
struct Learnt {
    steps: Vec<BTreeMap<String, f64>>,
    weights: BTreeMap<String, Vec<f64>>,
    scores: Vec<Vec<f32>>,
}

fn learnt(
    model: &Model,
    rows: &[Sequence],
    (task, memory): (&Task, &MemoryConfig),
    ranks: Arc<dyn Collective>,
) -> Learnt {
    let world = groups(memory, ranks);
    let runtime = Runtime::new(model.decoder.device()).with_world(world);
    learnt_with(model, rows, (task, memory), runtime)
}

fn learnt_with(model: &Model, rows: &[Sequence], (task, memory): (&Task, &MemoryConfig), runtime: Runtime) -> Learnt {
    let decoder = own_share(&model.decoder, runtime.world());
    let plan = memory.plan(model.decoder.arch()).expect("a plan");
    let optim = OptimConfig { lr: 1e-2, ..OptimConfig::default() };
    let (role, loss) = match task {
        Task::Policy(objective) => (Role::Policy, HeadLoss::from(objective)),
        Task::Critic(loss) => (Role::Critic, HeadLoss::from(*loss)),
    };
    let mut learner = Learner::for_role(role, decoder, plan, optim, runtime);
    let placed = learner.model.set_residency(Residency::Pass);
    placed.expect("weights in their place");
    let mut steps = Vec::new();
    for _ in 0..UPDATES {
        let updated = learner.update(rows, TEMPERATURE, loss, 1e-2);
        let updated = updated.unwrap_or_else(|error| panic!("{}: {error}", model.name));
        let mut step = BTreeMap::from([
            ("loss".to_owned(), updated.sums.loss),
            ("norm".to_owned(), updated.outcome.grad_norm),
            ("tokens".to_owned(), updated.sums.tokens as f64),
            ("sequences".to_owned(), updated.sums.sequences as f64),
        ]);
        step.extend(updated.sums.values().map(|(name, v)| (name.to_owned(), v)));
        steps.push(step);
    }
    let scores = match task {
        Task::Policy(_) => {
            let scores = learner.score(rows, TEMPERATURE).expect("scores");
            [scores.logp, scores.entropy].concat()
        }
        Task::Critic(_) => learner.values(rows).expect("values"),
    };
    learner.model.make_whole().expect("whole weights");
    Learnt { steps, weights: whole_weights(&learner), scores }
}

pub(super) fn assert_learnt_alike(
    (model, rows): (&Model, &[Sequence]),
    name: &str,
    task: &Task,
    groups: &[SharedSequences],
) -> usize {
    let plain = packed(|_| {});
    let expected = learnt(model, rows, (task, &plain), Arc::new(Solo));
    for &(ranks, size, share) in groups {
        let mut memory = plain.clone();
        share(&mut memory);
        let found = Threads::run(size, Settings::default(), |rank| learnt(model, rows, (task, &memory), rank));
        let found: Vec<Learnt> = found.into_iter().map(|rank| rank.unwrap()).collect();
        let label = format!("{}, {name}, {ranks}", model.name);
        assert_alike(&label, &found, &expected);
    }
    groups.len()
}

/// Ranks that are one another's to the bit, and as near to one rank as sums of another order are.
fn assert_alike(label: &str, found: &[Learnt], expected: &Learnt) {
    assert!(found.iter().all(|other| *other == found[0]), "{label}");
    for (found, expected) in found[0].steps.iter().zip(&expected.steps) {
        assert!(found.keys().eq(expected.keys()), "{label}");
        for (key, value) in found {
            assert_close(&format!("{label}: {key}"), *value, expected[key], TOLERANCE);
        }
    }
    for (name, values) in &found[0].weights {
        let expected = &expected.weights[name];
        assert_gradient(&format!("{label}: {name}"), values, expected, TOLERANCE);
    }
    let pairs = found[0].scores.concat();
    let pairs = pairs.iter().zip(expected.scores.concat());
    for (found, expected) in pairs {
        // read off in f32
        assert_close(label, f64::from(*found), f64::from(expected), 1e-6);
    }
}

/// A loss of whole sequences, whose tokens lie on several ranks.
pub(super) fn of_sequences() -> PolicyGradient {
    let settings = serde_json::json!({"name": "gspo", "entropy_coeff": 0.02, "kl_loss_coef": 0.05});
    let config: ObjectiveConfig = serde_json::from_value(settings).expect("settings");
    config.build().expect("an objective")
}

#[test]
fn losses_of_tokens_sequences_and_values_are_one_ranks() {
    let (mut cases, sample) = (0, ["llama-gqa", "gemma3"]);
    for (model, rows) in with_rows() {
        if sample.contains(&model.name.as_str()) {
            let task = Task::Policy(objective());
            let case = (&model, &rows[..]);
            cases += assert_learnt_alike(case, "tokens", &task, &SHARED_SEQUENCES);
            let task = Task::Policy(of_sequences());
            cases += assert_learnt_alike(case, "sequences", &task, &SHARED_SEQUENCES);
        }
    }
    for (model, rows) in critics() {
        if model.name == "llama-gqa" {
            let task = Task::Critic(ValueLoss { clip_range: 0.05 });
            let case = (&model, &rows[..]);
            cases += assert_learnt_alike(case, "values", &task, &SHARED_SEQUENCES);
        }
    }
    checked("losses over shared sequences", cases);
}

#[test]
fn policy_and_critic_that_share_sequences_over_unlike_groups_learn_what_one_rank_learns() {
    let (mut cases, plain) = (0, packed(|_| {}));
    let (policies, critics) = (with_rows(), critics());
    let named = |all: &[(Model, Vec<Sequence>)]| {
        let own = all.iter().position(|(model, _)| model.name == "llama-gqa");
        own.expect("a model of four heads")
    };
    let (policy, policy_rows) = &policies[named(&policies)];
    let (critic, critic_rows) = &critics[named(&critics)];
    let (actor, values) = (Task::Policy(objective()), Task::Critic(ValueLoss { clip_range: 0.05 }));
    let solo = || Arc::new(Solo) as Arc<dyn Collective>;
    let expected =
        [learnt(policy, policy_rows, (&actor, &plain), solo()), learnt(critic, critic_rows, (&values, &plain), solo())];
    for (size, own, critics, zero) in
        [(2, 1, 2, 0), (2, 2, 1, 0), (4, 1, 2, 0), (4, 2, 1, 3), (4, 2, 4, 0), (4, 4, 2, 2), (4, 1, 2, 3)]
    {
        let mut memory = plain.clone();
        memory.ulysses_sequence_parallel_size = own;
        memory.zero_stage = zero;
        memory.gradient_checkpointing = zero == 3;
        let found = Threads::run(size, Settings::default(), |rank| {
            let world = groups(&memory, rank).with_critic_sequence_parallel(critics);
            let runtime = Runtime::new(policy.decoder.device()).with_world(world.expect("groups"));
            let for_critic = runtime.for_critic();
            let before = runtime.world().sequence_traffic().operations;
            let exchanged =
                |runtime: &World, since: u64| runtime.sequence_traffic().operations.iter().sum::<u64>() - since;
            let (world, start) = (runtime.world().clone(), before.iter().sum());
            let policy = learnt_with(policy, policy_rows, (&actor, &memory), runtime);
            let by_policy = exchanged(&world, start);
            let critic = learnt_with(critic, critic_rows, (&values, &memory), for_critic);
            let by_critic = exchanged(&world, start + by_policy);
            ([policy, critic], [by_policy > 0, by_critic > 0])
        });
        let found = found.into_iter().map(|rank| rank.unwrap());
        let (mut of_policy, mut for_critic) = (Vec::new(), Vec::new());
        let label = format!("{size} ranks, {own} share the policy's and {critics} the critic's, ZeRO-{zero}");
        for ([policy, critic], exchanged) in found {
            assert_eq!(exchanged, [own > 1, critics > 1], "{label}");
            of_policy.push(policy);
            for_critic.push(critic);
        }
        assert_alike(&format!("policy, {label}"), &of_policy, &expected[0]);
        assert_alike(&format!("critic, {label}"), &for_critic, &expected[1]);
        cases += 2;
    }
    checked("models over unlike groups", cases);
}

/// What ranks say that are to share a model's sequences.
fn refused(name: &str, degree: usize, size: usize, router_loss: f64) -> Vec<String> {
    let model = with_rows().into_iter().find(|(model, _)| model.name == name);
    let (model, rows) = model.expect("a model with gradients");
    let plan = MemoryConfig::default().plan(model.decoder.arch());
    let plan = plan.expect("a plan");
    let said = Threads::run(size, Settings::default(), |rank| {
        let world = World::new(rank).with_sequence_parallel(degree);
        let runtime = Runtime::new(model.decoder.device()).with_world(world.expect("a mesh"));
        let optim = OptimConfig::default();
        let mut learner = Learner::new(model.decoder.clone(), plan.clone(), optim, runtime);
        learner.router_aux_loss_coef = router_loss;
        let scored = learner.score(&rows, 1.0).map(drop);
        let updated = learner.update(&rows, TEMPERATURE, &objective(), 1e-2);
        let updated = updated.map(drop).unwrap_err().to_string();
        if router_loss == 0.0 {
            assert_eq!(scored.unwrap_err().to_string(), updated);
        }
        updated
    });
    said.into_iter().map(|rank| rank.unwrap()).collect()
}

#[test]
fn models_whose_sequences_cannot_be_shared_are_refused_by_name() {
    for (name, degree, router_loss, parts) in [
        ("gemma2", 4, 0.0, ["the policy has 2 of them", "divides 2"]),
        ("qwen3_5", 2, 0.0, ["gated DeltaNet", "set it to 1"]),
        ("qwen3-moe", 2, 0.1, ["model.router_aux_loss_coef", "to 0"]),
    ] {
        for message in refused(name, degree, degree, router_loss) {
            let key = format!("memory.ulysses_sequence_parallel_size: {degree}");
            assert!(message.contains(&key), "{message}");
            for part in parts {
                assert!(message.contains(part), "{part}: {message}");
            }
        }
    }
}
