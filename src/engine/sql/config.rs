//! Where an embedded store is: `sqlite:PATH`, or the user's state folder.

use std::path::{MAIN_SEPARATOR, Path, PathBuf};
use std::time::Duration;

use crate::engine::Settings;
use crate::error::LockError;

/// The longest table name. Suffixes (`_waiters`) come on top.
const MAX_TABLE: usize = 51;
const TARGET_RULE: &str = "must be sqlite:PATH with the path of a file (write ? as %3F and % as %25)";

/// An embedded store that was understood: its file and its tables.
#[derive(Debug, Clone)]
pub struct SqliteConfig {
    /// The file, absolute, so that a later change of the working directory changes nothing.
    pub(super) path: PathBuf,
    /// Whether the file's folder is this library's own, to be made for this user alone.
    pub(super) own_folder: bool,
    /// The table of the locks, and the beginning of the other tables' names. Checked: safe inside quotes.
    pub(super) table: String,
    /// Put in front of every name.
    pub(super) key_prefix: String,
    /// How long to wait for other processes' transactions.
    pub(super) patience: Duration,
}

impl SqliteConfig {
    /// Understands `sqlite:PATH` and `sqlite://PATH`.
    ///
    /// # Behavior
    /// The path is percent-decoded (what is no valid escape stays as it is); `~/` at its start is the user's home, and a
    /// relative path starts at the working directory of this moment. Folders that are missing are made on connect.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` naming `target` when there is no path in it, or naming `table`.
    pub fn parse(url: &str, settings: &Settings) -> Result<Self, LockError> {
        let refuse = |got: &str| LockError::invalid("target", TARGET_RULE, format_args!("{got:?}"));
        let rest = url.strip_prefix("sqlite:").ok_or_else(|| refuse(url))?;
        let raw = rest.strip_prefix("//").unwrap_or(rest);
        if raw == ":memory:" {
            // Each connection would have a store of its own, and exclude nobody.
            return Err(LockError::invalid(
                "target",
                "must be a file: the store in memory is memory:",
                "sqlite::memory:",
            ));
        }
        if raw.contains('?') {
            return Err(refuse(url));
        }
        let path = percent_decoded(raw)
            .filter(|path| !path.contains('\0'))
            .ok_or_else(|| refuse(url))?;
        if path.is_empty() || path.ends_with('/') || path.ends_with(MAIN_SEPARATOR) {
            return Err(refuse(url));
        }
        let path = std::path::absolute(located(&path)).map_err(|_| refuse(url))?;
        Self::at(path, false, settings)
    }

    /// The default store: `holdfast/locks.sqlite` in the user's state folder, or where the platform has none, in the
    /// folder of local application data.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` naming `target` when this user has neither, or naming `table`.
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
        // The driver hands paths on as text.
        if path.to_str().is_none() {
            return Err(LockError::invalid("target", "must be a path in UTF-8", path.display()));
        }
        Ok(SqliteConfig {
            path,
            own_folder,
            table: checked_table(&settings.table)?,
            key_prefix: settings.key_prefix.clone().unwrap_or_default(),
            // The driver takes milliseconds as a 32-bit number, and gives up at once when there are none.
            patience: settings
                .store_timeout
                .clamp(Duration::from_millis(100), Duration::from_secs(3600)),
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn checked_table(table: &str) -> Result<String, LockError> {
    let mut bytes = table.bytes();
    let well_formed = bytes
        .next()
        .is_some_and(|first| first.is_ascii_alphabetic() || first == b'_')
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        && table.len() <= MAX_TABLE;
    if !well_formed || table.to_ascii_lowercase().starts_with("sqlite_") {
        return Err(LockError::invalid(
            "table",
            "must be 1 to 51 letters, digits and underscores, not starting with a digit or with sqlite_",
            format_args!("{table:?}"),
        ));
    }
    Ok(table.to_owned())
}

/// `%41` becomes `A`; a `%` without two hexadecimal digits stays. `None` when the result is no UTF-8.
fn percent_decoded(raw: &str) -> Option<String> {
    let digit = |byte: Option<&u8>| byte.and_then(|byte| char::from(*byte).to_digit(16));
    let bytes = raw.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        match (byte, digit(bytes.get(at + 1)), digit(bytes.get(at + 2))) {
            (b'%', Some(high), Some(low)) => {
                decoded.push((high * 16 + low) as u8);
                at += 3;
            }
            _ => {
                decoded.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8(decoded).ok()
}

/// No shell sees a URL, and a folder named `~` is what nobody wants; `sqlite:///C:/x` is how URLs write `C:/x`.
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
    fn what_is_no_path_is_refused() {
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
    fn tables_are_plain_words() {
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
    fn the_default_store_is_in_a_folder_of_its_own() {
        let config = SqliteConfig::in_state_folder(&Settings::default()).unwrap();
        assert!(
            config.path().is_absolute() && config.path().ends_with("holdfast/locks.sqlite"),
            "{config:?}"
        );
        assert!(config.own_folder);
    }
}
