#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| firebrick_fuzz::import_python(data));
