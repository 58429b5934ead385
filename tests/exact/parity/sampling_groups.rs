//! Ranks that sample together against one rank that samples alone, in f64: the same tokens.

use std::sync::Arc;

use firebrick_arch::TensorShare;
use firebrick_backends::accounts::Accounts;
use firebrick_backends::collective::{Collective, Settings, Threads};
use firebrick_engine::executor::{Residency, ResidentModel};
use firebrick_engine::plan::{MemoryConfig, Role};
use firebrick_engine::world::World;
use firebrick_models::random::DrawKey;
use firebrick_sampler::{GenerationRequest, Generator, Sample, SamplingParams};

use crate::support::model::Model;
use crate::support::{checked, folders};

const TOKENS: usize = 16;

/// Completions of some prompts by a model on one rank, from its whole weights or from shards of them.
fn completions(model: &Model, rank: Arc<dyn Collective>, zero: u8, greedy: bool) -> Vec<Sample> {
    let arch = model.decoder.arch();
    let together = rank.size();
    let world = World::new(rank).with_rollout_tensor_parallel(together).expect("a mesh");
    let memory = MemoryConfig { zero_stage: zero, gradient_checkpointing: true, ..MemoryConfig::default() };
    let plan = memory.plan(arch).expect("a plan");
    let own = ResidentModel::new(model.decoder.clone(), plan, Role::Policy, &Accounts::new());
    let mut own = own.shared_by(&world);
    own.set_residency(Residency::Idle).expect("weights away");
    let group = world.tensor_group();
    let decoder = match group {
        Some(group) => own.sampling_shard(&group, arch.precision).expect("a share"),
        None => own.decoder.clone(),
    };
    let sampling = SamplingParams {
        temperature: if greedy { 0.0 } else { 1.0 },
        max_new_tokens: TOKENS,
        ..SamplingParams::default()
    };
    let vocab = arch.vocab_size as u32;
    let request = |salt: u32| GenerationRequest {
        tokens: (0..5 + salt).map(|i| (i * 7919 + salt * 31) % vocab).collect(),
        key: DrawKey { seed: 9, step: 1, prompt_index: salt, sample: 0 },
        max_new_tokens: None,
    };
    let requests: Vec<GenerationRequest> = (0..3).map(request).collect();
    let generator = Generator::new(&decoder, None, &sampling).expect("settings");
    generator.run(&requests, 2, 6).expect("samples")
}

#[test]
fn ranks_that_sample_together_sample_the_tokens_of_one_rank() {
    let mut cases = 0;
    for dir in folders("models") {
        let model = Model::load(&dir);
        for size in [2, 4] {
            if TensorShare::check(model.decoder.arch(), size).is_err() {
                continue;
            }
            for (zero, greedy) in [(0, true), (3, false)] {
                let on = |size: usize| {
                    let ranks = Threads::run(size, Settings::default(), |rank| completions(&model, rank, zero, greedy));
                    let ranks = ranks.into_iter().map(|rank| rank.expect("no panic"));
                    ranks.collect::<Vec<_>>()
                };
                let alone = on(1).swap_remove(0);
                for found in on(size) {
                    for (found, alone) in found.iter().zip(&alone) {
                        let label = format!("{}, {size} ranks, ZeRO-{zero}", model.name);
                        assert_eq!(found.tokens, alone.tokens, "{label}");
                        for (found, alone) in found.logps.iter().zip(&alone.logps) {
                            // read off in f32
                            assert!((found - alone).abs() < 2e-6, "{label}: {found} {alone}");
                        }
                    }
                }
                cases += 1;
            }
        }
    }
    checked("models sampled by groups of ranks", cases);
    assert!(cases >= 30, "only {cases}");
}
