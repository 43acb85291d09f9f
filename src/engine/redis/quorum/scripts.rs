//! The scripts of the quorum: each is one verb on one node.

use std::sync::LazyLock;

use super::super::scripts::Script;

macro_rules! scripts {
    ($($name:ident = $file:literal;)*) => {
        $(
            #[doc = concat!("`", $file, "`: what it takes and answers is in its header.")]
            pub(super) static $name: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!($file)));
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
    RELEASE = "release.lua";
    FORCE_RELEASE = "force_release.lua";
}
