-- A page of the leases that have not expired, sorted by name.
--
-- $1 the first name   $2 the first name after the range   $3 maximum number
-- → name, remaining time, fence, host, pid, since, metadata, live positions in the queue, permits, their limit
--
-- The queue of a share is that of its name, which lacks a byte and the owner token.
WITH clock (now) AS MATERIALIZED (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER))
SELECT name, expires_at - clock.now, fence, host, pid, since, metadata,
  (SELECT count(*) FROM "{table}_waiters" AS waiter
    WHERE waiter.name = CASE WHEN held.permits IS NULL THEN held.name ELSE substr(held.name, 1, length(held.name) - 33) END
      AND waiter.alive_until > clock.now),
  held.permits,
  held.permit_limit
FROM clock
CROSS JOIN "{table}" AS held
WHERE held.name >= $1 AND held.name < $2 AND held.expires_at > clock.now
  AND held.owner NOT LIKE '%-next'
ORDER BY held.name
LIMIT $3;
