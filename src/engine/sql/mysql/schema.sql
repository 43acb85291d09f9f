-- The tables of a store, created by the first process that finds them missing. Times are microseconds since 1970, UTC.

-- One row per name that is held, or was within the last hour, and per share of a shared name. Names are bytes: no collation makes two of
-- them equal.
CREATE TABLE IF NOT EXISTS {locks} (
  name         varbinary(1100) NOT NULL PRIMARY KEY,
  owner        varchar(64) CHARACTER SET ascii COLLATE ascii_bin,
  fence        bigint NOT NULL,
  expires_at   bigint NOT NULL,
  queued       int NOT NULL DEFAULT 0,
  since        bigint,
  host         varchar(255) CHARACTER SET utf8mb4,
  pid          bigint,
  metadata     text CHARACTER SET utf8mb4,
  permits      int,
  permit_limit int
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC;

-- One row per waiter: its position in the queue of one name. Host and pid are NULL where a hand-off only reserves the name. The ticket
-- is drawn under the lock of the name's row, so that the tickets of a name have the order of arrival.
CREATE TABLE IF NOT EXISTS {waiters} (
  ticket       bigint NOT NULL AUTO_INCREMENT PRIMARY KEY,
  owner        varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  name         varbinary(1100) NOT NULL,
  alive_until  bigint NOT NULL,
  process      varchar(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  hold_ms      int NOT NULL,
  host         varchar(255) CHARACTER SET utf8mb4,
  pid          bigint,
  permits      int,
  permit_limit int,
  UNIQUE KEY owner (owner),
  KEY queue (name, ticket),
  KEY process (process)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC;
