//! `inspect` and `list`.

use std::time::Duration;

use mongodb::Cursor;
use mongodb::bson::{Document, doc};

use crate::engine::Result;
use crate::engine::mongodb::connection::pool::Class;
use crate::engine::mongodb::error::{ENGINE, Failure};
use crate::engine::mongodb::{Core, Outcome, documents};
use crate::error::EngineError;
use crate::model::{Key, LockInfo};

/// Number of documents in one page of a list.
const PAGE: u32 = 1000;

/// The name of `list` in errors.
const LIST: &str = "list";

impl Core {
    /// The engine's `inspect`.
    pub(crate) async fn inspect_one(&self, key: &Key) -> Outcome<Option<LockInfo>> {
        let filter = documents::busy(doc! { "_id": self.id(key) });
        let locks = self.locks();
        let found = self.pool.call(Class::Query, || async move {
            Ok(locks.find_one(filter).projection(documents::info_fields()).await?)
        });
        let document = found.await?;
        Ok(document.map(|document| documents::info(key.as_str(), &document, self.clock)))
    }

    /// The engine's `list`. Each page has `page_timeout` and a permit of its own, so that a long list does not occupy a
    /// connection.
    pub(crate) async fn list_all(&self, prefix: &str, page_timeout: Duration) -> Result<Vec<LockInfo>> {
        let filter = documents::busy(documents::starting_with(&format!("{}{prefix}", self.prefix)));
        let locks = self.locks();
        let open = self.pool.call(Class::Query, || async move {
            let found = locks.find(filter).projection(documents::info_fields());
            Ok(found.sort(doc! { "_id": 1 }).batch_size(PAGE).await?)
        });
        let mut cursor = in_time(page_timeout, open).await?;
        let mut list = Vec::new();
        loop {
            let page;
            (cursor, page) = in_time(page_timeout, self.pool.call(Class::Query, || next_page(cursor))).await?;
            if page.is_empty() {
                return Ok(list);
            }
            list.extend(page.iter().filter_map(|document| {
                // Only the engine's own prefix is not a part of the name.
                let name = documents::id(document)?.strip_prefix(&self.prefix)?;
                Some(documents::info(name, document, self.clock))
            }));
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

async fn in_time<T>(limit: Duration, call: impl Future<Output = Outcome<T>>) -> Result<T> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => answer.map_err(|failure: Failure| failure.during(LIST)),
        Err(_) => Err(EngineError::no_answer(ENGINE, LIST, limit)),
    }
}
