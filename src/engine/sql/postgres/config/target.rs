//! The servers of a URL, and how to connect to them.

use std::fmt;
use std::str::FromStr;

use tokio_postgres::Config;
use tokio_postgres::config::{SslMode, TargetSessionAttrs};

use crate::engine::sql::server::config::POOL_OPTIONS;
use crate::engine::tls::{Pem, Verified};
use crate::engine::url_options::unknown_option;
use crate::engine::{Settings, TlsFiles};
use crate::error::LockError;

const RULE: &str = "must be postgres://[user[:password]@]host[:port][,host[:port]][/database][?option=value], special characters \
                    percent-encoded";
const MODES: &str = "must be disable, allow, prefer, require, verify-ca or verify-full";
const DEFAULT_PORT: u16 = 5432;
const FILE_OPTIONS: [&str; 3] = ["sslrootcert", "sslcert", "sslkey"];

/// The servers of a URL.
#[derive(Clone)]
pub(in crate::engine::sql::postgres) struct Target {
    /// At least one, in the order of the URL.
    pub servers: Vec<ServerConfig>,
    pub tls: TlsFiles,
    pub verified: Verified,
    /// Whether there is a pooler. `None`: the URL does not say.
    pub is_pooled: Option<bool>,
}

/// One server.
#[derive(Clone)]
pub(in crate::engine::sql::postgres) struct ServerConfig {
    pub driver_config: Config,
    /// The host of the URL, or the folder of the socket.
    pub host: String,
    pub port: u16,
}

impl fmt::Display for ServerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let servers: Vec<String> = self.servers.iter().map(ServerConfig::to_string).collect();
        f.write_str(&servers.join(","))?;
        let first = self.servers.first();
        match first.and_then(|server| server.driver_config.get_dbname()) {
            Some(database) => write!(f, "/{database}"),
            None => Ok(()),
        }
    }
}

/// A host of a URL, and its port, if the URL has it.
type Named = (String, Option<u16>);

/// The options that holdfast handles, and the rest for the driver.
#[derive(Default)]
struct Options {
    is_pooled: Option<bool>,
    /// They replace the hosts in front of the `?`.
    hosts: Vec<String>,
    ssl_mode: Option<String>,
    /// The values of [`FILE_OPTIONS`].
    files: [Option<String>; 3],
    /// The options of the driver.
    rest: Vec<String>,
}

/// The usual options, for the error of an unknown one. The driver has more.
const OPTIONS: [&str; 12] = [
    "application_name",
    "connect_timeout",
    "host",
    "keepalives",
    "options",
    "pooler",
    "port",
    "sslcert",
    "sslkey",
    "sslmode",
    "sslrootcert",
    "target_session_attrs",
];

impl Options {
    fn parse(query: &str) -> Result<Self, &'static str> {
        let mut options = Options::default();
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let (name, value) = decoded(option);
            match (name.as_str(), value.as_str()) {
                ("pooler", "transaction") | ("pgbouncer", "true") => options.is_pooled = Some(true),
                ("pooler", "none") | ("pgbouncer", "false") => options.is_pooled = Some(false),
                ("pooler", _) => return Err("a URL with a value of pooler other than transaction and none"),
                ("pgbouncer", _) => return Err("a URL with a value of pgbouncer other than true and false"),
                // The schema of Prisma's tables, in which Prisma drops others.
                ("schema", _) => {}
                (name, _) if POOL_OPTIONS.contains(&name) => {}
                ("host", hosts) => options.hosts = hosts.split(',').map(str::to_owned).collect(),
                ("sslmode", mode) => options.ssl_mode = Some(mode.to_owned()),
                ("sslrootcert", path) => options.files[0] = Some(path.to_owned()),
                ("sslcert", path) => options.files[1] = Some(path.to_owned()),
                ("sslkey", path) => options.files[2] = Some(path.to_owned()),
                ("target_session_attrs", "any" | "read-write" | "primary") => {}
                ("target_session_attrs", _) => return Err("a URL whose target_session_attrs is not read-write"),
                _ => options.rest.push(option.to_owned()),
            }
        }
        Ok(options)
    }
}

impl Target {
    /// Parses a URL, the value of `argument`. `main`: has the login and the database, if the URL has none.
    pub(super) fn parse(
        argument: &'static str,
        url: &str,
        settings: &Settings,
        main: Option<&Target>,
    ) -> Result<Self, LockError> {
        let invalid = |got: &str| LockError::invalid(argument, RULE, got);
        let variable = |name: &str| settings.environment.get(name).filter(|value| !value.is_empty());
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        if !["postgres://", "postgresql://"]
            .iter()
            .any(|scheme| base.starts_with(scheme))
        {
            return Err(invalid("another URL"));
        }
        if query.contains('@') {
            return Err(invalid("a URL with an \"@\" behind its hosts"));
        }
        let options = Options::parse(query).map_err(invalid)?;
        if options.is_pooled == Some(true) && main.is_some() {
            return Err(LockError::invalid(
                argument,
                "must bypass the pooler",
                "a URL of a pooler",
            ));
        }
        let (login, hosts, path) = parts(base);
        let parsed = |options: &str| Config::from_str(&format!("{login}{path}?{options}"));
        if let Some(unknown) = options.rest.iter().find(|option| parsed(option).is_err())
            && parsed("").is_ok()
        {
            return Err(invalid(&unknown_option(&decoded(unknown).0, query, &OPTIONS)));
        }
        let mut all = parsed(&options.rest.join("&")).map_err(|_| invalid("a URL that does not parse"))?;
        let mut named = hosts.map_err(invalid)?;
        if !options.hosts.is_empty() {
            let ports: Vec<Option<u16>> = named.iter().map(|(_, port)| *port).collect();
            let port = |index: usize| ports.get(index).copied().flatten();
            named = options
                .hosts
                .iter()
                .enumerate()
                .map(|(index, host)| (host.clone(), port(index)))
                .collect();
        }
        if named.is_empty() && all.get_hostaddrs().is_empty() {
            let hosts = variable("PGHOST").ok_or_else(|| invalid("a URL without a host, and PGHOST is not set"))?;
            named.extend(hosts.split(',').map(|host| (host.to_owned(), None)));
        }
        if all.get_ports().is_empty()
            && named.iter().any(|(_, port)| port.is_none())
            && let Some(ports) = variable("PGPORT")
        {
            parsed_ports(ports)?.into_iter().for_each(|port| _ = all.port(port));
        }
        // The login of the main URL may be from the environment.
        let main = main.and_then(|main| main.servers.first());
        let main = main.map(|server| &server.driver_config);
        let text = |of_main: Option<&str>, name: &str| of_main.map(str::to_owned).or_else(|| variable(name).cloned());
        if all.get_user().is_none_or(str::is_empty)
            && let Some(user) = text(main.and_then(Config::get_user), "PGUSER")
        {
            all.user(user);
        }
        if all.get_password().is_none() {
            if let Some(password) = main.and_then(Config::get_password) {
                all.password(password);
            } else if let Some(password) = variable("PGPASSWORD") {
                all.password(password);
            }
        }
        if all.get_dbname().is_none()
            && let Some(database) = text(main.and_then(Config::get_dbname), "PGDATABASE")
        {
            all.dbname(database);
        }
        if all.get_application_name().is_none() {
            all.application_name("holdfast");
        }
        let (mut tls, sources) = tls_files(&options, settings);
        let (mode, verified) = ssl_mode(argument, &options, settings)?;
        if mode == SslMode::Disable {
            tls = TlsFiles::default();
        } else {
            Pem::read(&tls).map_err(|wrong| {
                let source = sources.iter().find(|(setting, _)| *setting == wrong.setting);
                LockError::invalid(
                    source.map_or(wrong.setting, |(_, source)| *source),
                    wrong.rule,
                    wrong.how,
                )
            })?;
        }
        Ok(Target {
            servers: servers(&named, &all, mode).map_err(invalid)?,
            tls,
            verified,
            is_pooled: options.is_pooled,
        })
    }
}

/// Returns the servers, each with a configuration of its own. `all`: what they have in common, their addresses, and the ports of
/// hosts without one.
fn servers(named: &[Named], all: &Config, mode: SslMode) -> Result<Vec<ServerConfig>, &'static str> {
    let (addresses, ports) = (all.get_hostaddrs(), all.get_ports());
    let count = named.len().max(addresses.len());
    let is_of_each = |len: usize| len == 0 || len == count;
    if !is_of_each(named.len()) || !is_of_each(addresses.len()) || !(ports.len() == 1 || is_of_each(ports.len())) {
        return Err("a URL with different numbers of hosts, addresses and ports");
    }
    if named.iter().any(|(host, _)| host.is_empty() || host.contains('@')) {
        return Err("a URL with an invalid host");
    }
    let server = |index: usize| {
        let mut driver_config = Config::new();
        let (host, port) = match named.get(index) {
            Some((host, port)) => {
                driver_config.host(host);
                (host.clone(), *port)
            }
            None => (addresses.get(index).map(ToString::to_string).unwrap_or_default(), None),
        };
        let port = port
            .or(ports.get(index).or(ports.first()).copied())
            .unwrap_or(DEFAULT_PORT);
        // There is no TLS on the socket of a folder.
        let mode = if host.starts_with('/') { SslMode::Disable } else { mode };
        driver_config.port(port).ssl_mode(mode);
        if let Some(address) = addresses.get(index) {
            driver_config.hostaddr(*address);
        }
        if let Some(user) = all.get_user() {
            driver_config.user(user);
        }
        if let Some(database) = all.get_dbname() {
            driver_config.dbname(database);
        }
        if let Some(options) = all.get_options() {
            driver_config.options(options);
        }
        if let Some(name) = all.get_application_name() {
            driver_config.application_name(name);
        }
        if let Some(password) = all.get_password() {
            driver_config.password(password);
        }
        driver_config
            .ssl_negotiation(all.get_ssl_negotiation())
            .channel_binding(all.get_channel_binding())
            .keepalives(all.get_keepalives());
        if count > 1 {
            driver_config.target_session_attrs(TargetSessionAttrs::ReadWrite);
        }
        ServerConfig {
            driver_config,
            host,
            port,
        }
    };
    Ok((0..count).map(server).collect())
}

/// Parses the value of `PGPORT`.
fn parsed_ports(text: &str) -> Result<Vec<u16>, LockError> {
    let ports: Result<Vec<u16>, _> = text.split(',').map(str::parse).collect();
    ports.map_err(|_| {
        let rule = "must be a port, or one for each host, separated by commas";
        LockError::invalid("PGPORT", rule, format_args!("{text:?}"))
    })
}

/// Splits a URL without options: up to its login, its hosts, and the rest.
fn parts(base: &str) -> (&str, Result<Vec<Named>, &'static str>, &str) {
    let start = base.find("://").map_or(0, |at| at + 3);
    let start = base[start..].find('@').map_or(start, |at| start + at + 1);
    let end = base[start..].find('/').map_or(base.len(), |at| start + at);
    let hosts = match &base[start..end] {
        "" => Ok(Vec::new()),
        hosts => hosts.split(',').map(named).collect(),
    };
    (&base[..start], hosts, &base[end..])
}

/// Parses one host of a URL.
fn named(text: &str) -> Result<Named, &'static str> {
    let (host, port) = match text.strip_prefix('[').and_then(|text| text.split_once(']')) {
        Some((host, rest)) => (host, rest.strip_prefix(':').unwrap_or(rest)),
        None => text.split_once(':').unwrap_or((text, "")),
    };
    let port = match port {
        "" => None,
        port => Some(port.parse().map_err(|_| "a URL with an invalid port")?),
    };
    Ok((decoded(host).0, port))
}

/// Decodes the name and the value of an option.
fn decoded(text: &str) -> (String, String) {
    // A plus is no space.
    let encoded = text.replace('+', "%2B");
    let decoded = url::form_urlencoded::parse(encoded.as_bytes()).next();
    let (name, value) = decoded.unwrap_or_default();
    (name.into_owned(), value.into_owned())
}

/// Returns the TLS settings, completed with files of the URL and the environment (a setting wins over the URL, the URL over the
/// environment). Also returns, for each file, the setting that it replaces and the option or variable that named it.
fn tls_files(options: &Options, settings: &Settings) -> (TlsFiles, Vec<(&'static str, &'static str)>) {
    let mut tls = settings.tls.clone();
    let mut sources = Vec::new();
    let [root, cert, key] = &options.files;
    let of_environment = settings.environment.get("PGSSLROOTCERT");
    let of_environment = of_environment.filter(|path| !path.is_empty());
    let root = root
        .as_ref()
        .map(|path| (path, "sslrootcert"))
        .or(of_environment.map(|path| (path, "PGSSLROOTCERT")));
    if let Some((path, source)) = root.filter(|(path, _)| *path != "system")
        && tls.ca.is_none()
        && tls.ca_file.is_none()
        && !tls.insecure
    {
        tls.ca_file = Some(path.into());
        sources.push(("tls.caFile", source));
    }
    if let Some(path) = cert
        && tls.cert.is_none()
        && tls.cert_file.is_none()
    {
        tls.cert_file = Some(path.into());
        sources.push(("tls.certFile", "sslcert"));
    }
    if let Some(path) = key
        && tls.key.is_none()
        && tls.key_file.is_none()
    {
        tls.key_file = Some(path.into());
        sources.push(("tls.keyFile", "sslkey"));
    }
    (tls, sources)
}

/// Returns whether the connection has TLS, and what is verified. `PGSSLMODE` does not disable TLS where settings are about it.
fn ssl_mode(argument: &str, options: &Options, settings: &Settings) -> Result<(SslMode, Verified), LockError> {
    let advice = "put the name into the URL as the host, and the IP address into its option hostaddr";
    settings.tls.reject_server_name(advice)?;
    let is_configured = settings.tls != TlsFiles::default() || options.files.iter().any(Option::is_some);
    let of_environment = settings.environment.get("PGSSLMODE").filter(|mode| !mode.is_empty());
    let mode = options.ssl_mode.as_ref().or(of_environment).map(String::as_str);
    let of_url = options.ssl_mode.is_some();
    match (mode, is_configured) {
        (None, false) => Ok((SslMode::Prefer, Verified::Full)),
        (None, true) | (Some("require" | "verify-full"), _) => Ok((SslMode::Require, Verified::Full)),
        (Some("verify-ca"), _) => Ok((SslMode::Require, Verified::Authority)),
        (Some("allow" | "prefer" | "disable"), true) if !of_url => Ok((SslMode::Require, Verified::Full)),
        (Some("allow" | "prefer"), _) => Ok((SslMode::Prefer, Verified::Full)),
        (Some("disable"), false) => Ok((SslMode::Disable, Verified::Full)),
        (Some("disable"), true) => {
            let mut files = FILE_OPTIONS.into_iter().zip(&options.files);
            let option = match files.find(|(_, file)| file.is_some()) {
                Some((option, _)) if settings.tls == TlsFiles::default() => option,
                _ => "tls",
            };
            let rule = "must be absent, or sslmode=disable removed from the URL";
            Err(LockError::invalid(option, rule, "both"))
        }
        (Some(_), _) if of_url => Err(LockError::invalid(
            argument,
            RULE,
            "a URL with an sslmode other than disable, allow, prefer, require, verify-ca and verify-full",
        )),
        (Some(mode), _) => Err(LockError::invalid("PGSSLMODE", MODES, format_args!("{mode:?}"))),
    }
}
