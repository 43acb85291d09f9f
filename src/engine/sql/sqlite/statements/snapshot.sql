-- Reads the state of the names of a claim. One row per name, in the order of $1.
--
-- $1 names: JSON array of hexadecimal texts   $2 owner
-- → now, last fence, held by $2 (NULL: free, or reserved for it), lease's end, lease's fence,
-- ends of the first and of the last live position ahead
--
-- Smaller tickets are ahead of a claim with a position. All tickets are ahead of a claim without one.
WITH clock (now) AS MATERIALIZED (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER))
SELECT
  clock.now,
  fence.last,
  held.owner = $2,
  held.expires_at,
  held.fence,
  (SELECT ahead.alive_until
    FROM "{table}_waiters" AS ahead
    WHERE ahead.name = unhex(claimed.value)
      AND ahead.alive_until > clock.now
      AND ahead.owner <> $2
      AND ahead.ticket < coalesce(position.ticket, 9223372036854775807)
    ORDER BY ahead.ticket
    LIMIT 1),
  (SELECT ahead.alive_until
    FROM "{table}_waiters" AS ahead
    WHERE ahead.name = unhex(claimed.value)
      AND ahead.alive_until > clock.now
      AND ahead.owner <> $2
      AND ahead.ticket < coalesce(position.ticket, 9223372036854775807)
    ORDER BY ahead.ticket DESC
    LIMIT 1)
FROM json_each($1) AS claimed
CROSS JOIN clock
CROSS JOIN "{table}_fence" AS fence
LEFT JOIN "{table}_waiters" AS position ON position.owner = $2
LEFT JOIN "{table}" AS held
  ON held.name = unhex(claimed.value) AND held.expires_at > clock.now AND held.owner <> $2 || '-next'
ORDER BY claimed.key;
