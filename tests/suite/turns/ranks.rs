//! Several ranks: each plays the rollouts of its prompts, and all have what came of them.

use super::{At, Chat, Fails, config};
use firebrick_backends::collective::{Collective, Settings, Threads};
use firebrick_engine::metrics::StepReport;
use firebrick_engine::rollout::Rollout;
use firebrick_engine::trainer::Trainer;
use std::path::Path;
use std::sync::Arc;

/// The first step of a run on so many ranks, as each reports it.
fn first_steps(folder: &Path, size: usize, task: fn() -> Chat) -> Vec<StepReport> {
    let config = config(&folder.join(size.to_string()), &[]);
    let ranks = Threads::run(size, Settings::default(), |rank: Arc<dyn Collective>| {
        let builder = Trainer::builder(config.clone()).task(task());
        let mut trainer = builder.world(rank).build().expect("a trainer");
        trainer.step().expect("a step")
    });
    ranks.into_iter().map(|rank| rank.expect("a rank")).collect()
}

/// What does not depend on the order in which floats are added.
fn facts(rollout: &Rollout) -> impl PartialEq + std::fmt::Debug {
    (
        (rollout.prompt_index, rollout.sample),
        (rollout.prompt.clone(), rollout.completion.clone()),
        (rollout.inserted.clone(), rollout.turns.clone()),
        (rollout.reward, rollout.reward_parts.clone()),
        rollout.reward_error.clone(),
    )
}

fn same_as_on_one(task: fn() -> Chat) {
    let folder = tempfile::tempdir().expect("a folder");
    let alone = first_steps(folder.path(), 1, task).remove(0);
    let alone = alone.rollout.expect("sampled");
    for size in [2, 4] {
        for found in first_steps(folder.path(), size, task) {
            let found = found.rollout.expect("sampled");
            let prompts = |own: &firebrick_engine::metrics::RolloutReport| {
                let each = own.prompts.iter();
                let each = each.map(|p| (p.text.clone(), p.tokens.clone(), p.example.clone()));
                each.collect::<Vec<_>>()
            };
            assert_eq!(prompts(&found), prompts(&alone), "{size} ranks");
            for (found, alone) in [(&found.rollouts, &alone.rollouts), (&found.left_out, &alone.left_out)] {
                let [found, alone] = [found, alone].map(|all| all.iter().map(facts));
                assert!(found.eq(alone), "{size} ranks");
            }
            assert_eq!(found.stats.turns, alone.stats.turns, "{size} ranks");
        }
    }
}

#[test]
fn ranks_play_together_what_one_rank_plays() {
    same_as_on_one(|| Chat { says: Some("a1".into()), ..Chat::new(Fails::Never) });
}

#[test]
fn a_group_that_one_rank_loses_is_left_out_by_all() {
    same_as_on_one(|| Chat::new(Fails::Row(1, At::Step)));
}
