-- The tables of a store. Carried out within one transaction, by however many processes at once.
--
-- {table} is checked to be letters, digits and underscores. Times are milliseconds since 1970-01-01 UTC.
-- Names are bytes: they are compared as such, and may hold any.

-- One row per lease. A row past its end counts for nothing, and is removed by later calls.
CREATE TABLE IF NOT EXISTS "{table}" (
  name       BLOB    NOT NULL PRIMARY KEY,
  owner      TEXT    NOT NULL,
  fence      INTEGER NOT NULL,
  expires_at INTEGER NOT NULL,
  since      INTEGER NOT NULL,
  host       TEXT    NOT NULL,
  pid        INTEGER NOT NULL,
  metadata   TEXT
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS "{table}_expiry" ON "{table}" (expires_at);

-- One row per waiter: its place in the queue of one name. SQLite gives the next ticket as one more than the largest
-- there is, which keeps the order of arrival among all that are there.
CREATE TABLE IF NOT EXISTS "{table}_waiters" (
  ticket      INTEGER NOT NULL PRIMARY KEY,
  owner       TEXT    NOT NULL UNIQUE,
  name        BLOB    NOT NULL,
  alive_until INTEGER NOT NULL,
  wake_port   INTEGER,
  wake_id     INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS "{table}_queue" ON "{table}_waiters" (name, ticket);
CREATE INDEX IF NOT EXISTS "{table}_lapse" ON "{table}_waiters" (alive_until);

-- One row: the last fence that anybody was given. One for all names, so that nothing is kept per name.
CREATE TABLE IF NOT EXISTS "{table}_fence" (
  id   INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
  last INTEGER NOT NULL
) STRICT;
INSERT OR IGNORE INTO "{table}_fence" (id, last) VALUES (1, 0);
