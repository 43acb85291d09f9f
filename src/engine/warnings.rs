//! Warnings of an engine, for the user of the service.

use std::collections::HashSet;
use std::fmt;

use parking_lot::Mutex;

/// Reports warnings, each text once.
pub struct Warnings {
    report: Box<dyn Fn(&str) + Send + Sync>,
    reported: Mutex<HashSet<String>>,
}

impl Warnings {
    /// Creates the warnings of a service. `report` receives their texts.
    pub fn new(report: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Warnings {
            report: Box::new(report),
            reported: Mutex::default(),
        }
    }

    /// Reports a warning, unless the same one has been reported.
    pub(super) fn warn(&self, text: String) {
        if self.reported.lock().insert(text.clone()) {
            (self.report)(&text);
        }
    }
}

impl fmt::Debug for Warnings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Warnings").finish_non_exhaustive()
    }
}
