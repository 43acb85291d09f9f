//! Products that have the protocol of another server.

use super::connection::Connections;
use crate::engine::sql::failure::{Failure, Kind};

/// Recognises products by a text in their version. Each entry has the text and the name of the product. `needed`: the server
/// whose protocol they have.
pub(in crate::engine::sql) struct Others {
    products: &'static [(&'static str, &'static str)],
    needed: &'static str,
}

pub(in crate::engine::sql) const OF_POSTGRES: Others = Others {
    products: &[
        ("cockroachdb", "CockroachDB"),
        ("-yb-", "YugabyteDB"),
        ("redshift", "Amazon Redshift"),
        ("materialize", "Materialize"),
    ],
    needed: "PostgreSQL",
};

pub(in crate::engine::sql) const OF_MYSQL: Others = Others {
    products: &[
        ("tidb", "TiDB"),
        ("vitess", "Vitess or PlanetScale"),
        ("oceanbase", "OceanBase"),
        ("singlestore", "SingleStore"),
    ],
    needed: "MySQL or MariaDB",
};

impl Others {
    /// Returns the failure of a server with this version. `None`: it is no other product.
    pub(in crate::engine::sql) fn failure(&self, connections: &Connections, version: &str) -> Option<Failure> {
        let lower = version.to_ascii_lowercase();
        let (_, product) = self.products.iter().find(|(text, _)| lower.contains(text))?;
        let needed = self.needed;
        let message = format!(
            "this server is {product} ({version}), where locks are not safe: it has the protocol of {needed}, but other row locks or several \
             clocks. Use {needed}, or another store"
        );
        Some(Failure::new(&connections.place, Kind::Permanent, message).not_sent())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Settings;

    fn is_other(others: &Others, version: &str) -> bool {
        let connections = Connections::new("sql", "host:1", &Settings::default());
        others.failure(&connections, version).is_some()
    }

    #[test]
    fn products_with_the_protocol_of_postgresql_are_recognised() {
        for version in [
            "CockroachDB CCL v23.1.11 (x86_64-pc-linux-gnu, built 2023/09/27)",
            "PostgreSQL 11.2-YB-2.20.1.3-b0 on x86_64-pc-linux-gnu",
            "PostgreSQL 8.0.2 on i686-pc-linux-gnu, compiled by GCC gcc (GCC) 3.4.2, Redshift 1.0.60353",
        ] {
            assert!(is_other(&OF_POSTGRES, version), "{version}");
        }
        for version in [
            "PostgreSQL 15.18 (Debian 15.18-0+deb12u1)",
            "PostgreSQL 16.1 on aarch64, by gcc",
        ] {
            assert!(!is_other(&OF_POSTGRES, version), "{version}");
        }
    }

    #[test]
    fn products_with_the_protocol_of_mysql_are_recognised() {
        for version in ["8.0.11-TiDB-v7.5.1", "8.0.34-Vitess", "5.7.25-OceanBase-v4.2.1"] {
            assert!(is_other(&OF_MYSQL, version), "{version}");
        }
        for version in ["8.0.36", "10.11.19-MariaDB-0+deb12u1-log", "8.0.mysql_aurora.3.05.2"] {
            assert!(!is_other(&OF_MYSQL, version), "{version}");
        }
    }
}
