//! Identifies the files of a connection: the database, its write-ahead log (`-wal`) and the log's index (`-shm`).
//!
//! A connection keeps using the files that it opened, even when they were deleted or replaced since. It would then lock
//! files that no other process sees. So `File` compares the inodes at the three paths with those of the open files. It never
//! opens the files for that: closing them would drop the process's POSIX locks on them.

use std::path::{Path, PathBuf};

pub(super) use self::system::file_id;
use self::system::make_private;

/// Device and inode.
pub(super) type FileId = (u64, u64);

/// The files of one connection.
#[derive(Debug)]
pub(super) struct Files {
    path: PathBuf,
    log: PathBuf,
    index: PathBuf,
    /// The ids at the time of the opening. `None`: there was no such file.
    ids: [Option<FileId>; 3],
}

impl Files {
    /// Reads the ids of the files at this path. The connection has read the database, so all files of its mode are open.
    pub(super) fn at(path: &Path) -> Self {
        // SQLite resolves links before it appends the suffixes.
        let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let beside = |suffix: &str| {
            let mut path = real.clone().into_os_string();
            path.push(suffix);
            PathBuf::from(path)
        };
        let mut files = Files {
            path: path.to_owned(),
            log: beside("-wal"),
            index: beside("-shm"),
            ids: [None; 3],
        };
        files.ids = files.ids_now();
        files
    }

    fn ids_now(&self) -> [Option<FileId>; 3] {
        [&self.path, &self.log, &self.index].map(|path| file_id(path))
    }

    /// Removes the permissions of other users: the names and the metadata of locks are private.
    pub(super) fn make_private(&self) {
        for path in [&self.path, &self.log, &self.index] {
            // SQLite creates the log and its index with the rights of the database. A file that is gone was deleted meanwhile.
            if let Err(error) = make_private(path) {
                tracing::debug!(path = %path.display(), %error, "the rights of other users were not taken away");
            }
        }
    }

    /// Returns the id of the database.
    pub(super) fn database(&self) -> Option<FileId> {
        self.ids[0]
    }

    /// Whether all paths lead to the open files.
    pub(super) fn are_in_place(&self) -> bool {
        self.ids_now() == self.ids
    }

    /// Whether a different file is at one of the paths. `false` when files are only missing.
    pub(super) fn were_replaced(&self) -> bool {
        let pairs = self.ids_now().into_iter().zip(self.ids);
        pairs.into_iter().any(|(now, then)| now.is_some() && now != then)
    }
}

#[cfg(unix)]
mod system {
    use std::fs::{Permissions, metadata, set_permissions};
    use std::io;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::path::Path;

    use super::FileId;

    pub(crate) fn file_id(path: &Path) -> Option<FileId> {
        metadata(path).ok().map(|file| (file.dev(), file.ino()))
    }

    pub(super) fn make_private(path: &Path) -> io::Result<()> {
        set_permissions(path, Permissions::from_mode(0o600))
    }
}

/// Windows refuses to delete or replace a file that SQLite has open. The files there have the rights of the user's folder.
#[cfg(not(unix))]
mod system {
    use std::io;
    use std::path::Path;

    use super::FileId;

    pub(crate) fn file_id(_path: &Path) -> Option<FileId> {
        None
    }

    pub(super) fn make_private(_path: &Path) -> io::Result<()> {
        Ok(())
    }
}
