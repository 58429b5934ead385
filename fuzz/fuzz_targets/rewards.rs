#![no_main]

libfuzzer_sys::fuzz_target!(init: firebrick_fuzz::limit_allocations(), |data: &[u8]| firebrick_fuzz::rewards(data));
