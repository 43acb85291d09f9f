//! The scripts of the quorum: each is one verb on one node.

use std::sync::LazyLock;

use super::super::scripts::{Script, scripts};

scripts! {
    ACQUIRE = "acquire.lua";
    RAISE = "raise.lua";
    WITHDRAW = "withdraw.lua";
    RENEW = "renew.lua";
    HEAL = "heal.lua";
    TRANSFER = "transfer.lua";
    RELEASE = "let_go.lua" "release.lua";
    #[cfg(unix)]
    RELEASE_MANY = "let_go.lua" "release_many.lua";
    FORCE_RELEASE = "force_release.lua";
}
