use std::collections::HashMap;

use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};

use super::*;
use crate::engine::TlsFiles;
use crate::engine::tls::Verified;

fn with(url: &str, variables: &[(&str, &str)]) -> Result<PostgresConfig, LockError> {
    let environment: HashMap<String, String> = variables
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect();
    let settings = Settings {
        environment,
        ..Settings::default()
    };
    PostgresConfig::parse(url, &settings)
}

fn parsed(url: &str) -> PostgresConfig {
    with(url, &[]).unwrap()
}

fn driver_config(config: &PostgresConfig) -> &Config {
    &config.target.servers[0].driver_config
}

#[test]
fn a_url_is_parsed() {
    let config = parsed("postgres://u:s%40cret@h:6543/app?pooler=transaction&application_name=jobs");
    assert_eq!(
        (config.server.as_str(), config.target.is_pooled),
        ("h:6543/app", Some(true))
    );
    assert_eq!(driver_config(&config).get_password(), Some(&b"s@cret"[..]));
    assert_eq!(driver_config(&config).get_application_name(), Some("jobs"));
    assert!(!format!("{config:?}").contains("cret"));
    let attrs = driver_config(&config).get_target_session_attrs();
    assert_eq!(attrs, TargetSessionAttrs::Any);
    let two = parsed("postgresql://u@a,b:5433/app");
    assert_eq!(two.server, "a:5432,b:5433/app");
    for server in &two.target.servers {
        let attrs = server.driver_config.get_target_session_attrs();
        assert_eq!(attrs, TargetSessionAttrs::ReadWrite);
        assert_eq!(server.driver_config.get_hosts().len(), 1);
    }
    let named = parsed("postgres://db.example/app?hostaddr=127.0.0.1&target_session_attrs=primary");
    assert_eq!(driver_config(&named).get_hosts(), [Host::Tcp("db.example".into())]);
    assert_eq!(driver_config(&named).get_hostaddrs().len(), 1);
}

#[test]
fn the_environment_has_what_the_url_leaves_out() {
    let all = [
        ("PGHOST", "h1,h2"),
        ("PGPORT", "6000,6001"),
        ("PGUSER", "me"),
        ("PGPASSWORD", "secret"),
        ("PGDATABASE", "app"),
    ];
    let config = with("postgres://", &all).unwrap();
    assert_eq!(config.server, "h1:6000,h2:6001/app");
    let server = driver_config(&config);
    assert_eq!(
        (server.get_user(), server.get_password()),
        (Some("me"), Some(&b"secret"[..]))
    );
    let config = with("postgres://:own@h:1", &all).unwrap();
    assert_eq!(driver_config(&config).get_user(), Some("me"));
    // The URL is first.
    let config = with("postgres://you:own@[::1],h:7000/db", &all).unwrap();
    assert_eq!(config.server, "::1:6000,h:7000/db");
    let server = driver_config(&config);
    assert_eq!(
        (server.get_user(), server.get_password()),
        (Some("you"), Some(&b"own"[..]))
    );
    let config = with("postgres:///db?host=%2Fvar%2Frun%2Fpostgresql", &[("PGPORT", "6000")]).unwrap();
    assert_eq!(config.server, "/var/run/postgresql:6000/db");
    let config = parsed("postgres://u:p@localhost:6000/db?host=/cloudsql/a:b:c");
    assert_eq!(config.server, "/cloudsql/a:b:c:6000/db");
    for (name, value) in [
        ("PGPORT", "x"),
        ("PGSSLMODE", "always"),
        ("PGSSLROOTCERT", "/does/not/exist"),
    ] {
        let message = with("postgres://h/app", &[(name, value)]).unwrap_err().message;
        assert!(message.starts_with(&format!("{name} ")), "{message}");
    }
}

#[test]
fn tls_is_verified() {
    let (prefer, require, disable) = (SslMode::Prefer, SslMode::Require, SslMode::Disable);
    for (query, variable, mode, verified) in [
        ("", "", prefer, Verified::Full),
        ("?sslmode=disable", "verify-full", disable, Verified::Full),
        ("?sslmode=allow", "", prefer, Verified::Full),
        ("?sslmode=require", "disable", require, Verified::Full),
        ("?sslmode=verify-ca", "", require, Verified::Authority),
        ("?sslmode=verify-full", "verify-ca", require, Verified::Full),
        ("", "require", require, Verified::Full),
        ("", "disable", disable, Verified::Full),
        ("", "verify-ca", require, Verified::Authority),
    ] {
        let config = with(&format!("postgres://h/app{query}"), &[("PGSSLMODE", variable)]).unwrap();
        let found = (driver_config(&config).get_ssl_mode(), config.target.verified);
        assert_eq!(found, (mode, verified), "{query} {variable}");
    }
    let mut settings = Settings {
        tls: TlsFiles {
            insecure: true,
            ..TlsFiles::default()
        },
        ..Settings::default()
    };
    settings.environment.insert("PGSSLMODE".into(), "disable".into());
    let config = PostgresConfig::parse("postgres://h/app", &settings).unwrap();
    let mode = driver_config(&config).get_ssl_mode();
    assert_eq!(mode, require, "a setting is about TLS");
    let error = PostgresConfig::parse("postgres://h/app?sslmode=disable", &settings).unwrap_err();
    assert!(error.message.starts_with("tls "), "{}", error.message);
    let error = with("postgres://h/app?sslmode=disable&sslkey=none", &[]).unwrap_err();
    assert!(error.message.starts_with("sslkey "), "{}", error.message);
    settings.tls.server_name = Some("h".into());
    let error = PostgresConfig::parse("postgres://h/app", &settings).unwrap_err();
    assert!(error.message.starts_with("tls.servername "), "{}", error.message);
}

#[test]
fn the_files_of_a_url_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("none.pem");
    for option in ["sslrootcert", "sslcert"] {
        let url = format!("postgres://h/app?{option}={}", path.display());
        let message = with(&url, &[]).unwrap_err().message;
        assert!(
            message.starts_with(&format!("{option} must be a PEM file")),
            "{message}"
        );
    }
    assert_eq!(
        parsed("postgres://h/app?sslrootcert=system").target.tls,
        TlsFiles::default()
    );
    let missing = ("PGSSLROOTCERT", path.to_str().unwrap());
    for query in ["sslrootcert=system", "sslmode=disable"] {
        let config = with(&format!("postgres://h/app?{query}"), &[missing]).unwrap();
        assert_eq!(config.target.tls, TlsFiles::default(), "{query}");
    }
}

#[test]
fn the_listening_connection_has_the_login_of_the_url() {
    let listening = |url: &str| {
        let settings = Settings {
            listen_url: Some(url.into()),
            ..Settings::default()
        };
        PostgresConfig::parse("postgres://u:p@pooler:6432/app?pooler=transaction", &settings)
    };
    let listen = listening("postgres://db:5432").unwrap().listen.unwrap();
    let server = &listen.servers[0].driver_config;
    assert_eq!(listen.to_string(), "db:5432/app");
    assert_eq!((server.get_user(), server.get_password()), (Some("u"), Some(&b"p"[..])));
    for url in ["postgres://", "redis://h", "postgres://db?pooler=transaction"] {
        let message = listening(url).unwrap_err().message;
        assert!(message.starts_with("listenUrl "), "{url}: {message}");
    }
}

#[test]
fn an_unknown_option_is_named() {
    let message = with("postgres://u:secret@h/app?application_name=a&sslpassword=x", &[])
        .unwrap_err()
        .message;
    assert!(message.contains("not one of application_name, "), "{message}");
    assert!(
        message.ends_with(" target_session_attrs, or that has an invalid value: sslpassword"),
        "{message}"
    );
}

#[test]
fn an_invalid_url_is_rejected_without_its_text() {
    for url in [
        "postgres:secret",
        "postgres://",
        "postgres:///app",
        "postgres://u:secret@",
        "postgres://u:secret@,h/app",
        "postgres://u:secret@h:port/app",
        "postgres://u:secret@h,i/app?port=1,2,3",
        "postgres://u:p?secret@h/app",
        "postgres://u:1?secret=x&y=z@h/app",
        "postgres://u:1?host=secret@h/app",
        "postgres://u:p@secret@h/app",
        "postgres://u:secret@h/app?sslmode=secret",
        "postgres://u:secret@h/app?pooler=secret",
        "postgres://u:secret@h/app?pgbouncer=secret",
        "postgres://u:secret@h,i/app?target_session_attrs=read-only",
    ] {
        let message = with(url, &[]).unwrap_err().message;
        assert!(
            message.starts_with("target ") && !message.contains("secret"),
            "{url}: {message}"
        );
    }
}

#[test]
fn table_names_are_checked() {
    let table = |table: &str| {
        let settings = Settings {
            table: table.into(),
            ..Settings::default()
        };
        PostgresConfig::parse("postgres://h/app", &settings).map(|config| config.table)
    };
    assert_eq!(table("app.locks").unwrap(), "app.locks");
    // The schema is that of Prisma's tables.
    assert_eq!(
        parsed("postgres://h/app?schema=shop&connection_limit=5&pool_timeout=2").table,
        "locks"
    );
    for bad in ["", "a\"b", "a.b.c", ".b", "1a", &"x".repeat(52)] {
        assert!(table(bad).unwrap_err().message.starts_with("table "), "{bad}");
    }
}
