-- Releases what claims hold, and what is reserved for them (with `-next` after the owner), and removes their positions. Or keeps
-- the names busy for $2 more, with an owner that does not exist.
--
-- $1 JSON array of [name as a hexadecimal text, owner], one for each name of each claim   $2 time to keep, 0: none
-- → port, number of the first live waiter of each name that this concerns (of a share: its name, which lacks a byte and the owner token)
-- → one row per lease that was kept: its owner
-- → one row per lease that was released: its owner, whether it had not expired
WITH clock (now) AS MATERIALIZED (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER)),
claims (name, owner) AS MATERIALIZED
  (SELECT unhex(claimed.value ->> 0), claimed.value ->> 1 FROM json_each($1) AS claimed),
concerned (name) AS (
  SELECT CASE WHEN held.permits IS NULL THEN held.name ELSE substr(held.name, 1, length(held.name) - 33) END
    FROM claims
    CROSS JOIN "{table}" AS held ON held.name = claims.name
    WHERE held.owner = claims.owner
  UNION
  SELECT position.name
    FROM claims
    CROSS JOIN "{table}_waiters" AS position ON position.owner = claims.owner
    WHERE NOT EXISTS (SELECT 1 FROM "{table}" AS held, clock
        WHERE held.name = position.name AND held.owner <> position.owner AND held.expires_at > clock.now)
)
SELECT next.wake_port, next.wake_id
FROM concerned
JOIN "{table}_waiters" AS next ON next.ticket =
  (SELECT ticket FROM "{table}_waiters"
    WHERE name = concerned.name
      AND alive_until > (SELECT now FROM clock)
      AND owner NOT IN (SELECT owner FROM claims)
    ORDER BY ticket LIMIT 1)
WHERE next.wake_id IS NOT NULL;
WITH clock (now) AS MATERIALIZED (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER))
UPDATE "{table}" SET owner = owner || '-kept', expires_at = (SELECT now FROM clock) + $2
WHERE $2 > 0
  AND (name, owner) IN (SELECT unhex(claimed.value ->> 0), claimed.value ->> 1 FROM json_each($1) AS claimed)
  AND expires_at > (SELECT now FROM clock)
RETURNING replace(owner, '-kept', '');
DELETE FROM "{table}"
WHERE (name, owner) IN (SELECT unhex(claimed.value ->> 0), claimed.value ->> 1 FROM json_each($1) AS claimed)
RETURNING owner, expires_at > CAST(round(unixepoch('subsec') * 1000) AS INTEGER);
DELETE FROM "{table}_waiters" WHERE owner IN (SELECT claimed.value ->> 1 FROM json_each($1) AS claimed);
