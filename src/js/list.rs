//! The list of held locks, in pages: the JSON text of all of them at once would block the event loop.

use std::rc::Rc;
use std::time::Duration;

use napi::Env;
use napi::bindgen_prelude::{Result, Unknown};
use napi_derive::napi;

use super::bridge::Bridge;
use super::bridge::deferred::infos_to_json;
use super::service::LockService;
use crate::model::LockInfo;

/// The number of locks in a page: about a millisecond of the JavaScript thread.
const PAGE: usize = 200;
/// The pause before each page but the first, in which the event loop runs. Without it, one wake-up of the event loop would settle
/// all pages.
const PAUSE: Duration = Duration::from_millis(1);

/// The locks of a list that JavaScript has not read yet.
#[napi]
pub struct LockList {
    bridge: Rc<Bridge>,
    rest: std::vec::IntoIter<LockInfo>,
    has_begun: bool,
}

#[napi]
impl LockService {
    /// Lists the held locks whose name starts with `prefix`.
    #[napi(ts_return_type = "Promise<LockList>")]
    pub fn list<'env>(&self, env: &'env Env, prefix: String) -> Result<Unknown<'env>> {
        let locks = self.locks.clone();
        let listing = async move { locks.list(&prefix).await };
        self.bridge.answer(env, &self.locks, listing, move |bridge, infos| {
            Ok(LockList {
                bridge: bridge.clone(),
                rest: infos.into_iter(),
                has_begun: false,
            })
        })
    }
}

#[napi]
impl LockList {
    /// Returns the next page as JSON text: an array. `null`: there is none.
    #[napi(ts_return_type = "Promise<string | null>")]
    pub fn next<'env>(&mut self, env: &'env Env) -> Result<Unknown<'env>> {
        let page: Vec<LockInfo> = self.rest.by_ref().take(PAGE).collect();
        let pauses = std::mem::replace(&mut self.has_begun, true);
        let converting = async move {
            if page.is_empty() {
                return Ok(None);
            }
            if pauses {
                tokio::time::sleep(PAUSE).await;
            }
            Ok(Some(infos_to_json(&page)))
        };
        self.bridge.promise(env, false, converting, |_, _, text| text)
    }
}
