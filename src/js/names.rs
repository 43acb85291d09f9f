//! Names as arguments. Reading one allocates only its key.

use napi::bindgen_prelude::{FromNapiValue, Result};
use napi::{check_status, sys};

use crate::error::LockError;
use crate::model::{Key, MAX_KEY_BYTES, Names};

/// A name, or the error of an invalid one.
pub struct NameArgument(pub(super) std::result::Result<Key, LockError>);

impl NameArgument {
    /// Returns the shared name with the same text.
    pub(super) fn shared(self) -> Self {
        NameArgument(self.0.map(|key| key.shared()))
    }
}

/// One name or several, or the error of an invalid one.
pub struct NamesArgument(pub(super) std::result::Result<Names, LockError>);

impl FromNapiValue for NameArgument {
    unsafe fn from_napi_value(env: sys::napi_env, value: sys::napi_value) -> Result<Self> {
        // Room for one more character and the null. A longer text is cut, and then has more than the maximum length as well.
        let mut room = [0; MAX_KEY_BYTES + 5];
        let mut length = 0;
        // SAFETY: the caller's environment and value, and a buffer with its size.
        check_status!(unsafe {
            sys::napi_get_value_string_utf8(env, value, room.as_mut_ptr().cast(), room.len(), &mut length)
        })?;
        if let Ok(name) = std::str::from_utf8(&room[..length])
            && length <= MAX_KEY_BYTES
        {
            return Ok(NameArgument(Key::new(name)));
        }
        // SAFETY: as above. The error contains the whole length.
        let name = unsafe { String::from_napi_value(env, value) }?;
        Ok(NameArgument(Key::new(&name)))
    }
}

impl FromNapiValue for NamesArgument {
    unsafe fn from_napi_value(env: sys::napi_env, value: sys::napi_value) -> Result<Self> {
        // SAFETY: the caller's environment and value.
        if let Ok(NameArgument(name)) = unsafe { NameArgument::from_napi_value(env, value) } {
            return Ok(NamesArgument(name.map(Names::from)));
        }
        // SAFETY: as above.
        let names = unsafe { Vec::<String>::from_napi_value(env, value) }?;
        Ok(NamesArgument(keys(&names).map(|keys| Names::unique(&keys))))
    }
}

/// Checks names.
pub(super) fn keys(names: &[String]) -> std::result::Result<Vec<Key>, LockError> {
    names.iter().map(|name| Key::new(name)).collect()
}
