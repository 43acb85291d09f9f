//! Describes why a server cannot be used, and whether that is transient. The driver reports causes as text.

use mongodb::event::sdam::TopologyDescription;
use mongodb::{ServerInfo, ServerType};

use crate::engine::errors::{Row, find, render, rows};

/// Why a server, or every server, cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Diagnosis {
    pub(crate) text: String,
    /// Whether it may end without a change of the configuration.
    pub(crate) is_transient: bool,
}

/// Parts of the driver's texts: whether they are transient, and what they mean.
const MEANINGS: &[Row<bool>] = rows! {
    // Two authorities of one name have BadSignature.
    ": UnknownIssuer|peer certificate: BadSignature" => false, "its certificate is from an authority that is not trusted here (tls.caFile names \
        one that is):";
    ": not valid for name|NotValidForName" => false, "its certificate is for another host name:";
    ": CertificateRequired" => false, "it asks for a client's certificate (tls.certFile names one):";
    ": received fatal alert" => false, "it refuses the TLS connection:";
    ": received corrupt message" => false, "it does not speak TLS: omit tls=true and the option tls, or use the port with TLS:";
    ": certificate" => false, "its certificate is not accepted:";
    ": invalid reply to a database operation" => false, "what answers there is not MongoDB: check the host and the port:";
    ": does not match actual name" => false, "it belongs to another replica set:";
    ": tls handshake eof" => true, "it ended the connection in the TLS handshake, as a server without TLS does:";
    // With TLS 1.3 the handshake ends for the client before the server has verified the client's certificate, and mongod then
    // closes the connection without an alert.
    ": without sending TLS close_notify" => true, "it ended the connection without an answer, as a server does that asks for a client's \
        certificate (tls.certFile) other than the one it got, if any:";
    ": end of file|early eof" => true, "it ended the connection without an answer, as a server does that wants TLS:";
    ": lookup address|DNS resolution" => true, "its name cannot be resolved:";
    ": timed out" => true, "it does not answer:";
    ": Not a directory" => false, "a part of the socket's path is not a directory:";
};

/// Describes the text of an error of the driver.
pub(crate) fn of_error(text: &str) -> Diagnosis {
    let text = without_labels(text);
    let text = text.trim_start_matches("Kind: ").trim_start_matches("I/O error: ");
    // rustls appends a link to its manual.
    let text = text.split(": https://docs.rs/").next().unwrap_or(text);
    let (is_transient, meaning) = find(MEANINGS, "", text).unwrap_or((true, ""));
    Diagnosis {
        text: render(text, meaning),
        is_transient,
    }
}

/// Describes what may end without a change of the configuration.
pub(crate) fn transient(text: &str) -> Diagnosis {
    Diagnosis {
        text: text.to_owned(),
        is_transient: true,
    }
}

/// Whether the peer closed the connection before it sent anything. It may expect TLS, or not expect it.
pub(crate) fn is_disconnect(text: &str) -> bool {
    ["tls handshake eof", "end of file", "early eof"]
        .iter()
        .any(|sign| text.contains(sign))
}

/// Describes the servers after the driver found no usable one.
pub(crate) fn of_topology(topology: &TopologyDescription) -> Diagnosis {
    let servers = topology.servers().into_values().map(|server| Server {
        address: server.address().to_string(),
        answers: server.server_type() != ServerType::Unknown,
        diagnosis: of_server(&server),
    });
    of_servers(servers.collect())
}

/// One server of a topology.
struct Server {
    address: String,
    answers: bool,
    diagnosis: Diagnosis,
}

fn of_server(server: &ServerInfo<'_>) -> Diagnosis {
    if let Some(error) = server.error() {
        return of_error(&error.kind.to_string());
    }
    match server.server_type() {
        ServerType::Unknown => transient("it does not answer"),
        ServerType::RsSecondary => transient("a secondary"),
        ServerType::RsPrimary => transient("the primary"),
        ServerType::RsArbiter => transient("an arbiter"),
        ServerType::RsGhost => transient("not in a replica set yet"),
        ServerType::RsOther => transient("starting, or recovering"),
        other => transient(&other.to_string()),
    }
}

fn of_servers(mut servers: Vec<Server>) -> Diagnosis {
    if servers.is_empty() {
        // The driver removes servers of another replica set.
        return Diagnosis {
            text: "none of the servers that answered belongs to the replica set of the URL".to_owned(),
            is_transient: false,
        };
    }
    servers.sort_by(|one, other| one.address.cmp(&other.address));
    let what = match servers.iter().any(|server| server.answers) {
        true => "no server is the primary",
        false => "no server can be reached",
    };
    let list: Vec<String> = servers
        .iter()
        .map(|server| format!("{} ({})", server.address, server.diagnosis.text))
        .collect();
    Diagnosis {
        text: format!("{what}: {}", list.join(", ")),
        is_transient: servers.iter().any(|server| server.diagnosis.is_transient),
    }
}

/// Returns the text without the labels and replies that the driver appends to each nested error.
pub(crate) fn without_labels(message: &str) -> String {
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

    fn server(address: &str, answers: bool, diagnosis: Diagnosis) -> Server {
        Server {
            address: address.to_owned(),
            answers,
            diagnosis,
        }
    }

    #[test]
    fn the_diagnosis_names_every_server() {
        let untrusted = || of_error("I/O error: invalid peer certificate: UnknownIssuer");
        let all = of_servers(vec![
            server("h:2", false, transient("it does not answer")),
            server("h:1", false, of_error("I/O error: Connection refused (os error 111)")),
            server("h:3", false, untrusted()),
        ]);
        assert_eq!(
            all.text,
            "no server can be reached: h:1 (Connection refused (os error 111)), h:2 (it does not answer), h:3 (its \
             certificate is from an authority that is not trusted here (tls.caFile names one that is): invalid peer \
             certificate: UnknownIssuer)"
        );
        assert!(all.is_transient, "the first two may recover");
        assert!(!of_servers(vec![server("h:3", false, untrusted())]).is_transient);
        let election = of_servers(vec![
            server("h:1", true, transient("a secondary")),
            server("h:2", false, transient("it does not answer")),
        ]);
        assert_eq!(
            election.text,
            "no server is the primary: h:1 (a secondary), h:2 (it does not answer)"
        );
        let none = of_servers(Vec::new());
        assert!(!none.is_transient && none.text.contains("replica set"), "{}", none.text);
    }

    #[test]
    fn messages_omit_labels() {
        assert_eq!(of_error(REFUSED).text, "Connection refused (os error 111)");
        assert_eq!(
            without_labels(&format!("Topology: {{ Error: {REFUSED} }}")),
            "Topology: { Error: I/O error: Connection refused (os error 111) }"
        );
        assert_eq!(without_labels("x, labels: {} and no end"), "x, labels: {} and no end");
    }
}
