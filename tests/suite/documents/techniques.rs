//! Every memory technique of the planner is in the guides, and in the table that compares plans.

use super::read;
use crate::support::project;
use crate::support::techniques::{MOMENTS, optimizers, passes, settings};
use firebrick_engine::plan::{MemoryConfig, TECHNIQUES, TechniqueKind};
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// Keys that other tests compare: sizes of micro-batches and samples, the reference policy's, and shared prefixes, which
/// are on in every row of the table and off in the plain plan.
const COMPARED_ELSEWHERE: [&str; 8] = [
    "memory.recompute_logits",
    "memory.share_prefix",
    "memory.train_tokens",
    "memory.score_tokens",
    "memory.micro_batch_size",
    "memory.reference.score_tokens",
    "memory.reference.param_offload",
    "rollout.max_num_seqs",
];

#[test]
fn every_key_of_a_technique_is_in_the_guides() {
    let page = |name: &str| read(&project().join("docs/guides").join(name));
    let guides = page("memory.md") + &page("multi_gpu.md");
    for key in TECHNIQUES.iter().flat_map(|technique| technique.keys()) {
        let name = key.trim_start_matches("memory.");
        assert!(guides.contains(name), "{key}");
    }
}

#[test]
fn every_technique_of_one_rank_is_compared_with_the_plain_plan() {
    let object = |memory: &MemoryConfig| -> Map<String, Value> {
        serde_json::from_value(serde_json::to_value(memory).expect("JSON")).expect("an object")
    };
    let plain = object(&MemoryConfig::default());
    let mut compared = BTreeSet::new();
    for (_, memory) in passes().into_iter().chain(optimizers()).chain(MOMENTS.map(|moments| settings(&[moments]))) {
        let set = object(&memory).into_iter().filter(|(key, value)| plain[key] != *value);
        compared.extend(set.map(|(key, _)| format!("memory.{key}")));
    }
    for technique in TECHNIQUES.iter().filter(|technique| technique.about().kind != TechniqueKind::Parallelism) {
        for key in technique.keys().iter().filter(|key| !COMPARED_ELSEWHERE.contains(key)) {
            assert!(compared.contains(*key), "{key} is in no row of tests/support/techniques.rs");
        }
    }
}
