//! `inspect` and `list`.
//!
//! The token of a new lease may not be in its document yet (`unwritten_tokens.rs`). Then both read the document again, up to
//! [`REPEATS`] times; `list` does so once for all of its pages. So does a transfer before its first write.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::TryStreamExt;
use mongodb::Cursor;
use mongodb::bson::{Document, doc};

use crate::engine::Result;
use crate::engine::mongodb::connection::pool::Class;
use crate::engine::mongodb::error::{ENGINE, Failure};
use crate::engine::mongodb::unwritten_tokens::{DELAY, is_without_token_yet};
use crate::engine::mongodb::{Core, Outcome, documents};
use crate::error::EngineError;
use crate::model::{Claim, Key, LockInfo};

/// How often a document without a token is read again, every [`DELAY`].
const REPEATS: usize = 3;
/// Number of documents in one page of a list.
const PAGE: u32 = 1000;

/// The name of `list` in errors.
const LIST: &str = "list";

impl Core {
    /// The engine's `inspect`.
    ///
    /// # Behavior
    /// Where another owner has the name meanwhile, the token of that one is not waited for: the name is acquired so often that the
    /// next read would find one more owner without a token.
    pub(crate) async fn inspect_one(&self, key: &Key) -> Outcome<Option<LockInfo>> {
        let mut found = self.read(&[self.id(key)]).await?;
        for _ in 0..REPEATS {
            let Some(owner) = found.first().and_then(|document| self.owner_without_token(document)) else {
                break;
            };
            let owner = owner.to_owned();
            tokio::time::sleep(DELAY).await;
            found = self.read(&[self.id(key)]).await?;
            if found.first().and_then(documents::owner) != Some(&owner) {
                break;
            }
        }
        Ok(self.info_of(key, &found))
    }

    /// The engine's `inspect_now`.
    pub(crate) async fn inspect_once(&self, key: &Key) -> Outcome<Option<LockInfo>> {
        let found = self.read(&[self.id(key)]).await?;
        Ok(self.info_of(key, &found))
    }

    fn info_of(&self, key: &Key, found: &[Document]) -> Option<LockInfo> {
        let document = found.first()?;
        Some(documents::info(key.as_str(), document))
    }

    /// Returns the owner of a new lease whose token is written later.
    fn owner_without_token<'d>(&self, document: &'d Document) -> Option<&'d str> {
        let is_expected = self.unwritten.is_some() && is_without_token_yet(document);
        documents::owner(document).filter(|_| is_expected)
    }

    /// Waits until the token of a new lease of another process is in its documents, which no other process can write.
    pub(crate) async fn await_token(&self, claim: &Claim) -> Outcome<()> {
        if self.unwritten.is_none() || self.tick_of(claim).is_some() {
            return Ok(());
        }
        let owner = Some(claim.owner.as_str());
        for _ in 0..REPEATS {
            let found = self.read(&self.ids(claim)).await?;
            if !found.iter().any(|document| self.owner_without_token(document) == owner) {
                break;
            }
            tokio::time::sleep(DELAY).await;
        }
        Ok(())
    }

    /// Reads the documents that keep these names busy.
    async fn read(&self, ids: &[String]) -> Outcome<Vec<Document>> {
        let filter = documents::busy(match ids {
            [id] => doc! { "_id": id },
            ids => doc! { "_id": { "$in": ids } },
        });
        let (locks, fields) = (self.locks(), documents::info_fields(self.queue.is_some()));
        let read = || async move {
            let found = locks.find(filter).projection(fields);
            Ok(found.await?.try_collect().await?)
        };
        self.pool.call(Class::Query, read).await
    }

    /// Reads the locks of a list again that have no token yet: the index in the list and the owner of each, by id. One that is gone
    /// stays as it was read.
    async fn add_tokens(
        &self,
        list: &mut [LockInfo],
        mut without: HashMap<String, (usize, String)>,
        page_timeout: Duration,
    ) -> Result<()> {
        for _ in 0..REPEATS {
            if without.is_empty() {
                break;
            }
            tokio::time::sleep(DELAY).await;
            let ids: Vec<String> = without.keys().cloned().collect();
            let mut still_without = HashMap::new();
            for ids in ids.chunks(PAGE as usize) {
                for document in self.in_time(page_timeout, self.read(ids)).await? {
                    let entry = documents::id(&document).and_then(|id| without.remove_entry(id));
                    let Some((id, (at, owner))) = entry else { continue };
                    list[at] = documents::info(&list[at].name, &document);
                    if self.owner_without_token(&document) == Some(&owner) {
                        still_without.insert(id, (at, owner));
                    }
                }
            }
            without = still_without;
        }
        Ok(())
    }

    /// The engine's `list`. Each page has `page_timeout` and a permit of its own, so that a long list does not occupy a
    /// connection.
    pub(crate) async fn list_all(&self, prefix: &str, page_timeout: Duration) -> Result<Vec<LockInfo>> {
        let filter = documents::busy(documents::starting_with(&format!("{}{prefix}", self.prefix)));
        let (locks, fields) = (self.locks(), documents::info_fields(self.queue.is_some()));
        let open = self.pool.call(Class::Query, || async move {
            let found = locks.find(filter).projection(fields);
            Ok(found.sort(doc! { "_id": 1 }).batch_size(PAGE).await?)
        });
        let mut cursor = self.in_time(page_timeout, open).await?;
        let mut list = Vec::new();
        let mut without = HashMap::new();
        loop {
            let page;
            (cursor, page) = self
                .in_time(page_timeout, self.pool.call(Class::Query, || next_page(cursor)))
                .await?;
            if page.is_empty() {
                break;
            }
            for document in &page {
                // Only the engine's own prefix is not a part of the name.
                let Some((id, name)) =
                    documents::id(document).and_then(|id| Some((id, id.strip_prefix(&self.prefix)?)))
                else {
                    continue;
                };
                if let Some(owner) = self.owner_without_token(document) {
                    without.insert(id.to_owned(), (list.len(), owner.to_owned()));
                }
                list.push(documents::info(name, document));
            }
        }
        self.add_tokens(&mut list, without, page_timeout).await?;
        Ok(list)
    }

    /// Waits for one page, for `limit` at most.
    async fn in_time<T>(&self, limit: Duration, page: impl Future<Output = Outcome<T>>) -> Result<T> {
        match tokio::time::timeout(limit, page).await {
            Ok(answer) => answer.map_err(|failure: Failure| failure.during(LIST)),
            Err(_) => Err(EngineError::no_answer(ENGINE, &self.address, LIST, limit)),
        }
    }
}

/// Returns the next page: the documents that the driver has fetched, or those of one request. Empty: the list has ended.
async fn next_page(mut cursor: Cursor<Document>) -> Outcome<(Cursor<Document>, Vec<Document>)> {
    let mut page = Vec::new();
    while page.len() < PAGE as usize && cursor.advance().await? {
        page.push(cursor.deserialize_current()?);
    }
    Ok((cursor, page))
}
