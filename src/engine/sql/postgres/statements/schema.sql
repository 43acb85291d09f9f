-- The tables of a store. Executed in one transaction, under an advisory lock, by the first process that finds them missing.

-- One row per name that is held, or was within the last hour, and per share of a shared name. Names are arbitrary bytes.
CREATE TABLE IF NOT EXISTS {locks} (
  name         bytea       NOT NULL PRIMARY KEY,
  owner        text,
  fence        bigint      NOT NULL,
  expires_at   timestamptz NOT NULL,
  queued       integer     NOT NULL DEFAULT 0,
  since        timestamptz,
  host         text,
  pid          bigint,
  metadata     text,
  permits      integer,
  permit_limit integer
) WITH (fillfactor = 50);

-- One row per waiter: its position in the queue of one name. Host and pid are NULL where a hand-off only reserves the name. The ticket
-- is drawn under the lock of the name's row, so that the tickets of a name have the order of arrival.
CREATE TABLE IF NOT EXISTS {waiters} (
  ticket       bigint      NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  owner        text        NOT NULL UNIQUE,
  name         bytea       NOT NULL,
  alive_until  timestamptz NOT NULL,
  process      text        NOT NULL,
  hold_ms      integer     NOT NULL,
  host         text,
  pid          bigint,
  permits      integer,
  permit_limit integer
) WITH (fillfactor = 50);
CREATE INDEX IF NOT EXISTS {queue_index} ON {waiters} (name, ticket);
CREATE INDEX IF NOT EXISTS {process_index} ON {waiters} (process);
