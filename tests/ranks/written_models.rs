//! Models of which each rank has a part, as they are loaded, as rank 0 writes them, and as all ranks start a critic
//! from them.

use firebrick_backends::accounts::{Accounts, Home};
use firebrick_backends::collective::{Settings, Threads};
use firebrick_backends::out_of_memory::OutOfMemory;
use firebrick_engine::executor::{Residency, ResidentModel, kept_values};
use firebrick_engine::plan::{MemoryConfig, Role};
use firebrick_engine::world::World;
use firebrick_engine::{Error, Result};
use firebrick_models::adapter::LoraConfig;
use firebrick_models::checkpoint::{ExportOptions, WholeModel, export, save_adapter};
use firebrick_models::decoder::RankShard;
use firebrick_models::{Checkpoint, Decoder};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// How ranks share a model: its name, the ranks, degrees and the stage of `ZeRO`.
struct Shared {
    name: &'static str,
    ranks: usize,
    tensor: usize,
    stages: usize,
    zero: u8,
}

const SHARED: [Shared; 7] = [
    Shared { name: "nothing", ranks: 2, tensor: 1, stages: 1, zero: 0 },
    Shared { name: "weights, 2 ranks", ranks: 2, tensor: 1, stages: 1, zero: 3 },
    Shared { name: "weights, 4 ranks", ranks: 4, tensor: 1, stages: 1, zero: 3 },
    Shared { name: "matrices", ranks: 2, tensor: 2, stages: 1, zero: 0 },
    Shared { name: "matrices, and weights", ranks: 4, tensor: 2, stages: 1, zero: 3 },
    Shared { name: "layers", ranks: 2, tensor: 1, stages: 2, zero: 0 },
    Shared { name: "layers, 4 ranks", ranks: 4, tensor: 1, stages: 2, zero: 1 },
];

impl Shared {
    fn memory(&self) -> MemoryConfig {
        MemoryConfig {
            zero_stage: self.zero,
            gradient_checkpointing: true,
            tensor_model_parallel_size: self.tensor,
            pipeline_model_parallel_size: self.stages,
            ..MemoryConfig::default()
        }
    }

    /// What every rank makes of a model, with its part of it in place.
    fn on_ranks<T: Send>(
        &self,
        checkpoint: &Checkpoint,
        lora: Option<&LoraConfig>,
        work: impl Fn(&World, &ResidentModel) -> T + Sync,
    ) -> Vec<T> {
        self.on_ranks_with(checkpoint, lora, |decoder, _| decoder, work)
    }

    /// The same of a model that is changed as soon as each rank has loaded its part.
    fn on_ranks_with<T: Send>(
        &self,
        checkpoint: &Checkpoint,
        lora: Option<&LoraConfig>,
        change: impl Fn(Decoder, RankShard<'_>) -> Decoder + Sync,
        work: impl Fn(&World, &ResidentModel) -> T + Sync,
    ) -> Vec<T> {
        let plan = self.memory().plan(checkpoint.arch()).unwrap();
        let ranks = Threads::run(self.ranks, Settings::default(), |rank| {
            let world = World::new(rank)
                .with_tensor_parallel(self.tensor)
                .and_then(|world| world.with_pipeline_stages(self.stages))
                .unwrap();
            let values = kept_values(&plan, checkpoint.arch(), &world);
            let part = RankShard { share: world.tensor_share(), values: Some(&values) };
            let mut decoder = checkpoint.load_shard(part, &device()).unwrap();
            if let Some(lora) = lora {
                decoder = adapted(&decoder, lora);
                decoder.keep_values_of_adapters(part).unwrap();
            }
            let decoder = change(decoder, part);
            work(&world, &self.placed(decoder, &world, Role::Policy))
        });
        ranks.into_iter().map(|rank| rank.unwrap()).collect()
    }

    /// A rank's part of a model, in its place.
    fn placed(&self, decoder: Decoder, world: &World, role: Role) -> ResidentModel {
        let plan = self.memory().plan(decoder.whole_arch()).unwrap();
        let decoder = match (world.pipeline_stage(), world.tensor_share()) {
            (Some(stage), _) => decoder.with_stage(stage).unwrap(),
            (None, Some(share)) if decoder.share().is_none() => decoder.training_shard(share).unwrap(),
            (None, _) => decoder,
        };
        let model = ResidentModel::new(decoder, plan, role, &Accounts::new());
        let mut model = model.shared_by(world);
        model.set_residency(Residency::Idle).unwrap();
        model
    }

    /// A rank's part of a critic that starts from the policy, in its place.
    fn critic(&self, world: &World, policy: &ResidentModel, seed: u64) -> ResidentModel {
        let arch = policy.decoder.whole_arch().clone().with_value_head();
        let values = kept_values(&self.memory().plan(&arch).unwrap(), &arch, world);
        let part = RankShard { share: world.tensor_share(), values: Some(&values) };
        let whole = policy.read_together();
        let rows = |index, rows| whole.rows(index, rows);
        let critic = policy.decoder.shard_with_value_head(part, seed, rows);
        self.placed(critic.unwrap(), world, Role::Critic)
    }
}

fn device() -> burn::tensor::Device {
    burn::tensor::Device::flex()
}

/// Adapters none of whose numbers are zero.
fn adapted(base: &Decoder, lora: &LoraConfig) -> Decoder {
    let mut next = 0;
    let built = base.with_adapters(lora.clone(), |_, spec| {
        let values = (0..spec.numel()).map(|i| ((i * 7 + next) % 11) as f32 / 50.0 - 0.1);
        let values: Vec<f32> = values.collect();
        next += 1;
        let [rows, cols] = spec.rows_cols();
        let data = burn::tensor::TensorData::new(values, [rows, cols]);
        Ok::<_, Error>(burn::tensor::Tensor::from_data(data, &device()))
    });
    built.unwrap()
}

fn config(family: &str, tied: bool) -> Value {
    json!({"model_type": family, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": tied})
}

/// A random model in a folder, read again.
fn saved(config: Value, dir: &Path) -> Checkpoint {
    let Value::Object(config) = config else { unreachable!("an object") };
    let made = Checkpoint::create(config, None, None).unwrap();
    let decoder = Decoder::random(made.arch().clone(), 3, &device());
    std::fs::create_dir_all(dir).unwrap();
    export(&decoder, &made, None, dir, small_files()).unwrap();
    Checkpoint::open(dir).unwrap()
}

/// Several files, whose tensors have another order than the model's.
fn small_files() -> ExportOptions {
    ExportOptions { max_shard_bytes: 20_000 }
}

/// The files of a folder, by name.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        (name, std::fs::read(entry.path()).unwrap())
    });
    entries.collect()
}

#[test]
fn rank_0_writes_the_files_of_one_rank_from_the_parts_that_all_ranks_load() {
    let folders = tempfile::tempdir().unwrap();
    for (place, tied) in [false, true].into_iter().enumerate() {
        let from = folders.path().join(format!("model {place}"));
        let checkpoint = saved(config("qwen3", tied), &from);
        let expected = files(&from);
        assert!(expected.len() > 3, "several files");
        for shared in SHARED {
            let to = folders.path().join(format!("{} {place}", shared.name));
            std::fs::create_dir_all(&to).unwrap();
            shared.on_ranks(&checkpoint, None, |world, model| {
                let written = model.write_whole(|policy| Ok(export(policy, &checkpoint, None, &to, small_files())?));
                world.agree(written).unwrap();
            });
            assert!(files(&to) == expected, "{}, tied: {tied}", shared.name);
        }
    }
}

#[test]
fn adapters_and_the_model_they_merge_into_are_written_as_by_one_rank() {
    let folders = tempfile::tempdir().unwrap();
    let checkpoint = saved(config("llama", false), &folders.path().join("model"));
    let lora = LoraConfig { rank: 4, ..LoraConfig::default() };
    let write = |model: &dyn WholeModel, dir: &Path| -> Result<()> {
        for name in ["adapter", "merged"] {
            std::fs::create_dir_all(dir.join(name)).unwrap();
        }
        save_adapter(model, "base", &dir.join("adapter"))?;
        Ok(export(model, &checkpoint, None, &dir.join("merged"), small_files())?)
    };
    let one = adapted(&checkpoint.load(&device()).unwrap(), &lora);
    let alone = folders.path().join("alone");
    write(&one, &alone).unwrap();
    for shared in SHARED {
        let to = folders.path().join(shared.name);
        shared.on_ranks(&checkpoint, Some(&lora), |world, model| {
            let written = model.write_whole(|policy| write(policy, &to));
            world.agree(written).unwrap();
        });
        for name in ["adapter", "merged"] {
            let [found, expected] = [&to, &alone].map(|dir| files(&dir.join(name)));
            assert!(found == expected, "{name}: {}", shared.name);
        }
    }
}

#[test]
fn a_critic_that_starts_from_the_parts_of_all_ranks_is_that_of_one_rank() {
    let folders = tempfile::tempdir().unwrap();
    let lora = LoraConfig { rank: 4, ..LoraConfig::default() };
    let cases = [(false, None), (true, None), (false, Some(&lora))];
    for (place, (tied, lora)) in cases.into_iter().enumerate() {
        let from = folders.path().join(format!("model {place}"));
        let checkpoint = saved(config("llama", tied), &from);
        let as_critic = checkpoint.clone().with_value_head();
        let write = |critic: &dyn WholeModel, dir: &Path| -> Result<()> {
            std::fs::create_dir_all(dir).unwrap();
            Ok(export(critic, &as_critic, None, dir, small_files())?)
        };
        let policy = checkpoint.load(&device()).unwrap();
        let policy = lora.map_or(policy.clone(), |lora| adapted(&policy, lora));
        let alone = folders.path().join(format!("critic {place}"));
        write(&policy.with_value_head(5), &alone).unwrap();
        let read = checkpoint.load_with_value_head(RankShard::default(), 5, &device());
        if lora.is_none() {
            let own = folders.path().join(format!("read {place}"));
            write(&read.unwrap(), &own).unwrap();
            assert!(files(&own) == files(&alone), "tied: {tied}");
        }
        for shared in SHARED {
            let to = folders.path().join(format!("{} {place}", shared.name));
            let parts = shared.on_ranks(&checkpoint, lora, |world, policy| {
                let critic = shared.critic(world, policy, 5);
                let written = critic.write_whole(|critic| write(critic, &to));
                world.agree(written).unwrap();
                let own = &critic.decoder;
                own.bytes_in(Home::Device) + own.bytes_in(Home::Host)
            });
            let label = format!("{}, tied: {tied}, {}", shared.name, lora.is_some());
            assert!(files(&to) == files(&alone), "{label}");
            let all: usize = policy.with_value_head(5).specs().map(|s| 4 * s.numel()).sum();
            let divided = shared.name != "nothing";
            assert_eq!(parts.iter().all(|&own| own < all), divided, "{label}");
        }
    }
}

#[test]
fn memory_that_one_rank_lacks_for_its_part_of_a_critic_is_every_ranks_and_all_make_it_again() {
    let folders = tempfile::tempdir().unwrap();
    let checkpoint = saved(config("llama", false), &folders.path().join("model"));
    for shared in &SHARED[1..] {
        let begun = Instant::now();
        let told = shared.on_ranks(&checkpoint, None, |world, policy| {
            let whole = policy.read_together();
            let refused = |index, rows| {
                if world.rank() == 1 && index == 7 {
                    let what = OutOfMemory::over_limit(1234, 1000);
                    return Err(firebrick_backends::Error::OutOfMemory(what).into());
                }
                whole.rows(index, rows)
            };
            let part = RankShard::default();
            let made = policy.decoder.shard_with_value_head(part, 5, refused);
            let made = world.agree(made.map_err(Error::from)).unwrap_err();
            let cause = made.out_of_memory().expect("memory, on every rank");
            shared.critic(world, policy, 5);
            world.agree(Ok(())).unwrap();
            (cause.bytes, cause.kind)
        });
        assert!(begun.elapsed() < Duration::from_secs(20), "{}", shared.name);
        let cause = OutOfMemory::over_limit(1234, 1000);
        for told in told {
            assert_eq!(told, (cause.bytes, cause.kind), "{}", shared.name);
        }
    }
}

#[test]
fn a_value_head_beside_each_ranks_part_of_a_policy_is_that_of_one_rank() {
    let folders = tempfile::tempdir().unwrap();
    for (place, tied) in [false, true].into_iter().enumerate() {
        let checkpoint = saved(config("qwen3", tied), &folders.path().join(place.to_string()));
        let one = checkpoint.load(&device()).unwrap();
        let one = one.with_joint_value_head(RankShard::default(), 5);
        let index = one.value_index().unwrap();
        let expected = one.rows(index, 0..1).unwrap().rows(0..1).unwrap();
        for shared in SHARED {
            let head = |decoder: Decoder, part: RankShard<'_>| decoder.with_joint_value_head(part, 5);
            shared.on_ranks_with(&checkpoint, None, head, |_, policy| {
                assert_eq!(policy.decoder.value_index(), Some(index), "{}", shared.name);
                let found = policy.read_together().rows(index, 0..1).unwrap();
                let label = format!("{}, tied: {tied}", shared.name);
                assert_eq!(found.rows(0..1).unwrap(), expected, "{label}");
                let count = policy.decoder.whole_params();
                assert_eq!(count, one.whole_params(), "{label}");
            });
        }
    }
}

#[test]
fn a_disk_that_is_full_while_rank_0_writes_is_every_ranks_error_and_they_go_on() {
    let folders = tempfile::tempdir().unwrap();
    let checkpoint = saved(config("llama", false), &folders.path().join("model"));
    for shared in &SHARED[1..] {
        let begun = Instant::now();
        let said = shared.on_ranks(&checkpoint, None, |world, model| {
            let written = model.write_whole(|policy| {
                policy.rows(0, 0..8)?;
                Err(Error::Io {
                    action: "write",
                    path: "model.safetensors".into(),
                    error: std::io::ErrorKind::StorageFull.into(),
                })
            });
            let told = world.agree(written).unwrap_err().to_string();
            // another checkpoint may be written after it
            let again = model.write_whole(|policy| {
                policy.rows(1, 0..1)?;
                Ok(())
            });
            world.agree(again).unwrap();
            told
        });
        assert!(begun.elapsed() < Duration::from_secs(20), "{}", shared.name);
        for told in said {
            assert!(told.contains("no storage space"), "{}: {told}", shared.name);
        }
    }
}
