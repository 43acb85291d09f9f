//! The pages of a list.

/// The names of one page of a list.
#[derive(Debug, Clone)]
pub(super) struct Page {
    /// The first name, as stored.
    pub(super) start: Vec<u8>,
    /// The first name behind the last page. `None`: there is no such name.
    pub(super) end: Option<Vec<u8>>,
}

impl Page {
    /// Maximum number of leases in a page. Other jobs run between two pages.
    pub(super) const SIZE: i64 = 1000;
    /// Maximum number of rows that are read for a page. Most are of free names: their rows stay for an hour.
    pub(super) const ROWS: i64 = 20_000;

    /// Returns the first page of the stored names with a prefix.
    pub(super) fn first(store_prefix: &str, prefix: &str) -> Self {
        let start = [store_prefix.as_bytes(), prefix.as_bytes()].concat();
        // UTF-8 has no byte 255, so that the last byte can grow by one without a carry.
        let end = start.split_last().map(|(byte, rest)| [rest, &[byte + 1]].concat());
        Page { start, end }
    }

    /// Returns the page of one stored name.
    pub(super) fn of_name(name: Vec<u8>) -> Self {
        let end = Some(after(&name));
        Page { start: name, end }
    }

    /// Whether it may have more than one name.
    pub(super) fn is_range(&self) -> bool {
        self.end.as_deref() != Some(&after(&self.start))
    }

    /// Returns the page after this one, which has `count` names up to `last`, read from the rows before `bound`. `None`: this is the
    /// last page.
    pub(super) fn next(&self, last: Option<&[u8]>, count: usize, bound: Option<Vec<u8>>) -> Option<Self> {
        let is_full = count as i64 == Self::SIZE;
        let start = last.filter(|_| is_full).map(after).or(bound)?;
        Some(Page {
            start,
            end: self.end.clone(),
        })
    }
}

/// Returns the next name in byte order.
fn after(name: &[u8]) -> Vec<u8> {
    [name, &[0]].concat()
}
