//! `HOLDFAST_DEBUG=1`: prints the events of `tracing` to stderr, one line each.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::Once;
use std::time::{SystemTime, UNIX_EPOCH};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Starts to print, once per process, if the environment asks for it.
pub(super) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        if std::env::var_os("HOLDFAST_DEBUG").is_some_and(|value| value == "1") {
            // Fails only if this library has a subscriber.
            let _ = tracing::subscriber::set_global_default(Printer);
        }
    });
}

/// Prints the events of this crate. It has no spans.
struct Printer;

impl Subscriber for Printer {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::DEBUG && metadata.target().starts_with(env!("CARGO_PKG_NAME"))
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::DEBUG)
    }

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let metadata = event.metadata();
        let line = line(now.as_secs_f64(), *metadata.level(), metadata.target(), &fields);
        // The process may have closed stderr.
        let _ = std::io::stderr().lock().write_all(line.as_bytes());
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The text of an event, and its other fields.
#[derive(Default)]
struct Fields {
    message: String,
    others: String,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // A write to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.others, " {name}={value:?}"),
        };
    }
}

/// Returns one line: control characters, as in a name, are escaped.
fn line(seconds: f64, level: Level, target: &str, fields: &Fields) -> String {
    let text = format!("{}{}", fields.message, fields.others);
    let mut line = format!("holdfast {seconds:.3} {level} {target}: ");
    for char in text.chars() {
        match char.is_control() {
            true => line.extend(char.escape_default()),
            false => line.push(char),
        }
    }
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line() {
        let fields = Fields {
            message: "a renewal failed".into(),
            others: " name=a\nb\u{1b}[0m é".into(),
        };
        assert_eq!(
            line(1.5, Level::WARN, "holdfast::service", &fields),
            "holdfast 1.500 WARN holdfast::service: a renewal failed name=a\\nb\\u{1b}[0m é\n"
        );
    }
}
