-- Extends leases of one name each, and never shortens one. Waits for no other transaction: a row that one has locked is left out.
--
-- $1 names   $2 owners   $3 ttls in ms
-- → owner of each extended lease
WITH k AS MATERIALIZED (
  SELECT l.name, c.ttl_ms
  FROM unnest($1::bytea[], $2::text[], $3::bigint[]) AS c(name, owner, ttl_ms)
  JOIN {locks} AS l ON l.name = c.name AND l.owner = c.owner
  WHERE l.expires_at > clock_timestamp()
  FOR UPDATE OF l SKIP LOCKED
)
UPDATE {locks} AS l SET expires_at = greatest(l.expires_at, clock_timestamp() + k.ttl_ms * interval '1 millisecond')
FROM k WHERE l.name = k.name
RETURNING l.owner
