//! The servers of a URL, and how to connect to them.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use tokio_postgres::Config;
use tokio_postgres::config::{SslMode, TargetSessionAttrs};

use crate::engine::target::{Known, Options, Values, host_and_port};
use crate::engine::tls::{Pem, Verified, WrongFile};
use crate::engine::{Settings, TlsFiles};
use crate::error::LockError;

const RULE: &str = "must be postgres://[user[:password]@]host[:port][,host[:port]][/database][?option=value], special characters \
                    percent-encoded";
const MODES: &str = "must be disable, allow, prefer, require, verify-ca or verify-full";
const DEFAULT_PORT: &str = "5432";
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

/// The options of a URL. The driver has more. Those of a pool of connections, and the schema of its tables, are Prisma's.
const OPTIONS: [Known; 19] = [
    ("application_name", Values::OfDriver),
    ("connect_timeout", Values::OfDriver),
    ("connection_limit", Values::Ignored),
    ("host", Values::Text),
    ("hostaddr", Values::Text),
    ("keepalives", Values::OfDriver),
    ("options", Values::OfDriver),
    ("pgbouncer", Values::OneOf(&["true", "false"])),
    ("pool_timeout", Values::Ignored),
    ("pooler", Values::OneOf(&["transaction", "none"])),
    ("port", Values::Text),
    ("schema", Values::Ignored),
    ("socket_timeout", Values::Ignored),
    ("sslcert", Values::Text),
    ("sslkey", Values::Text),
    (
        "sslmode",
        Values::OneOf(&["disable", "allow", "prefer", "require", "verify-ca", "verify-full"]),
    ),
    ("sslrootcert", Values::Text),
    ("statement_cache_size", Values::Ignored),
    ("target_session_attrs", Values::OneOf(&["any", "read-write", "primary"])),
];

impl Target {
    /// Parses a URL, the value of `argument`. `main`: has the login and the database, if the URL has none.
    pub(super) fn parse(
        argument: &'static str,
        url: &str,
        settings: &Settings,
        main: Option<&Target>,
    ) -> Result<Self, LockError> {
        let invalid = |got: String| LockError::invalid(argument, RULE, got);
        let variable = |name: &str| variable(settings, name);
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        if !base.starts_with("postgres://") && !base.starts_with("postgresql://") {
            return Err(invalid("another URL".into()));
        }
        if query.contains('@') {
            return Err(invalid("a URL with an \"@\" behind its hosts".into()));
        }
        let (login, hosts, path) = parts(base);
        let parsed = |options: &str| Config::from_str(&format!("{login}{path}?{options}"));
        let mut of_driver = Vec::new();
        let options = Options::parse(query, &OPTIONS, |option| {
            of_driver.push(option.to_owned());
            parsed(option).is_ok() || parsed("").is_err()
        });
        let options = options.map_err(invalid)?;
        let is_pooled = match (options.get("pooler"), options.get("pgbouncer")) {
            (None, None) => None,
            (pooler, pgbouncer) => Some(pooler == Some("transaction") || pooler.is_none() && pgbouncer == Some("true")),
        };
        if is_pooled == Some(true) && main.is_some() {
            return Err(LockError::invalid(
                argument,
                "must bypass the pooler",
                "a URL of a pooler",
            ));
        }
        let mut all = parsed(&of_driver.join("&")).map_err(|_| invalid("a URL that does not parse".into()))?;
        let mut named = hosts.map_err(invalid)?;
        if let Some(hosts) = options.get("host") {
            let mut ports = named.into_iter().map(|(_, port)| port);
            let hosts = hosts.split(',');
            named = hosts.map(|host| (host.to_owned(), ports.next().flatten())).collect();
        }
        let addresses: Option<Vec<IpAddr>> = list(options.get("hostaddr"), "");
        let addresses = addresses.ok_or_else(|| invalid("a URL with an invalid hostaddr".into()))?;
        let ports: Option<Vec<u16>> = list(options.get("port"), DEFAULT_PORT);
        let mut ports = ports.ok_or_else(|| invalid("a URL with an invalid port".into()))?;
        if named.is_empty() && addresses.is_empty() {
            let hosts = variable("PGHOST");
            let hosts = hosts.ok_or_else(|| invalid("a URL without a host, and PGHOST is not set".into()))?;
            named.extend(hosts.split(',').map(|host| (host.to_owned(), None)));
        }
        if ports.is_empty()
            && named.iter().any(|(_, port)| port.is_none())
            && let Some(text) = variable("PGPORT")
        {
            let rule = "must be a port, or one for each host, separated by commas";
            let wrong = || LockError::invalid("PGPORT", rule, format_args!("{text:?}"));
            ports = list(Some(text), "").ok_or_else(wrong)?;
        }
        set_login(&mut all, main, settings);
        let (tls, verified, mode) = tls_of(&options, settings)?;
        Ok(Target {
            servers: servers(&named, &addresses, &ports, &all, mode).map_err(|got| invalid(got.into()))?,
            tls,
            verified,
            is_pooled,
        })
    }
}

/// Sets the login and the database that the URL does not have: those of the main URL, which may be from the environment, or of the
/// environment.
fn set_login(all: &mut Config, main: Option<&Target>, settings: &Settings) {
    let variable = |name: &str| variable(settings, name);
    let main = main.and_then(|main| main.servers.first());
    let main = main.map(|server| &server.driver_config);
    if all.get_user().is_none_or(str::is_empty)
        && let Some(user) = main.and_then(Config::get_user).or(variable("PGUSER"))
    {
        all.user(user);
    }
    let password = main
        .and_then(Config::get_password)
        .or(variable("PGPASSWORD").map(str::as_bytes));
    if all.get_password().is_none()
        && let Some(password) = password
    {
        all.password(password);
    }
    if all.get_dbname().is_none()
        && let Some(database) = main.and_then(Config::get_dbname).or(variable("PGDATABASE"))
    {
        all.dbname(database);
    }
    if all.get_application_name().is_none() {
        all.application_name("holdfast");
    }
}

/// Returns the settings of TLS: files, what is verified, and the mode for the driver.
fn tls_of(options: &Options, settings: &Settings) -> Result<(TlsFiles, Verified, SslMode), LockError> {
    let (mut tls, sources) = tls_files(options, settings);
    let (mode, verified) = ssl_mode(options, settings)?;
    if mode == SslMode::Disable {
        tls = TlsFiles::default();
    } else {
        Pem::read(&tls).map_err(|wrong| {
            let source = sources.iter().find(|(setting, _)| *setting == wrong.setting);
            let setting = source.map_or(wrong.setting, |(_, source)| *source);
            WrongFile { setting, ..wrong }
        })?;
    }
    Ok((tls, verified, mode))
}

/// Returns a variable of the environment that is set and not empty.
fn variable<'s>(settings: &'s Settings, name: &str) -> Option<&'s str> {
    let value = settings.environment.get(name).filter(|value| !value.is_empty());
    value.map(String::as_str)
}

/// Returns the servers, each with a configuration of its own. `ports`: those of hosts without one. `all`: what the servers have in common.
fn servers(
    named: &[Named],
    addresses: &[IpAddr],
    ports: &[u16],
    all: &Config,
    mode: SslMode,
) -> Result<Vec<ServerConfig>, &'static str> {
    let count = named.len().max(addresses.len());
    let is_of_each = |len: usize| len == 0 || len == count;
    if !is_of_each(named.len()) || !is_of_each(addresses.len()) || !(ports.len() == 1 || is_of_each(ports.len())) {
        return Err("a URL with different numbers of hosts, addresses and ports");
    }
    if named.iter().any(|(host, _)| host.is_empty() || host.contains('@')) {
        return Err("a URL with an invalid host");
    }
    let server = |index: usize| {
        let mut driver_config = all.clone();
        let (host, port) = match named.get(index) {
            Some((host, port)) => {
                driver_config.host(host);
                (host.clone(), *port)
            }
            None => (addresses.get(index).map(ToString::to_string).unwrap_or_default(), None),
        };
        let port = port.or(ports.get(index).or(ports.first()).copied()).unwrap_or(5432);
        // There is no TLS on the socket of a folder.
        let mode = if host.starts_with('/') { SslMode::Disable } else { mode };
        driver_config.port(port).ssl_mode(mode);
        if let Some(address) = addresses.get(index) {
            driver_config.hostaddr(*address);
        }
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

/// Parses a list that is separated by commas. `default`: in the place of an empty part.
fn list<T: FromStr>(text: Option<&str>, default: &str) -> Option<Vec<T>> {
    let parts = text.into_iter().flat_map(|text| text.split(','));
    parts
        .map(|part| if part.is_empty() { default } else { part }.parse().ok())
        .collect()
}

/// Splits a URL without options: up to its login, its hosts, and the rest. As for the driver, the login ends at the first "@", and may have
/// a "/".
fn parts(base: &str) -> (&str, Result<Vec<Named>, String>, &str) {
    let start = base.find("://").map_or(0, |at| at + 3);
    let start = base[start..].find('@').map_or(start, |at| start + at + 1);
    let end = base[start..].find('/').map_or(base.len(), |at| start + at);
    let hosts = match &base[start..end] {
        "" => Ok(Vec::new()),
        hosts => hosts.split(',').map(host_and_port).collect(),
    };
    (&base[..start], hosts, &base[end..])
}

/// Returns the TLS settings, completed with files of the URL and the environment (a setting wins over the URL, the URL over the
/// environment). Also returns, for each file, the setting that it replaces and the option or variable that named it.
fn tls_files(options: &Options, settings: &Settings) -> (TlsFiles, Vec<(&'static str, &'static str)>) {
    let mut tls = settings.tls.clone();
    let mut sources = Vec::new();
    let option = |name: &'static str| options.get(name).map(|path| (path, name));
    let of_environment = variable(settings, "PGSSLROOTCERT").map(|path| (path, "PGSSLROOTCERT"));
    let root = option("sslrootcert").or(of_environment);
    let root = root.filter(|(path, _)| *path != "system" && !tls.insecure);
    for (file, setting, text, path) in [
        (root, "tls.caFile", &tls.ca, &mut tls.ca_file),
        (option("sslcert"), "tls.certFile", &tls.cert, &mut tls.cert_file),
        (option("sslkey"), "tls.keyFile", &tls.key, &mut tls.key_file),
    ] {
        if let Some((of_option, option)) = file
            && text.is_none()
            && path.is_none()
        {
            *path = Some(of_option.into());
            sources.push((setting, option));
        }
    }
    (tls, sources)
}

/// Returns whether the connection has TLS, and what is verified. `PGSSLMODE` does not disable TLS where settings are about it.
fn ssl_mode(options: &Options, settings: &Settings) -> Result<(SslMode, Verified), LockError> {
    let advice = "put the name into the URL as the host, and the IP address into its option hostaddr";
    settings.tls.reject_server_name(advice)?;
    let file = FILE_OPTIONS.into_iter().find(|file| options.get(file).is_some());
    let has_settings = settings.tls != TlsFiles::default();
    let is_configured = has_settings || file.is_some();
    let of_url = options.get("sslmode");
    let mode = of_url.or(variable(settings, "PGSSLMODE"));
    match (mode, is_configured) {
        (None, false) => Ok((SslMode::Prefer, Verified::Full)),
        (None, true) | (Some("require" | "verify-full"), _) => Ok((SslMode::Require, Verified::Full)),
        (Some("verify-ca"), _) => Ok((SslMode::Require, Verified::Authority)),
        (Some("allow" | "prefer" | "disable"), true) if of_url.is_none() => Ok((SslMode::Require, Verified::Full)),
        (Some("allow" | "prefer"), _) => Ok((SslMode::Prefer, Verified::Full)),
        (Some("disable"), false) => Ok((SslMode::Disable, Verified::Full)),
        (Some("disable"), true) => {
            let option = file.filter(|_| !has_settings).unwrap_or("tls");
            let rule = "must be absent, or sslmode=disable removed from the URL";
            Err(LockError::invalid(option, rule, "both"))
        }
        (Some(mode), _) => Err(LockError::invalid("PGSSLMODE", MODES, format_args!("{mode:?}"))),
    }
}
