//! Block tables: what is shared, copied, given back and found again. No keys or values are computed here.

mod states;

use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;

fn arch(family: &str) -> Arch {
    let Value::Object(mut config) = json!({
        "model_type": family, "vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "sliding_window": 40
    }) else {
        unreachable!("an object")
    };
    if family == "qwen3_5_text" {
        let Value::Object(linear) = json!({
            "layer_types": ["linear_attention", "full_attention"], "partial_rotary_factor": 0.5, "linear_num_key_heads": 1,
            "linear_num_value_heads": 1, "linear_key_head_dim": 4, "linear_value_head_dim": 4
        }) else {
            unreachable!("an object")
        };
        config.extend(linear);
    }
    Arch::from_config(&config, Path::new(family)).expect("a valid architecture")
}

fn cache(family: &str, blocks: usize) -> KvCache {
    let arch = arch(family);
    let pools = vec![blocks; KvCache::groups(&arch)];
    KvCache::new(&arch, &pools, KvCacheDtype::Auto, &Device::flex())
}

fn tokens(count: usize, salt: u32) -> Vec<u32> {
    (0..count as u32).map(|i| i * 7 % 61 + salt).collect()
}

#[test]
fn a_group_of_16_stores_its_prompt_once() {
    let mut cache = cache("llama", 64);
    let mut prompt = cache.begin(&tokens(40, 0));
    assert!(cache.append(&mut prompt, 40));
    let mut members: Vec<BlockTable> = (1..16).map(|_| cache.fork(&mut prompt)).collect();
    members.push(prompt);
    assert_eq!(cache.used_blocks(), 3);
    // the third block is not full: all but one of the sequences take a copy of it
    for member in &mut members {
        assert!(cache.append(member, 1));
    }
    assert_eq!(cache.used_blocks(), 2 + 16);
    assert_eq!(cache.groups[0].copies.len(), 15);
    cache.copy_shared_blocks();
    for member in members {
        cache.free(member);
    }
    assert_eq!(cache.used_blocks(), 0);
}

#[test]
fn a_block_that_is_copied_before_it_is_written_is_no_shared_prefix() {
    for prompt in [6, 40] {
        let mut cache = cache("llama", 8);
        let mut first = cache.begin(&tokens(prompt, 0));
        assert!(cache.append(&mut first, prompt));
        let mut second = cache.fork(&mut first);
        assert!(cache.append(&mut second, 1) && cache.append(&mut first, 1));
        let groups = cache.groups[0].shared_blocks(0, &[Some(&first), Some(&second)]);
        let whole = prompt / BLOCK_SIZE;
        assert!(groups.iter().all(|group| group.blocks.len() == whole), "{groups:?}");
        let members: Vec<_> = groups.iter().flat_map(|group| &group.members).collect();
        assert_eq!(members.len(), 2);
        for member in members {
            assert_eq!((member.tokens, member.blocks.len()), (prompt + 1 - whole * BLOCK_SIZE, 1));
        }
    }
}

#[test]
fn a_full_last_block_is_not_copied() {
    let mut cache = cache("llama", 8);
    let mut prompt = cache.begin(&[]);
    assert!(cache.append(&mut prompt, 32));
    let mut other = cache.fork(&mut prompt);
    assert!(cache.append(&mut other, 1) && cache.append(&mut prompt, 1));
    assert!(cache.groups[0].copies.is_empty());
    assert_eq!(cache.used_blocks(), 4);
}

#[test]
fn a_pool_without_blocks_changes_nothing() {
    let mut cache = cache("llama", 3);
    let mut first = cache.begin(&[]);
    assert!(cache.append(&mut first, 40));
    let mut second = cache.fork(&mut first);
    // neither a copy of the shared last block nor a new one
    assert!(!cache.append(&mut second, 1) && !cache.append(&mut second, 20));
    assert_eq!((second.tokens(), cache.used_blocks()), (40, 3));
    cache.free(second);
    assert!(cache.append(&mut first, 8) && !cache.append(&mut first, 1));
}

#[test]
fn prompts_with_the_same_beginning_share_its_full_blocks() {
    let mut cache = cache("llama", 32);
    let system = tokens(50, 0);
    let prompt = |salt| [system.clone(), tokens(10, salt)].concat();
    let mut first = cache.begin(&prompt(1));
    assert_eq!(first.tokens(), 0);
    assert!(cache.append(&mut first, 60));
    cache.keep_prefix(&mut first, &prompt(1));
    // 50 tokens are three full blocks
    let second = cache.begin(&prompt(2));
    assert_eq!((second.tokens(), cache.used_blocks()), (48, 4));
    // the same prompt again: all but the block of its last token, which has to be run
    let third = cache.begin(&prompt(1)[..48]);
    assert_eq!(third.tokens(), 32);
    for table in [first, second, third] {
        cache.free(table);
    }
    assert_eq!(cache.used_blocks(), 0);
    let later = cache.begin(&prompt(2));
    assert_eq!(later.tokens(), 48, "kept after its sequences have ended");
    cache.free(later);
    // until others need the blocks
    let mut large = cache.begin(&[]);
    assert!(cache.append(&mut large, 32 * BLOCK_SIZE));
    cache.free(large);
    assert_eq!(cache.begin(&prompt(2)).tokens(), 0);
}

#[test]
fn layers_with_a_window_give_blocks_back() {
    // gemma2: one layer with a window of 40 tokens, one without
    let mut cache = cache("gemma2", 64);
    let window = cache.groups.iter().position(|g| g.window.is_some());
    let window = window.expect("a group with a window");
    let mut table = cache.begin(&[]);
    for _ in 0..300 {
        assert!(cache.append(&mut table, 1));
        assert!(cache.groups[window].pool.used() <= 40_usize.div_ceil(BLOCK_SIZE) + 1);
    }
    assert_eq!(cache.groups[1 - window].pool.used(), 300_usize.div_ceil(BLOCK_SIZE));
    // what the next token sees is there
    let seen = (300 - 39) / BLOCK_SIZE;
    assert!(table.groups[window].first <= seen && table.groups[window].end() == 19);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Begin(usize),
    Append(usize, usize),
    Fork(usize),
    Free(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0_usize..90).prop_map(Step::Begin),
        (any::<usize>(), 1_usize..40).prop_map(|(i, n)| Step::Append(i, n)),
        any::<usize>().prop_map(Step::Fork),
        any::<usize>().prop_map(Step::Free),
    ];
    prop::collection::vec(step, 1..60)
}

proptest! {
    /// Every reference is one of a table's, and what one sequence writes no other has.
    #[test]
    fn references_are_those_of_the_tables(steps in steps(), windowed in any::<bool>()) {
        let family = if windowed { "gemma2" } else { "llama" };
        let mut cache = cache(family, 24);
        let mut tables: Vec<BlockTable> = Vec::new();
        for step in steps {
            match step {
                Step::Begin(count) => {
                    let prompt = tokens(count, 0);
                    let mut table = cache.begin(&prompt);
                    let more = count - table.tokens();
                    if cache.append(&mut table, more) {
                        cache.keep_prefix(&mut table, &prompt);
                        tables.push(table);
                    } else {
                        cache.free(table);
                    }
                }
                Step::Append(i, count) if !tables.is_empty() => {
                    let i = i % tables.len();
                    let before = tables[i].tokens();
                    let appended = cache.append(&mut tables[i], count);
                    prop_assert_eq!(tables[i].tokens(), before + if appended { count } else { 0 });
                    if appended {
                        for (group, table_group) in cache.groups.iter().zip(&tables[i].groups) {
                            for index in before / BLOCK_SIZE..table_group.end() {
                                prop_assert!(!group.is_shared(table_group.block(index)));
                            }
                        }
                    }
                }
                Step::Fork(i) if !tables.is_empty() => {
                    let i = i % tables.len();
                    let other = cache.fork(&mut tables[i]);
                    tables.push(other);
                }
                Step::Free(i) if !tables.is_empty() => {
                    let i = i % tables.len();
                    cache.free(tables.swap_remove(i));
                }
                _ => {}
            }
            for (index, group) in cache.groups.iter().enumerate() {
                let mut references = vec![0; group.pool.len()];
                for &(source, _) in &group.copies {
                    references[source as usize] += 1;
                }
                for table in &tables {
                    for &block in &table.groups[index].blocks {
                        references[block as usize] += 1;
                    }
                }
                let counted = (0..group.pool.len() as u32).map(|b| group.pool.references(b));
                prop_assert!(counted.eq(references));
            }
        }
    }
}

/// Lengths of completions with a long tail: log-normal, median 250, σ 0.8, at most 2,048.
fn long_tail(count: usize) -> impl Iterator<Item = usize> {
    let mut random = crate::random::Stream::new(5, 0);
    (0..count).map(move |_| {
        let length = 250.0 * (0.8 * f64::from(random.normal())).exp();
        (length.round() as usize).clamp(1, 2048)
    })
}

#[test]
fn what_a_long_tail_wastes_is_the_rest_of_last_blocks() {
    let mut cache = cache("llama", 64 * 2048 / BLOCK_SIZE);
    let mut lengths = long_tail(1024);
    let mut running: Vec<(BlockTable, usize)> = Vec::new();
    let (mut slots, mut unused) = (0, 0);
    loop {
        while running.len() < 64
            && let Some(length) = lengths.next()
        {
            running.push((cache.begin(&[]), length));
        }
        if running.is_empty() {
            break;
        }
        for (table, _) in &mut running {
            assert!(cache.append(table, 1));
        }
        let tokens: usize = running.iter().map(|(table, _)| table.tokens()).sum();
        let rounding: usize = running.iter().map(|(table, _)| table.unused_slots()).sum();
        assert_eq!(cache.used_blocks() * BLOCK_SIZE, tokens + rounding);
        slots += cache.used_blocks() * BLOCK_SIZE;
        unused += rounding;
        let (ended, going): (Vec<_>, Vec<_>) =
            running.into_iter().partition(|(table, length)| table.tokens() == *length);
        for (table, _) in ended {
            cache.free(table);
        }
        running = going;
    }
    let waste = unused as f64 / slots as f64;
    assert!(waste > 0.005 && waste <= 0.04, "{waste}");
    assert_eq!(cache.used_blocks(), 0);
}
