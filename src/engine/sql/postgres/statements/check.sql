-- Reads what the waiters of names wait for, without a lock.
--
-- $1 names
-- → name, now, rest of the lease (NULL: free), its owner, whether the name is free and has a live waiter
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT
  c.name,
  (date_part('epoch', clock.now) * 1e6)::bigint,
  (date_part('epoch', l.expires_at - clock.now) * 1e6)::bigint,
  l.owner,
  w.ticket IS NOT NULL
FROM clock
CROSS JOIN unnest($1::bytea[]) AS c(name)
LEFT JOIN {locks} AS l ON l.name = c.name AND l.owner IS NOT NULL AND l.expires_at > clock.now
LEFT JOIN LATERAL (SELECT q.ticket FROM {waiters} AS q
  WHERE l.name IS NULL AND q.name = c.name AND q.alive_until > clock.now ORDER BY q.ticket LIMIT 1) AS w ON true
