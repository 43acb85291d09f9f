//! The text of a URL: what is passed over, what is wrong with it, and what of it may be shown.

use mongodb::error::ErrorKind;
use mongodb::options::ConnectionString;

/// URL options of other official drivers that say nothing about where the locks are or how safely they are kept. They
/// are passed over, because a URL that served the gist shall serve here: the Rust driver refuses what it does not know.
const PASSED_OVER: [&str; 24] = [
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

/// The URL without the options that are passed over.
pub(super) fn without_passed_over(url: &str) -> String {
    let Some((before, options)) = url.split_once('?') else {
        return url.to_owned();
    };
    let kept: Vec<&str> = options
        .split('&')
        .filter(|option| {
            let name = option.split('=').next().unwrap_or_default().to_lowercase();
            !option.is_empty() && !PASSED_OVER.contains(&name.as_str())
        })
        .collect();
    format!("{before}?{}", kept.join("&"))
}

/// What is wrong with a URL, as far as that can be told without showing a secret.
pub(super) fn reason(url: &str) -> String {
    const ANYWHERE: &str = "must be a MongoDB URL such as mongodb://user:password@host:27017/database?replicaSet=rs0 with \
                            special characters in the user name and the password percent-encoded";
    let url = without_passed_over(url);
    let (Some((scheme, _)), Some((_, options))) = (url.split_once("://"), url.split_once('?')) else {
        return ANYWHERE.to_owned();
    };
    // Behind a question mark in a password follows the rest of it, and some options are secrets themselves.
    let lower = options.to_lowercase();
    if options.contains('@')
        || ["password", "authmechanismproperties"]
            .iter()
            .any(|secret| lower.contains(secret))
    {
        return ANYWHERE.to_owned();
    }
    match ConnectionString::parse(format!("{scheme}://host.example.com/?{options}")) {
        Ok(_) => ANYWHERE.to_owned(),
        Err(error) => match &*error.kind {
            ErrorKind::InvalidArgument { message, .. } => {
                format!("must be a MongoDB URL with valid options ({message})")
            }
            _ => ANYWHERE.to_owned(),
        },
    }
}

/// A URL that was not understood, without whatever may be a secret in it: nobody knows where its password ends.
pub(super) fn shown(url: &str) -> String {
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
