-- The tables of a store. Executed in one transaction, also by several processes at the same time.
--
-- {table} has only letters, digits and underscores. Times are milliseconds since 1970-01-01 UTC.
-- Names are arbitrary bytes, and are compared as bytes.

-- One row per lease, that is per share of a shared name, and per reservation of a waiter of several names: its owner is `<owner>-next`.
-- An expired row has no effect, and later calls remove it.
CREATE TABLE IF NOT EXISTS "{table}" (
  name         BLOB    NOT NULL PRIMARY KEY,
  owner        TEXT    NOT NULL,
  fence        INTEGER NOT NULL,
  expires_at   INTEGER NOT NULL,
  since        INTEGER NOT NULL,
  host         TEXT    NOT NULL,
  pid          INTEGER NOT NULL,
  metadata     TEXT,
  permits      INTEGER,
  permit_limit INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS "{table}_expiry" ON "{table}" (expires_at);

-- One row per waiter: its position in the queue of one name. A new ticket is one more than the largest existing one, so the
-- tickets have the order of arrival.
CREATE TABLE IF NOT EXISTS "{table}_waiters" (
  ticket       INTEGER NOT NULL PRIMARY KEY,
  owner        TEXT    NOT NULL UNIQUE,
  name         BLOB    NOT NULL,
  alive_until  INTEGER NOT NULL,
  wake_port    INTEGER,
  wake_id      INTEGER,
  permits      INTEGER,
  permit_limit INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS "{table}_queue" ON "{table}_waiters" (name, ticket);
CREATE INDEX IF NOT EXISTS "{table}_lapse" ON "{table}_waiters" (alive_until);

-- One row: the last fencing token. It is shared by all names, so that a name needs no row of its own.
CREATE TABLE IF NOT EXISTS "{table}_fence" (
  id   INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
  last INTEGER NOT NULL
) STRICT;
INSERT OR IGNORE INTO "{table}_fence" (id, last) VALUES (1, 0);
