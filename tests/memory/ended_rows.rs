//! Memory that the KV cache needs when sequences enter and end.

use crate::own_process::in_own_process;
use burn::tensor::{Int, Tensor};
use firebrick::backends::allocator;
use firebrick::backends::device::{DeviceSpec, open};
use firebrick::models::cache::{BLOCK_SIZE, BlockTable, Chunk, KvCache};
use firebrick::models::{Arch, Decoder, KvCacheDtype};
use serde_json::{Value, json};
use std::path::Path;

in_own_process!(sequences_enter_and_end_without_memory_and_one_block_is_copied);
#[cfg(target_os = "linux")]
mod resident {
    use super::blocks_take_memory_when_they_are_first_used;
    crate::own_process::in_own_process!(blocks_take_memory_when_they_are_first_used);
}

const SEQUENCES: usize = 16;
const PROMPT: usize = 380;
const BLOCKS: usize = 256;

fn decoder() -> Decoder {
    let Value::Object(config) = json!({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4
    }) else {
        unreachable!("an object")
    };
    let arch = Arch::from_config(&config, Path::new("ended rows")).expect("a valid architecture");
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
    Decoder::random(arch, 1, &device)
}

fn ids(decoder: &Decoder, count: usize) -> Tensor<1, Int> {
    let ids: Vec<i32> = (0..count as i32).map(|i| i % 64).collect();
    Tensor::<1, Int>::from_ints(ids.as_slice(), decoder.device())
}

/// A cache in which all sequences share a prompt whose last block is not full.
fn full(decoder: &Decoder) -> (KvCache, Vec<BlockTable>) {
    let (arch, device) = (decoder.arch(), decoder.device());
    let mut cache = KvCache::new(arch, &[BLOCKS], KvCacheDtype::Auto, device);
    let mut prompt = cache.begin(&[]);
    assert!(cache.append(&mut prompt, PROMPT));
    let chunk = Chunk { table: &prompt, tokens: 0..PROMPT };
    let metadata = cache.prefill(arch, &[chunk]);
    drop(decoder.hidden_cached(ids(decoder, PROMPT), &metadata, &mut cache));
    let mut tables: Vec<BlockTable> = (1..SEQUENCES).map(|_| cache.fork(&mut prompt)).collect();
    tables.push(prompt);
    (cache, tables)
}

/// Runs a token of every sequence, and tells the bytes that were allocated at a time.
fn decode(decoder: &Decoder, cache: &mut KvCache, tables: &mut [BlockTable]) -> u64 {
    for table in &mut *tables {
        assert!(cache.append(table, 1));
    }
    let rows: Vec<Option<&BlockTable>> = tables.iter().map(Some).collect();
    let metadata = cache.decode(decoder.arch(), &rows);
    let ids = ids(decoder, rows.len());
    let before = allocator::heap().expect("the counting allocator is installed");
    allocator::reset_peak();
    drop(decoder.hidden_cached(ids, &metadata, cache));
    let after = allocator::heap().expect("the counting allocator is installed");
    after.peak_bytes - before.current_bytes
}

fn sequences_enter_and_end_without_memory_and_one_block_is_copied() {
    // what threads hold at the same time is up to the scheduler
    let alone = rayon::ThreadPoolBuilder::new().num_threads(1);
    alone.build_global().expect("this process has no pool yet");
    let decoder = decoder();
    let (mut cache, mut tables) = full(&decoder);
    let shared = PROMPT.div_ceil(BLOCK_SIZE);
    assert_eq!(cache.used_blocks(), shared, "the prompt is stored once");

    // the first token of each takes a copy of the last block, but for the last that has it
    let copies = decode(&decoder, &mut cache, &mut tables);
    assert_eq!(cache.used_blocks(), shared + SEQUENCES - 1);
    let again = decode(&decoder, &mut cache, &mut tables);
    let layer = (cache.bytes() / 2) as u64;
    assert!(
        copies < layer / 4 && again < layer / 4,
        "{copies} and {again} bytes were allocated where a layer's pool has {layer}"
    );

    // sequences that end and enter: a pool never moves, and no step needs more than the one before and the copy of a
    // block
    let block = (cache.bytes() / BLOCKS) as u64;
    for _ in 0..3 {
        let first = tables.remove(0);
        let before = allocator::heap().expect("the counting allocator is installed");
        allocator::reset_peak();
        cache.free(first);
        let other = cache.fork(&mut tables[0]);
        tables.push(other);
        let after = allocator::heap().expect("the counting allocator is installed");
        let allocated = after.peak_bytes - before.current_bytes;
        assert!(allocated < 4096, "{allocated} bytes for an entry in tables");
        let step = decode(&decoder, &mut cache, &mut tables);
        assert!(step <= again + block, "{step} bytes, {again} before");
    }
}

#[cfg(target_os = "linux")]
fn blocks_take_memory_when_they_are_first_used() {
    use crate::reuse::resident;
    const POOLS: usize = 256 << 20;
    allocator::keep_freed_memory();
    let decoder = decoder();
    let (arch, device) = (decoder.arch(), decoder.device());
    // a run before takes memory of the pools' size from the global allocator, and gives it back
    drop(vec![1_u8; POOLS]);
    let blocks = POOLS / (KvCache::new(arch, &[1], KvCacheDtype::Auto, device).bytes());
    for dtype in [KvCacheDtype::Auto, KvCacheDtype::Int8] {
        let (before, counted) = (resident(), allocator::heap().expect("it is installed"));
        let mut cache = KvCache::new(arch, &[blocks], dtype, device);
        let now = allocator::heap().expect("it is installed");
        assert!(now.current_bytes - counted.current_bytes >= cache.bytes() as u64);
        let mut table = cache.begin(&[]);
        assert!(cache.append(&mut table, PROMPT));
        let chunk = Chunk { table: &table, tokens: 0..PROMPT };
        let metadata = cache.prefill(arch, &[chunk]);
        drop(decoder.hidden_cached(ids(&decoder, PROMPT), &metadata, &mut cache));
        let taken = resident().saturating_sub(before);
        assert!(
            taken < (cache.bytes() / 8) as u64,
            "{taken} bytes in memory for {PROMPT} tokens of pools of {} bytes",
            cache.bytes()
        );
        let pools = cache.bytes() as u64;
        drop(cache);
        let left = allocator::heap().expect("it is installed").current_bytes;
        assert!(now.current_bytes - left >= pools * 7 / 8, "{left} bytes left");
    }
}
