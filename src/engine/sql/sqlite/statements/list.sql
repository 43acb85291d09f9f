-- A page of the leases that have not expired, sorted by name.
--
-- $1 the first name   $2 the first name after the range   $3 maximum number
-- → name, remaining time, fence, host, pid, since, metadata, live positions in the queue
WITH clock (now) AS MATERIALIZED (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER))
SELECT name, expires_at - clock.now, fence, host, pid, since, metadata,
  (SELECT count(*) FROM "{table}_waiters" AS waiter WHERE waiter.name = held.name AND waiter.alive_until > clock.now)
FROM clock
CROSS JOIN "{table}" AS held
WHERE held.name >= $1 AND held.name < $2 AND held.expires_at > clock.now
  AND held.owner NOT LIKE '%-next'
ORDER BY held.name
LIMIT $3;
