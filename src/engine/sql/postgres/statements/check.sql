-- Reads the lease and the queue of each name, without a lock.
--
-- $1 names   $2 process   $3 maximum number of live waiters that are read
-- → name, now, remaining time of the lease (NULL: free), its owner, whether the name has a live waiter, the number of waiters of other processes
--   ahead of those of this one, how long the lease has lasted
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT
  c.name,
  (date_part('epoch', clock.now) * 1e6)::bigint,
  (date_part('epoch', l.expires_at - clock.now) * 1e6)::bigint,
  l.owner,
  cardinality(w.processes) > 0,
  coalesce(array_position(w.processes, $2::text) - 1, $3::bigint),
  (date_part('epoch', clock.now - l.since) * 1e6)::bigint
FROM clock
CROSS JOIN unnest($1::bytea[]) AS c(name)
LEFT JOIN {locks} AS l ON l.name = c.name AND l.owner IS NOT NULL AND l.expires_at > clock.now
CROSS JOIN LATERAL (SELECT ARRAY(SELECT q.process FROM {waiters} AS q
  WHERE q.name = c.name AND q.alive_until > clock.now ORDER BY q.ticket LIMIT $3::bigint) AS processes) AS w
