//! Reads the holders of names.

use std::time::Duration;

use tokio::time::timeout;

use super::Store;
use super::client::{Answer, Failure, Request, code};
use super::record::info;
use super::release::Seen;
use super::renew::{TOKEN_POLL, TOKEN_POLLS};
use crate::model::{Key, LockInfo};

/// The number of names in one read of a list.
const PAGE_SIZE: usize = 50;
/// How often a page is read again for fencing tokens that are not written yet.
const PAGE_POLLS: usize = 5;

impl Store {
    /// Reads the holder of a name. `waits`: also for its fencing token, which is written a moment after the grant.
    pub(super) async fn inspect(&self, key: &Key, waits: bool) -> Answer<Option<LockInfo>> {
        let keys = std::slice::from_ref(key);
        for poll in 1.. {
            let names = self.look(keys).await?;
            let Some(oldest) = names[0].children.first() else {
                return Ok(None);
            };
            let mut seen = self.see(keys, &names, |child| child == oldest).await?;
            // It was released in the meantime.
            let Some(seen) = seen.pop() else { continue };
            if !seen.is_holder {
                return Ok(None);
            }
            if !waits || !seen.awaits_token() || poll >= TOKEN_POLLS {
                return Ok(Some(info(
                    key.as_str(),
                    seen.record,
                    &seen.stat,
                    names[0].children.len() - 1,
                )));
            }
            tokio::time::sleep(TOKEN_POLL).await;
        }
        Ok(None)
    }

    /// Lists the held locks whose names start with `prefix`. `None`: a page had no answer within its timeout.
    pub(super) async fn list(&self, prefix: &str, page_timeout: Duration) -> Option<Answer<Vec<LockInfo>>> {
        let folders = match timeout(page_timeout, self.folders()).await.ok()? {
            Ok(folders) => folders,
            Err(failure) => return Some(Err(failure)),
        };
        let names = folders.iter().filter_map(|folder| self.layout.name_of(folder));
        let mut keys: Vec<Key> = names.filter(|key| key.as_str().starts_with(prefix)).collect();
        keys.sort();
        let mut found = Vec::new();
        for page in keys.chunks(PAGE_SIZE) {
            match timeout(page_timeout, self.page(page)).await.ok()? {
                Ok(infos) => found.extend(infos),
                Err(failure) => return Some(Err(failure)),
            }
        }
        Some(Ok(found))
    }

    async fn folders(&self) -> Answer<Vec<String>> {
        let chroot = self.layout.chroot.as_str();
        let synced = self.client.call(Request::sync("/"));
        let read = self
            .client
            .call(Request::children(if chroot.is_empty() { "/" } else { chroot }));
        synced.await?;
        match read.await {
            Ok(reply) => Ok(reply.children()?.0),
            Err(Failure::Refused(code::NO_NODE)) => Ok(Vec::new()),
            Err(failure) => Err(failure),
        }
    }

    /// Reads the holders of names. Waits a little for fencing tokens that are not written yet.
    async fn page(&self, keys: &[Key]) -> Answer<Vec<LockInfo>> {
        let mut polls = 0;
        let (names, seen) = loop {
            let names = self.look(keys).await?;
            let is_oldest = |child: &_| names.iter().any(|name| name.children.first() == Some(child));
            let seen = self.see(keys, &names, is_oldest).await?;
            if polls >= PAGE_POLLS || !seen.iter().any(Seen::awaits_token) {
                break (names, seen);
            }
            polls += 1;
            tokio::time::sleep(TOKEN_POLL).await;
        };
        let infos = seen.into_iter().filter(|seen| seen.is_holder).map(|seen| {
            let index = keys.iter().position(|key| *key == seen.node.key).unwrap_or_default();
            info(
                seen.node.key.as_str(),
                seen.record,
                &seen.stat,
                names[index].children.len().saturating_sub(1),
            )
        });
        Ok(infos.collect())
    }
}
