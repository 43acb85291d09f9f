//! Checks the reader and the writer of a connection with arbitrary bytes.

#![no_main]

#[path = "../../src/engine/redis/wire/resp.rs"]
mod resp;
#[path = "../../src/engine/redis/wire/resp_check.rs"]
mod resp_check;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| resp_check::check(bytes));
