//! The message about an option of a URL that is not known.

/// Options of other drivers, and what they are here.
const OF_OTHER_DRIVERS: [(&[&str], &str); 4] = [
    (
        &["ssl", "tls", "usessl", "encrypt", "secure"],
        "sslmode=require for PostgreSQL, ssl-mode=REQUIRED for MySQL, a URL with rediss:// for Redis",
    ),
    (
        &[
            "max",
            "pool_size",
            "poolsize",
            "connectionlimit",
            "maxconnections",
            "max_connections",
            "pool_max_conns",
        ],
        "the option maxConnections of connect, for PostgreSQL and MySQL",
    ),
    (
        &["timeout", "connecttimeout", "connecttimeoutmillis"],
        "the option storeTimeoutMs of connect",
    ),
    (&["db", "database", "dbname"], "the path of the URL"),
];

/// Describes an option of a URL that is not known. Names it only if it cannot be a part of a password that contains a question mark.
/// `query`: all options of the URL. `known`: those that a URL may have.
pub(super) fn unknown_option(name: &str, query: &str, known: &[&str]) -> String {
    let is_name = (1..=32).contains(&name.len())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
        && !query.contains('@');
    let lower = name.to_ascii_lowercase();
    let here = OF_OTHER_DRIVERS.iter().find(|(names, _)| names.contains(&&*lower));
    let shown = match here {
        Some((_, here)) if is_name && !known.contains(&name) => format!(": {name} (did you mean {here}?)"),
        _ if is_name => format!(": {name}"),
        _ => String::new(),
    };
    match known.join(", ").as_str() {
        "" => format!("a URL with an option{shown}"),
        known => format!("a URL with an option that is not one of {known}, or that has an invalid value{shown}"),
    }
}

#[cfg(test)]
mod tests {
    use super::unknown_option;

    #[test]
    fn the_option_of_another_driver_is_explained() {
        for (name, here) in [
            ("ssl", "sslmode=require for PostgreSQL"),
            ("useSSL", "ssl-mode=REQUIRED for MySQL"),
            ("max", "the option maxConnections"),
            ("connectionLimit", "the option maxConnections"),
        ] {
            let message = unknown_option(name, "", &["sslmode"]);
            assert!(
                message.contains(&format!(": {name} (did you mean ")) && message.contains(here),
                "{message}"
            );
        }
        assert!(
            unknown_option("db", "", &["db"]).ends_with(": db"),
            "its value is wrong"
        );
        assert!(
            !unknown_option("ssl", "ssl=secret@h", &[]).contains("ssl (did"),
            "it may be a password"
        );
    }
}
