//! The TLS settings of a URL.

use super::*;

#[test]
fn tls_settings_are_checked() {
    let with = |url: &str, tls: TlsFiles| {
        RedisConfig::parse(
            url,
            &Settings {
                tls,
                ..Settings::default()
            },
        )
    };
    let message = |url, tls| with(url, tls).unwrap_err().message;
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().join("empty.pem");
    std::fs::write(&empty, "").unwrap();

    let insecure = TlsFiles {
        insecure: true,
        ..TlsFiles::default()
    };
    assert!(message("redis://h", insecure.clone()).contains("rediss://"));
    let config = with("rediss://h", insecure).unwrap();
    assert!(matches!(
        config.server.addr(),
        ConnectionAddr::TcpTls { insecure: true, .. }
    ));
    let missing = TlsFiles {
        ca_file: Some("/does/not/exist.pem".into()),
        ..TlsFiles::default()
    };
    let shown = message("rediss://h", missing);
    assert!(
        shown.starts_with("tls.caFile ") && shown.contains("/does/not/exist.pem"),
        "{shown}"
    );
    let hollow = TlsFiles {
        ca_file: Some(empty.clone()),
        ..TlsFiles::default()
    };
    assert!(message("rediss://h", hollow).contains("without a certificate"));
    let lonely = TlsFiles {
        key_file: Some(empty),
        ..TlsFiles::default()
    };
    assert!(message("rediss://h", lonely).starts_with("tls.certFile "));
    let with_key = |key: Option<&str>| TlsFiles {
        cert: Some("-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n".into()),
        key: key.map(str::to_owned),
        ..TlsFiles::default()
    };
    assert!(message("rediss://h", with_key(None)).starts_with("tls.keyFile must be set"));
    assert!(message("rediss://h", with_key(Some("x"))).starts_with("tls.key must be PEM with a private key"));
}
