//! The process of a holder.

/// The process that acquires a lock, as `inspect` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// The host's name.
    pub host: String,
    /// The process id on that host.
    pub pid: u32,
}

impl Process {
    /// Returns this process. Characters of the host name that are not ASCII become question marks, because not every store can
    /// store them.
    pub fn current() -> Self {
        let host = gethostname::gethostname().to_string_lossy().into_owned();
        Process {
            // Stores read an empty host as an unknown process.
            host: match host.is_empty() {
                true => "localhost".to_owned(),
                false => host.replace(|character: char| !character.is_ascii(), "?"),
            },
            pid: std::process::id(),
        }
    }
}
