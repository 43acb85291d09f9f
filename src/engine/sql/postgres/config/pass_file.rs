//! Reads the password file of PostgreSQL's tools, `~/.pgpass`
//! (<https://www.postgresql.org/docs/current/libpq-pgpass.html>).

use std::path::Path;

/// The folders of the server's sockets, for which the file has `localhost`.
const SOCKETS: [&str; 3] = ["/tmp", "/var/run/postgresql", "/run/postgresql"];

/// Returns the password for a server: host, port, database and user. `None`: the file cannot be read, or has none.
pub(in super::super) fn password(path: &Path, [host, port, database, user]: [&str; 4]) -> Option<String> {
    let text = std::fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&text);
    let host = if SOCKETS.contains(&host) { "localhost" } else { host };
    let wanted = [host, port, database, user];
    text.lines().find_map(|line| of_line(line, wanted))
}

/// Returns the password of a line `host:port:database:user:password` that matches. In a field, `\` escapes `:` and `\`.
fn of_line(line: &str, wanted: [&str; 4]) -> Option<String> {
    if line.starts_with('#') {
        return None;
    }
    let mut is_escaped = false;
    let mut fields = line.split(|char| {
        let ends = char == ':' && !is_escaped;
        is_escaped = char == '\\' && !is_escaped;
        ends
    });
    for wanted in wanted {
        let field = fields.next()?;
        if field != "*" && unescaped(field) != wanted {
            return None;
        }
    }
    fields.next().map(unescaped)
}

fn unescaped(field: &str) -> String {
    let mut text = String::new();
    let mut chars = field.chars();
    while let Some(char) = chars.next() {
        text.push(match char {
            '\\' => chars.next().unwrap_or(char),
            _ => char,
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_matches_counts() {
        let lines = [
            "# h:5432:app:u:comment",
            "h:5432:app",
            "h:5432:app:other:wrong",
            r"h\:1:5432:a\\b:u:p\:\\q:ignored",
            "h:*:*:u:any database",
            "*:*:*:*:last",
        ];
        let password = |wanted: [&str; 4]| lines.iter().find_map(|line| of_line(line, wanted));
        assert_eq!(password(["h:1", "5432", r"a\b", "u"]).unwrap(), r"p:\q");
        assert_eq!(password(["h", "5433", "app", "u"]).unwrap(), "any database");
        assert_eq!(password(["h", "5432", "app", "else"]).unwrap(), "last");
        assert_eq!(
            of_line(r"\*:*:*:*:p", ["h", "1", "d", "u"]),
            None,
            "an escaped star is a star"
        );
    }

    #[test]
    fn a_socket_is_localhost() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".pgpass");
        let wanted = ["/var/run/postgresql", "5432", "app", "u"];
        assert_eq!(password(&path, wanted), None);
        std::fs::write(&path, "localhost:*:*:*:secret\r\n").unwrap();
        assert_eq!(password(&path, wanted).as_deref(), Some("secret"));
        assert_eq!(password(&path, ["h", "5432", "app", "u"]), None);
    }
}
