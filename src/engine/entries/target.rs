//! URLs with several servers: `scheme://user:password@h1,h2:2379/path?option=value`.

use url::form_urlencoded;

/// The largest number of servers in a URL.
const MAX_SERVERS: usize = 100;

/// A server: its host, without brackets, and its port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in crate::engine) struct Server {
    pub host: String,
    pub port: u16,
}

impl std::fmt::Display for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// The parts of a URL. It has no `Debug`: it may have a password.
pub(in crate::engine) struct Target<'u> {
    /// The user name and the password, decoded.
    pub login: Option<(String, String)>,
    /// The servers without repeats: at least one.
    pub servers: Vec<Server>,
    /// The path with its first slash, or an empty text, as it was written.
    pub path: &'u str,
    /// The options after the `?`, as they were written.
    pub query: &'u str,
}

impl<'u> Target<'u> {
    /// Parses the text after the `://`. `port`: that of a server without one.
    ///
    /// # Errors
    /// What is wrong with the URL, without any of its text.
    pub(in crate::engine) fn parse(rest: &'u str, port: u16) -> Result<Self, &'static str> {
        if rest.contains('#') {
            return Err("a URL with a \"#\"");
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        // A "/" or "?" of a password that was not encoded.
        if path.contains('@') || query.contains('@') {
            return Err("a URL with an \"@\" behind its hosts");
        }
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let login = match login.map(|login| login.split_once(':')) {
            None => None,
            Some(None) => return Err("a URL with a user name and no password"),
            Some(Some((user, password))) => Some((decoded(user)?, decoded(password)?)),
        };
        let mut servers = Vec::new();
        for text in hosts.split(',') {
            let server = server(text.trim(), port)?;
            if !servers.contains(&server) {
                servers.push(server);
            }
        }
        if servers.len() > MAX_SERVERS {
            return Err("a URL with more than 100 hosts");
        }
        Ok(Target {
            login,
            servers,
            path,
            query,
        })
    }
}

fn server(text: &str, port: u16) -> Result<Server, &'static str> {
    let (host, rest) = match text.strip_prefix('[') {
        Some(text) => text.split_once(']').ok_or("a URL with an invalid host")?,
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let of_host = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    let is_host = match text.starts_with('[') {
        true => host.parse::<std::net::Ipv6Addr>().is_ok(),
        false => !host.is_empty() && host.bytes().all(of_host),
    };
    if !is_host {
        return Err("a URL with an empty or invalid host");
    }
    let port = match rest.strip_prefix(':') {
        Some(port) => port.parse().map_err(|_| "a URL with an invalid port")?,
        None if rest.is_empty() => port,
        None => return Err("a URL with an invalid host"),
    };
    Ok(Server {
        host: host.to_owned(),
        port,
    })
}

/// Decodes a user name or a password.
fn decoded(text: &str) -> Result<String, &'static str> {
    // The only available decoder is that of forms, where "&" and "=" have a meaning, and "+" is a blank.
    let escaped = text.replace('&', "%26").replace('=', "%3D").replace('+', "%2B");
    let (text, _) = form_urlencoded::parse(escaped.as_bytes()).next().unwrap_or_default();
    match text.contains(char::REPLACEMENT_CHARACTER) {
        true => Err("a URL with a user name or password that is not UTF-8"),
        false => Ok(text.into_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_split() {
        let target = Target::parse("us%40er:p%2Cw:&=+@h1,h2:7000, [::1]:7001,h1:2379/a/b?x=1", 2379).unwrap();
        let servers: Vec<_> = target.servers.iter().map(ToString::to_string).collect();
        assert_eq!(servers, ["h1:2379", "h2:7000", "[::1]:7001"]);
        assert_eq!(target.login, Some(("us@er".into(), "p,w:&=+".into())));
        assert_eq!((target.path, target.query), ("/a/b", "x=1"));
        let plain = Target::parse("h", 1).unwrap();
        assert!(plain.login.is_none() && plain.path.is_empty());
    }

    #[test]
    fn a_wrong_url_is_refused_without_its_text() {
        for rest in [
            "",
            "h,",
            ",h",
            "user:secret@",
            "user@h",
            "h1:secret,h2",
            "h1,h2 secret",
            "user:sec/secret@h",
            "user:sec?secret@h",
            "user:sec#secret@h",
            "user:%ff@h",
            "h:99999",
            "h:",
            "[::1",
            "[h]:1",
            "[::1]1",
            "sécret",
        ] {
            let problem = Target::parse(rest, 1).err().unwrap_or_else(|| panic!("{rest}"));
            assert!(
                problem.starts_with("a URL with") && !problem.contains("secret"),
                "{rest}"
            );
        }
        let many: Vec<String> = (0..=MAX_SERVERS).map(|i| format!("h{i}")).collect();
        assert!(Target::parse(&many.join(","), 1).is_err());
    }
}
