//! The grammar of URLs, for all stores: `scheme://user:password@h1,h2:2379/path?option=value`.
//!
//! MongoDB's and PostgreSQL's drivers parse their own URLs.

use std::borrow::Cow;
use std::fmt;
use std::net::Ipv6Addr;

use percent_encoding::percent_decode_str;

/// The largest number of hosts in a URL.
const MAX_HOSTS: usize = 100;
/// What is wrong with a URL of a store that has one server.
pub(super) const LIST: &str = "a URL with a list of hosts";
/// The schemes with TLS, up to a "+".
const WITH_TLS: [&str; 3] = ["rediss", "etcds", "zookeepers"];

/// A server: its host, decoded and without brackets, and its port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Server {
    pub host: String,
    pub port: u16,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// The parts of a URL. It has no `Debug`: any part may be a password that was not encoded.
pub(super) struct Target {
    pub has_tls: bool,
    /// The user name, which may be empty, and the password, decoded.
    pub login: Option<(String, Option<String>)>,
    /// Without repeats.
    pub servers: Vec<Server>,
    /// The path with its first slash, or an empty text, as it was written.
    pub path: String,
    /// The options after the `?`, as they were written.
    pub query: String,
}

impl Target {
    /// Splits a URL. `ports`: those of hosts without one, without and with TLS.
    ///
    /// # Errors
    /// What is wrong with the URL, without any of its text.
    pub fn parse(url: &str, ports: [u16; 2]) -> Result<Self, String> {
        // As the URL standard has it: a line break at the end of a secret is no part of it.
        let url = url.replace(['\t', '\n', '\r'], "");
        let (scheme, rest) = url.trim().split_once(':').unwrap_or_default();
        let rest = match rest.strip_prefix("//") {
            Some(rest) => rest,
            None if rest.starts_with('/') => rest,
            None => return Err("a URL without \"//\"".into()),
        };
        if rest.contains('#') {
            return Err("a URL with a \"#\"".into());
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        // After a "/" or "?" of a password that was not encoded, the rest of it would follow, and the "@".
        if !authority.is_empty() && (path.contains('@') || query.contains('@')) {
            return Err("a URL with an \"@\" behind its hosts".into());
        }
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let login = login.map(|login| match login.split_once(':') {
            Some((user, password)) => Ok((decoded(user)?, Some(decoded(password)?))),
            None => decoded(login).map(|user| (user, None)),
        });
        let has_tls = scheme
            .split('+')
            .next()
            .is_some_and(|scheme| WITH_TLS.contains(&scheme));
        let port = ports[usize::from(has_tls)];
        let hosts: Vec<&str> = hosts.split(',').filter(|_| !hosts.is_empty()).collect();
        if hosts.len() > MAX_HOSTS {
            return Err("a URL with more than 100 hosts".into());
        }
        let mut servers = Vec::with_capacity(hosts.len());
        for host in hosts {
            let is_ip = host.trim().starts_with('[');
            let (host, of_host) = host_and_port(host.trim())?;
            let host = match is_ip {
                true => host.parse::<Ipv6Addr>().map(|host| host.to_string()).ok(),
                false => Some(host).filter(|host| !host.is_empty() && host.bytes().all(is_of_host)),
            };
            let host = host.ok_or("a URL with an empty or invalid host")?;
            let port = of_host.unwrap_or(port);
            let server = Server { host, port };
            if !servers.contains(&server) {
                servers.push(server);
            }
        }
        Ok(Target {
            has_tls,
            login: login.transpose()?,
            servers,
            path: path.to_owned(),
            query: query.to_owned(),
        })
    }

    /// Returns the servers: at least one.
    pub fn servers(&self) -> Result<&[Server], String> {
        match &self.servers[..] {
            [] => Err("a URL without a host".into()),
            servers => Ok(servers),
        }
    }

    /// Returns the only server.
    pub fn server(&self) -> Result<&Server, String> {
        match self.servers()? {
            [server] => Ok(server),
            _ => Err(LIST.into()),
        }
    }

    /// Parses the options. The store knows no others than those of the table.
    pub fn options(&self, known: &[Known]) -> Result<Options, String> {
        Options::parse(&self.query, known, |_| false)
    }
}

fn is_of_host(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b".-_".contains(&byte)
}

/// Splits a host, in brackets or not, from its port, and decodes it.
pub(super) fn host_and_port(text: &str) -> Result<(String, Option<u16>), String> {
    let (host, rest) = match text.strip_prefix('[') {
        Some(text) => text.split_once(']').ok_or("a URL with an invalid host")?,
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let port = match rest.strip_prefix(':') {
        None | Some("") => None,
        // `parse` would take a "+".
        Some(port) if port.starts_with('+') => return Err("a URL with an invalid port".into()),
        Some(port) => Some(port.parse().map_err(|_| "a URL with an invalid port")?),
    };
    match rest.is_empty() || rest.starts_with(':') {
        true => Ok((decoded(host)?, port)),
        false => Err("a URL with an invalid host".into()),
    }
}

/// Decodes a part of a URL. A "%" without two hexadecimal digits stays.
pub(super) fn decoded(text: &str) -> Result<String, String> {
    let text = percent_decode_str(text).decode_utf8().map(Cow::into_owned);
    text.map_err(|_| "a URL with text that is not UTF-8".into())
}

/// An option of a URL: its name, and its values.
pub(super) type Known = (&'static str, Values);

/// The values of an option.
pub(super) enum Values {
    Text,
    /// Text with spaces as "+", as in forms.
    Form,
    /// The number of a database.
    Number,
    /// One of these. Upper and lower case are the same.
    OneOf(&'static [&'static str]),
    /// The option has no meaning here: it is of another client.
    Ignored,
    /// The driver parses the option.
    OfDriver,
}

impl Values {
    /// Decodes the value of an option.
    fn parsed(&self, name: &str, text: &str) -> Result<String, String> {
        let value = decoded(text)?;
        let other_than = |values: &str| format!("a URL with a value of {name} other than {values}");
        match self {
            Values::Form => decoded(&text.replace('+', " ")),
            Values::Number if !is_database(&value) => Err(other_than("the number of a database")),
            Values::OneOf(all @ [first @ .., last]) => {
                let of_table = all.iter().find(|one| one.eq_ignore_ascii_case(&value));
                let of_table = of_table.map(|one| (*one).to_owned());
                of_table.ok_or_else(|| other_than(&format!("{} and {last}", first.join(", "))))
            }
            _ => Ok(value),
        }
    }
}

/// Whether a text is the number of a database of Redis.
pub(super) fn is_database(text: &str) -> bool {
    (1..=9).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The options of a URL that have a meaning, decoded.
pub(super) struct Options(Vec<(&'static str, String)>);

impl Options {
    /// Parses the options of a URL. `is_of_driver`: whether the driver knows an option as it was written.
    pub fn parse(query: &str, known: &[Known], mut is_of_driver: impl FnMut(&str) -> bool) -> Result<Self, String> {
        let mut options = Vec::new();
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            let name = decoded(name)?;
            match known.iter().find(|(known, _)| *known == name) {
                Some((_, Values::Ignored)) => {}
                None | Some((_, Values::OfDriver)) => {
                    if !is_of_driver(option) {
                        return Err(unknown_option(&name, query, known));
                    }
                }
                Some((name, values)) => options.push((*name, values.parsed(name, value)?)),
            }
        }
        Ok(Options(options))
    }

    /// Returns the value of an option. The last one counts.
    pub fn get(&self, name: &str) -> Option<&str> {
        let option = self.0.iter().rfind(|(option, _)| *option == name);
        option.map(|(_, value)| value.as_str())
    }
}

/// Options of other drivers, and what they are here.
const OF_OTHER_DRIVERS: [(&str, &str); 4] = [
    (
        "ssl tls usessl encrypt secure",
        "sslmode=require for PostgreSQL, ssl-mode=REQUIRED for MySQL, a URL with rediss:// for Redis",
    ),
    (
        "max pool_size poolsize connectionlimit maxconnections max_connections pool_max_conns",
        "the option maxConnections of connect, for PostgreSQL and MySQL",
    ),
    (
        "timeout connecttimeout connecttimeoutmillis",
        "the option storeTimeoutMs of connect",
    ),
    ("db database dbname", "the path of the URL"),
];

/// Describes an option of a URL that is not known. Names it only if it cannot be a part of a password that contains a question mark.
/// `query`: all options of the URL.
fn unknown_option(name: &str, query: &str, known: &[Known]) -> String {
    let known = known.iter().filter(|(_, values)| !matches!(values, Values::Ignored));
    let known: Vec<&str> = known.map(|(name, _)| *name).collect();
    let is_name = (1..=32).contains(&name.len())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
        && !query.contains('@');
    let lower = name.to_ascii_lowercase();
    let here = OF_OTHER_DRIVERS
        .iter()
        .find(|(names, _)| names.split(' ').any(|name| name == lower));
    let shown = match here {
        Some((_, here)) if is_name => format!(": {name} (did you mean {here}?)"),
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
    use super::*;

    fn split(rest: &str) -> Result<Target, String> {
        let target = Target::parse(&format!("etcds://{rest}"), [1, 2379])?;
        target.servers().map(drop)?;
        Ok(target)
    }

    #[test]
    fn a_url_is_split() {
        let target = split("us%40er:p%2Cw:&=+@h1,h2:7000, [0::1]:7001,h1:2379,h3:/a/b?x=1\n").unwrap();
        let servers: Vec<String> = target.servers.iter().map(ToString::to_string).collect();
        assert_eq!(servers, ["h1:2379", "h2:7000", "[::1]:7001", "h3:2379"]);
        assert_eq!(target.login, Some(("us@er".into(), Some("p,w:&=+".into()))));
        assert_eq!((&*target.path, &*target.query, target.has_tls), ("/a/b", "x=1", true));
        let plain = Target::parse("redis+sentinel://user@h/", [1, 2]).unwrap();
        assert_eq!(plain.login, Some(("user".into(), None)));
        assert!(plain.path == "/" && !plain.has_tls && plain.server().unwrap().port == 1);
        for host in ["h", "h:"] {
            let target = split(host).unwrap();
            assert!(target.login.is_none() && target.server().unwrap().port == 2379);
        }
        assert!(Target::parse("redis+unix:///a?x=@", [1, 2]).unwrap().servers.is_empty());
    }

    #[test]
    fn a_wrong_url_is_refused_without_its_text() {
        for rest in [
            "",
            "h,",
            ",h",
            "user:secret@",
            "h1:secret,h2",
            "h1,h2 secret",
            "user:sec/secret@h",
            "user:sec?secret@h",
            "user:sec#secret@h",
            "user:%ff@h",
            "h:99999",
            "h:+1",
            "[::1",
            "[h]:1",
            "[::1]1",
            "sécret",
        ] {
            let problem = split(rest).err().unwrap_or_else(|| panic!("{rest}"));
            assert!(
                problem.starts_with("a URL with") && !problem.contains("secret"),
                "{rest}"
            );
        }
        assert!(split(&["h"; MAX_HOSTS + 1].join(",")).is_err());
    }

    const KNOWN: [Known; 5] = [
        ("mode", Values::OneOf(&["On", "Off"])),
        ("db", Values::Number),
        ("text", Values::Text),
        ("form", Values::Form),
        ("pool", Values::Ignored),
    ];

    #[test]
    fn options_have_values() {
        let options = Options::parse(
            "mode=off&mode=on&text=a%2B+&&form=a%2B+&pool=1&own&db=7",
            &KNOWN,
            |option| option == "own",
        )
        .unwrap();
        let values = ["mode", "text", "form", "pool", "own", "db"].map(|name| options.get(name).unwrap_or("none"));
        assert_eq!(values, ["On", "a++", "a+ ", "none", "none", "7"]);
        for (query, problem) in [
            ("mode=secret", "a URL with a value of mode other than On and Off"),
            (
                "db=secret",
                "a URL with a value of db other than the number of a database",
            ),
            ("text=%ff", "a URL with text that is not UTF-8"),
            (
                "other=secret",
                "a URL with an option that is not one of mode, db, text, form, or that has an invalid value: other",
            ),
        ] {
            let options = Options::parse(query, &KNOWN, |_| false);
            assert_eq!(options.err().as_deref(), Some(problem));
        }
    }

    #[test]
    fn the_option_of_another_driver_is_explained() {
        let message = |name: &str, query: &str| unknown_option(name, query, &KNOWN);
        for (name, here) in [
            ("ssl", "sslmode=require for PostgreSQL"),
            ("useSSL", "ssl-mode=REQUIRED for MySQL"),
            ("max", "the option maxConnections"),
            ("connectionLimit", "the option maxConnections"),
        ] {
            let message = message(name, "");
            assert!(
                message.contains(&format!(": {name} (did you mean ")) && message.contains(here),
                "{message}"
            );
        }
        assert!(
            !message("ssl", "ssl=secret@h").contains("ssl (did"),
            "it may be a password"
        );
    }
}
