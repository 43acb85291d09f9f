//! Errors on their way to JavaScript, as JSON text. `lib/errors.ts` turns the text into a `LockError`.

use std::error::Error as _;

use serde_json::{Value, json};

use crate::error::LockError;

/// The fields of a `LockError` as JSON; `null` where a field does not apply.
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
