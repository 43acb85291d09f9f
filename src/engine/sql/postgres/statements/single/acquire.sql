-- Grants names without a queue that are free, and names that the same owner holds already. Each name occurs once.
--
-- $1 names   $2 owners   $3 ttls in ms   $4 hosts   $5 pids   $6 metadata
-- → name, fence (NULL: not granted), owner of a lease, remaining time of that lease
--
-- {lock_timeout}: behind a pooler, the limit of the wait for a locked row.
--
-- A busy name is left out before its row is locked, because a lock is a write. The conflict checks it again, under the lock. If not
-- all names are granted, the statement also returns the live leases of the names, as of its snapshot.
WITH granted AS (
  INSERT INTO {locks} AS l (name, owner, fence, expires_at, since, host, pid, metadata)
    SELECT c.name, c.owner, (date_part('epoch', clock.now) * 1e6)::bigint,
      clock.now + c.ttl_ms * interval '1 millisecond', clock.now, c.host, c.pid, c.metadata
    FROM (SELECT clock_timestamp() AS now{lock_timeout} OFFSET 0) AS clock
    CROSS JOIN unnest($1::bytea[], $2::text[], $3::bigint[], $4::text[], $5::bigint[], $6::text[])
      AS c(name, owner, ttl_ms, host, pid, metadata)
    WHERE NOT EXISTS (SELECT FROM {locks} AS s
      WHERE s.name = c.name AND (s.queued > 0 OR (s.expires_at > clock.now AND s.owner IS DISTINCT FROM c.owner)))
    ORDER BY c.name
  {grant}
  RETURNING l.name, l.fence
)
SELECT g.name, g.fence, NULL::text, NULL::bigint FROM granted AS g
UNION ALL
SELECT h.name, NULL, h.owner, (date_part('epoch', h.expires_at - clock_timestamp()) * 1e6)::bigint
FROM {locks} AS h
WHERE (SELECT count(*) FROM granted) < cardinality($1::bytea[])
  AND h.name = ANY($1::bytea[]) AND h.owner IS NOT NULL AND h.expires_at > clock_timestamp()
