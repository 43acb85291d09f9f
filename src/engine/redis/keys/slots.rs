//! Hash slots: the position of a key in a cluster ("Hash tags" in the Redis Cluster specification).

use std::fmt::Write;
use std::sync::OnceLock;

/// Returns the part of a key that determines its slot, if it is not the whole key.
pub(in super::super) fn hash_tag(key: &str) -> Option<&str> {
    let (_, rest) = key.split_once('{')?;
    let (tag, _) = rest.split_once('}')?;
    Some(tag).filter(|tag| !tag.is_empty())
}

/// Returns the slot of a key.
pub(in super::super) fn slot_of(key: &str) -> u16 {
    slot(hash_tag(key).unwrap_or(key).as_bytes())
}

/// The number of slots.
pub(in super::super) const SLOTS: u16 = 16384;

/// Returns the slot of a key without a hash tag.
pub(in super::super) fn slot(key: &[u8]) -> u16 {
    crc16(key) % SLOTS
}

/// CRC16 as Redis Cluster has it (XMODEM: polynomial 0x1021, initial value 0).
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc: u16, byte| {
        (crc << 8) ^ CRC_TABLE[usize::from((crc >> 8) ^ u16::from(*byte))]
    })
}

const CRC_TABLE: [u16; 256] = {
    let mut table = [0u16; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 != 0 {
                (crc << 1) ^ 0x1021
            } else {
                crc << 1
            };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// Returns the smallest number whose decimal digits hash to a slot. The table (64 KB, some milliseconds) is created when the
/// first such name needs it.
pub(in super::super) fn tag_for_slot(slot: u16) -> u32 {
    static TAGS: OnceLock<Box<[u32]>> = OnceLock::new();
    let tags = TAGS.get_or_init(|| {
        let mut tags = vec![u32::MAX; usize::from(SLOTS)].into_boxed_slice();
        let mut missing = SLOTS;
        let mut digits = String::new();
        for number in 0u32.. {
            digits.clear();
            let _ = write!(digits, "{number}");
            let tag = &mut tags[usize::from(self::slot(digits.as_bytes()))];
            if *tag == u32::MAX {
                *tag = number;
                missing -= 1;
                if missing == 0 {
                    break;
                }
            }
        }
        tags
    });
    tags[usize::from(slot)]
}

#[cfg(test)]
pub(in super::super) mod tests {
    use super::*;

    /// The slot by the letter of the cluster specification, bit by bit, and sharing no code with the above.
    pub(in crate::engine::redis) fn slot_by_the_book(key: &str) -> u16 {
        let bytes = key.as_bytes();
        let mut hashed = bytes;
        if let Some(open) = bytes.iter().position(|b| *b == b'{')
            && let Some(length) = bytes[open + 1..].iter().position(|b| *b == b'}')
            && length > 0
        {
            hashed = &bytes[open + 1..open + 1 + length];
        }
        let mut crc: u32 = 0;
        for byte in hashed {
            crc ^= u32::from(*byte) << 8;
            for _ in 0..8 {
                crc = if crc & 0x8000 != 0 {
                    (crc << 1) ^ 0x1021
                } else {
                    crc << 1
                } & 0xffff;
            }
        }
        (crc % 16384) as u16
    }

    #[test]
    fn the_crc_is_that_of_the_cluster_specification() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(slot_by_the_book("123456789"), 0x31c3);
        assert_eq!(slot_by_the_book("{user1000}.following"), slot_by_the_book("user1000"));
    }

    #[test]
    fn the_table_has_a_tag_for_every_slot() {
        for slot in 0..SLOTS {
            assert_eq!(self::slot(tag_for_slot(slot).to_string().as_bytes()), slot);
        }
    }
}
