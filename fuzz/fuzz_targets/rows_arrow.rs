#![no_main]

libfuzzer_sys::fuzz_target!(init: firebrick_fuzz::allow_caught_panics(), |data: &[u8]| firebrick_fuzz::rows_arrow(data));
