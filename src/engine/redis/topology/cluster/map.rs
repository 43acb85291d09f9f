//! The master of each slot, by `CLUSTER SLOTS`.

use redis::Value;

use crate::engine::redis::keys::slots::SLOTS;

/// Host and port of a node, which identify it, as in every redirection.
pub(in crate::engine::redis) type Address = (String, u16);

/// The master of each range of slots: first slot, last slot, address. Sorted.
pub(super) type Ranges = Vec<(u16, u16, Address)>;

/// The master of every slot.
#[derive(Default)]
pub(super) struct SlotMap {
    masters: Vec<Address>,
    /// For each slot the index of its master plus one. 0: no master.
    served: Vec<u16>,
}

impl SlotMap {
    pub(super) fn new(ranges: &Ranges) -> Self {
        let mut map = SlotMap {
            masters: Vec::new(),
            served: vec![0; usize::from(SLOTS)],
        };
        for (first, last, master) in ranges {
            let place = map.place(master);
            map.served[usize::from(*first)..=usize::from(*last)].fill(place);
        }
        map
    }

    /// Takes over a redirection, which is newer than what the other nodes may know.
    pub(super) fn learn(&mut self, slot: u16, master: &Address) {
        let place = self.place(master);
        if let Some(served) = self.served.get_mut(usize::from(slot)) {
            *served = place;
        }
    }

    fn place(&mut self, master: &Address) -> u16 {
        let known = self.masters.iter().position(|known| known == master);
        let place = known.unwrap_or_else(|| {
            self.masters.push(master.clone());
            self.masters.len() - 1
        });
        // There are fewer masters than slots.
        place as u16 + 1
    }

    pub(super) fn master(&self, slot: u16) -> Option<&Address> {
        let place = *self.served.get(usize::from(slot))?;
        self.masters.get(usize::from(place.checked_sub(1)?))
    }

    /// Returns every master that serves a slot.
    pub(super) fn masters(&self) -> Vec<Address> {
        let mut serving = vec![false; self.masters.len()];
        for place in self.served.iter().filter(|place| **place > 0) {
            serving[usize::from(*place) - 1] = true;
        }
        let masters = self.masters.iter().zip(serving);
        masters
            .filter(|(_, serves)| *serves)
            .map(|(master, _)| master.clone())
            .collect()
    }
}

/// Reads the answer of `CLUSTER SLOTS`. A node that does not know its own address has the one where it was asked.
pub(super) fn ranges(answer: &Value, asked: &Address) -> Option<Ranges> {
    let mut ranges = Ranges::new();
    for range in answer.as_sequence()? {
        let [Value::Int(first), Value::Int(last), master, ..] = range.as_sequence()? else {
            return None;
        };
        let [host, Value::Int(port), ..] = master.as_sequence()? else {
            return None;
        };
        let host = match host {
            Value::BulkString(host) if !host.is_empty() && host != b"?" => String::from_utf8(host.clone()).ok()?,
            _ => asked.0.clone(),
        };
        let slots = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
        if slots.0 > slots.1 || slots.1 >= SLOTS {
            return None;
        }
        ranges.push((slots.0, slots.1, (host, u16::try_from(*port).ok()?)));
    }
    ranges.sort();
    Some(ranges)
}

/// Reads the address in a redirection. Without a host it is that of the redirecting node.
pub(super) fn address(text: &str, redirecting: &Address) -> Option<Address> {
    let (host, port) = text.rsplit_once(':')?;
    let host = if host.is_empty() { &redirecting.0 } else { host };
    Some((host.to_owned(), port.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> Address {
        ("h".into(), port)
    }

    #[test]
    fn slots_have_masters_and_redirections_are_learnt() {
        let mut map = SlotMap::new(&vec![(0, 99, at(1)), (200, SLOTS - 1, at(2))]);
        assert_eq!(map.master(99), Some(&at(1)));
        assert_eq!((map.master(100), map.master(199)), (None, None));
        assert_eq!(map.master(SLOTS - 1), Some(&at(2)));
        assert_eq!(map.master(SLOTS), None);
        map.learn(100, &at(3));
        map.learn(0, &at(2));
        assert_eq!((map.master(100), map.master(0)), (Some(&at(3)), Some(&at(2))));
        assert_eq!(map.masters(), [at(1), at(2), at(3)]);
        for slot in 0..100 {
            map.learn(slot, &at(3));
        }
        assert_eq!(map.masters(), [at(2), at(3)], "a node without slots is no master");
    }

    #[test]
    fn answers_are_read() {
        let answer = |line: &str| redis::parse_redis_value(line.as_bytes()).unwrap();
        let two = answer(
            "*2\r\n*4\r\n:100\r\n:16383\r\n*3\r\n$1\r\nh\r\n:2\r\n$2\r\nid\r\n*3\r\n$1\r\nr\r\n:9\r\n$2\r\nid\r\n\
             *3\r\n:0\r\n:99\r\n*2\r\n$-1\r\n:1\r\n",
        );
        let here = ("here".to_owned(), 7);
        assert_eq!(
            ranges(&two, &here),
            Some(vec![(0, 99, ("here".into(), 1)), (100, 16383, at(2))])
        );
        assert_eq!(ranges(&answer("*0\r\n"), &here), Some(vec![]));
        for nonsense in [
            ":1\r\n",
            "*1\r\n:1\r\n",
            "*1\r\n*3\r\n:5\r\n:4\r\n*2\r\n$1\r\nh\r\n:1\r\n",
        ] {
            assert_eq!(ranges(&answer(nonsense), &here), None, "{nonsense}");
        }
        assert_eq!(address("::1:7000", &here), Some(("::1".into(), 7000)));
        assert_eq!(address(":7000", &here), Some(("here".into(), 7000)));
        assert_eq!(address("h:port", &here), None);
    }
}
