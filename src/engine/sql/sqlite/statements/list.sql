-- A page of the leases that have not expired, sorted by name.
--
-- $1 the first name   $2 the first name that is too far, NULL: none is   $3 how many at most
-- → name, what remains, fence, host, pid, since, metadata
WITH clock (now) AS MATERIALIZED (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER))
SELECT name, expires_at - clock.now, fence, host, pid, since, metadata
FROM clock
CROSS JOIN "{table}" AS held
WHERE held.name >= $1 AND ($2 IS NULL OR held.name < $2) AND held.expires_at > clock.now
ORDER BY held.name
LIMIT $3;
