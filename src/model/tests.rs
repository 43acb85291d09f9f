use super::*;
use crate::error::Code;

#[test]
fn a_name_has_1_to_512_bytes() {
    assert_eq!(Key::new("").unwrap_err().code, Code::InvalidArgument);
    assert!(Key::new(&"x".repeat(512)).is_ok());
    assert!(Key::new(&"x".repeat(513)).unwrap_err().message.contains("513 bytes"));
    assert!(Key::new(&"é".repeat(257)).is_err(), "bytes count, not characters");
}

#[test]
fn tokens_are_fresh_and_well_formed() {
    let (a, b) = (OwnerToken::fresh(), OwnerToken::fresh());
    assert_ne!(a, b);
    assert_eq!(OwnerToken::parse(a.as_str()).unwrap(), a);
    for bad in ["", "abc", &"g".repeat(32), &"A".repeat(32), &"a".repeat(33)] {
        assert!(OwnerToken::parse(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn ttl_rounds_up_and_has_limits() {
    assert!(Ttl::new(Duration::ZERO).is_err());
    assert!(Ttl::new(MAX_TTL).is_ok() && Ttl::new(MAX_TTL + Duration::from_millis(1)).is_err());
    assert_eq!(Ttl::new(Duration::from_micros(1)).unwrap().as_millis(), 1);
    assert_eq!(Ttl::new(Duration::from_micros(1500)).unwrap().as_millis(), 2);
}

#[test]
fn the_validity_is_shorter_by_one_percent_and_two_ms() {
    let validity = |ms| Ttl::clamped(Duration::from_millis(ms)).validity();
    assert_eq!(validity(10_000), Duration::from_millis(9898));
    assert_eq!(validity(1), Duration::ZERO);
}

#[test]
fn a_claim_sorts_its_keys() {
    let key = |s| Key::new(s).unwrap();
    let claim = Claim::new(
        &[key("b"), key("a"), key("b")],
        OwnerToken::fresh(),
        Ttl::clamped(MAX_TTL),
        Arc::new(Process::current()),
    );
    assert_eq!(claim.keys(), &[key("a"), key("b")]);
    let names = Names::unique(&[key("a"), key("b"), key("a")]);
    let shared = Claim::with_names(&names, OwnerToken::fresh(), claim.ttl, claim.process);
    assert!(std::ptr::eq(shared.keys(), &*names));
    assert_eq!(*Names::unique(&[key("b"), key("a"), key("b")]), [key("b"), key("a")]);
    assert_eq!(*Names::from(key("a")), *Names::unique(&[key("a"), key("a")]));
}
