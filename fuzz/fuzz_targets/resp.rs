//! Checks the reader and the writer of the fast path with arbitrary bytes.

#![no_main]

#[path = "../../src/engine/redis/fast_path/resp.rs"]
mod resp;
#[path = "../../src/engine/redis/fast_path/resp_check.rs"]
mod resp_check;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| resp_check::check(bytes));
