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
    /// Reads the holder of a name, and waits for its token.
    pub(crate) async fn inspect_one(&self, key: &Key) -> Outcome<Option<LockInfo>> {
        let mut found = self.read(vec![self.id(key)]).await?;
        self.add_tokens(&mut found, |ids| self.read(ids)).await?;
        Ok(info_of(key, &found))
    }

    /// Reads the holder of a name without that wait.
    pub(crate) async fn inspect_once(&self, key: &Key) -> Outcome<Option<LockInfo>> {
        Ok(info_of(key, &self.read(vec![self.id(key)]).await?))
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
        let mut found = self.read(self.ids(claim)).await?;
        self.add_tokens(&mut found, |ids| self.read(ids)).await
    }

    /// Reads the documents that keep these names busy.
    async fn read(&self, ids: Vec<String>) -> Outcome<Vec<Document>> {
        let filter = documents::busy(documents::named(&ids));
        let (locks, fields) = (self.locks(), documents::info_fields(self.queue.is_some()));
        let read = || async move {
            let found = locks.find(filter).projection(fields);
            Ok(found.await?.try_collect().await?)
        };
        self.pool.call(Class::Query, read).await
    }

    /// Reads the documents again that have no token yet, by `read`. One that is gone becomes empty.
    ///
    /// # Behavior
    /// Where another owner has the name meanwhile, the token of that one is not waited for: the name is acquired so often that the
    /// next read would find one more owner without a token.
    async fn add_tokens<E, F>(
        &self,
        documents: &mut [Document],
        read: impl Fn(Vec<String>) -> F,
    ) -> std::result::Result<(), E>
    where
        F: Future<Output = std::result::Result<Vec<Document>, E>>,
    {
        let without = |(at, document): (usize, &Document)| {
            let owner = self.owner_without_token(document)?.to_owned();
            Some((documents::id(document)?.to_owned(), (at, owner)))
        };
        let mut without: HashMap<String, (usize, String)> = documents.iter().enumerate().filter_map(without).collect();
        for _ in 0..REPEATS {
            if without.is_empty() {
                break;
            }
            tokio::time::sleep(DELAY).await;
            let mut before = std::mem::take(&mut without);
            let ids: Vec<String> = before.keys().cloned().collect();
            for ids in ids.chunks(PAGE as usize) {
                for document in read(ids.to_vec()).await? {
                    let entry = documents::id(&document).and_then(|id| before.remove_entry(id));
                    let Some((id, (at, owner))) = entry else { continue };
                    if self.owner_without_token(&document) == Some(&owner) {
                        without.insert(id, (at, owner));
                    }
                    documents[at] = document;
                }
            }
            before.values().for_each(|(at, _)| documents[*at].clear());
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
        let (mut places, mut without) = (Vec::new(), Vec::new());
        loop {
            let page;
            (cursor, page) = self
                .in_time(page_timeout, self.pool.call(Class::Query, || next_page(cursor)))
                .await?;
            if page.is_empty() {
                break;
            }
            for document in page {
                // Only the engine's own prefix is not a part of the name.
                let Some(name) = documents::id(&document).and_then(|id| id.strip_prefix(&self.prefix)) else {
                    continue;
                };
                list.push(documents::info(name, &document));
                if self.owner_without_token(&document).is_some() {
                    places.push(list.len() - 1);
                    without.push(document);
                }
            }
        }
        self.add_tokens(&mut without, |ids| self.in_time(page_timeout, self.read(ids)))
            .await?;
        let found = places
            .into_iter()
            .zip(&without)
            .filter(|(_, document)| !document.is_empty());
        for (at, document) in found {
            // One that is gone stays as it was read.
            list[at] = documents::info(&list[at].name, document);
        }
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

fn info_of(key: &Key, found: &[Document]) -> Option<LockInfo> {
    let document = found.first().filter(|document| !document.is_empty())?;
    Some(documents::info(key.as_str(), document))
}

/// Returns the next page: the documents that the driver has fetched, or those of one request. Empty: the list has ended.
async fn next_page(mut cursor: Cursor<Document>) -> Outcome<(Cursor<Document>, Vec<Document>)> {
    let mut page = Vec::new();
    while page.len() < PAGE as usize && cursor.advance().await? {
        page.push(cursor.deserialize_current()?);
    }
    Ok((cursor, page))
}
