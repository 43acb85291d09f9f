//! The native core of the JavaScript surface. Besides `lib.rs`, only this folder uses napi.
//!
//! `lib/*.ts` is the public API. It checks arguments, creates the public classes and errors, and calls the functions here,
//! which take and return numbers, strings and one record of options. JavaScript refers to a lease by a number ([`bridge::leases`]). A call
//! returns a promise; an error rejects it with JSON text ([`bridge::deferred`]). Losses and events are sent to one JavaScript function per
//! service ([`bridge::notifier`]).
//!
//! - `service.rs`: the verbs. `acquisition.rs`: a pending acquisition. `list.rs`: lists. `testing.rs`: `holdfast/testing`.
//! - `options.rs`, `names.rs`: arguments. `debug.rs`: `HOLDFAST_DEBUG=1`.
//! - `bridge/`: between a Rust future and a promise.
//!
//! # References
//! The native core has no reference to a service, only to its `onEvent` and `credentials`. So a service that is unreachable is collected,
//! and its connection closed (`lib/connection.ts`), unless one of these two functions refers to it.

mod acquisition;
mod bridge;
mod debug;
mod list;
mod names;
mod options;
mod service;
mod testing;

/// Keeps this library loaded until the process ends.
///
/// Node unloads an addon with the last environment that loaded it, for example with a worker. A helper thread of the runtime
/// may still run its code then: a lookup of a host name cannot be cancelled.
fn pin_library() {
    #[cfg(unix)]
    {
        // SAFETY: `info` is a valid out-parameter, and the address is one of this library's own functions.
        unsafe {
            let mut info: libc::Dl_info = std::mem::zeroed();
            if libc::dladdr(pin_library as *const () as *const _, &mut info) != 0 && !info.dli_fname.is_null() {
                libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NODELETE);
            }
        }
    }
    #[cfg(windows)]
    {
        use windows_sys::Win32::System::LibraryLoader as loader;
        let mut module = std::ptr::null_mut();
        let flags = loader::GET_MODULE_HANDLE_EX_FLAG_PIN | loader::GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS;
        // SAFETY: the address is one of this library's own functions, and `module` is a valid out-parameter.
        unsafe { loader::GetModuleHandleExW(flags, pin_library as *const () as *const u16, &mut module) };
    }
}
