//! Checks the reader of etcd's messages with arbitrary bytes.

#![no_main]
#![allow(dead_code)]

#[path = "../../src/engine"]
mod engine {
    pub mod etcd {
        pub mod client {
            pub mod framing;
            pub mod messages;
            pub mod status;

            use self::framing::{Frames, decoded};
            use self::messages::{LeaseResponse, RangeResponse, TxnResponse, WatchResponse};

            /// Reads the bytes in two pieces, and each message as all that it may be.
            pub fn check(bytes: &[u8]) {
                let (first, second) = bytes.split_at(bytes.len() / 2);
                let mut frames = Frames::default();
                for piece in [first, second] {
                    frames.push(piece);
                    while let Ok(Some(message)) = frames.next() {
                        let _ = decoded::<RangeResponse>(message.clone());
                        let _ = decoded::<TxnResponse>(message.clone());
                        let _ = decoded::<WatchResponse>(message.clone());
                        let _ = decoded::<LeaseResponse>(message);
                    }
                }
            }
        }
    }
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| engine::etcd::client::check(bytes));
