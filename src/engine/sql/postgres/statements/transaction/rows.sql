-- Reads the rows of names after they were locked. Returns at least one row.
--
-- $1 names
-- → now, name (NULL: none of the names has a row), owner, end of the lease, fence
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT
  (date_part('epoch', clock.now) * 1e6)::bigint,
  l.name,
  l.owner,
  (date_part('epoch', greatest(l.expires_at, 'epoch'::timestamptz)) * 1e6)::bigint,
  l.fence
FROM clock LEFT JOIN {locks} AS l ON l.name = ANY($1::bytea[])
