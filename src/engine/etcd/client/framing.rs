//! The frames of gRPC's messages: one byte (0: not compressed), the length in four bytes, the message.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;

use super::status::Status;

/// The largest message that is accepted from a server: more than a range of 1000 entries with large metadata.
const MAX_MESSAGE: usize = 16 << 20;
const HEADER: usize = 5;

/// Returns a message as a frame.
pub(super) fn encoded(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut frame = BytesMut::with_capacity(HEADER + length);
    frame.put_u8(0);
    frame.put_u32(length as u32);
    // The buffer grows: there is always room.
    let _ = message.encode(&mut frame);
    frame.freeze()
}

/// The bytes of a stream that are not a whole frame yet.
#[derive(Default)]
pub(super) struct Frames(BytesMut);

impl Frames {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Takes the next message. `None`: it is not complete.
    ///
    /// # Errors
    /// A message that is compressed or too large.
    pub(super) fn next(&mut self) -> Result<Option<BytesMut>, Status> {
        let Some((head, _)) = self.0.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let [flag, length @ ..] = *head;
        let length = u32::from_be_bytes(length) as usize;
        if flag != 0 {
            return Err(Status::protocol("a compressed message"));
        }
        if length > MAX_MESSAGE {
            return Err(Status::protocol("a message of more than 16 MiB"));
        }
        if self.0.len() < HEADER + length {
            return Ok(None);
        }
        self.0.advance(HEADER);
        Ok(Some(self.0.split_to(length)))
    }
}

/// Decodes a message.
///
/// # Errors
/// When its bytes are invalid.
pub(super) fn decoded<M: Message + Default>(bytes: BytesMut) -> Result<M, Status> {
    M::decode(bytes).map_err(|error| Status::protocol(&format!("an invalid message: {error}")))
}

#[cfg(test)]
mod tests {
    use super::super::messages::{KeyValue, RangeResponse, TxnResponse, WatchResponse};
    use super::*;

    fn next<M: Message + Default>(frames: &mut Frames) -> Result<Option<M>, Status> {
        frames.next()?.map(decoded).transpose()
    }

    fn answer() -> RangeResponse {
        let kv = KeyValue {
            key: b"holdfast/n/0123".to_vec(),
            create_revision: 7,
            mod_revision: i64::MAX,
            value: vec![0xff; 300],
            lease: -1,
        };
        RangeResponse {
            kvs: vec![kv; 3],
            count: 3,
            ..RangeResponse::default()
        }
    }

    #[test]
    fn messages_are_read_from_any_pieces() {
        let frame = encoded(&answer());
        let twice = [&frame[..], &frame].concat();
        for size in [1, 4, 5, 6, frame.len(), twice.len()] {
            let (mut frames, mut read) = (Frames::default(), Vec::new());
            for piece in twice.chunks(size) {
                frames.push(piece);
                while let Some(message) = next::<RangeResponse>(&mut frames).unwrap() {
                    read.push(message);
                }
            }
            assert_eq!(read, [answer(), answer()], "{size}");
        }
    }

    #[test]
    fn a_cut_message_is_never_complete() {
        let frame = encoded(&answer());
        for end in 0..frame.len() {
            let mut frames = Frames::default();
            frames.push(&frame[..end]);
            assert_eq!(next::<RangeResponse>(&mut frames).unwrap(), None, "{end}");
        }
    }

    #[test]
    fn a_wrong_message_is_an_error() {
        let error = |bytes: &[u8]| {
            let mut frames = Frames::default();
            frames.push(bytes);
            next::<RangeResponse>(&mut frames).unwrap_err().to_string()
        };
        assert!(error(&[1, 0, 0, 0, 0]).contains("compressed"));
        assert!(error(&[0, 1, 0, 0, 1]).contains("16 MiB"));
        assert!(error(&[0, 255, 255, 255, 255]).contains("16 MiB"));
        assert!(error(&[0, 0, 0, 0, 2, 0x12, 0x7f]).contains("invalid message"));
    }

    /// Readers get any bytes, and damaged messages.
    #[test]
    fn no_bytes_make_a_reader_panic() {
        let frame = encoded(&answer());
        for round in 0..20_000 {
            let mut bytes = frame.to_vec();
            if round % 2 == 0 {
                bytes = (0..fastrand::usize(0..64)).map(|_| fastrand::u8(..)).collect();
                bytes.splice(0..0, [0, 0, 0, 0, bytes.len() as u8]);
            } else {
                let at = fastrand::usize(5..bytes.len());
                bytes[at] = fastrand::u8(..);
            }
            let mut frames = Frames::default();
            frames.push(&bytes);
            let _ = next::<RangeResponse>(&mut frames);
            frames.0 = bytes[..].into();
            let _ = next::<TxnResponse>(&mut frames);
            frames.0 = bytes[..].into();
            let _ = next::<WatchResponse>(&mut frames);
        }
    }
}
