-- A page of the leases that have not expired, sorted by name. A reserved name has no holder.
--
-- $1 the first name   $2 the first name after the range   $3 maximum number
-- → name, remaining time, fence, host, pid, since, metadata, live positions in the queue
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT
  l.name,
  (date_part('epoch', l.expires_at - clock.now) * 1e6)::bigint,
  l.fence,
  l.host,
  l.pid,
  (date_part('epoch', l.since) * 1e3)::bigint,
  l.metadata,
  (SELECT count(*) FROM {waiters} AS w WHERE w.name = l.name AND w.alive_until > clock.now)
FROM clock
CROSS JOIN {locks} AS l
WHERE l.name >= $1::bytea AND l.name < $2::bytea
  AND l.owner IS NOT NULL AND l.owner NOT LIKE '%-next' AND l.expires_at > clock.now
ORDER BY l.name
LIMIT $3::bigint
