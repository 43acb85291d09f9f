//! Checks the readers of ZooKeeper's replies and events with arbitrary bytes.

#![no_main]
#![allow(dead_code)]

#[path = "../../src/engine"]
mod engine {
    pub mod zookeeper {
        pub mod client {
            mod jute;
            mod messages;
            mod replies;

            use self::replies::{Connected, Reply, event, head};

            /// Reads the bytes as all that a frame may be.
            pub fn check(bytes: &[u8]) {
                let _ = Connected::parse(bytes).is_ok();
                let Ok((_, body)) = head(bytes) else { return };
                let _ = event(body).is_ok();
                let body = body.to_vec();
                let reply = Reply { body, session: 1 };
                let _ = (reply.children().is_ok(), reply.parts().is_ok());
            }
        }
    }
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| engine::zookeeper::client::check(bytes));
