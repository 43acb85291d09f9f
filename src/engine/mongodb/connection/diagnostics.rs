//! What a human is told of a server that cannot be used, and whether that passes by itself. The driver passes on what
//! happened as text, in which the reason stands between its labels, sources and replies.

/// What is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Trouble {
    pub(super) text: String,
    /// Whether it may be over later without a human's help.
    pub(super) passes: bool,
}

const UNTRUSTED: &str = "its certificate is from an authority that is not trusted here (tls.caFile names one that is)";

/// By a sign in the driver's text: what it means (nothing: the text says it), and whether it passes. The first that fits.
const MEANINGS: [(&str, &str, bool); 17] = [
    ("UnknownIssuer", UNTRUSTED, false),
    // Two authorities of one name.
    ("peer certificate: BadSignature", UNTRUSTED, false),
    ("not valid for name", "its certificate is for another host name", false),
    ("NotValidForName", "its certificate is for another host name", false),
    (
        "CertificateRequired",
        "it asks for a client's certificate (tls.certFile names one)",
        false,
    ),
    ("received fatal alert", "it refuses the TLS connection", false),
    ("received corrupt message", "it does not speak TLS", false),
    ("certificate", "its certificate is not accepted", false),
    (
        "invalid reply to a database operation",
        "what answers there is not MongoDB",
        false,
    ),
    ("does not match actual name", "it belongs to another replica set", false),
    (
        "tls handshake eof",
        "it ended the connection in the TLS handshake, as a server without TLS does",
        true,
    ),
    // With TLS 1.3 a client takes the handshake for done before the server has looked at its certificate, and mongod hangs up
    // without an alert.
    (
        "without sending TLS close_notify",
        "it ended the connection without an answer, as a server does that asks for a client's certificate (tls.certFile) \
         other than the one it got, if any",
        true,
    ),
    (
        "end of file",
        "it ended the connection without an answer, as a server does that wants TLS",
        true,
    ),
    (
        "early eof",
        "it ended the connection without an answer, as a server does that wants TLS",
        true,
    ),
    ("lookup address", "its name cannot be resolved", true),
    ("DNS resolution", "its name cannot be resolved", true),
    ("timed out", "it does not answer", true),
];

/// The trouble behind the text of one of the driver's errors.
pub(super) fn of_error(text: &str) -> Trouble {
    let text = without_inner_life(text);
    let text = text.trim_start_matches("Kind: ").trim_start_matches("I/O error: ");
    // rustls refers to its own manual.
    let text = text.split(": https://docs.rs/").next().unwrap_or(text);
    match MEANINGS.iter().find(|(sign, ..)| text.contains(sign)) {
        Some((_, meaning, passes)) => Trouble {
            text: format!("{meaning}: {text}"),
            passes: *passes,
        },
        None => Trouble {
            text: text.to_owned(),
            passes: true,
        },
    }
}

/// Whether the peer hung up before it had said anything: it may expect TLS, or not expect it.
pub(super) fn is_hang_up(text: &str) -> bool {
    ["tls handshake eof", "end of file", "early eof"]
        .iter()
        .any(|sign| text.contains(sign))
}

/// Whether an error can only come from a peer that speaks TLS.
pub(super) fn is_within_tls(text: &str) -> bool {
    ["received fatal alert", "without sending TLS close_notify"]
        .iter()
        .any(|sign| text.contains(sign))
}

/// The trouble behind the driver's report of a search for a server that found none.
pub(super) fn of_search(report: &str) -> Trouble {
    let Some((_, topology)) = report
        .split_once("Topology: {")
        .filter(|_| report.starts_with("Server selection timeout"))
    else {
        // Servers of a version that the driver does not know.
        return Trouble {
            text: without_inner_life(report),
            passes: false,
        };
    };
    let servers: Vec<Server<'_>> = topology
        .split("{ Address: ")
        .skip(1)
        .filter_map(Server::parse)
        .collect();
    if servers.is_empty() {
        return match topology.contains("Servers:") {
            true => Trouble {
                text: without_inner_life(report),
                passes: true,
            },
            false => Trouble {
                text: "none of the servers that answered belongs to the replica set of the URL".to_owned(),
                passes: false,
            },
        };
    }
    let troubles: Vec<Trouble> = servers.iter().map(Server::trouble).collect();
    let list: Vec<String> = servers
        .iter()
        .zip(&troubles)
        .map(|(server, trouble)| format!("{} ({})", server.address, trouble.text))
        .collect();
    let what = match servers.iter().any(Server::answers) {
        true => "no server is the primary",
        false => "no server can be reached",
    };
    Trouble {
        text: format!("{what}: {}", list.join(", ")),
        passes: troubles.iter().any(|trouble| trouble.passes),
    }
}

/// One server in the driver's report.
#[derive(Debug)]
struct Server<'a> {
    address: &'a str,
    kind: &'a str,
    error: Option<&'a str>,
}

impl<'a> Server<'a> {
    /// Reads `h:1, Type: Unknown, Error: Kind: …, labels: {…`.
    fn parse(text: &'a str) -> Option<Self> {
        let (address, rest) = text.split_once(", Type: ")?;
        let kind = rest.split([',', ' ']).next()?;
        let error = rest.split_once(", Error: ").map(|(_, error)| {
            error
                .split(", labels: {")
                .next()
                .unwrap_or(error)
                .trim_start_matches("Kind: ")
        });
        Some(Server { address, kind, error })
    }

    fn answers(&self) -> bool {
        self.kind != "Unknown"
    }

    fn trouble(&self) -> Trouble {
        if let Some(error) = self.error {
            return of_error(error);
        }
        let text = match self.kind {
            "Unknown" => "it does not answer",
            "RsSecondary" => "a secondary",
            "RsPrimary" => "the primary",
            "RsArbiter" => "an arbiter",
            "RsGhost" => "not in a replica set yet",
            "RsOther" => "starting, or recovering",
            other => other,
        };
        Trouble {
            text: text.to_owned(),
            passes: true,
        }
    }
}

/// The text without the labels and replies that the driver appends to every error that is part of another one.
pub(super) fn without_inner_life(message: &str) -> String {
    const START: &str = ", labels: {";
    const END: &str = "server response: None";
    let mut shown = String::with_capacity(message.len());
    let mut rest = message;
    while let Some(start) = rest.find(START) {
        let Some(length) = rest[start..].find(END) else { break };
        shown.push_str(&rest[..start]);
        rest = &rest[start + length + END.len()..];
    }
    shown.push_str(rest);
    shown.replace("Error: Kind: ", "Error: ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFUSED: &str = "Kind: I/O error: Connection refused (os error 111), labels: {\"A\", \"B\"}, source: None, \
                           server response: None";
    const BAD_AUTHORITY: &str =
        "Kind: I/O error: invalid peer certificate: UnknownIssuer, labels: {}, source: None, server response: None";

    fn report(servers: &[(&str, &str, Option<&str>)]) -> String {
        let servers: Vec<String> = servers
            .iter()
            .map(|(address, kind, error)| match error {
                Some(error) => format!("{{ Address: {address}, Type: {kind}, Error: {error} }}"),
                None => format!("{{ Address: {address}, Type: {kind}, Average RTT: 1ms }}"),
            })
            .collect();
        let servers = servers.join(", ");
        format!("Server selection timeout: No available servers. Topology: {{ Type: Unknown, Servers: [ {servers} ] }}")
    }

    #[test]
    fn every_server_is_told_with_its_trouble() {
        let told = of_search(&report(&[
            ("h:1", "Unknown", Some(REFUSED)),
            ("h:2", "Unknown", None),
            ("[::1]:3", "Unknown", Some(BAD_AUTHORITY)),
        ]));
        assert_eq!(
            told.text,
            "no server can be reached: h:1 (Connection refused (os error 111)), h:2 (it does not answer), [::1]:3 (its \
             certificate is from an authority that is not trusted here (tls.caFile names one that is): invalid peer \
             certificate: UnknownIssuer)"
        );
        assert!(told.passes, "the first two may be back");
        assert!(!of_search(&report(&[("h:1", "Unknown", Some(BAD_AUTHORITY))])).passes);
        let election = of_search(&report(&[
            ("h:1", "RsSecondary", None),
            ("h:2", "Unknown", Some(REFUSED)),
        ]));
        assert_eq!(
            election.text,
            "no server is the primary: h:1 (a secondary), h:2 (Connection refused (os error 111))"
        );
        assert!(election.passes);
    }

    #[test]
    fn a_report_in_other_words_is_passed_on() {
        for text in [
            "Server selection timeout: No available servers. Topology: { Type: X, Servers: [ ? ] }",
            "Server at h:1 reports wire version 2",
        ] {
            assert_eq!(of_search(text).text, text);
        }
        let none = of_search("Server selection timeout: No available servers. Topology: { Type: ReplicaSetNoPrimary }");
        assert!(!none.passes && none.text.contains("replica set"), "{}", none.text);
    }

    #[test]
    fn messages_leave_out_what_helps_nobody() {
        assert_eq!(
            without_inner_life(&format!("Topology: {{ Error: {REFUSED} }}")),
            "Topology: { Error: I/O error: Connection refused (os error 111) }"
        );
        assert_eq!(
            without_inner_life("x, labels: {} and no end"),
            "x, labels: {} and no end"
        );
    }
}
