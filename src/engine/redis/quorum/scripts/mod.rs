//! The scripts of the quorum. Each of them is one verb on one node.

use std::sync::LazyLock;

use crate::engine::redis::scripts::{Script, scripts};

scripts! {
    ACQUIRE = "acquire.lua";
    RAISE = "raise.lua";
    ROLLBACK = "rollback.lua";
    RENEW = "renew.lua";
    RELEASE = "release_one.lua" "release.lua";
    RELEASE_MANY = "release_one.lua" "release_many.lua";
    FORCE_RELEASE = "release_one.lua" "force_release.lua";
}
