//! The location of an embedded store: `sqlite:PATH`, or the user's state folder.

use std::path::{MAIN_SEPARATOR, Path, PathBuf};
use std::time::Duration;

use super::tables::checked_table;
use crate::engine::Settings;
use crate::engine::target::decoded;
use crate::error::LockError;

const TARGET_RULE: &str = "must be sqlite:PATH with the path of a file (write ? as %3F and % as %25)";

/// A parsed embedded store: its file and its tables.
#[derive(Debug, Clone)]
pub struct SqliteConfig {
    /// The absolute path of the file. A later change of the working directory has no effect.
    pub(super) path: PathBuf,
    /// Whether the file is in holdfast's folder, which is created for this user only.
    pub(super) own_folder: bool,
    /// The table of the locks, and the prefix of the other tables' names. It is checked, and safe inside quotes.
    pub(super) table: String,
    /// The prefix of every name.
    pub(super) key_prefix: String,
    /// The longest wait for transactions of other processes.
    pub(super) busy_timeout: Duration,
}

impl SqliteConfig {
    /// Parses `sqlite:PATH` and `sqlite://PATH`.
    ///
    /// # Behavior
    /// The path is percent-decoded; an invalid escape stays unchanged. A path that starts with `~/` is in the user's home
    /// folder. A relative path starts at the current working directory. `connect` creates missing folders.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` with `target` when the URL has no path, or with `table`.
    pub fn parse(url: &str, settings: &Settings) -> Result<Self, LockError> {
        let refuse = |got: &str| LockError::invalid("target", TARGET_RULE, format_args!("{got:?}"));
        let rest = url.strip_prefix("sqlite:").ok_or_else(|| refuse(url))?;
        let raw = rest.strip_prefix("//").unwrap_or(rest);
        if raw == ":memory:" {
            // Each connection would have a separate store.
            return Err(LockError::invalid(
                "target",
                "must be a file: the store in memory is memory:",
                "sqlite::memory:",
            ));
        }
        if raw.contains('?') {
            return Err(refuse(url));
        }
        let path = decoded(raw).map_err(|_| refuse(url))?;
        if path.is_empty() || path.contains('\0') || path.ends_with('/') || path.ends_with(MAIN_SEPARATOR) {
            return Err(refuse(url));
        }
        let path = std::path::absolute(located(&path)).map_err(|_| refuse(url))?;
        Self::at(path, false, settings)
    }

    /// Returns the default store: `holdfast/locks.sqlite` in the user's state folder, or in the folder of local application data
    /// where the platform has no state folder.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` with `target` when this user has neither folder, or with `table`.
    pub fn in_state_folder(settings: &Settings) -> Result<Self, LockError> {
        let folder = dirs::state_dir().or_else(dirs::data_local_dir).ok_or_else(|| {
            LockError::invalid(
                "target",
                "is needed: this user has no home folder for the embedded store",
                "nothing",
            )
        })?;
        Self::at(folder.join("holdfast").join("locks.sqlite"), true, settings)
    }

    fn at(path: PathBuf, own_folder: bool, settings: &Settings) -> Result<Self, LockError> {
        // The driver takes a path as text.
        if path.to_str().is_none() {
            return Err(LockError::invalid("target", "must be a path in UTF-8", path.display()));
        }
        Ok(SqliteConfig {
            path,
            own_folder,
            table: checked_table(&settings.table, false)?,
            key_prefix: settings.key_prefix.clone().unwrap_or_default(),
            // The driver takes milliseconds as a 32-bit number. With 0 it would not wait.
            busy_timeout: settings
                .store_timeout
                .clamp(Duration::from_millis(100), Duration::from_secs(3600)),
        })
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Resolves `~/` to the user's home folder, because no shell expands a URL, and on Windows `/C:/x` of a URL to `C:/x`.
fn located(path: &str) -> PathBuf {
    if let Some(rest) = path.strip_prefix("~/")
        && let Some(home) = dirs::home_dir()
    {
        return home.join(rest);
    }
    if cfg!(windows)
        && let Some(rest) = path.strip_prefix('/')
        && rest.as_bytes().get(1) == Some(&b':')
    {
        return PathBuf::from(rest);
    }
    PathBuf::from(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    fn path(url: &str) -> PathBuf {
        SqliteConfig::parse(url, &Settings::default()).unwrap().path
    }

    fn refused(url: &str, settings: &Settings) -> String {
        let error = SqliteConfig::parse(url, settings).unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
        error.message
    }

    #[test]
    #[cfg(unix)]
    fn paths_are_absolute_and_decoded() {
        let here = std::env::current_dir().unwrap();
        assert_eq!(path("sqlite:/tmp/a.sqlite"), Path::new("/tmp/a.sqlite"));
        assert_eq!(path("sqlite:///tmp/a.sqlite"), Path::new("/tmp/a.sqlite"));
        assert_eq!(path("sqlite:a.sqlite"), here.join("a.sqlite"));
        assert_eq!(path("sqlite://a.sqlite"), here.join("a.sqlite"));
        assert_eq!(path("sqlite:./x/a.sqlite"), here.join("x/a.sqlite"));
        assert_eq!(
            path("sqlite:/tmp/a%20b%3F%C3%A9%2f100%.db#1"),
            Path::new("/tmp/a b?é/100%.db#1")
        );
        assert_eq!(path("sqlite:~/a.sqlite"), dirs::home_dir().unwrap().join("a.sqlite"));
    }

    #[test]
    fn an_invalid_path_is_rejected() {
        for url in [
            "sqlite:",
            "sqlite://",
            "sqlite:/tmp/",
            "sqlite:a?mode=ro",
            "sqlite:a%00b",
            "sqlite:a%ff",
            "sqlite::memory:",
        ] {
            let message = refused(url, &Settings::default());
            assert!(message.starts_with("target "), "{url}: {message}");
        }
    }

    #[test]
    fn table_names_are_checked() {
        for good in ["locks", "_", "L0", "order", &"x".repeat(51)] {
            let settings = Settings {
                table: good.into(),
                ..Settings::default()
            };
            assert_eq!(SqliteConfig::parse("sqlite:x", &settings).unwrap().table, good);
        }
        for bad in [
            "",
            "0a",
            "a b",
            "a\"",
            "a;b",
            "é",
            "a.b",
            "sqlite_x",
            "SQLITE_x",
            &"x".repeat(52),
        ] {
            let settings = Settings {
                table: bad.into(),
                ..Settings::default()
            };
            let message = refused("sqlite:x", &settings);
            assert!(
                message.starts_with("table ") && message.contains(&format!("{bad:?}")),
                "{message}"
            );
        }
    }

    #[test]
    fn the_default_store_has_its_own_folder() {
        let config = SqliteConfig::in_state_folder(&Settings::default()).unwrap();
        assert!(
            config.path().is_absolute() && config.path().ends_with("holdfast/locks.sqlite"),
            "{config:?}"
        );
        assert!(config.own_folder);
    }
}
