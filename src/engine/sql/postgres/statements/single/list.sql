-- A page of the rows, sorted by name. A free or reserved name has no holder.
--
-- $1 the first name   $2 the first name after the range   $3 maximum number of rows
-- → name, remaining time (NULL: no holder), fence, host, pid, since, metadata, live positions in the queue, permits, their limit
--
-- The queue of a share is that of its name, which lacks a byte and the owner token.
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT
  l.name,
  CASE WHEN l.is_held THEN (date_part('epoch', l.expires_at - clock.now) * 1e6)::bigint END,
  l.fence,
  l.host,
  l.pid,
  (date_part('epoch', l.since) * 1e3)::bigint,
  l.metadata,
  CASE WHEN l.is_held THEN (SELECT count(*) FROM {waiters} AS w WHERE w.name = l.queue AND w.alive_until > clock.now) END,
  l.permits,
  l.permit_limit
FROM clock
CROSS JOIN LATERAL (
  SELECT *, owner NOT LIKE '%-next' AND expires_at > clock.now AS is_held,
    CASE WHEN permits IS NULL THEN name ELSE substr(name, 1, length(name) - 33) END AS queue
  FROM {locks}
  WHERE name >= $1::bytea AND name < $2::bytea
  ORDER BY name
  LIMIT $3::bigint
) AS l
ORDER BY l.name
