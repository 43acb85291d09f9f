-- Reads the rows of names after they were locked. Returns at least one row.
--
-- A row that was not created, and did not exist when the rows were locked, may exist now: it is locked, or left out if another
-- transaction has locked it. A name without a row in the answer counts as free. The lock is that of lock.sql: a stronger one would leave
-- out rows that another transaction has locked FOR KEY SHARE, as for a foreign key.
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
FROM clock
LEFT JOIN (SELECT name, owner, expires_at, fence FROM {locks} WHERE name = ANY($1::bytea[]) FOR NO KEY UPDATE SKIP LOCKED) AS l ON true
