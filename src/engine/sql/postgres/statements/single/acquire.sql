-- Grants names without a queue that are free, and names that the same owner holds already. Each name occurs once.
--
-- $1 names   $2 owners   $3 ttls in ms   $4 hosts   $5 pids   $6 metadata
-- → name, fence of each grant
--
-- A busy name is left out before its row is locked, because a lock is a write. The conflict checks it again, under the lock.
INSERT INTO {locks} AS l (name, owner, fence, expires_at, since, host, pid, metadata)
  SELECT c.name, c.owner, (date_part('epoch', clock.now) * 1e6)::bigint,
    clock.now + c.ttl_ms * interval '1 millisecond', clock.now, c.host, c.pid, c.metadata
  FROM (SELECT clock_timestamp() AS now OFFSET 0) AS clock
  CROSS JOIN unnest($1::bytea[], $2::text[], $3::bigint[], $4::text[], $5::bigint[], $6::text[])
    AS c(name, owner, ttl_ms, host, pid, metadata)
  WHERE NOT EXISTS (SELECT FROM {locks} AS s
    WHERE s.name = c.name AND (s.queued > 0 OR (s.expires_at > clock.now AND s.owner IS DISTINCT FROM c.owner)))
  ORDER BY c.name
{grant}
RETURNING l.name, l.fence
