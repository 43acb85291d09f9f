//! `mongodb+srv`: the DNS has the servers of a name, and may have some options of the URL. The rules are those of MongoDB's specification "Initial
//! DNS Seedlist Discovery".

use std::sync::Arc;

use mongodb::options::{ConnectionString, HostInfo, ServerAddress, Tls, TlsOptions};

use super::url::options;
use crate::engine::{Resolver, Settings};

/// The name of a URL, which each attempt to connect resolves.
#[derive(Clone)]
pub(crate) struct Srv {
    pub(crate) name: String,
    service: String,
    /// Maximum number of the servers that the service contacts first. 0: all.
    max_hosts: usize,
    resolver: Option<Arc<Resolver>>,
}

impl Srv {
    /// Returns the name of a `mongodb+srv` URL, and switches TLS on if the URL does not say otherwise. `connection`: what the driver
    /// parsed from [`for_driver`].
    ///
    /// # Errors
    /// The rule that the URL does not follow.
    ///
    /// [`for_driver`]: super::url::for_driver
    pub(super) fn of(
        url: &str,
        connection: &mut ConnectionString,
        settings: &Settings,
    ) -> Result<Option<Self>, &'static str> {
        if !url.starts_with("mongodb+srv:") {
            return Ok(None);
        }
        let name = match &connection.host_info {
            HostInfo::HostIdentifiers(hosts) => match &hosts[..] {
                [ServerAddress::Tcp { host, port: None }] => host.clone(),
                _ => return Err("must have one host, without a port, with mongodb+srv"),
            },
            _ => return Ok(None),
        };
        if connection.direct_connection == Some(true) {
            return Err("must not have directConnection=true with mongodb+srv");
        }
        let value = |option: &str| {
            let mut of_option = options(url).filter(|(name, _)| name.eq_ignore_ascii_case(option));
            of_option.next_back().map(|(_, value)| value.trim_start_matches('='))
        };
        let max_hosts = value("srvMaxHosts").unwrap_or("0").parse();
        let this = Srv {
            name,
            service: value("srvServiceName").unwrap_or("mongodb").to_owned(),
            max_hosts: max_hosts.map_err(|_| "must have a whole number in srvMaxHosts")?,
            resolver: settings.resolver.clone(),
        };
        this.check_limit(connection)?;
        connection.tls.get_or_insert(Tls::Enabled(TlsOptions::default()));
        Ok(Some(this))
    }

    /// Replaces the name by its servers, and adds the options of the DNS that the URL leaves out.
    ///
    /// # Errors
    /// The name cannot be resolved, or its records do not follow the rules.
    pub(crate) async fn resolve(&self, connection: &mut ConnectionString) -> Result<(), String> {
        let resolver = self.resolver.as_ref().ok_or("the caller has no resolver")?;
        let records = resolver(&self.service, &self.name).await?;
        connection.host_info = HostInfo::HostIdentifiers(self.servers(records.servers)?);
        self.add_options(&records.texts, connection)?;
        self.check_limit(connection)?;
        if let HostInfo::HostIdentifiers(hosts) = &mut connection.host_info
            && self.max_hosts > 0
        {
            fastrand::shuffle(hosts);
            hosts.truncate(self.max_hosts);
        }
        Ok(())
    }

    fn check_limit(&self, connection: &ConnectionString) -> Result<(), &'static str> {
        match self.max_hosts > 0 && (connection.replica_set.is_some() || connection.load_balanced == Some(true)) {
            true => Err("must not have srvMaxHosts with replicaSet or loadBalanced=true"),
            false => Ok(()),
        }
    }

    /// Returns the servers of the SRV records, each of which must be in the domain of the name: another one may belong to someone else.
    fn servers(&self, records: Vec<(String, u16)>) -> Result<Vec<ServerAddress>, String> {
        let domain = match self.name.split_once('.') {
            Some((_, parent)) if parent.contains('.') => parent,
            _ => &self.name,
        };
        if records.is_empty() {
            return Err(format!(
                "the DNS has no SRV record of _{}._tcp.{}",
                self.service, self.name
            ));
        }
        let server = |(target, port): (String, u16)| {
            let host = target.strip_suffix('.').unwrap_or(&target).to_ascii_lowercase();
            let above = host.strip_suffix(domain).and_then(|host| host.strip_suffix('.'));
            match above {
                Some(label) if !label.is_empty() => Ok(ServerAddress::Tcp { host, port: Some(port) }),
                _ => Err(format!(
                    "an SRV record names the server {host:?}, which is outside the domain {domain:?}"
                )),
            }
        };
        records.into_iter().map(server).collect()
    }

    fn add_options(&self, records: &[String], connection: &mut ConnectionString) -> Result<(), String> {
        let text = match records {
            [] => return Ok(()),
            [text] => text,
            _ => {
                return Err(format!(
                    "{} has {} TXT records, and may have one",
                    self.name,
                    records.len()
                ));
            }
        };
        for option in text.split('&') {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            match (name.to_ascii_lowercase().as_str(), value) {
                ("authsource", source) if !source.is_empty() => {
                    if let Some(credential) = &mut connection.credential {
                        credential.source.get_or_insert(source.to_owned());
                    }
                }
                ("replicaset", set) if !set.is_empty() => {
                    connection.replica_set.get_or_insert(set.to_owned());
                }
                ("loadbalanced", "true" | "false") => {
                    connection.load_balanced.get_or_insert(value == "true");
                }
                _ => {
                    return Err(format!(
                        "the TXT record of {} has {option:?}, and may have authSource, replicaSet, and loadBalanced with true or \
                         false",
                        self.name
                    ));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::MongodbConfig;
    use super::*;
    use crate::engine::Records;

    /// Parses and resolves a URL. `servers`: hosts, all with the port 1.
    async fn resolve(url: &str, servers: &[&str], texts: &[&str]) -> Result<ConnectionString, String> {
        let servers: Vec<_> = servers.iter().map(|host| ((*host).to_owned(), 1)).collect();
        let texts: Vec<_> = texts.iter().map(|text| (*text).to_owned()).collect();
        let resolver = move |service: &str, name: &str| {
            assert_eq!((service, name.contains("://")), ("mongodb", false));
            let (servers, texts) = (servers.clone(), texts.clone());
            Box::pin(async { Ok(Records { servers, texts }) }) as _
        };
        let settings = Settings {
            resolver: Some(Arc::new(resolver)),
            ..Settings::default()
        };
        let config = MongodbConfig::parse(url, &settings).map_err(|error| error.message)?;
        let mut connection = config.connection;
        config.srv.unwrap().resolve(&mut connection).await?;
        Ok(connection)
    }

    fn hosts(connection: &ConnectionString) -> Vec<String> {
        match &connection.host_info {
            HostInfo::HostIdentifiers(hosts) => hosts.iter().map(ToString::to_string).collect(),
            _ => panic!("not resolved"),
        }
    }

    #[tokio::test]
    async fn servers_are_in_the_domain_of_the_name() {
        for (name, target, is_in) in [
            ("a.example.com", "b.example.com", true),
            ("a.example.com", "B.Example.com.", true),
            ("A.example.com", "x.b.example.com", true),
            ("a.example.com", "example.com", false),
            ("a.example.com", ".example.com", false),
            ("a.example.com", "bexample.com", false),
            ("a.example.com", "b.evil.com", false),
            ("a.example.com", "b.example.com.evil.com", false),
            // Fewer than three labels: at least one label more than the name.
            ("example.com", "b.example.com", true),
            ("example.com", "example.com", false),
            ("example.com", "b.com", false),
            ("localhost", "b.localhost", true),
            ("localhost", "localhost", false),
        ] {
            let resolved = resolve(&format!("mongodb+srv://{name}"), &[target], &[]).await;
            match resolved {
                Ok(connection) => {
                    let host = target.trim_end_matches('.').to_lowercase();
                    assert_eq!((is_in, hosts(&connection)), (true, vec![format!("{host}:1")]));
                }
                Err(error) => assert!(!is_in && error.contains("domain"), "{name}, {target}: {error}"),
            }
        }
        let none = resolve("mongodb+srv://a.example.com", &[], &[]).await.unwrap_err();
        assert!(none.contains("no SRV record of _mongodb._tcp.a.example.com"), "{none}");
    }

    #[tokio::test]
    async fn options_of_the_name_are_those_that_the_url_leaves_out() {
        let options = async |url: &str, text: &str| {
            let connection = resolve(url, &["b.example.com"], &[text]).await.unwrap();
            assert!(matches!(connection.tls, Some(Tls::Enabled(_))));
            let source = connection.credential.and_then(|credential| credential.source);
            (source, connection.replica_set, connection.load_balanced)
        };
        let some = |text: &str| Some(text.to_owned());
        let all = "authSource=a&replicaSet=b&loadBalanced=false";
        let url = "mongodb+srv://u:p@c.example.com/db";
        assert_eq!(options(url, all).await, (some("a"), some("b"), Some(false)));
        assert_eq!(options("mongodb+srv://c.example.com", all).await.0, None);
        let own = format!("{url}?authSource=own&replicaSet=own&loadBalanced=true");
        assert_eq!(options(&own, all).await, (some("own"), some("own"), Some(true)));
        for text in [
            "",
            "authSource",
            "replicaSet=",
            "loadBalanced=1",
            "tls=false",
            "authSource=a&w=1",
        ] {
            assert!(resolve(url, &["b.example.com"], &[text]).await.is_err(), "{text}");
        }
        assert!(resolve(url, &["b.example.com"], &[all, all]).await.is_err());
        let plain = resolve("mongodb+srv://c.example.com/?tls=false", &["b.example.com"], &[]).await;
        assert_eq!(plain.unwrap().tls, Some(Tls::Disabled));
    }

    #[tokio::test]
    async fn a_limit_chooses_servers() {
        let targets = ["b1.example.com", "b2.example.com", "b3.example.com"];
        let number = async |options: &str, texts: &[&str]| {
            let connection = resolve(&format!("mongodb+srv://c.example.com/?{options}"), &targets, texts).await;
            connection.map(|connection| hosts(&connection).len())
        };
        for (limit, chosen) in [(0, 3), (2, 2), (9, 3)] {
            assert_eq!(
                number(&format!("srvMaxHosts={limit}&srvServiceName=mongodb"), &[]).await,
                Ok(chosen)
            );
        }
        assert!(number("srvMaxHosts=2", &["replicaSet=rs0"]).await.is_err());
        assert_eq!(number("srvMaxHosts=0", &["replicaSet=rs0"]).await, Ok(3));
        for refused in [
            "srvMaxHosts=2&replicaSet=rs0",
            "srvMaxHosts=x",
            "directConnection=true",
            "srvName=x",
        ] {
            assert!(
                number(refused, &[]).await.unwrap_err().starts_with("target "),
                "{refused}"
            );
        }
        for url in ["mongodb+srv://a.b.c:1", "mongodb+srv://a.b.c,d.b.c"] {
            let error = resolve(url, &[], &[]).await.unwrap_err();
            assert!(error.contains("must have one host, without a port"), "{error}");
        }
        for option in ["srvMaxHosts=2", "srvServiceName=mongodb"] {
            assert!(MongodbConfig::parse(&format!("mongodb://h/?{option}"), &Settings::default()).is_err());
        }
    }
}
