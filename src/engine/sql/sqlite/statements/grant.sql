-- Grants every name, or the share of a name, to a claim, and removes its position in a queue.
--
-- $1 names: JSON array of hexadecimal texts   $2 owner   $3 fence   $4 now   $5 ttl   $6 host   $7 pid   $8 metadata
-- $9 positions that expired before this are removed   $10 permits   $11 their limit
--
-- Also removes some expired rows: more than it adds, so that their number decreases. (With a LIMIT that is only a parameter, SQLite
-- would plan the statement again at each call.)
INSERT INTO "{table}" (name, owner, fence, expires_at, since, host, pid, metadata, permits, permit_limit)
  SELECT unhex(claimed.value), $2, $3, $4 + $5, $4, $6, $7, $8, $10, $11 FROM json_each($1) AS claimed WHERE true
  ON CONFLICT (name) DO UPDATE SET
    owner = excluded.owner, fence = excluded.fence, expires_at = excluded.expires_at, since = excluded.since,
    host = excluded.host, pid = excluded.pid, metadata = excluded.metadata;
UPDATE "{table}_fence" SET last = $3;
DELETE FROM "{table}_waiters" WHERE owner = $2;
DELETE FROM "{table}" WHERE name IN
  (SELECT name FROM "{table}" WHERE expires_at <= $4 ORDER BY expires_at LIMIT 4 * json_array_length($1));
DELETE FROM "{table}_waiters" WHERE ticket IN
  (SELECT ticket FROM "{table}_waiters" WHERE alive_until < $9 ORDER BY alive_until LIMIT 16);
