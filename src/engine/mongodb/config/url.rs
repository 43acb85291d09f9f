//! The text of a URL: which options are ignored, why it is invalid, and which part of it a message may contain.

use mongodb::error::ErrorKind;
use mongodb::options::ConnectionString;

/// Options of other official drivers that affect neither where the locks are nor how safe they are. They are ignored, so that a
/// URL of the gist works here: the Rust driver rejects options that it does not know.
const IGNORED_OPTIONS: [&str; 24] = [
    "autoreconnect",
    "autoselectfamily",
    "autoselectfamilyattempttimeout",
    "buffermaxentries",
    "checkkeys",
    "compressors",
    "family",
    "forceserverobjectid",
    "ignoreundefined",
    "keepalive",
    "keepaliveinitialdelay",
    "monitorcommands",
    "nodelay",
    "poolsize",
    "reconnectinterval",
    "reconnecttries",
    "serializefunctions",
    "sockettimeoutms",
    "timeoutms",
    "usenewurlparser",
    "useunifiedtopology",
    "uuidrepresentation",
    "waitqueuemultiple",
    "zlibcompressionlevel",
];

/// Returns the URL without the ignored options.
pub(crate) fn without_ignored_options(url: &str) -> String {
    let Some((before, options)) = url.split_once('?') else {
        return url.to_owned();
    };
    let kept: Vec<&str> = options
        .split('&')
        .filter(|option| {
            let name = option.split('=').next().unwrap_or_default().to_lowercase();
            !option.is_empty() && !IGNORED_OPTIONS.contains(&name.as_str())
        })
        .collect();
    format!("{before}?{}", kept.join("&"))
}

/// Describes why a URL is invalid, without a secret.
pub(crate) fn reason(url: &str) -> String {
    const GENERAL: &str = "must be a MongoDB URL such as mongodb://user:password@host:27017/database?replicaSet=rs0 with \
                            special characters in the user name and the password percent-encoded";
    let url = without_ignored_options(url);
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
