//! Counted bytes of ranks that load a model of which each keeps its part, and of ranks that write one together: threads
//! of this process, so that what is counted is all of theirs.

use crate::cases::llama;
use crate::own_process::in_own_process;
use firebrick::backends::DeviceSpec;
use firebrick::backends::accounts::Accounts;
use firebrick::backends::allocator;
use firebrick::backends::collective::{Settings, Threads};
use firebrick::backends::device::open;
use firebrick::engine::executor::{Residency, ResidentModel, kept_values};
use firebrick::engine::plan::{MemoryConfig, Role};
use firebrick::engine::world::World;
use firebrick::models::checkpoint::{ExportOptions, export};
use firebrick::models::decoder::RankShard;
use firebrick::models::unit::ParamSpec;
use firebrick::models::{Checkpoint, Decoder};
use serde_json::json;
use std::io::Write;
use std::path::Path;
use std::sync::Barrier;

/// Ranks.
const RANKS: usize = 4;

in_own_process!(ranks_that_share_out_weights_load_and_write_a_model_that_none_of_them_ever_holds,);

/// A model whose ends are not tied, so that all of it is shared out.
fn saved(dir: &Path) -> Checkpoint {
    let mut config = llama().as_object().expect("a configuration").clone();
    config.insert("tie_word_embeddings".into(), json!(false));
    config.insert("vocab_size".into(), json!(2048));
    let checkpoint = Checkpoint::create(config, None, None).expect("an architecture");
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
    let decoder = Decoder::random(checkpoint.arch().clone(), 1, &device);
    std::fs::create_dir_all(dir).expect("a folder");
    export(&decoder, &checkpoint, None, dir, ExportOptions::default()).expect("saved");
    Checkpoint::open(dir).expect("what was saved")
}

/// What was counted at most beyond `before`, since the count was begun anew.
fn grew(before: u64) -> usize {
    let heap = allocator::heap().expect("the counting allocator is installed");
    (heap.peak_bytes - before) as usize
}

fn ranks_that_share_out_weights_load_and_write_a_model_that_none_of_them_ever_holds() {
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = saved(&folder.path().join("model"));
    let arch = checkpoint.arch();
    let whole = Decoder::random(arch.clone(), 1, &open(DeviceSpec::CPU).expect("a CPU").0);
    let bytes = |decoder: &Decoder| decoder.units().iter().map(|unit| unit.store.bytes()).sum::<usize>();
    let largest_unit = whole.units().iter().map(|unit| unit.store.bytes()).max().expect("units");
    let largest = 4 * whole.specs().map(ParamSpec::numel).max().expect("parameters");
    let model_bytes = bytes(&whole);
    drop(whole);
    let memory = MemoryConfig { zero_stage: 3, gradient_checkpointing: true, ..MemoryConfig::default() };
    let plan = memory.plan(arch).expect("a plan");
    let before = allocator::heap().expect("a count").current_bytes;
    allocator::reset_peak();
    let together = Barrier::new(RANKS);
    let written = folder.path().join("written");
    std::fs::create_dir_all(&written).expect("a folder");
    let ranks = Threads::run(RANKS, Settings::default(), |rank| {
        let world = World::new(rank);
        let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
        let values = kept_values(&plan, arch, &world);
        let part = RankShard { share: None, values: Some(&values) };
        let decoder = checkpoint.load_shard(part, &device).expect("loaded");
        let model = ResidentModel::new(decoder, plan.clone(), Role::Policy, &Accounts::new());
        let mut model = model.shared_by(&world);
        model.set_residency(Residency::Idle).expect("shards");
        together.wait();
        let loading = grew(before);
        together.wait();
        let own = bytes(&model.decoder);
        let held = allocator::heap().expect("a count").current_bytes;
        if world.writes() {
            allocator::reset_peak();
        }
        together.wait();
        let done =
            model.write_whole(|policy| Ok(export(policy, &checkpoint, None, &written, ExportOptions::default())?));
        world.agree(done).expect("written");
        together.wait();
        (own, loading, grew(held))
    });
    let ranks: Vec<_> = ranks.into_iter().map(|rank| rank.expect("a rank")).collect();
    let (own, loading, writing) = ranks[0];
    let line = format!(
        "memory: {RANKS} ranks, a model of {model_bytes} bytes: a rank has {own}; all together {loading} while they load and {writing} more \
         while they write"
    );
    writeln!(std::io::stderr(), "{line}").expect("writing to stderr");
    // rounded up to whole blocks of each parameter
    assert!(own * RANKS < model_bytes + model_bytes / 50, "{line}");
    // beside its shards each rank has a unit, and a matrix on its way there
    let on_the_way = largest_unit + 2 * largest;
    assert!(loading < own * RANKS + RANKS * on_the_way, "{line}");
    assert!(loading < RANKS * model_bytes / 2, "{line}");
    // each has the rows that all give, twice, and its own; the first their values and what it writes of them
    assert!(writing < RANKS * 3 * largest + 4 * largest, "{line}");
    for name in ["model.safetensors", "config.json"] {
        let [first, second] = ["model", "written"].map(|dir| std::fs::read(folder.path().join(dir).join(name)));
        assert!(first.expect("a file") == second.expect("a file"), "{name}");
    }
}
