//! What ranks that share out state save, loaded by other numbers of ranks.

use super::model;
use crate::support::zero::{groups, learner, rows, settings};
use firebrick_backends::Precision;
use firebrick_backends::collective::{Settings, Threads};
use firebrick_engine::checkpoint::trainer_state::{load_masters, load_optimizer, save_optimizer};
use firebrick_engine::learner::Learner;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::plan::{MemoryConfig, MomentKind};
use firebrick_engine::sequence::Sequence;
use firebrick_engine::world::World;
use serde_json::{Value, json};
use std::path::Path;

/// Bits of the weights, and of what a rank's optimizer keeps of each parameter: its elements, both moments and the
/// master.
#[derive(Debug, PartialEq)]
struct Kept {
    weights: Vec<Vec<u32>>,
    state: Vec<[Vec<u32>; 3]>,
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn kept(learner: &Learner) -> Kept {
    let params = learner.decoder().params();
    let weights = params.map(|(_, value)| bits(&value.download().expect("values").to_f32()));
    let count = learner.decoder().specs().count();
    let state = (0..count).map(|index| {
        let moments = learner.optimizer.moments(index).expect("moments");
        let [first, second] = moments.unwrap_or_default();
        let master = learner.optimizer.master(index).expect("a master");
        [first, second, master.unwrap_or_default()].map(|values| bits(&values))
    });
    Kept { weights: weights.collect(), state: state.collect() }
}

/// What ranks keep, put together in their order.
fn whole(ranks: Vec<Kept>) -> Kept {
    let mut ranks = ranks.into_iter();
    let mut all = ranks.next().expect("a rank");
    for rank in ranks {
        assert!(rank.weights == all.weights, "unlike weights");
        for (all, own) in all.state.iter_mut().zip(rank.state) {
            for (all, own) in all.iter_mut().zip(own) {
                all.extend(own);
            }
        }
    }
    all
}

fn on_ranks<T: Send>(size: usize, work: impl Fn(World) -> T + Sync) -> Vec<T> {
    let ranks = Threads::run(size, Settings::default(), |rank| work(World::new(rank)));
    ranks.into_iter().map(|rank| rank.unwrap()).collect()
}

/// Trains on some ranks and saves what optimizers keep.
fn saved(memory: &MemoryConfig, precision: Precision, size: usize, dir: &Path) -> Kept {
    std::fs::create_dir_all(dir).unwrap();
    let ranks = on_ranks(size, |world| {
        let mut model = model();
        model.decoder = model.decoder.in_precision(precision);
        let rows = rows(&model);
        let mut learner = learner(&model, memory, None, &world);
        for _ in 0..2 {
            learner.update(&rows, 1.0, &Nll, 1e-2).expect("an update");
        }
        learner.model.make_whole().expect("whole weights");
        save_optimizer(dir, &learner.optimizer, learner.decoder(), true, &world).expect("saved");
        kept(&learner)
    });
    whole(ranks)
}

/// What some ranks load of it into a model that was not trained.
fn loaded(memory: &MemoryConfig, precision: Precision, size: usize, dir: &Path) -> Kept {
    let ranks = on_ranks(size, |world| {
        let mut model = model();
        model.decoder = model.decoder.in_precision(precision);
        let mut learner = learner(&model, memory, None, &world);
        learner.model.make_whole().expect("whole weights");
        let Learner { model, optimizer, .. } = &mut learner;
        load_masters(dir, &mut model.decoder, optimizer).expect("masters");
        load_optimizer(dir, 2, &model.decoder, optimizer).expect("moments");
        kept(&learner)
    });
    whole(ranks)
}

#[test]
fn what_any_number_of_ranks_saves_any_other_loads_to_the_bit() {
    let folders = tempfile::tempdir().unwrap();
    for (name, stage, moments, precision) in [
        ("f32", 1, MomentKind::F32, Precision::F32),
        ("8 bits", 2, MomentKind::Block8, Precision::F32),
        ("half", 3, MomentKind::Bf16, Precision::Bf16),
    ] {
        let mut memory = settings(|m| m.gradient_checkpointing = true);
        memory.zero_stage = stage;
        memory.moments = moments;
        for from in [1, 2, 4] {
            let dir = folders.path().join(format!("{name} {from}"));
            let expected = saved(&memory, precision, from, &dir);
            assert_eq!(dir.join("optimizer.index.json").is_file(), from > 1);
            for to in [1, 2, 4] {
                let found = loaded(&memory, precision, to, &dir);
                assert!(found == expected, "{name}: saved by {from}, loaded by {to}");
            }
        }
    }
}

/// What one rank makes of a folder that some ranks have saved: weights, masters and moments.
fn of_one_rank(precision: Precision, dir: &Path) -> Kept {
    loaded(&settings(|_| {}), precision, 1, dir)
}

#[test]
fn ranks_that_share_matrices_save_and_load_what_others_do_to_the_bit() {
    let folders = tempfile::tempdir().unwrap();
    let divided = |degree: usize, zero: u8| {
        let mut memory = settings(|m| m.gradient_checkpointing = true);
        memory.tensor_model_parallel_size = degree;
        memory.zero_stage = zero;
        memory
    };
    let meshes = [
        ("1", 1, divided(1, 0)),
        ("2, ZeRO-3", 2, divided(1, 3)),
        ("4, ZeRO-1", 4, divided(1, 1)),
        ("tensor 2 x data 2", 4, divided(2, 0)),
        ("tensor 2 x data 2, ZeRO-1", 4, divided(2, 1)),
    ];
    for precision in [Precision::F32, Precision::Bf16] {
        for (from, size, memory) in &meshes {
            let dir = folders.path().join(format!("{from} {precision}"));
            trained(memory, precision, *size, &dir);
            let expected = of_one_rank(precision, &dir);
            assert!(expected.state.iter().any(|[first, ..]| !first.is_empty()));
            for (to, size, memory) in &meshes {
                let again = dir.join(to);
                saved_again(memory, precision, *size, [&dir, &again]);
                let found = of_one_rank(precision, &again);
                assert!(found == expected, "{precision}: saved by {from}, loaded by {to}");
            }
        }
    }
}

/// Trains a share on each of some ranks, and saves what their optimizers keep.
fn trained(memory: &MemoryConfig, precision: Precision, size: usize, dir: &Path) {
    std::fs::create_dir_all(dir).unwrap();
    on_meshes(memory, precision, size, |learner, rows, world| {
        for _ in 0..2 {
            learner.update(rows, 1.0, &Nll, 1e-2).expect("an update");
        }
        save_optimizer(dir, &learner.optimizer, learner.decoder(), true, world).expect("saved");
    });
}

/// Loads what one folder has on each of some ranks, into models that were not trained, and saves it into another.
fn saved_again(memory: &MemoryConfig, precision: Precision, size: usize, [from, to]: [&Path; 2]) {
    std::fs::create_dir_all(to).unwrap();
    on_meshes(memory, precision, size, |learner, _, world| {
        let Learner { model, optimizer, .. } = learner;
        load_masters(from, &mut model.decoder, optimizer).expect("masters");
        load_optimizer(from, 2, &model.decoder, optimizer).expect("moments");
        save_optimizer(to, optimizer, &model.decoder, true, world).expect("saved");
    });
}

/// What ranks do with their shares of a model.
fn on_meshes(
    memory: &MemoryConfig,
    precision: Precision,
    size: usize,
    work: impl Fn(&mut Learner, &[Sequence], &World) + Sync,
) {
    let ranks = Threads::run(size, Settings::default(), |rank| {
        let world = groups(memory, rank);
        let mut model = model();
        model.decoder = model.decoder.in_precision(precision);
        let rows = rows(&model);
        let mut learner = learner(&model, memory, None, &world);
        work(&mut learner, &rows, &world);
    });
    for rank in ranks {
        rank.unwrap();
    }
}

#[test]
fn a_checkpoint_of_several_ranks_that_is_damaged_is_refused_by_name() {
    let folders = tempfile::tempdir().unwrap();
    let memory = settings(|m| m.zero_stage = 1);
    let dir = folders.path().join("saved");
    saved(&memory, Precision::F32, 2, &dir);
    let load = || {
        let model = model();
        let mut learner = learner(&model, &memory, None, &World::default());
        let error = load_optimizer(&dir, 2, &model.decoder, &mut learner.optimizer);
        error.expect_err("refused").to_string()
    };
    let file = dir.join("optimizer-00002-of-00002.safetensors");
    let good = std::fs::read(&file).unwrap();
    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    std::fs::write(&file, &bad).unwrap();
    let message = load();
    assert!(
        message.contains("differ from the elements that were written") && message.contains("step folder"),
        "{message}"
    );
    std::fs::write(&file, &good[..good.len() - 4]).unwrap();
    let message = load();
    assert!(message.contains("ends before the elements"), "{message}");
    std::fs::remove_file(&file).unwrap();
    assert!(load().contains("optimizer-00002-of-00002"), "{}", load());
    std::fs::remove_file(dir.join("optimizer.index.json")).unwrap();
    assert!(load().contains("optimizer.safetensors"), "{}", load());
}

#[test]
fn blocks_that_do_not_make_up_their_tensor_are_refused_by_name() {
    let folders = tempfile::tempdir().unwrap();
    let dir = folders.path();
    let memory = settings(|m| m.tensor_model_parallel_size = 2);
    let ranks = Threads::run(2, Settings::default(), |rank| {
        let world = groups(&memory, rank);
        let model = model();
        let mut learner = learner(&model, &memory, None, &world);
        let rows = rows(&model);
        learner.update(&rows, 1.0, &Nll, 1e-2).expect("an update");
        save_optimizer(dir, &learner.optimizer, learner.decoder(), true, &world).expect("saved");
    });
    assert!(ranks.into_iter().all(|rank| rank.is_ok()));

    let path = dir.join("optimizer.index.json");
    let good: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let load = |index: &Value| {
        std::fs::write(&path, index.to_string()).unwrap();
        let memory = settings(|_| ());
        let mut learner = learner(&model(), &memory, None, &World::default());
        load_optimizer(dir, 1, &learner.model.decoder, &mut learner.optimizer)
    };
    load(&good).expect("blocks that do");

    let tensors = good["tensors"].as_array().unwrap();
    let is_block = |at: &usize| !tensors[*at]["block"].is_null();
    let blocks: Vec<usize> = (0..tensors.len()).filter(is_block).collect();
    let refused = |damage: &dyn Fn(&mut Vec<Value>), expected: &str| {
        let mut index = good.clone();
        damage(index["tensors"].as_array_mut().unwrap());
        let message = load(&index).expect_err(expected).to_string();
        let name = tensors[blocks[0]]["name"].as_str().unwrap();
        assert!(message.contains(expected) && message.contains(name), "{message}");
    };
    let first = blocks[0];
    refused(&|all| all[first]["block"][0] = json!([100_000, 100_001]), "is outside its shape");
    refused(&|all| drop(all.remove(first)), "and its blocks");
    let other = blocks[1];
    assert_eq!(tensors[first]["name"], tensors[other]["name"]);
    refused(&|all| all[other]["block"] = all[first]["block"].clone(), "overlap");
}
