//! Memory that the KV cache needs to close the hole of a sequence that ended.

use crate::own_process::in_own_process;
use burn::tensor::{Int, Tensor};
use firebrick::backends::allocator;
use firebrick::backends::device::{DeviceSpec, open};
use firebrick::models::cache::KvCache;
use firebrick::models::forward_context::{Columns, ForwardContext};
use firebrick::models::{Arch, Decoder};
use serde_json::{Value, json};
use std::path::Path;

in_own_process!(an_ended_row_costs_a_copy_of_one_row);

const ROWS: usize = 16;
const LAYERS: usize = 2;
const PROMPT: usize = 384;
const CAPACITY: usize = 512;

fn decoder() -> Decoder {
    let Value::Object(config) = json!({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4
    }) else {
        unreachable!("an object")
    };
    let arch = Arch::from_config(&config, Path::new("ended rows")).expect("a valid architecture");
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
    Decoder::random(arch, 1, &device)
}

/// A cache whose rows all hold the same prompt.
fn full(decoder: &Decoder) -> KvCache {
    let (arch, device) = (decoder.arch(), decoder.device());
    let mut prompt = KvCache::new(arch, vec![0], PROMPT, device);
    let columns = Columns {
        starts: &[0],
        first: 0,
        len: PROMPT,
    };
    let ids: Vec<i32> = (0..PROMPT as i32).map(|i| i % 64).collect();
    let ids = Tensor::<1, Int>::from_ints(ids.as_slice(), device);
    let context = ForwardContext::cached(arch, columns, device);
    drop(decoder.hidden_cached(ids, &context, &mut prompt));
    let mut cache = KvCache::empty(arch, ROWS, CAPACITY, device);
    cache.clear(PROMPT);
    cache.adopt(0..ROWS, &prompt, 0);
    cache
}

fn an_ended_row_costs_a_copy_of_one_row() {
    let decoder = decoder();
    let mut cache = full(&decoder);
    // keys and values of one row, in one layer
    let row = (cache.bytes() / ROWS / LAYERS) as u64;
    for ended in [0, 5, 3] {
        let before = allocator::heap().expect("the counting allocator is installed");
        allocator::reset_peak();
        cache.drop_row(ended);
        let after = allocator::heap().expect("the counting allocator is installed");
        let allocated = after.peak_bytes - before.current_bytes;
        assert!(
            allocated <= 2 * row,
            "row {ended}: {allocated} bytes for a row of {row}"
        );
        assert!(
            allocated >= row / 2,
            "row {ended}: {allocated} bytes counted, the copy is {row}"
        );
    }
    assert_eq!(cache.starts().len(), ROWS - 3);
}
