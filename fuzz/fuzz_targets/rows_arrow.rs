#![no_main]

use firebrick_fuzz::{allow_caught_panics, limit_allocations, rows_arrow};

libfuzzer_sys::fuzz_target!(
    init: {
        limit_allocations();
        allow_caught_panics();
    },
    |data: &[u8]| rows_arrow(data)
);
