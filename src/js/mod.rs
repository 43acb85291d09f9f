//! The JavaScript boundary: the only place, beside `lib.rs`, that knows napi.

mod abort;
mod calls;
mod connect;
mod error;
#[cfg(unix)]
mod home;
mod lock;
mod memory;
mod options;
mod promise;
mod run;
mod service;
mod signal;
#[cfg(unix)]
mod turns;
mod value;

/// Keeps this library loaded until the process ends.
///
/// Node unloads an addon with the last environment that loaded it, for instance with a worker. A helper thread of the
/// runtime may still be inside then (a look-up of a host name cannot be cancelled), and would run code that is gone.
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
        // SAFETY: the address is one of this library's own functions, and `module` a valid out-parameter.
        unsafe { loader::GetModuleHandleExW(flags, pin_library as *const () as *const u16, &mut module) };
    }
}
