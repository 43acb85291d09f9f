//! Jute, the encoding of ZooKeeper's messages: big-endian integers, and a length before each text and each list.

/// A message that ends early, or contains a wrong length or text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Malformed;

/// Writes a message.
#[derive(Debug, Clone, Default)]
pub(super) struct Writer(pub Vec<u8>);

impl Writer {
    pub(super) fn int(mut self, value: i32) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(super) fn long(mut self, value: i64) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(super) fn flag(mut self, value: bool) -> Self {
        self.0.push(value.into());
        self
    }

    /// Writes bytes with their length. (No message comes near the largest length; the frame is checked before it is sent.)
    pub(super) fn buffer(mut self, bytes: &[u8]) -> Self {
        self = self.int(bytes.len() as i32);
        self.0.extend(bytes);
        self
    }

    pub(super) fn text(self, text: &str) -> Self {
        self.buffer(text.as_bytes())
    }
}

/// Reads a message of a server, which may be damaged or hostile. Allocates no more than the message has bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.take(N)?.try_into().map_err(|_| Malformed)
    }

    pub(super) fn int(&mut self) -> Result<i32, Malformed> {
        self.array().map(i32::from_be_bytes)
    }

    pub(super) fn long(&mut self) -> Result<i64, Malformed> {
        self.array().map(i64::from_be_bytes)
    }

    pub(super) fn flag(&mut self) -> Result<bool, Malformed> {
        self.array::<1>().map(|[byte]| byte != 0)
    }

    /// Reads a length. -1 stands for a missing text or list, which is empty here.
    fn length(&mut self) -> Result<usize, Malformed> {
        match self.int()? {
            -1 => Ok(0),
            length => usize::try_from(length).map_err(|_| Malformed),
        }
    }

    pub(super) fn buffer(&mut self) -> Result<&'a [u8], Malformed> {
        let length = self.length()?;
        self.take(length)
    }

    pub(super) fn text(&mut self) -> Result<&'a str, Malformed> {
        std::str::from_utf8(self.buffer()?).map_err(|_| Malformed)
    }

    /// Reads a list of texts.
    pub(super) fn texts(&mut self) -> Result<Vec<String>, Malformed> {
        let length = self.length()?;
        // Each text has at least its length.
        if length > self.0.len() / size_of::<i32>() {
            return Err(Malformed);
        }
        (0..length).map(|_| self.text().map(str::to_owned)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let written = Writer::default()
            .int(-7)
            .long(1 << 40)
            .flag(true)
            .text("é")
            .buffer(&[])
            .int(2)
            .text("a")
            .text("b");
        let mut reader = Reader(&written.0);
        assert_eq!(reader.int(), Ok(-7));
        assert_eq!(reader.long(), Ok(1 << 40));
        assert_eq!(reader.flag(), Ok(true));
        assert_eq!(reader.text(), Ok("é"));
        assert_eq!(reader.buffer(), Ok(&[][..]));
        assert_eq!(reader.texts(), Ok(vec!["a".to_owned(), "b".to_owned()]));
        assert!(reader.0.is_empty());
    }

    #[test]
    fn wrong_lengths_and_texts_are_errors() {
        for length in [5, i32::MAX, i32::MIN, -2] {
            let written = Writer::default().int(length).0;
            assert_eq!(Reader(&written).buffer(), Err(Malformed), "{length}");
            assert_eq!(Reader(&written).texts(), Err(Malformed), "{length}");
        }
        assert_eq!(Reader(&Writer::default().int(-1).0).texts(), Ok(vec![]));
        assert_eq!(Reader(&[0, 0, 0, 1, 0xff]).text(), Err(Malformed));
        assert_eq!(Reader(&[0; 3]).int(), Err(Malformed));
        assert_eq!(Reader(&[0; 7]).long(), Err(Malformed));
        assert_eq!(Reader(&[]).flag(), Err(Malformed));
    }
}
