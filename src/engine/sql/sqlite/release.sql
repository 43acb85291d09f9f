-- Frees what a claim holds, or keeps it busy for $3 more with an owner that nobody is, and gives up its place.
--
-- $1 names: JSON array of hexadecimal texts   $2 owner   $3 how long to keep, 0: not at all
-- → port, number of the first live waiter of each name that this concerns
-- → one row per lease that was kept
-- → one row per lease that was freed: whether it had not expired
WITH clock (now) AS MATERIALIZED (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER)),
concerned (name) AS (
  SELECT held.name
    FROM json_each($1) AS claimed
    JOIN "{table}" AS held ON held.name = unhex(claimed.value)
    WHERE held.owner = $2
  UNION
  SELECT place.name
    FROM "{table}_waiters" AS place
    WHERE place.owner = $2
      AND NOT EXISTS (SELECT 1 FROM "{table}" AS held, clock
        WHERE held.name = place.name AND held.owner <> $2 AND held.expires_at > clock.now)
)
SELECT next.wake_port, next.wake_id
FROM concerned
JOIN "{table}_waiters" AS next ON next.ticket =
  (SELECT ticket FROM "{table}_waiters"
    WHERE name = concerned.name AND owner <> $2 AND alive_until > (SELECT now FROM clock) ORDER BY ticket LIMIT 1)
WHERE next.wake_id IS NOT NULL;
WITH clock (now) AS MATERIALIZED (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER))
UPDATE "{table}" SET owner = owner || '-kept', expires_at = (SELECT now FROM clock) + $3
WHERE $3 > 0
  AND owner = $2
  AND name IN (SELECT unhex(claimed.value) FROM json_each($1) AS claimed)
  AND expires_at > (SELECT now FROM clock)
RETURNING 1;
DELETE FROM "{table}"
WHERE owner = $2 AND name IN (SELECT unhex(claimed.value) FROM json_each($1) AS claimed)
RETURNING expires_at > CAST(round(unixepoch('subsec') * 1000) AS INTEGER);
DELETE FROM "{table}_waiters" WHERE owner = $2;
