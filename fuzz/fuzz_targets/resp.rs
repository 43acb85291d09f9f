//! The fast lane's reader and writer, on whatever bytes.

#![no_main]

#[path = "../../src/engine/redis/fast_path/resp.rs"]
mod resp;
#[path = "../../src/engine/redis/fast_path/resp_check.rs"]
mod resp_check;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| resp_check::check(bytes));
