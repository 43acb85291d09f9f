//! URLs with several hosts: `redis+sentinel://user:password@h1,h2:26380/master?…`.
//!
//! The URL standard allows one host. So the list is split here, and each host is parsed as a URL of its own.

use redis::{ConnectionInfo, IntoConnectionInfo};
use url::{Url, form_urlencoded};

/// The largest number of hosts in a URL.
const MAX_HOSTS: usize = 100;

/// The parts of a URL with a list of hosts, as they were written.
///
/// # Behavior
/// A password that was not percent-encoded may be in any of the parts: none of them is ever shown.
pub(in super::super) struct HostList<'u> {
    login: Option<&'u str>,
    hosts: Vec<&'u str>,
    /// The segments of the path.
    pub(in super::super) path: Vec<&'u str>,
    query: &'u str,
}

impl<'u> HostList<'u> {
    /// Splits the text after the `://`.
    ///
    /// # Errors
    /// A description of the problem, without any of the text.
    pub(in super::super) fn parse(rest: &'u str) -> Result<Self, &'static str> {
        if rest.contains('#') {
            return Err("a URL with a \"#\"");
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let hosts: Vec<&str> = hosts.split(',').map(str::trim).collect();
        if hosts.len() > MAX_HOSTS {
            return Err("a URL with more than 100 hosts");
        }
        // After a "/" or "?" that was not encoded, the rest of a password would follow, and the "@".
        if path.contains('@') || query.contains('@') {
            return Err("a URL with an \"@\" behind its hosts");
        }
        Ok(HostList {
            login,
            hosts,
            path: path.split('/').filter(|part| !part.is_empty()).collect(),
            query,
        })
    }

    /// Returns the hosts without repeats, each with the login of the URL and this database.
    pub(in super::super) fn servers(
        &self,
        secure: bool,
        port: u16,
        database: &str,
    ) -> Result<Vec<ConnectionInfo>, String> {
        let scheme = if secure { "rediss" } else { "redis" };
        let login = self.login.map(|login| format!("{login}@")).unwrap_or_default();
        let mut servers: Vec<ConnectionInfo> = Vec::with_capacity(self.hosts.len());
        for host in &self.hosts {
            let mut url = Url::parse(&format!("{scheme}://{login}{host}/{database}"))
                .map_err(|error| format!("a URL with a host that does not parse ({error})"))?;
            if url.host_str().is_none_or(str::is_empty) {
                return Err("a URL without a host".into());
            }
            if url.port().is_none() {
                // A URL with a host can have a port.
                let _ = url.set_port(Some(port));
            }
            let server = url.into_connection_info().map_err(|error| error.to_string())?;
            if servers.iter().all(|known| known.addr() != server.addr()) {
                servers.push(server);
            }
        }
        Ok(servers)
    }

    /// Returns the options after the `?`, decoded. A "+" is a plus: this is no form.
    pub(in super::super) fn options(&self) -> impl Iterator<Item = (String, String)> {
        let query = self.query.replace('+', "%2B");
        let options: Vec<_> = form_urlencoded::parse(query.as_bytes()).into_owned().collect();
        options.into_iter()
    }
}

/// Decodes a segment of a path.
pub(in super::super) fn decoded(part: &str) -> String {
    // The only available decoder is that of forms, where "&" and "=" have a meaning, and "+" is a blank.
    let escaped = part.replace('&', "%26").replace('=', "%3D").replace('+', "%2B");
    form_urlencoded::parse(escaped.as_bytes())
        .map(|(name, _)| name.into_owned())
        .next()
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(list: &HostList) -> Vec<String> {
        let servers = list.servers(false, 26379, "").unwrap();
        servers.iter().map(|server| server.addr().to_string()).collect()
    }

    #[test]
    fn a_list_is_split() {
        let list = HostList::parse("us%40er:p%2Cw@h1,h2:7000,[::1]:7001,h1:26379/ma%20ster/3?a=1%2B+2&b=").unwrap();
        assert_eq!(addresses(&list), ["h1:26379", "h2:7000", "::1:7001"]);
        assert_eq!(list.path, ["ma%20ster", "3"]);
        assert_eq!(decoded(list.path[0]), "ma ster");
        let options: Vec<_> = list.options().collect();
        assert_eq!(options, [("a".into(), "1++2".into()), ("b".into(), String::new())]);
        for server in list.servers(true, 1, "3").unwrap() {
            let login = server.redis_settings();
            assert_eq!(
                (login.username(), login.password(), login.db()),
                (Some("us@er"), Some("p,w"), 3)
            );
        }
        assert_eq!(addresses(&HostList::parse("h").unwrap()), ["h:26379"]);
        assert_eq!(decoded("a=b&c+d"), "a=b&c+d");
    }

    #[test]
    fn what_cannot_be_a_list_is_refused_without_showing_it() {
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
            "user:%ff@h,secret",
            "h:99999",
        ] {
            let refusal = match HostList::parse(rest) {
                Ok(list) => list.servers(false, 1, "").unwrap_err(),
                Err(refusal) => refusal.to_owned(),
            };
            assert!(!refusal.contains("secret"), "{rest}: {refusal}");
        }
        let many = vec!["h"; MAX_HOSTS + 1].join(",");
        assert!(HostList::parse(&many).is_err());
    }
}
