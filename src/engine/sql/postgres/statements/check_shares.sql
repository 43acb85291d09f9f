-- Reads the live shares of names, and the first live waiter of each, without a lock.
--
-- $1 names   $2 first stored names of their shares   $3 the names after the last ones
-- → name of a share, its owner, its permits, their limit, the remaining time of its lease, how long that has lasted;
--   or a name, NULL, permits and limit of its first waiter
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT l.name, l.owner, l.permits, l.permit_limit, (date_part('epoch', l.expires_at - clock.now) * 1e6)::bigint,
  (date_part('epoch', clock.now - l.since) * 1e6)::bigint
FROM clock
CROSS JOIN unnest($2::bytea[], $3::bytea[]) AS c(first, last)
CROSS JOIN LATERAL (SELECT * FROM {locks} WHERE name >= c.first AND name < c.last AND expires_at > clock.now OFFSET 0) AS l
UNION ALL
SELECT c.name, NULL, w.permits, w.permit_limit, NULL, NULL
FROM clock
CROSS JOIN unnest($1::bytea[]) AS c(name)
CROSS JOIN LATERAL (SELECT q.permits, q.permit_limit FROM {waiters} AS q
  WHERE q.name = c.name AND q.alive_until > clock.now ORDER BY q.ticket LIMIT 1) AS w
