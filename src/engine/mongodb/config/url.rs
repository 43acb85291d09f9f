//! The text of a URL: its options as the Rust driver understands them, why it is invalid, and which part of it a message may
//! contain.
//!
//! Users have URLs for the official Node.js driver, which knows other options and other meanings.

use mongodb::error::ErrorKind;
use mongodb::options::ConnectionString;

/// Options of other official drivers that affect neither where the locks are nor how safe they are. They are ignored, so that a
/// URL of the gist works here: the Rust driver rejects options that it does not know.
const IGNORED_OPTIONS: &str = "\
    autoreconnect autoselectfamily autoselectfamilyattempttimeout bsonregexp buffermaxentries checkkeys \
    compressors driverinfo enableutf8validation family fieldsasraw forceserverobjectid ignoreundefined keepalive \
    keepaliveinitialdelay minheartbeatfrequencyms mininternalbuffersize monitorcommands nodelay poolsize \
    promotebuffers promotelongs promotevalues raw reconnectinterval reconnecttries serializefunctions \
    sockettimeoutms timeoutms usebigint64 usenewurlparser useunifiedtopology uuidrepresentation validateoptions \
    waitqueuemultiple zlibcompressionlevel";

/// Options of the Node.js driver that have another name here.
const SYNONYMS: [(&str, &str); 3] = [("fsync", "journal"), ("j", "journal"), ("wtimeout", "wtimeoutMS")];

/// Options whose 0 means no limit in the Node.js driver, and no time in this one. They are ignored then.
const UNLIMITED_BY_ZERO: &str =
    "connecttimeoutms maxidletimems maxpoolsize serverselectiontimeoutms waitqueuetimeoutms wtimeoutms";

/// Options that holdfast does not support: the name, the value (empty: any), and what to do.
const UNSUPPORTED: [(&str, &str, &str); 10] = [
    ("authMechanism", "=GSSAPI", LOGINS),
    ("authMechanism", "=MONGODB-AWS", LOGINS),
    ("authMechanism", "=MONGODB-OIDC", LOGINS),
    ("proxyHost", "", PROXY),
    ("proxyPassword", "", PROXY),
    ("proxyPort", "", PROXY),
    ("proxyUsername", "", PROXY),
    (
        "tlsAllowInvalidHostnames",
        "=true",
        "holdfast verifies the host name where it verifies the certificate: use the name in the certificate, or, for tests, \
         tlsInsecure=true",
    ),
    (
        "tlsCertificateKeyFilePassword",
        "",
        "holdfast reads no encrypted key: decrypt it (openssl pkey -in FILE -out FILE)",
    ),
    ("tlsCRLFile", "", "holdfast reads no list of revoked certificates"),
];
const LOGINS: &str =
    "holdfast cannot log in that way: create a user with a password (SCRAM), or with a certificate (MONGODB-X509)";
const PROXY: &str = "holdfast cannot use a SOCKS5 proxy: use a tunnel to the server, and its address in the URL";

/// Returns the name of each option of a URL, and its value with the equals sign.
pub(super) fn options(url: &str) -> impl DoubleEndedIterator<Item = (&str, &str)> {
    let options = url.split_once('?').map_or("", |(_, options)| options).split('&');
    options
        .filter(|option| !option.is_empty())
        .map(|option| option.split_at(option.find('=').unwrap_or(option.len())))
}

/// Returns what to do about an option that holdfast does not support. `None`: the URL has none.
pub(crate) fn unsupported(url: &str) -> Option<String> {
    options(url).find_map(|(name, value)| {
        let is_meant = |(of, only, _): &&(&str, &str, &str)| {
            name.eq_ignore_ascii_case(of) && (only.is_empty() || value.eq_ignore_ascii_case(only))
        };
        let (name, value, advice) = UNSUPPORTED.iter().find(is_meant)?;
        Some(format!("must not have {name}{value} ({advice})"))
    })
}

/// Options of `mongodb+srv`, which `srv.rs` reads.
const OF_SRV: &str = "srvmaxhosts srvservicename";

/// Returns the URL for the Rust driver. `mongodb+srv` becomes `mongodb`: holdfast resolves the name.
pub(crate) fn for_driver(url: &str) -> String {
    let (url, of_srv) = match url.strip_prefix("mongodb+srv:") {
        Some(rest) => (format!("mongodb:{rest}"), OF_SRV),
        None => (url.to_owned(), ""),
    };
    let Some((before, _)) = url.split_once('?') else {
        return url;
    };
    let kept: Vec<String> = options(&url)
        .filter_map(|(name, value)| {
            let lower = name.to_lowercase();
            let synonym = SYNONYMS.iter().find(|(synonym, _)| *synonym == lower);
            let name = synonym.map_or(name, |(_, name)| *name);
            let is_in = |list: &str, name: &str| !name.is_empty() && list.split(' ').any(|option| option == name);
            let is_ignored = is_in(IGNORED_OPTIONS, &lower)
                || is_in(of_srv, &lower)
                || (value == "=0" && is_in(UNLIMITED_BY_ZERO, &name.to_lowercase()))
                || (lower == "authmechanism" && value.eq_ignore_ascii_case("=DEFAULT"))
                || (lower == "tlsallowinvalidhostnames" && value.eq_ignore_ascii_case("=false"));
            (!is_ignored).then(|| format!("{name}{value}"))
        })
        .collect();
    format!("{before}?{}", kept.join("&"))
}

/// Describes why a URL is invalid, without a secret.
pub(crate) fn reason(url: &str) -> String {
    const GENERAL: &str = "must be a MongoDB URL such as mongodb://user:password@host:27017/database?replicaSet=rs0 with \
                            special characters in the user name and the password percent-encoded";
    let url = for_driver(url);
    let (Some((scheme, _)), Some((_, options))) = (url.split_once("://"), url.split_once('?')) else {
        return GENERAL.to_owned();
    };
    // A question mark may be a part of the password, and some options are secrets.
    let lower = options.to_lowercase();
    if options.contains('@')
        || ["password", "authmechanismproperties"]
            .iter()
            .any(|secret| lower.contains(secret))
    {
        return GENERAL.to_owned();
    }
    match ConnectionString::parse(format!("{scheme}://host.example.com/?{options}")) {
        Ok(_) => GENERAL.to_owned(),
        Err(error) => match &*error.kind {
            ErrorKind::InvalidArgument { message, .. } => {
                format!("must be a MongoDB URL with valid options ({message})")
            }
            _ => GENERAL.to_owned(),
        },
    }
}

/// Returns an invalid URL without everything that may be a secret: it is not known where the password ends.
pub(crate) fn shown(url: &str) -> String {
    let (scheme, rest) = url
        .split_once("://")
        .unwrap_or((url.split(':').next().unwrap_or_default(), ""));
    let hosts = rest
        .rsplit('@')
        .next()
        .unwrap_or_default()
        .split(['/', '?'])
        .next()
        .unwrap_or_default();
    let is_host = |host: &str| {
        let (name, port) = host.rsplit_once(':').unwrap_or((host, "27017"));
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '[' | ']' | ':');
        !name.is_empty() && name.chars().all(plain) && port.len() <= 5 && port.chars().all(|c| c.is_ascii_digit())
    };
    let is_whole = rest.contains('@') || !hosts.contains(':');
    match hosts.split(',').all(is_host) && is_whole {
        true => format!("{scheme}://…{hosts}…"),
        false => format!("{scheme}://…"),
    }
}
