//! The scripts of the quorum: each is one verb on one node.

use std::sync::LazyLock;

use super::super::scripts::Script;

macro_rules! scripts {
    ($($(#[$on:meta])? $name:ident = $($file:literal)+;)*) => {
        $(
            $(#[$on])?
            #[doc = concat!($("`", $file, "` ",)+ ": what it takes and answers is in its header.")]
            pub(super) static $name: LazyLock<Script> =
                LazyLock::new(|| Script::new(concat!($(include_str!($file)),+)));
        )*
    };
}

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
