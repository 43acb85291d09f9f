//! The pages of a list.

/// The names of one page of a list.
#[derive(Debug, Clone)]
pub(super) struct Page {
    /// The first name, as stored.
    pub(super) start: Vec<u8>,
    /// The first name after the range.
    pub(super) end: Vec<u8>,
    /// The first name after the rows that the page may read, if that is known from an earlier page.
    pub(super) bound: Option<Vec<u8>>,
}

impl Page {
    /// Maximum number of leases in a page. Other jobs run between two pages.
    pub(super) const SIZE: i64 = 1000;
    /// Maximum number of rows that a server reads for a page. Rows of free names count, too: they stay for an hour.
    pub(super) const ROWS: i64 = 20_000;

    /// Returns the first page of the stored names with a prefix.
    pub(super) fn first(store_prefix: &str, prefix: &str) -> Self {
        let start = [store_prefix.as_bytes(), prefix.as_bytes()].concat();
        // UTF-8 has no byte 255: the last byte can grow by one without a carry, and all names are less than this byte.
        let end = start
            .split_last()
            .map_or(vec![255], |(byte, rest)| [rest, &[byte + 1]].concat());
        Page {
            start,
            end,
            bound: None,
        }
    }

    /// Returns the page of one stored name.
    pub(super) fn of_name(name: Vec<u8>) -> Self {
        let end = after(&name);
        Page {
            start: name,
            end,
            bound: None,
        }
    }

    /// Returns whether the first name after the rows that the page may read has to be read first.
    pub(super) fn needs_bound(&self) -> bool {
        self.bound.is_none() && self.end != after(&self.start)
    }

    /// Returns the page after this one. This page has `count` leases, the last one of the name `last`, and reads only names before
    /// `bound`. `None`: this is the last page.
    pub(super) fn next(&self, last: Option<&[u8]>, count: usize, bound: Option<Vec<u8>>) -> Option<Self> {
        let end = self.end.clone();
        match last {
            Some(last) if count as i64 == Self::SIZE => Some(Page {
                start: after(last),
                end,
                bound,
            }),
            _ => Some(Page {
                start: bound?,
                end,
                bound: None,
            }),
        }
    }
}

/// Returns the next name in byte order.
fn after(name: &[u8]) -> Vec<u8> {
    [name, &[0]].concat()
}
