//! Errors as JSON text, from which `lib/errors.ts` creates a `LockError`.

use std::error::Error as _;

use serde_json::{Value, json};

use crate::error::LockError;

/// Returns the fields of a `LockError` as JSON. A field that does not apply is `null`.
pub(super) fn to_json(error: &LockError) -> Value {
    let cause = error
        .source()
        .map(|cause| cause.source().map_or_else(|| cause.to_string(), ToString::to_string));
    json!({
        "code": error.code.as_str(),
        "message": error.message,
        "retryable": error.retryable,
        "key": error.key,
        "engine": error.engine,
        "cause": cause,
    })
}
