//! Passes the flags of the Node addon to the linker.

fn main() {
    // Only the addon needs the linker flags of a Node module; a plain Rust build must not have them.
    if std::env::var_os("CARGO_FEATURE_NODE").is_some() {
        napi_build::setup();
    }
}
