-- Releases names without a queue. Waits for no other transaction: a row that one has locked is left out.
--
-- $1 names   $2 owners
-- → name, whether its lease had not expired
--
-- The commit does not wait for the disk. A crash that loses it leaves the name busy until the end of the lease; the next grant is
-- written after it.
WITH k AS MATERIALIZED (
  SELECT l.name, l.expires_at > clock_timestamp() AS is_live
  FROM unnest($1::bytea[], $2::text[]) AS c(name, owner)
  JOIN {locks} AS l ON l.name = c.name AND l.owner = c.owner
  WHERE l.queued = 0
  FOR UPDATE OF l SKIP LOCKED
)
UPDATE {locks} AS l SET owner = NULL, expires_at = '-infinity', since = clock_timestamp(), metadata = NULL
FROM k WHERE l.name = k.name
RETURNING l.name, k.is_live, set_config('synchronous_commit', 'off', true)
